"""Edge cases of a replica's ranks: empty shards, no process group, and a rank that dies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.algorithm import SyncSchedule, bind, flatten, local_shard, partition, unflatten_
from diloco.errors import ReplicaLostError
from diloco.model import build_model
from diloco.outer import DiLoCo
from diloco.train import OptimizerSettings, make_inner_optimizer, parallelise
from tests.processes import Processes, receive, report
from tests.train.ranks import CPU, MODEL, Rank, Setup, open_group, whole


def rank_with_an_empty_shard(position: int, folder: Path) -> dict[str, Any]:
    """A fragment consists of one norm, whose 4 values are sharded over 3 ranks as 2, 2 and none."""
    group = open_group(Setup(strategy="fsdp", size=3), position, folder)
    narrow = replace(MODEL, width=4, layers=1)
    model = parallelise(build_model(narrow, seed=0), "fsdp", group, CPU).model
    fragments = partition(
        model, num_fragments=2, strategy="patterns", patterns=[["model.norm.*"], ["model.[!n]*", "lm_head.*"]]
    )
    diloco = DiLoCo(
        model,
        make_inner_optimizer(OptimizerSettings(), model),
        fragments=fragments,
        schedule=SyncSchedule(inner_steps=2, num_fragments=2),
        codec="fp4",
        error_feedback=True,
    )
    norm = bind(model, fragments[0])
    unflatten_(flatten(norm, torch.empty(fragments[0].numel)) + 1 + position, norm)
    for _ in range(4):
        diloco.step()
    with diloco.global_model():
        agreed = whole(norm[0]).tolist()
    result = {
        "numel": fragments[0].numel,
        "committed": diloco.rounds_committed,
        "agreed": agreed,
        "local": local_shard(norm[0]).tolist(),
    }
    group.close()
    return result


def test_a_rank_may_hold_nothing_of_a_fragment(tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(3, rank_with_an_empty_shard, tmp_path)
        ranks = list(processes.results(timeout_s=300).values())
    assert [rank["numel"] for rank in ranks] == [2, 2, 0]
    assert [rank["committed"] for rank in ranks] == [3] * 3
    assert all(rank["agreed"] == ranks[0]["agreed"] for rank in ranks)
    assert [value for rank in ranks for value in rank["local"]] == ranks[0]["agreed"]
    assert min(ranks[0]["agreed"]) > 1.0, "the pseudo-gradient was applied"


def rank_that_dies(position: int, setup: Setup, folder: Path) -> str:
    group = open_group(setup, position, folder, replica=3)
    rank = Rank(setup, group)
    rank.step()
    report("ready")
    receive(timeout_s=300)
    try:
        while True:
            rank.step()
    except ReplicaLostError as error:
        return f"{error.replicas} {error}"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_loss_of_a_rank_is_named(strategy: Any, tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(2, rank_that_dies, Setup(strategy=strategy, size=2), tmp_path)
        assert [processes.next_report(rank, timeout_s=300) for rank in (0, 1)] == ["ready", "ready"]
        processes.kill(1)
        processes.send(0, "continue")
        words = processes.results(timeout_s=300)[0]
    assert words.startswith("(3,) A rank of replica 3 has ended or does not respond, so its position 0 can't continue")
