"""The command `diloco train` under torchrun: its processes are the replicas of a run over process groups.

The ranks are started as torchrun starts them, but forked, which takes no seconds to import torch.
"""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from diloco.checkpoint import list_checkpoints
from diloco.cli import main
from diloco.monitor import read_metrics
from tests.commands import Command
from tests.processes import Processes
from tests.runs import SMALL, of_torchrun, train

START = "--data-parallel-steps 3"


class Torchrun:
    """Starts the ranks of one torchrun, whose store keeps its keys when they are started again."""

    def __init__(self, processes: Processes, data: Path, out: Path, size: int) -> None:
        self.processes, self.out, self.size, self.attempt = processes, out, size, 0
        self.words = f"train {SMALL.replace('--replicas 2', '')} {data} --monitor.console quiet {START}"
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(self, arguments: str) -> list[Command]:
        """Start all ranks, for the first time or again."""
        self.attempt += 1
        words = f"{self.words} --out {self.out} {arguments}"
        return [
            Command(
                self.processes,
                words.split(),
                self.out.with_name(f"{self.attempt}-{rank}.txt"),
                environment=of_torchrun(rank, self.size, self.store.port),
            )
            for rank in range(self.size)
        ]

    def summaries(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.out.rglob("summary.json"))]


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes() as made:
        yield made


KILLS = """
import os, signal
from diloco.events import StepFinished

class Once:
    def __init__(self, folder):
        self.mark, self.rank = folder / "killed", os.environ["RANK"]

    def handle(self, event):
        if isinstance(event, StepFinished) and event.step == 11 and self.rank == "2" and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self): pass
"""


def test_a_rank_of_three_is_killed_and_all_start_again_from_the_newest_checkpoint(
    processes: Processes, data: Path, tmp_path: Path
) -> None:
    """Bit for bit, and with the same command, as torchrun restarts it. At step 11 all ranks have that of step 4."""
    more = "--steps 16 --checkpoint.every-steps 4 --network.silence 6s"
    alone = train(data, tmp_path / "alone", f"{START} {more} --replicas 3")
    (tmp_path / "kills.py").write_text(KILLS)
    torchrun, command = Torchrun(processes, data, tmp_path / "run", 3), f"{more} --sinks {tmp_path / 'kills.py'}:Once"
    ranks = torchrun.start(command)
    ranks[2].end(-signal.SIGKILL)
    started_s = time.monotonic()
    for rank in ranks[:2]:
        rank.end(1)
        assert re.search(r"diloco: rank 2 \(replica 2\) is lost: a connection has broken", rank.output)
    assert time.monotonic() - started_s < 30.0, "a third of the silence, 2 s, and load"
    for rank in torchrun.start(command):
        rank.end()
    assert {summary["global_params_digest"] for summary in torchrun.summaries()} == {alone["global_params_digest"]}
    resumed = [json.loads(line) for line in (torchrun.out / "metrics.jsonl").read_text().splitlines()]
    assert any(event.get("resumed_from") for event in resumed)


def test_a_run_that_goes_on_in_another_folder_is_started_again_there(
    processes: Processes, data: Path, tmp_path: Path
) -> None:
    """Killed before its first own checkpoint was due, it would have begun again from step 0."""
    train(data, tmp_path / "base", "--steps 30 --checkpoint.every-steps 0 --stop-after 5")
    torchrun, more = Torchrun(processes, data, tmp_path / "run", 2), "--transport torch --network.silence 6s"
    torchrun.words = f"train --resume {tmp_path / 'base'} --monitor.console quiet"
    folders = (torchrun.out, torchrun.out / "replica-1")
    first, second = torchrun.start(more)
    first.until(lambda: all(list_checkpoints(each / "checkpoints") for each in folders), "a checkpoint of each")
    processes.kill(second.rank)
    assert first.wait() in (0, 1), "it may have been done"
    for rank in torchrun.start(more):
        rank.end()
    for folder in folders:
        starts = read_metrics(folder / "metrics.jsonl", "RunStarted")
        assert [start["step"] >= 5 for start in starts] == [True] * len(starts)
    assert len({summary["global_params_digest"] for summary in torchrun.summaries()}) == 1


