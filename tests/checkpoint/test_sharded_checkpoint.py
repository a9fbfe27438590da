"""A replica whose ranks shard its parameters: all ranks save or none, it resumes exactly, and damage is found first."""

import copy
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.checkpoint import Checkpoint, CheckpointWriter, list_checkpoints, open_checkpoint, save_checkpoint, whole
from diloco.errors import CheckpointError
from diloco.trained import read_weights
from diloco.transport import ReplicaGroup
from tests.processes import Processes
from tests.same import same
from tests.train.ranks import STEPS, Rank, Setup, load, open_group, save, unequal

OPEN = open
ODD = Path(__file__).parents[1] / "odd_optimizer.py"
AFTER = 8
"""Steps after the checkpoint, in which the rounds in flight and one more round of each fragment are merged."""

FAILURES = {"replica-0-values-rank-1.safetensors": 1, "replica-0-own-0.json": 0, "elsewhere": 1}
"""The file that can't be written and the position of its rank. In the last case, that rank has another folder."""


def goes_on(rank: Rank) -> tuple[Any, ...]:
    diloco, trained = rank.diloco, rank.train(AFTER)
    return trained, diloco.steps, diloco.rounds_committed, diloco.rounds_void


def rank_stops_and_goes_on(position: int, folder: Path, group: ReplicaGroup, optimizer: str) -> dict[str, Tensor]:
    """Return the values that were saved."""
    setup = Setup(strategy="fsdp", size=2, optimizer=optimizer, codec="fp4", error_feedback=True)
    rank = Rank(setup, group)
    rank.train(STEPS)
    saved, rest = rank.values(), copy.deepcopy(rank.state.rest())
    save(rank, folder / "checkpoints")
    ran, again = goes_on(rank), Rank(setup, group)
    load(again, open_checkpoint(folder))
    assert unequal(again.values(), saved) == []
    assert same(again.state.rest(), rest)
    assert goes_on(again) == ran
    assert unequal(again.values(), rank.values()) == []
    assert same(again.state.rest(), rank.state.rest())
    return saved


def check_saved(folder: Path, saved: dict[str, Tensor]) -> None:
    checkpoint = open_checkpoint(folder)
    own = [f"replica-0-own-{position}" for position in (0, 1)]
    assert {*checkpoint.parts} == {"replica-0-values", *own, "global", "outer"}
    shards = [f"replica-0-values-rank-{position}.safetensors" for position in (0, 1)]
    assert {*shards} < checkpoint.parts["replica-0-values"].keys()
    agreed = {name.removeprefix("global/"): v for name, v in saved.items() if name.startswith("global/")}
    assert unequal(dict(read_weights(folder)), agreed) == [], "a reader without ranks gets whole tensors"


def rank_fails_to_save(position: int, folder: Path, group: ReplicaGroup) -> None:
    """For each failure, the ranks save once, fail to save, and then save twice more."""
    rank = Rank(Setup(strategy="fsdp", size=2), group)
    for who, failing in FAILURES.items():
        checkpoints, step = folder / who / "checkpoints", rank.diloco.steps

        def opened(path: Any, *arguments: Any, who: str = who, **more: Any) -> Any:
            if Path(path).name == who:
                raise OSError(28, "No space left on device", str(path))
            return OPEN(path, *arguments, **more)

        save(rank, checkpoints)
        rank.step()
        given = folder / "elsewhere" if who == "elsewhere" and position == 1 else checkpoints
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("builtins.open", opened)
            with pytest.raises(CheckpointError, match="Earlier complete checkpoints are unchanged") as caught:
                save(rank, given)
        said = str(caught.value)
        assert f"position {failing}: " in said
        assert f"position {1 - failing}: " not in said
        assert ("elsewhere is not the folder" if who == "elsewhere" else who) in said
        rank.group.gather_texts("both have failed")
        assert [path.name for path in checkpoints.iterdir()] == [f"step-{step:08d}"]
        rank.group.gather_texts("both have looked")
        for _ in range(2):
            rank.step()
            save(rank, checkpoints, keep=2)
        assert [checkpoint.step for checkpoint in list_checkpoints(checkpoints)] == [step + 2, step + 3]


