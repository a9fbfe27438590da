"""A replica whose ranks shard its parameters resumes as if it had never stopped."""

from pathlib import Path
from typing import Any

from diloco.checkpoint import open_checkpoint
from diloco.trained import read_weights
from tests.processes import Processes
from tests.same import same
from tests.train.ranks import STEPS, Rank, Setup, load, open_group, save, unequal

AFTER = 8
"""Steps after the checkpoint, in which the rounds in flight and one more round of each fragment are merged."""

LOSSY: dict[str, Any] = {"codec": "fp4", "error_feedback": True}


def take_over(rank: Rank, folder: Path) -> dict[str, Any]:
    """Resume from the checkpoint in ``folder`` for `AFTER` steps."""
    load(rank, open_checkpoint(folder))
    return {"loaded": rank.values(), "rest": rank.state.rest(), **train(rank)}


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
    ran = {"loaded": saved, "rest": rest, **train(rank)}
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
