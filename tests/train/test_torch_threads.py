"""The number of threads of a process that shares its machine with others."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from diloco.protocol import Entry
from diloco.train import PeerThreads, Role, RunSettings, Seats, choose_threads, launch, launcher, resolve
from diloco.train.fleet import connecting
from diloco.transport import Address, Connected, PeerTransport, Table, TransportSettings
from tests.processes import Processes, receive, report


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulate a machine of four cores without a choice by the user, and restore the number of threads afterwards."""
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("diloco.train.torch_threads.share", lambda processes: max(1, 4 // processes))
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_a_process_takes_its_share() -> None:
    choose_threads(None, 2)
    assert torch.get_num_threads() == 2


def test_what_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_threads(3, 2)
    assert torch.get_num_threads() == 3
    choose_threads(None, 1)  # as torch.set_num_threads(3) before
    assert torch.get_num_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    choose_threads(None, 4)
    assert torch.get_num_threads() == 3


def sit(rank: int, folder: Path) -> None:
    """Hold a seat for the lifetime of this process."""
    seats = Seats(folder)
    report(seats.taken())
    receive()


def test_a_seat_is_free_when_its_process_was_killed(tmp_path: Path) -> None:
    mine = Seats(tmp_path)
    with Processes() as processes:
        processes.start(1, sit, tmp_path)
        assert processes.next_report(0) == 2
        assert mine.taken() == 2
        processes.kill(0)
    assert mine.taken() == 1
    assert Seats(tmp_path).taken() == 2
    assert len(list(tmp_path.iterdir())) == 2, "a free seat is reused"


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert Seats(tmp_path).taken() == 1
    assert not list(tmp_path.iterdir())


def test_peers_that_come_and_go_divide_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr("diloco.train.torch_threads.time.monotonic", lambda: now_s[0])
    mine = PeerThreads(None, Seats(tmp_path))
    assert torch.get_num_threads() == 4
    other = Seats(tmp_path)
    assert mine.follow() == "", "peers are not counted at every step"
    now_s[0] += 5
    assert mine.follow() == "2 peers train on this machine: this one uses 2 threads."
    assert torch.get_num_threads() == 2
    other.leave()
    now_s[0] += 5
    assert mine.follow() == "No other peer trains on this machine: this one uses 4 threads."
    torch.set_num_threads(3)
    others = [Seats(tmp_path), Seats(tmp_path)]
    now_s[0] += 5
    assert mine.follow() == ""
    assert torch.get_num_threads() == 3, "a number that the user sets meanwhile is kept"
    for seats in others:
        seats.leave()


class Started:
    """A process that has ended, or that waits for a signal, which the launcher receives when it first polls."""

    waits = False

    def __init__(self, arguments: list[str], *, env: dict[str, str], start_new_session: bool, **_: object) -> None:
        self.arguments = arguments[3:]
        self.env, self.signals, self.looks = env, list[int](), 0
        assert start_new_session, "Ctrl-C in the terminal does not reach it"
        STARTED.append(self)

    def poll(self) -> int | None:
        self.looks += 1
        if self.waits and self is STARTED[0] and self.looks == 1:
            signal.raise_signal(signal.SIGINT)
        return 0 if not self.waits else 130 if self.signals else None

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def terminate(self) -> None:
        """Ignore the request, as the process was asked before."""


STARTED: list[Started] = []


def launched(monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a launcher of four replicas and return its exit code."""
    monkeypatch.setattr("diloco.cores.usable_cores", lambda: 8)
    monkeypatch.setattr(subprocess, "Popen", Started)
    return launch(TransportSettings(name="torch", replicas=4), lambda *_: ["train"], print)


def test_processes_that_the_launcher_starts_get_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    STARTED.clear()
    for chosen in ("", "5"):
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
        assert launched(monkeypatch) == 0
    assert [process.env["OMP_NUM_THREADS"] for process in STARTED] == ["2"] * 4 + ["5"] * 4


def test_a_signal_to_the_launcher_reaches_all_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    STARTED.clear()
    monkeypatch.setattr(Started, "waits", True)
    assert launched(monkeypatch) == 130
    assert [process.signals for process in STARTED] == [[signal.SIGINT]] * 4


def test_the_processes_of_a_replica_are_started_again_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher waits until all have ended, as the last one is still saving. The restarted ones use a new store."""
    STARTED.clear()
    ports = itertools.count(1)

    def poll(process: Started) -> int | None:
        process.looks += 1
        if process.arguments[0] == "0" or process in STARTED[4:]:
            return 0 if len(STARTED) == 6 else None
        ended = process.arguments[1] == "0" or process.looks == 3
        assert len(STARTED) == 4
        return 1 if ended else None

    monkeypatch.setattr(Started, "poll", poll)
    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.setattr(launcher, "_inner_store", lambda host: SimpleNamespace(port=next(ports)))
    settings = TransportSettings(name="torch", replicas=2, replica_size=2, on_failure="continue", restarts=1)
    assert launch(settings, lambda m, s, meeting, inner: [str(m), str(s), str(inner)], print) == 0
    first, second, third = (f"127.0.0.1:{port}" for port in (1, 2, 3))
    assert [process.arguments for process in STARTED] == [
        *(["0", each, first] for each in "01"),
        *(["1", each, second] for each in "01"),
        *(["1", each, third] for each in "01"),
    ]


def test_a_rank_that_trained_to_the_end_in_vain_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    STARTED.clear()

    def poll(process: Started) -> int | None:
        process.looks += 1
        return launcher.IN_VAIN if process is STARTED[0] or process.looks == 3 else None

    monkeypatch.setattr(Started, "poll", poll)
    monkeypatch.setattr(subprocess, "Popen", Started)
    settings = TransportSettings(name="torch", replicas=2, on_failure="continue", restarts=1)
    assert launch(settings, lambda *_: ["train"], print) == 1
    assert len(STARTED) == 2


@pytest.mark.parametrize(("rank", "threads"), [(0, 2), (1, 4), (2, 2)])
def test_ranks_that_are_started_one_by_one_count_those_at_their_own_address(
    rank: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = ("10.0.0.1:4000", "10.0.0.2:4000", "10.0.0.1:4001")
    table = Table({number: Entry(number, address) for number, address in enumerate(addresses)}, running=False)
    transport = SimpleNamespace(rules=SimpleNamespace(rank=rank), replica=rank)
    monkeypatch.setattr(connecting, "connect", lambda *_, **__: Connected(cast(PeerTransport, transport), table, False))
    run = resolve(RunSettings(transport=TransportSettings(name="torch", replicas=3)), num_layers=4)
    role = Role("rank", rank, rendezvous=Address("10.0.0.1", 4000))
    connecting.connect_rank(run, role, {}, -1, torch.device("cpu"))
    assert torch.get_num_threads() == threads