def rank_writes_while_it_trains(position: int, folder: Path, group: ReplicaGroup) -> None:
    """Rank 1 is slow to write."""
    rank, slow, fsync = Rank(Setup(strategy="fsdp", size=2), group), threading.Event(), os.fsync
    rank.step()
    state = {name: whole(value).clone() for name, value in rank.state.values().items()}
    writer = CheckpointWriter(rank.group)
    with pytest.MonkeyPatch.context() as patch:
        if position == 1:
            patch.setattr(os, "fsync", lambda file: (slow.wait(), fsync(file)))
        writer.save(folder / "checkpoints", 1, {"values": rank.state.values()}, about={}, keep=1)
        rank.train(2)
        assert writer.poll() is None
        slow.set()
        assert writer.poll(wait=True) == folder / "checkpoints" / "step-00000001"
    assert unequal(open_checkpoint(folder).load("values"), state) == []


def rank_of_two(position: int, top: Path) -> dict[str, Tensor]:
    group = open_group(Setup(strategy="fsdp", size=2), position, top)
    saved = rank_stops_and_goes_on(position, top / "saved", group, "Muon")
    rank_stops_and_goes_on(position, top / "odd", group, f"{ODD}:OddAdam")
    rank_fails_to_save(position, top / "failed", group)
    rank_writes_while_it_trains(position, top / "slow", group)
    group.close()
    return saved


def test_sharded_ranks_resume_as_if_never_stopped_and_save_all_or_none(tmp_path: Path) -> None:
    """The bits are equal (invariant 6), with a round in flight, its residual undecided, and Muon, AdamW and one
    with a state of other types in use."""
    with Processes() as processes:
        processes.start(2, rank_of_two, tmp_path)
        check_saved(tmp_path / "saved", processes.results(timeout_s=300)[0])


VALUES = {
    "matrix": torch.arange(6.0).view(2, 3),
    "scalar": torch.tensor(7.0, dtype=torch.float64),
    "half": torch.arange(5, dtype=torch.bfloat16),
    "empty": torch.empty(0, 4),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    save_checkpoint(tmp_path, 3, {"values": VALUES}, own={"values-own": {"mine": 1}}, about={}, keep=1)
    return open_checkpoint(tmp_path)


def test_values_are_loaded_into_place(checkpoint: Checkpoint) -> None:
    room = {name: torch.zeros_like(value) for name, value in VALUES.items()}
    checkpoint.load_into("values", room)
    assert unequal(room, VALUES) == unequal(dict(checkpoint.values("values")), VALUES) == []
    assert checkpoint.load("values-own-0") == {"mine": 1}


@pytest.mark.parametrize(
    ("room", "words"),
    [
        ({"unknown": torch.zeros(1)}, r"has no value unknown, so it belongs to another model"),
        ({"matrix": torch.zeros(3, 2)}, r"matrix is \(3, 2\), torch.float32 in this run, .* \(2, 3\), torch.float32"),
        ({"half": torch.zeros(5)}, r"half is \(5,\), torch.float32 in this run, .* \(5,\), torch.bfloat16"),
        ({"matrix": torch.zeros(2, 3)}, r"values\.safetensors is damaged"),
    ],
)
def test_values_of_another_model_and_damaged_ones_are_refused_unread(
    room: dict[str, Tensor], words: str, checkpoint: Checkpoint
) -> None:
    if "damaged" in words:
        path = checkpoint.path / "values.safetensors"
        data = bytearray(path.read_bytes())
        data[-2] ^= 1
        path.write_bytes(data)
    with pytest.raises(CheckpointError, match=words):
        checkpoint.load_into("values", room)
    assert not any(bool(value.any()) for value in room.values())