@pytest.mark.parametrize("named", ["{folder}/elsewhere", "runs/elsewhere", "runs/../elsewhere", "{folder}/run"])
@pytest.mark.parametrize("out", ["--out {folder}/mine", ""])
def test_the_store_chooses_no_run_folder(
    processes: Processes, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, out: str
) -> None:
    """Anybody who reaches it can write there. Before, each rank read and wrote in whatever folder it named."""
    monkeypatch.chdir(tmp_path)
    torchrun = Torchrun(processes, data, tmp_path / "run", 1)
    torchrun.store.set("diloco/folder", named.format(folder=tmp_path))
    words = f"{torchrun.words} {out.format(folder=tmp_path)}"
    rank = Command(processes, words.split(), tmp_path / "said.txt", environment=of_torchrun(0, 1, torchrun.store.port))
    rank.end(2)
    assert "The store of torchrun names the run folder" in (tmp_path / "said.txt").read_text()
    assert {each.name for each in tmp_path.iterdir()} <= {"said.txt", data.name}


def test_a_numbered_run_folder_that_the_store_names_is_taken(
    processes: Processes, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the first rank, which has chosen it, and of all in a later attempt."""
    monkeypatch.chdir(tmp_path)
    name = ""
    for number in ("", "-2", "-17"):
        torchrun = Torchrun(processes, data, tmp_path / "run", 1)
        if name:
            torchrun.store.set("diloco/folder", f"runs/{name}{number}")
        environment = of_torchrun(0, 1, torchrun.store.port)
        Command(processes, torchrun.words.split(), tmp_path / f"said{number}", environment=environment).end()
        name = name or next(each.name for each in (tmp_path / "runs").iterdir())
    assert {each.name for each in (tmp_path / "runs").iterdir()} == {name, f"{name}-2", f"{name}-17"}


def test_a_signal_to_one_stops_all_ranks_of_all_replicas_at_one_step(
    processes: Processes, data: Path, tmp_path: Path
) -> None:
    """Where one rank of each replica talks to the others, so that it alone learns that they stop."""
    torchrun = Torchrun(processes, data, tmp_path / "run", 4)
    first, *others = torchrun.start("--replica-size 2 --steps 100000 --train.parallelism ddp")
    metrics = torchrun.out / "metrics.jsonl"
    first.until(lambda: metrics.exists() and '"RoundCommitted"' in metrics.read_text(), "a round")
    os.kill(others[2].pid, signal.SIGINT)
    for command in (first, *others):
        command.end(130)
    folders = (torchrun.out, torchrun.out / "replica-1")
    assert len({list_checkpoints(folder / "checkpoints")[-1].step for folder in folders}) == 1
    by_replica = [json.loads((folder / "summary.json").read_text())["global_params_digest"] for folder in folders]
    assert by_replica[0] == by_replica[1]


def test_an_older_run_is_not_overwritten_by_a_restart(processes: Processes, data: Path, tmp_path: Path) -> None:
    """The first attempt is refused, and so is the second, since neither has trained there."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    torchrun = Torchrun(processes, data, tmp_path / "run", 2)
    for _ in range(2):
        first, second = torchrun.start("")
        assert [first.wait(), second.wait()] == [2, 1]
        assert "is not empty" in first.output


@pytest.mark.parametrize(
    ("arguments", "world_size", "words"),
    [
        ("--transport torch", 0, "needs torchrun, which starts all processes: torchrun --nproc-per-node 2 -m diloco"),
        ("--transport torch --replica 1 --join h:1", 4, "network.replica=1 can't be used with network.tra"),
        ("--transport torch --replicas 3", 4, "torchrun started 4 processes, but 3 replicas of 1 ranks need 3."),
        ("--transport torch --on-loss continue", 4, "can't be used with network.transport='torch'. Leave it out, or"),
        ("--transport in-process", 4, "Use --transport torch."),
        ("--replica 1 --join h:1 --replicas 3", 4, "needs a torchrun of its own for every replica of several ranks"),
        ("--transport tcp --replica-size 2", 0, "torchrun --nproc-per-node 2 -m diloco train --replica M --join"),
    ],
)
def test_what_contradicts_the_way_of_starting_is_refused(
    arguments: str,
    world_size: int,
    words: str,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in of_torchrun(0, world_size, 1).items() if world_size else ():
        monkeypatch.setenv(name, value)
    small = SMALL.replace("--replicas 2", "" if "--replicas" in arguments else "--replicas 2")
    assert main(f"train {small} {data} --out {tmp_path / 'run'} {arguments}".split()) == 2
    assert words in " ".join(capsys.readouterr().err.split())
