"""The first signal asks to stop, the second ends the process, and the earlier handlers are restored afterwards."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest

from diloco.algorithm import Contribution
from diloco.cli import main
from diloco.events import StepFinished
from diloco.train import Session, StopAsked, StopRequest
from diloco.transport import PeerTransport, Pending
from tests.commands import LIMIT_S
from tests.processes import Processes, free_port
from tests.runs import SMALL, write_text

SIGNALS = [signal.SIGINT, signal.SIGTERM]

CHILD = """
import signal, sys
from diloco.train import StopRequest
first, second = (getattr(signal, name) for name in sys.argv[1:])
with StopRequest() as stop:
    signal.raise_signal(first)
    print("asked by", stop.signal, flush=True)
    try:
        signal.raise_signal(second)
    finally:
        print("cleaning up", flush=True)
"""


def wait(stop: StopRequest, meanwhile: Callable[[], object]) -> None:
    with stop.interrupting():
        meanwhile()


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("before", [False, True])
def test_a_wait_that_changes_nothing_is_interrupted(number: signal.Signals, before: bool) -> None:
    """A signal during the wait interrupts it, and one before the wait interrupts it at once."""
    waited: list[bool] = []
    with StopRequest() as stop:
        if before:
            signal.raise_signal(number)
        with pytest.raises(StopAsked):
            wait(stop, lambda: (waited.append(True), signal.raise_signal(number)))
        assert waited == [True] * (not before)
        assert stop.signal == number.name


@pytest.mark.parametrize("number", SIGNALS)
def test_the_request_is_told_while_the_main_thread_waits(number: signal.Signals) -> None:
    """Otherwise it would be told only after the step, for which other replicas that stop might not come."""
    told = threading.Event()
    with StopRequest(told.set):
        signal.raise_signal(number)
        assert told.wait(60)


def test_handlers_are_put_back_even_after_an_error() -> None:
    heard: list[int] = []

    def mine(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    before = [signal.signal(number, mine) for number in SIGNALS]
    try:
        with suppress(RuntimeError), StopRequest() as stop:
            assert all(signal.getsignal(number) != mine for number in SIGNALS)
            raise RuntimeError
        assert all(signal.getsignal(number) is mine for number in SIGNALS)
        signal.raise_signal(signal.SIGINT)
        assert (heard, stop.signal) == ([signal.SIGINT], None)
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)


@pytest.mark.parametrize(("first", "second"), [("SIGINT", "SIGINT"), ("SIGTERM", "SIGINT")])
def test_a_second_signal_ends_the_process_at_once(first: str, second: str) -> None:
    """The exit code is 130, the cursor is shown again, and no clean-up code can hang."""
    done = subprocess.run([sys.executable, "-c", CHILD, first, second], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stdout == f"asked by {first}\n"
    assert done.stderr == "\x1b[?25hstopped at once; nothing more was saved\n"


STUCK = """
import ctypes
from diloco.train import StopRequest
library, lock = ctypes.CDLL(None), ctypes.create_string_buffer(128)
library.pthread_mutex_lock(lock)
with StopRequest():
    print(hex(ctypes.addressof(lock)), flush=True)
    library.pthread_mutex_lock(lock)  # for ever: signals don't end it, and Python calls no handler before it has ended
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what a process waits for is looked up in Linux's /proc")
def test_a_second_signal_ends_a_process_whose_main_thread_is_stuck_in_a_library() -> None:
    """A collective whose other ranks never arrive waits like this."""
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        lock = process.stdout.readline().decode().strip()
        while lock not in Path(f"/proc/{process.pid}/syscall").read_text().split():
            os.sched_yield()
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130


def test_a_signal_that_a_launcher_passes_on_is_the_same_request() -> None:
    """Slurm sends SIGTERM to torchrun and also to the ranks to which torchrun forwards it."""
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == "SIGTERM"


def run_replica(number: int, data: Path, out: Path, port: int) -> dict[str, Any]:
    """Train as one of three replicas. The first is signalled before the step in which the others wait for its round."""
    done, average = Session.step, PeerTransport.average

    def step(session: Session) -> StepFinished:
        event = done(session)
        if number == 0 and event.step == 7:
            signal.raise_signal(signal.SIGTERM)
        return event

    def contribute(transport: PeerTransport, contribution: Contribution) -> Pending:
        pending = average(transport, contribution)
        if number > 0 and contribution.round.outer_step == 1:
            signal.raise_signal(signal.SIGTERM)
        return pending

    words = f"train {SMALL} {data} --transport tcp --join 127.0.0.1:{port} --replica {number} --out {out}"
    more = "--replicas 3 --fragments 1 --overlap-steps 0 --network.on-loss continue --monitor.console quiet"
    with mock.patch.object(Session, "step", step), mock.patch.object(PeerTransport, "average", contribute):
        assert main(f"{words} {more}".split()) == 130
    summary: dict[str, Any] = json.loads(((out / f"replica-{number}" if number else out) / "summary.json").read_text())
    return summary


def test_replicas_that_are_signalled_at_different_moments_stop_together(tmp_path: Path) -> None:
    """Regression: the first asked between steps, the others waited for its round, and it left alone."""
    data = write_text(tmp_path)
    with Processes() as processes:
        processes.start(3, run_replica, data, tmp_path / "run", free_port())
        summaries = processes.results(LIMIT_S).values()
    for name in ("steps", "global_params_digest", "rounds_committed"):
        assert len({summary[name] for summary in summaries}) == 1, name
    assert {summary["rounds_void"] for summary in summaries} == {0}
