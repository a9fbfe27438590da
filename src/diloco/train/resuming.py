"""Selection of the checkpoints from which a replica resumes: its own, or those of replica 0 for a new replica.

If each replica is a process, the run folder of replica 0 contains the run folders of the others.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from diloco.checkpoint import Checkpoint, list_checkpoints, open_checkpoint
from diloco.errors import CheckpointError

__all__ = ["Held", "base_home", "checkpoint_home", "held_checkpoint", "held_step", "replicas_in"]

_REPLICA = re.compile(r"replica-(\d+)\Z")  # a replica's part of a checkpoint; its shards have longer names


@dataclass(frozen=True)
class Held:
    """Facts about a peer's newest checkpoint that are needed before it is loaded."""

    step: int = -1  # inner steps done; -1: there is no checkpoint
    replica: int | None = None  # the replica that saved it
    swarm: str = ""  # the swarm of which the replica was a member then; "" if unknown


def held_checkpoint(resume: Path | None) -> Held:
    """Return the facts about the checkpoint that ``--resume`` names.

    A checkpoint that does not exist is no error here: a replica that ended before its first checkpoint can still join
    others.

    Raises:
        CheckpointError: if the state of an existing checkpoint can't be read.
    """
    if resume is None:
        return Held()
    try:
        checkpoint = open_checkpoint(resume)
    except CheckpointError:  # reported when it is loaded
        return Held()
    replicas = replicas_in(checkpoint)
    swarm = str(checkpoint.load("run")["transport"].get("swarm", ""))
    return Held(checkpoint.step, replicas[0] if len(replicas) == 1 else None, swarm)


def replicas_in(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the replicas whose state a checkpoint holds."""
    return tuple(int(found[1]) for found in map(_REPLICA.match, checkpoint.parts) if found)


def held_step(folder: Path, resume: Path) -> int:
    """Return the step from which the run in ``folder`` could resume: that of ``resume``, or else the newest.

    Return -1 if there is no such checkpoint.
    """
    found = list_checkpoints(folder / "checkpoints")
    if resume.name.startswith("step-"):
        found = [checkpoint for checkpoint in found if checkpoint.path.name == resume.name]
    return found[-1].step if found else -1


def checkpoint_home(home: Path, replica: int, resume: Path) -> Path:
    """Return the run folder with the checkpoints of a replica: its own, or that of replica 0 for a new replica.

    Args:
        home: the replica's own run folder, which is inside that of replica 0.
        resume: the run folder or checkpoint to resume from, as for `held_step`.
    """
    base = base_home(home, replica)
    if base == home or held_step(base, resume) < 0:
        return home
    newest = list_checkpoints(base / "checkpoints")[-1]
    return home if replica < newest.fact("num_replicas", int) else base


def base_home(home: Path, replica: int) -> Path:
    """Return the run folder of replica 0."""
    return home.parent if replica else home
