"""The command `diloco train --transport tcp`: real processes, compared with the run in one process."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from diloco.cli import main
from diloco.monitor import read_metrics
from tests.commands import Command
from tests.finetuning import write_base, write_sums
from tests.processes import Processes, free_port
from tests.runs import SMALL, of_torchrun, train

START = "--data-parallel-steps 3"


class Replicas:
    """Commands that train on ``data`` in ``out``: one command that starts all ranks, or one command for each rank."""

    def __init__(self, processes: Processes, words: str, out: Path) -> None:
        self.processes, self.out = processes, out
        self.words = f"{words} --out {out} --monitor.console quiet --transport tcp"

    def by_hand(self, arguments: str, *of_one: str) -> list[Command]:
        """Start one command for each entry of ``of_one``, which holds its own arguments."""
        meet = f"--join 127.0.0.1:{free_port()}"
        return [
            Command(self.processes, f"{self.words} {arguments} {meet} {own}".split(), self.out.with_suffix(f".{m}.txt"))
            for m, own in enumerate(of_one)
        ]

    def of_two_ranks(self, arguments: str) -> list[Command]:
        """Start two replicas of two ranks each, as a torchrun for each of them does."""
        self.stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
        size = "" if "--resume" in self.words else "--replica-size 2"
        meet = f"{size} {arguments} --join 127.0.0.1:{free_port()}"
        ranks = []
        for number in range(4):
            replica, position = divmod(number, 2)
            place = of_torchrun(position, 2, self.stores[replica].port)
            words = f"{self.words} {meet} --replica {replica}".split()
            output = self.out.with_suffix(f".{number}.txt")
            ranks.append(Command(self.processes, words, output, environment=place))
        return ranks

    @property
    def folders(self) -> tuple[Path, Path]:
        return self.out, self.out / "replica-1"

    def summaries(self) -> list[dict[str, Any]]:
        return [json.loads((folder / "summary.json").read_text()) for folder in self.folders]


@pytest.fixture
def replicas(data: Path, tmp_path: Path) -> Iterator[Replicas]:
    with Processes() as processes:
        yield Replicas(processes, f"train {SMALL} {data} {START}", tmp_path / "run")


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the summary of the run in one process."""
    return train(data, tmp_path_factory.mktemp("alone") / "run", START)


def test_machines_that_are_lost_with_their_disks_go_on_from_the_bucket(
    replicas: Replicas, alone: dict[str, Any]
) -> None:
    """The newest checkpoint of one replica was never uploaded, so both go on from the one before.

    They end where one process does: with a shared start, fragments in flight at the stop, and averages of fp4.
    """
    bucket = replicas.out.with_name("bucket")
    line = f"--resume-or-start file://{bucket} --checkpoint.every-steps 5"
    for command in replicas.by_hand(f"{line} --stop-after 10", "--replica 0", "--replica 1"):
        command.end()
    shutil.rmtree(replicas.out)
    (newest,) = bucket.glob("replica-1/checkpoints/*-step-00000010-*/manifest.json")
    newest.unlink()
    Command(replicas.processes, f"{replicas.words} {line}".split(), replicas.out.with_suffix(".txt")).end()
    starts = [read_metrics(folder / "metrics.jsonl", "RunStarted")[-1] for folder in replicas.folders]
    assert [start["step"] for start in starts] == [5, 5]
    for summary in replicas.summaries():
        for name in ("global_params_digest", "rounds_committed", "sent_bytes_per_replica"):
            assert summary[name] == alone[name], name
    assert replicas.summaries()[0]["heldout_loss"] == alone["heldout_loss"]


def test_two_replicas_of_two_ranks_fine_tuned_with_muon_learn_as_those_of_one_rank(tmp_path: Path) -> None:
    """Up to round-off, since the ranks sum gradients in another order. The result can be evaluated like any run."""
    base, sums = write_base(tmp_path / "base"), write_sums(tmp_path / "sums.jsonl")
    words = f"""finetune {base} --lora-rank 0 --data {sums} --optimizer.name Muon --learning-rate 3e-3 --replicas 2
        {START} --steps 12 --inner-steps 4 --batch-size 2 --sequence-length 48 --evaluation.every-steps 0
        --evaluation.sequences 8 --checkpoint.every-steps 0 --device cpu"""
    assert main([*words.split(), "--out", str(tmp_path / "alone"), "--monitor.console", "quiet"]) == 0
    with Processes() as processes:
        ranks = Replicas(processes, words, tmp_path / "cut")
        for command in ranks.of_two_ranks("--stop-after 7"):
            command.end()
        ranks.words = f"finetune --resume {tmp_path / 'cut'} --monitor.console quiet"
        for command in ranks.of_two_ranks(""):
            command.end()
    alone, cut = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("alone", "cut"))
    assert [(each["steps"], each["rounds_committed"]) for each in (alone, cut)] == [(12, 2)] * 2
    assert cut["heldout_loss"] == pytest.approx(alone["heldout_loss"], rel=1e-4)
    assert main(["evaluate", str(tmp_path / "cut")]) == 0
