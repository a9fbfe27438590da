"""What a replica could go on from: its own checkpoints, or replica 0's where it is new.

Where each replica is a process, the run folder of replica 0 has those of the others in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from diloco.checkpoint.reading import Checkpoint, list_checkpoints, open_checkpoint
from diloco.errors import CheckpointError

__all__ = ["Held", "base_home", "checkpoint_home", "held_checkpoint", "held_step", "replicas_in"]

_REPLICA = re.compile(r"replica-(\d+)\Z")  # the part of a checkpoint; its shards have longer names


@dataclass(frozen=True)
class Held:
    """What must be known of a peer's newest checkpoint before it is loaded."""

    step: int = -1  # inner steps done; -1: there is none
    replica: int | None = None  # whose state it is
    swarm: str = ""  # the swarm that it was a member of then; "" where that is not known


def held_checkpoint(resume: Path | None) -> Held:
    """What ``--resume`` names. A replica that ended before it had saved any checkpoint can still join others.

    Raises:
        CheckpointError: if its state can't be read.
    """
    if resume is None:
        return Held()
    try:
        checkpoint = open_checkpoint(resume)
    except CheckpointError:  # reported where it is loaded
        return Held()
    replicas = replicas_in(checkpoint)
    swarm = str(checkpoint.load("run")["transport"].get("swarm", ""))
    return Held(checkpoint.step, replicas[0] if len(replicas) == 1 else None, swarm)


def replicas_in(checkpoint: Checkpoint) -> tuple[int, ...]:
    """The replicas whose state it holds."""
    return tuple(int(found[1]) for found in map(_REPLICA.match, checkpoint.parts) if found)


def held_step(folder: Path, resume: Path) -> int:
    """The step that the checkpoints of a run in ``folder`` could go on from: that of ``resume``, or the newest.

    -1: there is none.
    """
    found = list_checkpoints(folder / "checkpoints")
    if resume.name.startswith("step-"):
        found = [checkpoint for checkpoint in found if checkpoint.path.name == resume.name]
    return found[-1].step if found else -1


def checkpoint_home(home: Path, replica: int, resume: Path) -> Path:
    """The run folder with the checkpoints that a replica goes on with: its own, or replica 0's where it is new.

    Args:
        home: the replica's own run folder, which is in that of replica 0.
        resume: what to go on from, as for `held_step`.
    """
    base = base_home(home, replica)
    if base == home or held_step(base, resume) < 0:
        return home
    newest = list_checkpoints(base / "checkpoints")[-1]
    return home if replica < int(newest.about["num_replicas"]) else base


def base_home(home: Path, replica: int) -> Path:
    """The run folder of replica 0."""
    return home.parent if replica else home
