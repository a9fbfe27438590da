"""What a peer of a swarm could go on from when it is started again: its own newest checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from diloco.checkpoint.reading import Checkpoint, open_checkpoint
from diloco.errors import CheckpointError

__all__ = ["Held", "held_checkpoint", "replicas_in"]

_REPLICA = re.compile(r"replica-(\d+)\Z")  # the part of a checkpoint; its shards have longer names


@dataclass(frozen=True)
class Held:
    """A checkpoint, as far as it matters before it is loaded.

    Attributes:
        step: inner steps done; -1: there is none.
        replica: whose it is.
        swarm: the swarm that it was a member of then; "" where that is not known.
    """

    step: int = -1
    replica: int | None = None
    swarm: str = ""


def replicas_in(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Whose state it holds."""
    return tuple(int(found[1]) for found in map(_REPLICA.match, checkpoint.parts) if found)


def held_checkpoint(resume: Path | None) -> Held:
    """What ``--resume`` names. None at all where a replica ended before it had saved one: it can still join others.

    Raises:
        CheckpointError: if what it was of can't be read.
    """
    if resume is None:
        return Held()
    try:
        checkpoint = open_checkpoint(resume)
    except CheckpointError:  # who begins with it hears of that when it is loaded
        return Held()
    replicas = replicas_in(checkpoint)
    swarm = str(checkpoint.load("run")["transport"].get("swarm", ""))
    return Held(checkpoint.step, replicas[0] if len(replicas) == 1 else None, swarm)
