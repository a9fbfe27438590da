"""Checkpoints with a mark in every part, to check that a checkpoint is complete and comes from a single save."""

from pathlib import Path
from typing import Any

import torch

from diloco.checkpoint import open_checkpoint, save_checkpoint


def tree(mark: float) -> dict[str, Any]:
    return {"weight": torch.full((3, 5), mark), "state": {0: (mark, torch.tensor([mark], dtype=torch.bfloat16))}}


def save(folder: Path, step: int, mark: float, keep: int = 3, agreed: int | None = None) -> Path:
    parts = {"replica-0": tree(mark), "replica-1": tree(mark + 0.5), "run": {"mark": mark}}
    about = {"algorithm": "streaming", "mark": mark}
    return save_checkpoint(folder, step, parts, about=about, keep=keep, agreed=agreed)


def mark_of(path: Path) -> float:
    """Read every part of a checkpoint, check that all bear the same mark, and return it."""
    checkpoint = open_checkpoint(path)
    mark: float = checkpoint.about["mark"]
    for part, offset in (("replica-0", 0.0), ("replica-1", 0.5)):
        loaded = checkpoint.load(part)
        assert torch.equal(loaded["weight"], torch.full((3, 5), mark + offset))
        assert loaded["state"][0][0] == mark + offset
    assert checkpoint.load("run") == {"mark": mark}
    return mark


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}
