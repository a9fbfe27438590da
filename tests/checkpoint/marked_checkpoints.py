"""Checkpoints with a mark in every part, which says whether one is complete and of a single save; and their damage."""

import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash

from diloco.checkpoint import open_checkpoint, save_checkpoint

WATCHED = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}


def tree(mark: float) -> dict[str, Any]:
    return {"weight": torch.full((3, 5), mark), "state": {0: (mark, torch.tensor([mark], dtype=torch.bfloat16))}}


def save(folder: Path, step: int, mark: float, keep: int = 3, agreed: int | None = None, **more: Any) -> Path:
    parts = {"replica-0": tree(mark), "replica-1": tree(mark + 0.5), "run": {"mark": mark}}
    about = {"algorithm": "streaming", "mark": mark}
    return save_checkpoint(folder, step, parts, about=about, keep=keep, agreed=agreed, **more)


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


def resealed(content: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Change a manifest and recompute its digest, as an attacker could."""
    members = json.loads(content)
    del members["digest"]
    change(members)
    digest = xxhash.xxh3_128_hexdigest(json.dumps(members, indent=2).encode())
    return json.dumps({**members, "digest": digest}, indent=2).encode()


def kill_at_every_call(top: Path, before: Path | None, work: Callable[[Path], object], every: int = 1) -> None:
    """Let ``work`` on copies of ``before``, in ``top``, be killed one system call later each time, until it ends."""
    for number in itertools.count(1, every):
        place = top / f"{number:03d}"
        if before is not None:
            shutil.copytree(before, place)
        if (child := os.fork()) == 0:
            _be_killed_at(number)
            work(place)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, status
            return
        assert os.WTERMSIG(status) == signal.SIGKILL, status


def _be_killed_at(number: int) -> None:
    calls = itertools.count(1)

    def tick() -> None:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = lambda descriptor: tick()  # the test reads what a kill leaves in the page cache, so no sync is needed
    sys.addaudithook(lambda event, arguments: tick() if event in WATCHED else None)
