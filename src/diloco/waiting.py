"""Telling people for what a process waits, for how long it has, and until when it will. A short wait is not told."""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from diloco.units import format_bytes

__all__ = ["FIRST_S", "LOGGER", "fetching", "moments", "sentence", "tell", "told_on_stderr", "waiting_for"]

LOGGER = logging.getLogger("diloco.waiting")
"""Warnings of it reach the standard error output of a program that has not set up logging."""

FIRST_S = 2.0  # waits shorter than this are not told

_RAREST_S = 30.0


def moments() -> Iterator[float]:
    """Seconds after the beginning of a wait at which it is told: from 2 s on, after pauses that double up to 30 s.

    >>> from itertools import islice
    >>> list(islice(moments(), 8))
    [2.0, 4.0, 8.0, 16.0, 32.0, 62.0, 92.0, 122.0]
    """
    moment_s = pause_s = FIRST_S
    while True:
        yield moment_s
        moment_s += pause_s
        pause_s = min(2 * pause_s, _RAREST_S)


def sentence(whom: str, waited_s: float, limit_s: float) -> str:
    """What is told of a wait that is given up after ``limit_s`` (infinity: never, or nobody knows).

    >>> sentence("replica 1 at 10.0.0.1:29400", 35.2, 300)
    'waiting for replica 1 at 10.0.0.1:29400 for 35 s; gives up after 300 s'
    """
    until = f"; gives up after {limit_s:g} s" if math.isfinite(limit_s) else ""
    return f"waiting for {whom} for {waited_s:.0f} s{until}"


def tell(whom: Callable[[], str], limit_s: float, ended: Callable[[float], bool]) -> None:
    """Tell of a wait until it has ended.

    Args:
        whom: for what, in words, as far as is known by then; called in the thread of this function.
        limit_s: as for `sentence`.
        ended: waits for the end for so many seconds; whether it has come.
    """
    told_s = 0.0
    for moment_s in moments():
        if ended(moment_s - told_s):
            return
        told_s = moment_s
        LOGGER.warning(sentence(whom(), moment_s, limit_s))


class _ToStderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        bars = sys.modules.get("tqdm")  # of what is waited for: a line is written above them
        write = bars.tqdm.write if bars else print
        write(f"diloco: {record.getMessage()}", file=sys.stderr)
        sys.stderr.flush()


def told_on_stderr() -> None:
    """For a command: waits are told as its other messages are."""
    if not LOGGER.handlers:
        LOGGER.addHandler(_ToStderr())


@contextmanager
def waiting_for(whom: Callable[[], str], limit_s: float = math.inf) -> Iterator[None]:
    """Everything inside is a wait, of which a thread tells as `tell` does."""
    over = threading.Event()
    thread = threading.Thread(target=tell, args=(whom, limit_s, over.wait), name="diloco-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def fetching(place: str, kind: Literal["models", "datasets"]) -> Iterator[None]:
    """Everything inside may fetch ``place`` from the Hugging Face hub, which is told with the bytes that have come.

    Args:
        place: a name on the hub; a path that exists is not fetched.
    """
    if Path(place).expanduser().exists():
        yield
        return
    from huggingface_hub import constants

    kept = Path(constants.HF_HUB_CACHE, f"{kind}--{place.replace('/', '--')}", "blobs")
    before_bytes = _size_bytes(kept)

    def whom() -> str:
        return (
            f"{place} from {constants.ENDPOINT}, {format_bytes(_size_bytes(kept) - before_bytes)} of which have come,"
        )

    with waiting_for(whom):
        yield


def _size_bytes(folder: Path) -> int:
    size_bytes = 0
    for file in folder.glob("*"):
        with suppress(OSError):  # one that is complete gets another name
            size_bytes += file.stat().st_size
    return size_bytes
