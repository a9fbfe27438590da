"""How many threads a process computes with beside others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from diloco.protocol.registry import Entry
from diloco.train.fleet import connecting
from diloco.train.launcher import launch
from diloco.train.resolve import resolve
from diloco.train.roles import Role
from diloco.train.settings import RunSettings
from diloco.train.threads import PeerThreads, Seats, choose_threads
from diloco.transport.address import Address
from diloco.transport.peers.connected import Connected, Table
from diloco.transport.peers.transport import PeerTransport
from diloco.transport.settings import TransportSettings


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine of four cores, a user who chose nothing, and threads that are what they were afterwards."""
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("diloco.train.threads.share", lambda processes: max(1, 4 // processes))
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


def test_a_seat_is_free_when_its_process_was_killed(tmp_path: Path) -> None:
    mine = Seats(tmp_path)
    program = (
        "import sys; from pathlib import Path; from diloco.train.threads import Seats\n"
        "seats = Seats(Path(sys.argv[1])); print(seats.taken(), flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "2\n"
    assert mine.taken() == 2
    other.kill()
    other.communicate()
    assert mine.taken() == 1
    assert Seats(tmp_path).taken() == 2
    assert len(list(tmp_path.iterdir())) == 2, "a seat that is free is taken again"


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert Seats(tmp_path).taken() == 1
    assert not list(tmp_path.iterdir())


def test_peers_that_come_and_go_divide_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr("diloco.train.threads.time.monotonic", lambda: now_s[0])
    mine = PeerThreads(None, Seats(tmp_path))
    assert torch.get_num_threads() == 4
    other = Seats(tmp_path)
    assert mine.follow() == "", "not counted at every step"
    now_s[0] += 5
    assert mine.follow() == "2 peers train on this machine: this one computes with 2 threads."
    assert torch.get_num_threads() == 2
    other.leave()
    now_s[0] += 5
    assert mine.follow() == "No other peer trains on this machine: this one computes with 4 threads."
    torch.set_num_threads(3)
    others = [Seats(tmp_path), Seats(tmp_path)]
    now_s[0] += 5
    assert mine.follow() == ""
    assert torch.get_num_threads() == 3, "what its user set meanwhile stays"
    for seats in others:
        seats.leave()


class Finished:
    """A process that has ended."""

    def __init__(self, arguments: list[str], *, env: dict[str, str], **_: object) -> None:
        self.env = env
        STARTED.append(self)

    def poll(self) -> int:
        return 0


STARTED: list[Finished] = []


def test_processes_that_the_launcher_starts_get_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.cores.usable_cores", lambda: 8)
    monkeypatch.setattr(subprocess, "Popen", Finished)
    settings = TransportSettings(name="torch", replicas=4)
    STARTED.clear()
    for chosen in ("", "5"):
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
        assert launch(settings, lambda *_: ["train"], print) == 0
    assert [process.env["OMP_NUM_THREADS"] for process in STARTED] == ["2"] * 4 + ["5"] * 4


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
