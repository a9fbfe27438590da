"""A sharded checkpoint is saved by all ranks or by none, and damage is detected before anything is loaded."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    Lazy,
    list_checkpoints,
    open_checkpoint,
    save_checkpoint,
    whole,
)
from diloco.errors import CheckpointError
from tests.processes import Processes
from tests.train.ranks import Rank, Setup, open_group, save, unequal

OPEN = open

FAILURES = {"replica-0-values-rank-1.safetensors": 1, "replica-0-own-0.json": 0, "elsewhere": 1}
"""The file that can't be written and the position of its rank. In the last case, that rank has another folder."""


def ranks_fail_to_save(position: int, folder: Path) -> dict[str, dict[str, Any]]:
    """For each failure, the ranks save once, fail to save, and then save twice more."""
    setup = Setup(strategy="fsdp", size=2)
    rank = Rank(setup, open_group(setup, position, folder))
    seen = {}
    for who in FAILURES:
        checkpoints = folder / who / "checkpoints"

        def opened(path: Any, *arguments: Any, who: str = who, **more: Any) -> Any:
            if Path(path).name == who:
                raise OSError(28, "No space left on device", str(path))
            return OPEN(path, *arguments, **more)

        save(rank, checkpoints)
        rank.step()
        given = folder / "elsewhere" if who == "elsewhere" and position == 1 else checkpoints
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("builtins.open", opened)
            with pytest.raises(CheckpointError) as caught:
                save(rank, given)
        rank.group.gather_texts("both have failed")
        left = sorted(path.name for path in checkpoints.iterdir())
        rank.group.gather_texts("both have looked")
        for _ in range(2):
            rank.step()
            save(rank, checkpoints, keep=2)
        kept = [checkpoint.path.name for checkpoint in list_checkpoints(checkpoints)]
        seen[who] = {"words": str(caught.value), "left": left, "kept": kept}
    rank.group.close()
    return seen


def test_all_ranks_save_or_none(tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(2, ranks_fail_to_save, tmp_path)
        ranks = processes.results(timeout_s=300)
    for rank in ranks.values():
        for number, (who, position) in enumerate(FAILURES.items()):
            seen, step = rank[who], 3 * number
            assert seen["left"] == [f"step-{step:08d}"]
            assert seen["kept"] == [f"step-{step + 2:08d}", f"step-{step + 3:08d}"]
            assert "Earlier complete checkpoints are unchanged" in seen["words"]
            assert f"position {position}: " in seen["words"]
            assert f"position {1 - position}: " not in seen["words"]
            assert ("elsewhere is not the folder" if who == "elsewhere" else who) in seen["words"]


def ranks_write_while_they_train(position: int, folder: Path) -> tuple[list[Path | None], Sequence[str]]:
    """Rank 1 is slow to write. Return what `poll` said before and after it had, and what was not saved as it was."""
    setup = Setup(strategy="fsdp", size=2)
    rank, slow, fsync = Rank(setup, open_group(setup, position, folder)), threading.Event(), os.fsync
    rank.step()
    state = {name: whole(value).clone() for name, value in rank.state.values().items()}
    writer = CheckpointWriter(rank.group)
    with pytest.MonkeyPatch.context() as patch:
        if position == 1:
            patch.setattr(os, "fsync", lambda file: (slow.wait(), fsync(file)))
        writer.save(folder / "checkpoints", 1, {"values": rank.state.values()}, about={}, keep=1)
        rank.train(2)
        polls = [writer.poll()]
        slow.set()
        polls.append(writer.poll(wait=True))
    rank.group.close()
    return polls, unequal(open_checkpoint(folder).load("values"), state)


def test_ranks_train_until_all_have_written_their_shards(tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(2, ranks_write_while_they_train, tmp_path)
        for rank in processes.results(timeout_s=300).values():
            assert rank == ([None, tmp_path / "checkpoints" / "step-00000001"], [])


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
    assert unequal(room, VALUES) == unequal(dict(Lazy(VALUES, whole)), VALUES) == []
    assert unequal(dict(checkpoint.values("values")), VALUES) == []
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
