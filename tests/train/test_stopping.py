"""The first signal asks to stop, the second ends the process, also a launcher and the processes that it has started."""

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
from typing import Any, ClassVar
from unittest import mock

import pytest

from diloco.algorithm import Contribution
from diloco.checkpoint import Mirror
from diloco.cli import main
from diloco.errors import NonFiniteError
from diloco.events import StepFinished
from diloco.signals import StopAsked, StopRequest
from diloco.train import Session, launch
from diloco.transport import NetworkSettings, PeerTransport, Pending
from tests.commands import LIMIT_S
from tests.processes import Processes, free_port, receive, report
from tests.runs import SMALL

SIGNALS = [signal.SIGINT, signal.SIGTERM]


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


def test_the_request_is_told_while_the_main_thread_waits_and_may_be_passed_on_by_a_launcher() -> None:
    """After the step, for which other replicas that stop might not come, were too late. Slurm sends SIGTERM to torchrun
    and also to the ranks to which torchrun forwards it."""
    told = threading.Event()
    with StopRequest(told.set) as stop:
        signal.raise_signal(signal.SIGTERM)
        assert told.wait(60)
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == "SIGTERM"


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


STUCK = """
import ctypes
from diloco.signals import StopRequest
library, lock = ctypes.CDLL(None), ctypes.create_string_buffer(128)
library.pthread_mutex_lock(lock)
with StopRequest(lambda: print("asked", flush=True)):
    print(hex(ctypes.addressof(lock)), flush=True)
    library.pthread_mutex_lock(lock)  # for ever: signals don't end it, and Python calls no handler before it has ended
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what a process waits for is looked up in Linux's /proc")
@pytest.mark.parametrize("first", SIGNALS)
def test_a_second_signal_ends_a_process_whose_main_thread_is_stuck_in_a_library(first: signal.Signals) -> None:
    """A collective whose other ranks never arrive waits like this. The cursor is shown; no clean-up code can hang."""
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        lock = process.stdout.readline().decode().strip()
        while lock not in Path(f"/proc/{process.pid}/syscall").read_text().split():
            os.sched_yield()
        process.send_signal(first)
        assert process.stdout.readline() == b"asked\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr is not None
        assert process.stderr.read() == b"\x1b[?25hstopped at once; nothing more was saved\n"


PROCESS_1 = """
import ctypes, sys, time
from diloco.__main__ import main
import diloco.cli
library, lock = ctypes.CDLL(None), ctypes.create_string_buffer(128)
library.pthread_mutex_lock(lock)
def prepare():
    print("prepares", flush=True)
    {wait}
diloco.cli.main = prepare
sys.exit(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has process namespaces")
@pytest.mark.parametrize(
    ("wait", "words"),
    [
        ("time.sleep(60)", ""),  # what the signal interrupts
        ("library.pthread_mutex_lock(lock)", "stopped at once"),
    ],
)
def test_sigterm_ends_process_1_of_a_container_also_while_it_prepares(wait: str, words: str) -> None:
    """Without a handler Linux ignores it. In the second case the main thread is in a library."""
    script = PROCESS_1.replace("{wait}", wait)
    command = ["unshare", "-rpf", "--mount-proc", sys.executable, "-c", script]
    if subprocess.run([*command[:3], "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no process namespaces")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"prepares\n"
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        while Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            pass  # its main thread has printed, but doesn't wait yet
        os.kill(int(child), signal.SIGTERM)
        assert process.wait(60) == 130
        assert process.stderr is not None
        assert words in process.stderr.read().decode()


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


def test_replicas_that_are_signalled_at_different_moments_stop_together(data: Path, tmp_path: Path) -> None:
    """Regression: the first asked between steps, the others waited for its round, and it left alone."""
    with Processes() as processes:
        processes.start(3, run_replica, data, tmp_path / "run", free_port())
        summaries = processes.results(LIMIT_S).values()
    for name in ("steps", "global_params_digest", "rounds_committed"):
        assert len({summary[name] for summary in summaries}) == 1, name
    assert {summary["rounds_void"] for summary in summaries} == {0}


def fail_before_an_upload_ends(number: int, data: Path, out: Path, port: int) -> int:
    """Train as one of two replicas. The second one fails, and its last upload ends when the test says so."""
    done, close = Session.step, Mirror.close

    def step(session: Session) -> StepFinished:
        if number == 1 and session.totals.steps == 6:
            raise NonFiniteError("The gradient norm is NaN.")
        return done(session)

    def upload(mirror: Mirror) -> None:
        if number == 1:
            report("uploads")
            receive(LIMIT_S)
        close(mirror)

    words = f"train {SMALL} {data} --transport tcp --join 127.0.0.1:{port} --replica {number} --out {out}"
    more = f"--checkpoint.mirror {out}-copy --monitor.console quiet"
    with mock.patch.object(Session, "step", step), mock.patch.object(Mirror, "close", upload):
        return main(f"{words} {more}".split())


def test_no_replica_waits_for_the_upload_of_one_that_has_failed(data: Path, tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(2, fail_before_an_upload_ends, data, tmp_path / "run", free_port())
        assert processes.next_report(1, LIMIT_S) == "uploads"
        assert processes.results(60.0, ranks=[0]) == {0: 1}
        processes.send(1, None)
        assert processes.results(LIMIT_S, ranks=[1]) == {1: 1}


class Started:
    """A process that waits for a signal, which the launcher receives when it first polls."""

    all: ClassVar[list["Started"]] = []
    dead: int | None = None  # the one that dies at its start
    interrupted: int | None = None  # the one during whose start the launcher is interrupted

    def __init__(self, arguments: list[str], *, start_new_session: bool, **_: object) -> None:
        self.arguments, self.signals, self.looks = arguments[3:], list[int](), 0
        assert start_new_session, "Ctrl-C in the terminal does not reach it"
        Started.all.append(self)
        if len(Started.all) - 1 == self.interrupted:
            signal.raise_signal(signal.SIGINT)

    def poll(self) -> int | None:
        self.looks += 1
        if self.dead is not None and self is Started.all[self.dead]:
            return 1
        if self.dead is None and self is Started.all[0] and self.looks == 1:
            signal.raise_signal(signal.SIGINT)
        return -self.signals[0] if self.signals else None

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        """It has ended before."""

    wait = kill


INT, TERM = [signal.SIGINT], [signal.SIGTERM]


@pytest.mark.parametrize(
    ("how", "code", "signals"),
    [
        ({}, 130, [INT] * 4),  # a signal to the launcher reaches all that run
        ({"dead": 1}, 1, [TERM, [], TERM, TERM]),  # those that wait for one that died at its start are stopped
        ({"interrupted": 1}, 130, [INT] * 2),  # a signal while replicas are started stops those and starts no other
    ],
)
def test_replicas_meet_where_the_user_says_and_end_together(
    how: dict[str, Any], code: int, signals: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco.devices.usable_cores", lambda: 8)
    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.setattr(Started, "all", [])
    for name, value in how.items():
        monkeypatch.setattr(Started, name, value)
    said: list[str] = []
    settings = NetworkSettings(transport="tcp", replicas=4, listen="[::1]:0", silence=0.1)
    assert launch(settings, lambda replica, address: ["train", str(address)], said.append) == code
    assert [process.signals[:1] for process in Started.all] == signals
    assert all(process.arguments[1].startswith("[::1]:") for process in Started.all)
    assert said == (["replica 1 ended with exit code 1."] if "dead" in how else [])
