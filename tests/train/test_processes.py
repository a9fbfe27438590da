"""The launcher, and the number of threads of a process that shares its machine with others."""

import signal
import subprocess
from collections.abc import Iterator

import pytest
import torch

from diloco.devices import choose_threads, share
from diloco.train import launch
from diloco.transport import NetworkSettings


@pytest.fixture(autouse=True)
def all_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use all cores without a choice by the user, and restore the number of threads afterwards."""
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(share(1))
    yield
    torch.set_num_threads(before)


def test_a_process_takes_its_share_unless_the_user_chose_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_threads(2)
    assert torch.get_num_threads() == share(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    choose_threads(4)
    assert torch.get_num_threads() == share(2)


class Started:
    """A process that has ended, or that waits for a signal, which the launcher receives when it first polls."""

    waits = False
    dead: int | None = None  # the one that dies at its start
    interrupted: int | None = None  # the one during whose start the launcher is interrupted

    def __init__(self, arguments: list[str], *, env: dict[str, str], start_new_session: bool, **_: object) -> None:
        self.arguments = arguments[3:]
        self.env, self.signals, self.looks = env, list[int](), 0
        assert start_new_session, "Ctrl-C in the terminal does not reach it"
        STARTED.append(self)
        if len(STARTED) - 1 == self.interrupted:
            signal.raise_signal(signal.SIGINT)

    def poll(self) -> int | None:
        self.looks += 1
        if self.dead is not None and self is STARTED[self.dead]:
            return 1
        if self.waits and self.dead is None and self is STARTED[0] and self.looks == 1:
            signal.raise_signal(signal.SIGINT)
        return 0 if not self.waits else -self.signals[0] if self.signals else None

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        """It has ended before."""

    wait = kill


STARTED: list[Started] = []


def launched(monkeypatch: pytest.MonkeyPatch, listen: str | None = None) -> int:
    """Run a launcher of four replicas and return its exit code."""
    monkeypatch.setattr("diloco.devices.usable_cores", lambda: 8)
    monkeypatch.setattr(subprocess, "Popen", Started)
    settings = NetworkSettings(transport="tcp", replicas=4, listen=listen, silence=0.1)
    return launch(settings, lambda replica, address: ["train", str(address)], print)


def test_replicas_meet_at_the_host_that_the_user_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    STARTED.clear()
    assert launched(monkeypatch, "[::1]:0") == 0
    assert all(process.arguments[1].startswith("[::1]:") for process in STARTED)


def test_a_signal_to_the_launcher_reaches_all_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    STARTED.clear()
    monkeypatch.setattr(Started, "waits", True)
    assert launched(monkeypatch) == 130
    assert [process.signals for process in STARTED] == [[signal.SIGINT]] * 4


def test_replicas_that_wait_for_one_that_died_at_its_start_are_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    STARTED.clear()
    monkeypatch.setattr(Started, "waits", True)
    monkeypatch.setattr(Started, "dead", 1)
    assert launched(monkeypatch) == 1
    assert [process.signals[:1] for process in STARTED] == [[signal.SIGTERM], [], [signal.SIGTERM], [signal.SIGTERM]]
    assert capsys.readouterr().out == "replica 1 ended with exit code 1.\n"


def test_a_signal_while_replicas_are_started_stops_those_and_starts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    STARTED.clear()
    monkeypatch.setattr(Started, "waits", True)
    monkeypatch.setattr(Started, "interrupted", 1)
    assert launched(monkeypatch) == 130
    assert len(STARTED) == 2
