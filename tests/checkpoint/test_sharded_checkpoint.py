"""Any number of ranks can load a replica's checkpoint; the same number resumes as if it had never stopped."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.algorithm import RoundId
from diloco.checkpoint import open_checkpoint
from diloco.trained import read_weights
from diloco.transport import ReplicaGroup
from tests.processes import Processes
from tests.same import same
from tests.train.ranks import STEPS, Rank, Setup, largest_difference, load, open_group, save, unequal

AFTER = 8
"""Steps after the checkpoint, in which the rounds in flight and one more round of each fragment are merged."""

LOSSY: dict[str, Any] = {"codec": "fp4", "error_feedback": True}


def take_over(rank: Rank, folder: Path) -> dict[str, Any]:
    """Resume from the checkpoint in ``folder`` for `AFTER` steps."""
    void = load(rank, open_checkpoint(folder))
    loaded, rest = rank.values(), rank.state.rest()
    return {"void": void, "loaded": loaded, "rest": rest, **train(rank)}


def train(rank: Rank, steps: int = AFTER) -> dict[str, Any]:
    losses, norms = rank.train(steps)
    diloco = rank.diloco
    counts = (diloco.steps, diloco.rounds_committed, diloco.rounds_void)
    return {"losses": losses, "norms": norms, "counts": counts, "values": rank.values()}


def rank_stops_and_goes_on(position: int, setup: Setup, folder: Path) -> dict[str, Any]:
    group = open_group(setup, position, folder)
    rank = Rank(setup, group)
    rank.train(STEPS)
    saved, rest = rank.values(), rank.state.rest()
    save(rank, folder / "checkpoints")
    ran = {"void": (), "loaded": saved, "rest": rest, **train(rank)}
    continued = take_over(Rank(setup, group), folder)
    group.close()
    return {"ran": ran, "continued": continued}


def test_stopping_and_going_on_as_many_is_never_stopping(tmp_path: Path) -> None:
    """The bits are equal (invariant 6), with a round in flight, its residual undecided, and Muon and AdamW in use."""
    with Processes() as processes:
        processes.start(2, rank_stops_and_goes_on, Setup(strategy="fsdp", size=2, optimizer="Muon", **LOSSY), tmp_path)
        ranks = processes.results(timeout_s=300)
    for rank in ranks.values():
        ran, continued = rank["ran"], rank["continued"]
        for kind in ("loaded", "values"):
            assert unequal(continued.pop(kind), ran[kind]) == []
        assert same(continued.pop("rest"), ran["rest"])
        assert continued == {name: ran[name] for name in continued}
    checkpoint = open_checkpoint(tmp_path)
    own = [f"replica-0-own-{position}" for position in (0, 1)]
    assert {*checkpoint.parts} == {"replica-0-values", *own, "global", "outer"}
    shards = [f"replica-0-values-rank-{position}.safetensors" for position in (0, 1)]
    assert {*shards} < checkpoint.parts["replica-0-values"].keys()
    saved = ranks[0]["ran"]["loaded"]
    agreed = {name.removeprefix("global/"): v for name, v in saved.items() if name.startswith("global/")}
    assert unequal(dict(read_weights(tmp_path)), agreed) == [], "a reader without ranks gets whole tensors"


def rank_in_relay(position: int, stages: Sequence[Setup], folder: Path) -> list[dict[str, Any]]:
    """Take part in the stages with a rank at this position. Each stage resumes from the previous one and saves."""
    done = []
    for number, setup in enumerate(stages):
        if position < setup.size:
            group = open_group(setup, position, folder, replica=number)
            rank = Rank(setup, group)
            done.append(take_over(rank, folder))
            save(rank, folder / "checkpoints")
            group.close()
    return done


def run_relay(stages: Sequence[Setup], folder: Path) -> list[list[dict[str, Any]]]:
    """Train a replica of one rank, then run the stages. Return the results of each rank of each stage."""
    first = Rank(replace(stages[0], strategy="none", size=1), ReplicaGroup())
    began = train(first, STEPS)
    save(first, folder / "checkpoints")
    with Processes() as processes:
        processes.start(max(setup.size for setup in stages), rank_in_relay, stages, folder)
        of_ranks = processes.results(timeout_s=300)
    last = Rank(replace(stages[0], strategy="none", size=1), ReplicaGroup())
    done = [[of_ranks[s].pop(0) for s in range(setup.size)] for setup in stages]
    return [[began], *done, [take_over(last, folder)]]


def test_other_shards_hold_the_same_and_drop_what_is_in_flight(tmp_path: Path) -> None:
    """The replica goes from one rank without shards to two with shards, to three, and back."""
    two, three = (Setup(strategy="fsdp", size=size, optimizer="Muon", error_feedback=True) for size in (2, 3))
    relay = run_relay([two, three], tmp_path)
    for before, after in pairwise(relay):
        for rank in after:
            assert unequal(rank["loaded"], before[0]["values"]) == []
            steps, committed, void = before[0]["counts"]
            assert len(rank["void"]) == 1, "the fragment's next round contains the work of the round in flight"
            assert rank["counts"] == (steps + AFTER, committed + 3, void + 1)
            assert rank["losses"] == after[0]["losses"]
            assert all(bool(torch.isfinite(value).all()) for value in rank["values"].values())
    assert relay[1][0]["void"] == (RoundId(fragment=0, outer_step=2),)
    finished = [fragment["finished_rounds"] for fragment in relay[1][0]["rest"]["diloco"]["fragments"]]
    assert finished == [3, 2, 2], "the void round has also ended"


def test_where_all_ranks_hold_everything_their_number_may_change_in_flight(tmp_path: Path) -> None:
    """The replica goes from one rank to two, to three and back, and equals one rank that never stopped."""
    two, three = (Setup(strategy="ddp", size=size, **LOSSY) for size in (2, 3))
    relay = run_relay([two, three], tmp_path)
    unbroken = Rank(Setup(**LOSSY), ReplicaGroup())
    unbroken.train(STEPS)
    for before, after in pairwise(relay):
        expected = train(unbroken)
        for rank in after:
            assert unequal(rank["loaded"], before[0]["values"]) == []
            assert (rank["void"], rank["counts"]) == ((), expected["counts"])
            assert rank["losses"] == pytest.approx(expected["losses"], abs=1e-3)
            assert unequal(rank["values"], after[0]["values"]) == []
            assert largest_difference(rank["values"], expected["values"], "global/") < 1e-2
    assert [*open_checkpoint(tmp_path).parts] == ["replica-0-values", "global", "outer", "replica-0-own-0"]
