"""Reports of long waits: what a process is waiting for, how long it has waited, and when the wait times out."""

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

__all__ = ["FIRST_S", "LOGGER", "fetching", "log_to_stderr", "report_times_s", "report_wait", "sentence", "waiting_for"]

LOGGER = logging.getLogger("diloco.waiting")
"""The logger of the reports. It warns, so that a program that has not configured logging prints them to stderr."""

FIRST_S = 2.0  # waits shorter than this are not reported

_RAREST_S = 30.0  # longest pause between two reports


def report_times_s() -> Iterator[float]:
    """Yield the seconds after the start of a wait at which to report it: first 2 s, then at intervals that double up
    to 30 s.

    >>> from itertools import islice
    >>> list(islice(report_times_s(), 8))
    [2.0, 4.0, 8.0, 16.0, 32.0, 62.0, 92.0, 122.0]
    """
    report_at_s = pause_s = FIRST_S
    while True:
        yield report_at_s
        report_at_s += pause_s
        pause_s = min(2 * pause_s, _RAREST_S)


def sentence(subject: str, waited_s: float, limit_s: float) -> str:
    """Return the report of a wait that times out after ``limit_s``; infinity stands for no time-out or an unknown one.

    >>> sentence("replica 1 at 10.0.0.1:29400", 35.2, 300)
    'waiting for replica 1 at 10.0.0.1:29400 for 35 s; gives up after 300 s'
    """
    until = f"; gives up after {limit_s:g} s" if math.isfinite(limit_s) else ""
    return f"waiting for {subject} for {waited_s:.0f} s{until}"


def report_wait(subject: Callable[[], str], limit_s: float, ended: Callable[[float], bool]) -> None:
    """Report a wait at each of `report_times_s`, until it has ended.

    Args:
        subject: returns what the process is currently waiting for; called in the thread of this function.
        limit_s: as for `sentence`.
        ended: blocks for at most the given number of seconds, and returns whether the wait has ended.
    """
    reported_s = 0.0
    for report_at_s in report_times_s():
        if ended(report_at_s - reported_s):
            return
        reported_s = report_at_s
        LOGGER.warning(sentence(subject(), report_at_s, limit_s))


class _ToStderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        bars = sys.modules.get("tqdm")  # tqdm.write prints a line above a download's progress bars
        write = bars.tqdm.write if bars else print
        write(f"diloco: {record.getMessage()}", file=sys.stderr)
        sys.stderr.flush()


def log_to_stderr() -> None:
    """Print reports of waits, and of what is left out of the data, as ``diloco: ...``, like a command's messages."""
    for logger in (LOGGER, logging.getLogger("diloco.data")):
        if not logger.handlers:
            logger.addHandler(_ToStderr())


@contextmanager
def waiting_for(subject: Callable[[], str], limit_s: float = math.inf) -> Iterator[None]:
    """Report the enclosed block as a wait, from a thread that runs `report_wait`."""
    ended = threading.Event()
    thread = threading.Thread(
        target=report_wait, args=(subject, limit_s, ended.wait), name="diloco-waiting", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def fetching(place: str, kind: Literal["models", "datasets"]) -> Iterator[None]:
    """Report the enclosed block as a download of ``place`` from the Hugging Face hub, with the bytes received so far.

    Args:
        place: a name on the hub. An existing path is not downloaded, so nothing is reported for it.
    """
    if Path(place).expanduser().exists():
        yield
        return
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE, f"{kind}--{place.replace('/', '--')}", "blobs")
    before_bytes = _size_bytes(cache)

    def subject() -> str:
        return f"{place} from {constants.ENDPOINT} ({format_bytes(_size_bytes(cache) - before_bytes)} received)"

    with waiting_for(subject):
        yield


def _size_bytes(folder: Path) -> int:
    size_bytes = 0
    for file in folder.glob("*"):
        with suppress(OSError):  # a finished download is renamed meanwhile
            size_bytes += file.stat().st_size
    return size_bytes
