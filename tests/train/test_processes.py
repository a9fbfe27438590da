"""The launcher, and the number of threads of a process that shares its machine with others."""

import signal
import subprocess
from collections.abc import Iterator
from typing import Any, ClassVar

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

    all: ClassVar[list["Started"]] = []
    waits = True
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
        if self.waits and self.dead is None and self is Started.all[0] and self.looks == 1:
            signal.raise_signal(signal.SIGINT)
        return 0 if not self.waits else -self.signals[0] if self.signals else None

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        """It has ended before."""

    wait = kill


INT, TERM = [signal.SIGINT], [signal.SIGTERM]


@pytest.mark.parametrize(
    ("how", "code", "signals"),
    [
        ({"waits": False}, 0, [[]] * 4),
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
