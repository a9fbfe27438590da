"""`diloco train --transport hivemind` as a user types it: real peers, compared with the run in one process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from diloco.cli import main
from diloco.transport.hivemind import lookout
from tests.processes import Processes, report
from tests.runs import SMALL

LIMIT_S = 300
"""Far more than any of these takes, for machines that are busy."""

QUICK = "--transport.heartbeat-s 0.5 --transport.silence-s 20 --transport.rendezvous-timeout-s 120 --train.threads 1"
LOOPBACK = "--swarm.listen /ip4/127.0.0.1/tcp/0 --swarm.no-map-ports"


class Peer:
    """One `diloco train` process of a swarm.

    Args:
        data: to train on.
        out: its folder.
        arguments: beside those that all have.
        join: address of another one.
    """

    def __init__(self, data: Path, out: Path, arguments: str, join: str = "") -> None:
        words = f"{SMALL} {data} --out {out} --monitor.console quiet --transport hivemind --run test {QUICK} {LOOPBACK}"
        joining = ["--join", join] if join else []
        self.out = out
        self.process = subprocess.Popen(
            [sys.executable, "-m", "diloco", "train", *words.split(), *arguments.split(), *joining],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that a signal to its group is one to it and to what it starts
        )
        self.words: list[str] = []
        self._said = threading.Condition()
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as said:
            for line in said:
                with self._said:
                    self.words.append(line)
                    self._said.notify_all()
        with self._said:
            self.words.append("(end)")
            self._said.notify_all()

    def address(self) -> str:
        """What others join by."""

        def found() -> re.Match[str] | None:
            return re.search(r"--join (/ip4/127\S+)", "".join(self.words))

        with self._said:
            self._said.wait_for(lambda: found() or "(end)" in self.words, LIMIT_S)
            match = found()
        assert match, "".join(self.words)
        return match[1]

    def metrics(self, event: str) -> list[dict[str, Any]]:
        path = self.out / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [record for line in lines if line.endswith("}") and (record := json.loads(line))["event"] == event]

    def wait_for(self, event: str, **fields: Any) -> dict[str, Any]:
        """Until it says so in its metrics."""
        while self.process.poll() is None:
            for record in self.metrics(event):
                if all(record[name] == value for name, value in fields.items()):
                    return record
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)
        raise AssertionError("".join(self.words))

    def end(self, code: int = 0) -> dict[str, Any]:
        assert self.process.wait(LIMIT_S) == code, "".join(self.words)
        path = self.out / "summary.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}


@pytest.fixture
def started() -> Iterator[list[Peer]]:
    peers: list[Peer] = []
    yield peers
    for peer in peers:
        if peer.process.poll() is None:
            peer.process.kill()
        peer.process.wait()
        peer._listening.join()


def test_a_swarm_that_begins_together_is_the_run_in_one_process_bit_for_bit(
    data: Path, tmp_path: Path, started: list[Peer]
) -> None:
    arguments = [*SMALL.split(), str(data), "--out", str(tmp_path / "alone"), "--monitor.console", "quiet"]
    subprocess.run([sys.executable, "-m", "diloco", "train", *arguments, "--train.threads", "1"], check=True)
    alone = json.loads((tmp_path / "alone" / "summary.json").read_text())
    started.append(Peer(data, tmp_path / "a", "--start-replicas 2 --replica 0"))
    started.append(Peer(data, tmp_path / "b", "--start-replicas 2 --replica 1", started[0].address()))
    for peer in started:
        summary = peer.end()
        assert summary["global_params_digest"] == alone["global_params_digest"]
        assert summary["rounds_committed"] == alone["rounds_committed"]
        assert summary["rounds_void"] == 0


def test_with_dynamic_steps_nobody_is_left_out_and_all_agree(data: Path, tmp_path: Path, started: list[Peer]) -> None:
    """How fast each one is depends on the machine; that they end with the same parameters does not."""
    arguments = "--start-replicas 2 --steps 40 --swarm.dynamic-steps"
    started.append(Peer(data, tmp_path / "a", f"{arguments} --replica 0"))
    started.append(Peer(data, tmp_path / "b", f"{arguments} --replica 1", started[0].address()))
    summaries = [peer.end() for peer in started]
    assert summaries[0]["global_params_digest"] == summaries[1]["global_params_digest"]
    assert [summary["steps"] for summary in summaries] == [40, 40]
    for peer in started:
        steps = peer.metrics("StepFinished")
        assert {record["pace"] for record in steps} <= {0.25, 0.5, 0.75, 1.0}
        assert all(record["trained"] for record in steps[:6])
        assert all(record["contributors"] == [0, 1] for record in peer.metrics("RoundCommitted"))


def test_replicas_come_and_go_and_those_who_stay_agree(data: Path, tmp_path: Path, started: list[Peer]) -> None:
    """The third joins late, the first is asked to leave, and the others end with the same global parameters."""
    steps = "--steps 100000 --inner-steps 8"
    first = Peer(data, tmp_path / "a", f"{steps} --replica 0")
    started.append(first)
    address = first.address()
    first.wait_for("RoundCommitted")
    others = [Peer(data, tmp_path / f"b{m}", f"{steps} --replica {m}", address) for m in (1, 2)]
    started.extend(others)
    for peer in others:
        peer.wait_for("RoundCommitted", contributors=[0, 1, 2])
    first.process.send_signal(signal.SIGINT)
    assert first.process.wait(LIMIT_S) == 130, "".join(first.words)
    for peer in others:
        left = peer.wait_for("ViewChanged", members=[1, 2])
        assert "replica 0 has left" in left["reason"]
        peer.wait_for("RoundCommitted", contributors=[1, 2])
    for peer in others:
        peer.process.send_signal(signal.SIGINT)
    for peer in others:
        peer.end(130)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_its_whole_group_ends_a_peer_as_one_to_itself_does(
    data: Path, tmp_path: Path, started: list[Peer], number: signal.Signals
) -> None:
    """Ctrl-C in a terminal, `timeout` and batch systems send it to all that the peer has started, too."""
    steps = "--steps 100000 --inner-steps 8 --start-replicas 2"
    started.append(Peer(data, tmp_path / "a", f"{steps} --replica 0"))
    started.append(Peer(data, tmp_path / "b", f"{steps} --replica 1", started[0].address()))
    for peer in started:
        peer.wait_for("RoundCommitted", contributors=[0, 1])
    first, second = started
    os.killpg(first.process.pid, number)
    assert first.process.wait(60) == 130, "".join(first.words)
    assert first.metrics("Interrupted")[0]["signal"] == number.name
    assert first.metrics("CheckpointSaved")
    assert "replica 0 has left" in second.wait_for("ViewChanged", members=[1])["reason"]
    os.killpg(second.process.pid, number)
    assert second.process.wait(60) == 130, "".join(second.words)


def test_ctrl_c_ends_a_round_that_nobody_else_would(data: Path, tmp_path: Path, started: list[Peer]) -> None:
    """The other replica stands still, and is not missed for hours."""
    steps = "--steps 100000 --inner-steps 8 --transport.silence-s 9000 --transport.round-timeout-s 9001"
    started.append(Peer(data, tmp_path / "a", f"{steps} --start-replicas 2 --replica 0"))
    started.append(Peer(data, tmp_path / "b", f"{steps} --start-replicas 2 --replica 1", started[0].address()))
    first, second = started
    first.wait_for("RoundCommitted", contributors=[0, 1])
    second.process.send_signal(signal.SIGSTOP)
    waited_for = len(first.metrics("StepFinished"))
    with suppress(subprocess.TimeoutExpired):
        first.process.wait(5)  # in which it comes to the end of its steps without a round
    assert first.process.poll() is None
    assert len(first.metrics("StepFinished")) <= waited_for + 8
    first.process.send_signal(signal.SIGINT)
    assert first.end(130)["interrupted"] == "SIGINT"
    assert first.metrics("CheckpointSaved"), "what it has not shared is kept"


def test_why_a_peer_does_not_answer_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [lookout.Seen("QmHere", 0, {"step": 7}), lookout.Seen("QmAway", 1, problem="no answer within 10 s")]

    async def look(*_: Any) -> list[lookout.Seen]:
        return found

    monkeypatch.setattr(lookout, "look", look)
    arguments = ["peers", "--run", "mine", "--join", "/ip4/127.0.0.1/tcp/1/p2p/QmHere"]
    assert main(arguments) == 0
    shown = capsys.readouterr()
    assert [line.split()[:4] for line in shown.out.splitlines()[1:]] == [
        ["QmHere", "0", "?", "7"],
        ["QmAway", "1", "no", "answer"],
    ]
    assert shown.err == "diloco: QmAway: no answer within 10 s\n"
    here = {"step": 7, "members": [0, 2], "digest": "ab"}
    found[:] = [
        lookout.Seen("QmHere", 0, here),
        lookout.Seen("QmDone", 1, problem="failed to dial QmDone\n * dial tcp", finished=True),
        lookout.Seen("QmFrozen", 2, problem="failed to dial QmFrozen\n * dial tcp"),
        lookout.Seen("QmLeft", 3, problem="failed to dial QmLeft\n * dial tcp"),
        lookout.Seen("QmAhead", 4, here | {"step": 9, "digest": "cd"}),
    ]
    assert main(arguments) == 0
    shown = capsys.readouterr()
    states = [line.split()[2] for line in shown.out.splitlines()[1:]]
    assert states == ["?", "finished", "no", "gone", "?"]
    assert shown.err.splitlines()[:3] == [
        "diloco: QmDone: replica 1 has finished the run, and has ended",
        "diloco: QmFrozen: failed to dial QmFrozen",
        "diloco: QmLeft: replica 3 takes part no more: it has left, or was lost, and the others went on",
    ]
    assert "the digests differ because the peers were asked at different steps" in shown.err
    found[-1] = lookout.Seen("QmAhead", 4, here | {"digest": "cd"})
    main(arguments)
    assert "peers at the same step show different digests" in capsys.readouterr().err
    found.clear()
    assert main(arguments) == 1
    assert "no peer of run 'mine'" in capsys.readouterr().err


class Told(io.StringIO):
    """What a process of `Processes` says, as it says it."""

    def write(self, text: str) -> int:
        report(text)
        return super().write(text)


def train(rank: int, words: list[str]) -> tuple[int, str]:
    """`diloco train` in a process of its own: how it ended, and what it said."""
    with contextlib.redirect_stderr(Told()) as told, contextlib.redirect_stdout(io.StringIO()):
        return main(["train", *words, "--monitor.console", "quiet"]), told.getvalue()


def finished(processes: Processes) -> None:
    """All of them end well."""
    ended = processes.results(LIMIT_S)
    said = "\n".join(words for _, words in ended.values())
    assert {rank: code for rank, (code, _) in ended.items()} == dict.fromkeys(ended, 0), said


def address_told(processes: Processes, rank: int) -> str:
    """By which others join a process."""
    while not (found := re.search(r"--join (/ip4/127\S+)", processes.heard(rank, LIMIT_S))):
        pass
    return found[1]


def test_a_swarm_that_was_stopped_goes_on_from_its_newest_checkpoint(data: Path, tmp_path: Path) -> None:
    """One peer stops early and one late; the late one founds the swarm again, and the other takes over its state."""
    early, late = tmp_path / "early", tmp_path / "late"
    new = f"{SMALL} {data} --steps 32 --transport hivemind --run test --start-replicas 2 {QUICK}".split()

    def peer(*words: object) -> list[str]:
        return [*map(str, words), *LOOPBACK.split()]

    with Processes() as processes:
        processes.start(1, train, peer(*new, "--out", early, "--stop-after", 6))
        join = "--join", address_told(processes, 0)
        processes.start(1, train, peer(*new, "--out", late, "--stop-after", 14, *join))
        finished(processes)
        processes.start(1, train, peer("--resume", late))
        join = "--join", address_told(processes, 2)
        processes.start(1, train, peer("--resume", early, *join))
        finished(processes)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (early, late)]
    assert [summary["steps"] for summary in summaries] == [32, 32]
    assert len({summary["global_params_digest"] for summary in summaries}) == 1
    said = {
        folder: [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (early, late)
    }
    notes = {folder: [record["text"] for record in said[folder] if record["event"] == "Note"] for folder in said}
    assert any("so it founds the swarm anew, at step 14." in note for note in notes[late])
    assert any("who are at step 14. Its own checkpoint of step 6 is not used" in note for note in notes[early])
    assert [record["step"] for record in said[late] if record["event"] == "RunStarted"] == [0, 14]
