"""A session in a checkpoint: all replicas of a process in one, or one replica as its ranks share it out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco.errors import CheckpointError
from diloco.train.checkpoint import Checkpoint, save_checkpoint
from diloco.train.pieces import SavedValues
from diloco.train.session import Session, Totals
from diloco.train.sharded_checkpoint import Shards, Whole, load_own, save_sharded_checkpoint
from diloco.train.trained import REST, rest_of_state

__all__ = ["load_session", "save_session"]


def save_session(session: Session, folder: Path, about: Mapping[str, Any], keep: int) -> Path:
    """Save all that the session needs to go on; on all ranks of a replica.

    A replica in a process of its own is saved by its ranks, also where it has one only, so that another number of ranks
    can go on with it.

    Raises:
        CheckpointError: if anything went wrong; what was complete before still is.
    """
    step, run = session.totals.steps, {"totals": vars(session.totals), "transport": session.fleet.state_dict()}
    if session.in_one_process:
        parts: dict[str, Any] = {"run": run, "global": dict(session.global_params())}
        if rest := rest_of_state(session.replicas[0].model):
            parts[REST] = rest
        return save_checkpoint(folder, step, parts | _plain_parts(session), about=about, keep=keep)
    (replica,), group = session.replicas, session.fleet.group
    state, name = replica.state, f"replica-{replica.number}"
    own = {"diloco": state.own(), "random": replica.random_state.state_dict()}
    sharded = group.size > 1 and session.settings.train.parallelism == "fsdp"
    rest = rest_of_state(replica.model)
    return save_sharded_checkpoint(
        folder,
        step,
        {"run": run, name: {"common": state.common(), "sampler": replica.sampler.state_dict()}},
        shards={name: Shards(state.values(), own, group.size if sharded else 1)},
        whole={"global": Whole(state.global_params())} | ({REST: Whole(rest)} if rest else {}),
        about=about,
        keep=keep,
        group=group,
    )


def load_session(session: Session, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Go on where `save_session` was called; on all ranks of a replica.

    Returns:
        Rounds that were in flight between another number of ranks, and are void; their work is in the next ones.

    Raises:
        CheckpointError: if it is of another model, or another kind of run.
    """
    run = checkpoint.load("run")
    session.totals = Totals(**run["totals"])
    if session.in_one_process:
        session.fleet.load_state_dict(run["transport"])
        _load_plain(session, checkpoint)
        return ()
    (replica,), group = session.replicas, session.fleet.group
    name = f"replica-{replica.number}"
    common = checkpoint.load(name)
    session.fleet.load_state_dict(run["transport"])
    session.restore_diloco(replica, has_diloco=common["common"]["diloco"] is not None)
    sharded = group.size > 1 and session.settings.train.parallelism == "fsdp"
    own = load_own(checkpoint, name, group.position, group.size if sharded else 1)
    void = replica.state.load(SavedValues(checkpoint, name), common["common"], None if own is None else own["diloco"])
    replica.sampler.load_state_dict(common["sampler"])
    if own is not None:
        replica.random_state.load_state_dict(own["random"])
    return tuple(map(str, void))


def _plain_parts(session: Session) -> dict[str, Any]:
    return {
        f"replica-{replica.number}": {
            "model": dict(replica.model.state_dict()),
            "inner": replica.inner.state_dict(),
            "sampler": replica.sampler.state_dict(),
            "random": replica.random_state.state_dict(),
            "diloco": replica.diloco.state_dict() if replica.diloco else None,
        }
        for replica in session.replicas
    }


def _load_plain(session: Session, checkpoint: Checkpoint) -> None:
    for replica in session.replicas:
        state = checkpoint.load(f"replica-{replica.number}")
        try:
            replica.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise CheckpointError(f"the checkpoint is of another model: {error} Nothing was started.") from error
        replica.inner.load_state_dict(state["inner"])
        replica.sampler.load_state_dict(state["sampler"])
        replica.random_state.load_state_dict(state["random"])
        session.restore_diloco(replica, has_diloco=state["diloco"] is not None)
        if replica.diloco is not None:
            replica.diloco.load_state_dict(state["diloco"])
