"""The command `diloco train --transport swarm`: real peers. Its bits: see `tests/train/test_golden_runs.py`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import diloco.transport
from diloco.cli import main
from diloco.transport import PeerReport, Status
from tests.commands import PACE, Command
from tests.processes import Processes
from tests.runs import SMALL

QUICK = " --network.silence 20s"
LOOPBACK = "--network.listen 127.0.0.1:0"


class Peer(Command):
    """One `diloco train` process of a swarm.

    Args:
        processes: the processes to which it is added.
        out: its run folder.
        arguments: its arguments in addition to those of all peers.
        joins: the peer to join; its address is awaited.
    """

    def __init__(self, processes: Processes, out: Path, arguments: str, joins: Peer | None = None) -> None:
        join = f"--join {joins.address()}" if joins else ""
        (pace := out.parent / "pace.py").write_text(PACE)
        words = shlex.split(f"train --monitor.console quiet --sinks {pace}:Pace {LOOPBACK} {arguments} {join}")
        self.out = out
        super().__init__(processes, words, out.with_suffix(f".{len(list(out.parent.iterdir()))}.txt"))

    def address(self) -> str:
        """Return the address that other peers give as --join."""
        return self.until(lambda: re.search(r"--join (/ip4/127\S+)", self.output), "an address")[1]

    def metrics(self, event: str) -> list[dict[str, Any]]:
        path = self.out / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [record for line in lines if line.endswith("}") and (record := json.loads(line))["event"] == event]

    def wait_for(self, event: str, **fields: Any) -> dict[str, Any]:
        """Wait until the event is in its metrics."""

        def said() -> list[dict[str, Any]]:
            return [each for each in self.metrics(event) if all(each[name] == fields[name] for name in fields)]

        return self.until(said, event)[0]

    def summary(self, code: int = 0) -> dict[str, Any]:
        """Wait for the process to end with ``code``, and return the summary of the run."""
        self.end(code)
        return dict(json.loads((self.out / "summary.json").read_text()))


MakePeer = Callable[..., Peer]


@pytest.fixture
def new_peer(data: Path, tmp_path: Path, keys: Path) -> Iterator[MakePeer]:
    """Return a function that starts a peer of one new run, with a name and arguments."""
    with Processes() as processes:

        def make(name: str, arguments: str, joins: Peer | None = None) -> Peer:
            where = f"--out {tmp_path / name}"
            run = f"{SMALL} {data} --transport swarm --run test {QUICK} {where} {arguments}"
            return Peer(processes, tmp_path / name, run, joins)

        yield make


ENDLESS = "--steps 100000 --inner-steps 8"


def test_replicas_come_and_go_by_the_commands_that_are_printed_and_those_who_stay_agree(
    tmp_path: Path, new_peer: MakePeer
) -> None:
    """Two join a running one by the command that it prints. It is asked to leave, and comes back by the next command.

    At the end all receive a signal that also goes to all processes that they have started, as from Ctrl-C in a
    terminal, `timeout` or batch systems, and they end as the first did.
    """
    first = new_peer("a", f"{ENDLESS} --replicas 1 --replica 0")
    first.wait_for("RoundCommitted")
    join = first.until(lambda: re.search(r"^  diloco train (.*/127\.0\.0\.1/.*)", first.output, re.M), "a command")[1]
    assert not {"--network.listen", "--replica", "--out"} & {*join.split()}
    others = [Peer(first.processes, tmp_path / name, f"{join} --out {tmp_path / name} --device cpu") for name in "bc"]
    views = [first.until(lambda: [r for r in first.metrics("ViewChanged") if len(r["members"]) == 3], "all three")]
    _, *numbers = views[0][0]["members"]
    for peer in others:
        peer.wait_for("RoundCommitted", contributors=[0, *numbers])
    os.kill(first.pid, signal.SIGINT)
    first.end(130)
    for peer in others:
        left = peer.wait_for("ViewChanged", members=numbers)
        assert "replica 0 has left" in left["reason"]
        assert (left["left"], left["lost"]) == ([0], [])
        peer.wait_for("RoundCommitted", contributors=numbers)
    resume = re.search(r"To resume while others train: diloco (train --resume .* --join .*)", first.output)
    assert resume, first.output
    count = len(first.metrics("RoundCommitted"))
    again = Command(first.processes, shlex.split(resume[1]), tmp_path / "again.txt")
    again.until(lambda: first.metrics("RoundCommitted")[count:], "a round after the resumption")
    for peer, number in zip((*others, again), (signal.SIGINT, signal.SIGTERM, signal.SIGINT), strict=True):
        os.killpg(peer.pid, number)
        peer.end(130, limit_s=60)
    for peer, number in zip(others, (signal.SIGINT, signal.SIGTERM), strict=True):
        assert peer.metrics("Interrupted")[0]["signal"] == number.name
        assert peer.metrics("CheckpointSaved")
    alone = re.search(r"^diloco: stopped.*To resume: (diloco train --resume \S+.*)", again.output, re.M)
    assert alone, again.output
    assert "--join" not in alone[1]


def test_ctrl_c_ends_a_round_that_nobody_else_would(new_peer: MakePeer) -> None:
    """The other replica is stalled, and would be declared lost only after hours."""
    arguments = f"{ENDLESS} --network.silence 9000s --network.round-timeout 9001s --replicas 2"
    first = new_peer("a", f"{arguments} --replica 0")
    second = new_peer("b", f"{arguments} --replica 1", first)
    first.wait_for("RoundCommitted", contributors=[0, 1])
    os.kill(second.pid, signal.SIGSTOP)
    steps = len(first.metrics("StepFinished"))
    first.until(lambda: len(first.metrics("RoundSent")) > len(first.metrics("RoundCommitted")), "a round in flight")
    os.kill(first.pid, signal.SIGINT)
    assert first.summary(130)["interrupted"] == "SIGINT"
    assert len(first.metrics("StepFinished")) <= steps + 8, "it stops at the round that never ends"
    assert first.metrics("CheckpointSaved"), "work that it has not shared is kept"


STATUS = ["status", "--run", "mine", "--join", "/ip4/127.0.0.1/tcp/1/p2p/QmHere"]
HERE = PeerReport("QmHere", 0, Status(replica=0, step=7, members=(0, 2), round="fragment 0, outer step 1", digest="ab"))
Ask = Callable[..., None]


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Ask:
    """A function that replaces the network by one that gives these answers to questions about the peers."""

    def replace(*answers: list[PeerReport] | BaseException) -> None:
        client = mock.Mock(ask=mock.AsyncMock(side_effect=answers))
        monkeypatch.setattr(diloco.transport, "open_status_client", lambda *_: contextlib.nullcontext(client))

    return replace


@pytest.mark.parametrize(
    ("other", "state", "remark"),
    [
        (PeerReport("Qm", 1, problem="no answer within 10 s"), "gone", "Qm: replica 1 is no longer a member"),
        (PeerReport("Qm", 2, problem="no answer\n * dial"), "no answer", "Qm: no answer"),
        (PeerReport("Qm", 1, problem="x", finished=True), "finished", "Qm: replica 1 has finished the run"),
        (PeerReport("Qm", 1, problem="x", searches=True), "joining", "Qm: replica 1 is looking for the members"),
        (PeerReport("Qm", 1, problem="x", objection="its run has a secret"), "refuses", "Qm: it answers, but its run"),
        (PeerReport("Qm", 2, Status(state="joining", state_expected_bytes=9, state_received_bytes=8)),
         "joining, 88 %", ""),
        (PeerReport("Qm", 2, Status(step=9, digest="cd", round="fragment 0, outer step 2")), "9", ""),
        (PeerReport("Qm", 2, Status(step=7, digest="cd", round="fragment 1, outer step 1")), "7", ""),
        (PeerReport("Qm", 2, Status(step=8)), "8", ""),
        (PeerReport("Qm", 2, Status(step=7, digest="cd", round="fragment 0, outer step 1")), "7",
         "peers show different digests of the state before the same round"),
    ],
)  # fmt: skip
def test_the_status_of_a_peer_that_does_not_answer_says_why(
    answering: Ask, capsys: pytest.CaptureFixture[str], other: PeerReport, state: str, remark: str
) -> None:
    answering([HERE, other], [HERE, other], [])
    assert main(STATUS) == 0
    shown = capsys.readouterr()
    assert [line.split("  ")[0] for line in shown.out.splitlines()[1:]] == ["QmHere", "Qm"]
    assert state in shown.out.splitlines()[2]
    assert (remark in shown.err) if remark else not shown.err
    assert main([*STATUS, "--json"]) == 0
    assert [report["number"] for report in json.loads(capsys.readouterr().out)] == [0, other.number]
    assert main(STATUS) == 1
    assert "no peer of run 'mine'" in capsys.readouterr().err


def test_status_is_kept_up_to_date_until_ctrl_c(answering: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    answering([HERE], OSError("the network is down"), [HERE], KeyboardInterrupt)
    assert main([*STATUS, "--every", "10ms"]) == 0
    shown, told = capsys.readouterr()
    assert shown.count("QmHere") == 2
    assert "could not be queried; trying again: the network is down" in told


def test_a_swarm_that_was_stopped_goes_on_from_its_newest_checkpoint(tmp_path: Path, new_peer: MakePeer) -> None:
    """One peer stops early and one late. The late one founds the swarm again, and the other adopts its state.

    Each trains as many steps as its speed allows, which depends on the machine.
    """
    early, late = tmp_path / "early", tmp_path / "late"
    arguments = "--steps 32 --replicas 2 --network.straggler dynamic"
    first = new_peer("early", f"{arguments} --stop-after 6")
    for peer in (first, new_peer("late", f"{arguments} --stop-after 14", first)):
        peer.end()
        steps = peer.metrics("StepFinished")
        assert {record["pace"] for record in steps} <= {0.25, 0.5, 0.75, 1.0}
        assert all(record["trained"] for record in steps[:6])
    founds = Peer(first.processes, late, f"--resume {late}")
    for peer in (founds, Peer(first.processes, early, f"--resume {early}", founds)):
        peer.end()
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (early, late)]
    assert [summary["steps"] for summary in summaries] == [32, 32]
    assert len({summary["global_params_digest"] for summary in summaries}) == 1
    assert "so it founds a new swarm at step 14." in str(founds.metrics("Note"))
    assert "which are at step 14. Its own checkpoint of step 6 is not used" in str(first.metrics("Note"))
    assert [record["step"] for record in founds.metrics("RunStarted")] == [0, 14]
