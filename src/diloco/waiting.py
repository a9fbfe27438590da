"""Work in a thread, types that threads share, messages on standard error, and reports of long waits."""

import json
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec

from diloco.errors import DEBUG

P = ParamSpec("P")
T = TypeVar("T")

LOGGER = logging.getLogger("diloco.waiting")
"""The logger of the reports. It warns, so that a program that has not configured logging prints them to stderr."""

FIRST_REPORT_S = 2.0  # waits shorter than this are not reported
_MAX_PAUSE_S = 30.0  # longest pause between two reports
_DESCRIBED: set[object] = set()
_DESCRIBING = threading.Lock()
_WAITS: dict[object, tuple[Callable[[], str], float]] = {}  # those of this process: what for, and since when


def elapsed_s() -> float:
    """Return a time that no setting of the clock changes, and that goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


def described(kind: type[T]) -> type[T]:
    """Return ``kind`` once msgspec has described it. Every type that msgspec is to decode goes through here.

    It describes a class when it first needs it, and lets other threads use what it has described by then, so that two
    threads that needed one class at once ended the process (a segmentation fault).
    """
    if kind not in _DESCRIBED:
        with _DESCRIBING:
            msgspec.json.Decoder(kind)
            _DESCRIBED.add(kind)
    return kind


def in_thread(function: Callable[[], T], name: str, *, daemon: bool = True) -> Future[T]:
    """Call ``function`` in a thread. The future gets its result or its error.

    ``daemon`` is False for work that ends soon in any case: a process that ended during an operation of torch in a
    daemon thread would abort.

    >>> in_thread(lambda: 1 + 1, "sum").result()
    2
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # nobody can cancel it any more

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=daemon).start()
    return future


def at_once(function: Callable[P, T], *arguments: P.args, **more: P.kwargs) -> Future[T]:
    """Call ``function`` here. The future has its result or its error."""
    future: Future[T] = Future()
    try:
        future.set_result(function(*arguments, **more))
    except Exception as error:
        future.set_exception(error)
    return future


def report_wait(subject: Callable[[], str], limit_s: float, ended: Callable[[float], bool]) -> None:
    """Report a wait at intervals that double, until ``ended(the longest time to block in seconds)``."""
    until = f"; gives up after {limit_s:g} s" if math.isfinite(limit_s) else ""
    waited_s, pause_s = 0.0, FIRST_REPORT_S
    while not ended(pause_s):
        waited_s += pause_s
        LOGGER.warning(f"waiting for {subject()} for {waited_s:.0f} s{until}")
        pause_s = min(waited_s, _MAX_PAUSE_S)


def waits() -> list[str]:
    """Return for what this process has been waiting for more than two seconds, as `waiting_for` knows."""
    now_s = time.monotonic()
    return [subject() for subject, since_s in list(_WAITS.values()) if now_s - since_s > FIRST_REPORT_S]


class _ToStderr(logging.Handler):
    as_json = False

    def emit(self, record: logging.LogRecord) -> None:
        numbers = {logging.ERROR: "error", logging.WARNING: "warning", logging.INFO: "info"}  # hivemind renames levels
        level = next((name for number, name in numbers.items() if record.levelno >= number), "debug")
        say(self.format(record), level, **getattr(record, "fields", {}))


def say(message: str, level: str = "info", **fields: Any) -> None:
    """Print a message of a command on standard error: as ``diloco: ...``, or as a JSON object with ``fields``."""
    line = f"diloco: {message}"
    if _ToStderr.as_json:
        time_utc = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = json.dumps({"time": time_utc, "level": level, "message": message, **fields})
    # tqdm.write prints a line above a download's progress bars; another thread may be importing it just now
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    (bars.write if bars else print)(f"{line}\n", file=sys.stderr, end="")  # in one piece, as other threads print too
    sys.stderr.flush()


def log_to_stderr(*, as_json: bool = False) -> None:
    """Print the warnings of this package, such as reports of waits, as `say` does.

    As JSON, also those of libraries, and after ``--debug`` all of this package, with the events of the protocol.
    """
    _ToStderr.as_json = as_json
    logging.captureWarnings(as_json)
    for logger in map(logging.getLogger, ("diloco", "py.warnings")):
        if not logger.handlers:
            logger.addHandler(_ToStderr())
    logging.getLogger("diloco").setLevel(logging.DEBUG if as_json and DEBUG.get() else logging.NOTSET)


@contextmanager
def waiting_for(subject: Callable[[], str], limit_s: float = math.inf) -> Iterator[None]:
    """Report the enclosed block as a wait from another thread: first after 2 s, then at intervals of up to 30 s.

    Args:
        subject: returns what the process is currently waiting for; called in the other thread.
        limit_s: the time after which the wait gives up; infinity: never, or unknown.
    """
    ended = threading.Event()
    _WAITS[ended] = subject, time.monotonic()
    reports = in_thread(lambda: report_wait(subject, limit_s, ended.wait), "diloco-waiting")
    try:
        yield
    finally:
        ended.set()
        del _WAITS[ended]
        reports.result()


@contextmanager
def fetching(name: str) -> Iterator[None]:
    """Report the enclosed block as a wait for ``name`` of the Hugging Face hub, unless that is an existing path."""
    here = Path(name).expanduser().exists()
    with nullcontext() if here else waiting_for(lambda: f"{name} from the Hugging Face hub"):
        yield
