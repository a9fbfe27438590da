"""A session in a checkpoint: all replicas of a process in one, or one replica as its ranks share it out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco.algorithm.averaging import RoundId
from diloco.checkpoint.reading import Checkpoint
from diloco.checkpoint.shards import SavedValues, Shards, load_own
from diloco.checkpoint.writing import save_checkpoint
from diloco.errors import CheckpointError
from diloco.train.local_replica import Replica
from diloco.train.resize import Before, base_home, grown_fleet_state, without_rounds_in_flight
from diloco.train.session import Session, Totals
from diloco.trained.load import REST, rest_of_state

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
    return save_checkpoint(
        folder,
        step,
        {"run": run, name: {"common": state.common(), "sampler": replica.sampler.state_dict()}},
        shards={name: Shards(state.values(), own, group.size if sharded else 1)},
        gathered={"global": state.global_params()} | ({REST: rest} if rest else {}),
        about=about,
        keep=keep,
        group=group,
    )


def load_session(session: Session, checkpoint: Checkpoint, home: Path) -> tuple[str, ...]:
    """Go on where `save_session` was called; on all ranks of a replica.

    Args:
        session: at its beginning.
        checkpoint: of its replicas, or, for a new replica in a process of its own, of replica 0.
        home: this replica's run folder.

    Returns:
        What is different from then on: another number of replicas, and rounds that were in flight between others and
        are void, whose work is in the next ones. A sentence each.

    Raises:
        CheckpointError: if it is of another model, or another kind of run.
    """
    run = checkpoint.load("run")
    session.totals = Totals(**run["totals"])
    now = session.settings.transport.replicas
    if session.fleet.elastic:
        before = Before.of_one(checkpoint, session.replicas[0].number, now)
    else:
        base = None if session.in_one_process else base_home(home, session.replicas[0].number)
        before = Before(checkpoint, base, now)
    if before.differs and session.settings.algorithm == "none":
        raise CheckpointError(
            f"{checkpoint.path} is of {before.number} independent replicas, which agree on nothing that another "
            f"number of them, {before.now}, could go on from; the same number would work. Nothing was started."
        )
    load = _load_plain if session.in_one_process else _load_sharded
    void = [f"{round_id} was in flight between others, and counts as void." for round_id in load(session, before, run)]
    return (*before.words(), *dict.fromkeys(void))


def _load_sharded(session: Session, before: Before, run: Mapping[str, Any]) -> tuple[RoundId, ...]:
    (replica,), group, checkpoint = session.replicas, session.fleet.group, before.checkpoint
    source = before.source(replica.number)
    name = f"replica-{source}"
    common = checkpoint.load(name)
    traffic = run["transport"].get("traffic", [0, 0]) if source == replica.number else [0, 0]
    session.fleet.load_state_dict({**run["transport"], "traffic": traffic} if run["transport"] else {})
    if common["common"]["diloco"] is not None:
        session.begin_diloco(replica)
    sharded = group.size > 1 and session.settings.train.parallelism == "fsdp"
    own = None
    if source == replica.number:
        own = load_own(checkpoint, name, group.position, group.size if sharded else 1)
    rounds = None if own is None or before.differs else own["diloco"]
    void = replica.state.load(SavedValues(checkpoint, name), common["common"], rounds)
    if own is not None:
        replica.random_state.load_state_dict(own["random"])
    _load_cursor(replica, before, common["sampler"])
    _begin_where_new(replica, before)
    return void


def _load_plain(session: Session, before: Before, run: Mapping[str, Any]) -> tuple[RoundId, ...]:
    fleet_state = run["transport"]
    session.fleet.load_state_dict(grown_fleet_state(fleet_state, before.now) if before.differs else fleet_state)
    void: tuple[RoundId, ...] = ()
    for replica in session.replicas:
        source = before.source(replica.number)
        state = before.checkpoint.load(f"replica-{source}")
        try:
            replica.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise CheckpointError(f"the checkpoint is of another model: {error} Nothing was started.") from error
        replica.inner.load_state_dict(state["inner"])
        if source == replica.number:
            replica.random_state.load_state_dict(state["random"])
        diloco = state["diloco"]
        if diloco is not None:
            session.begin_diloco(replica)
        if replica.diloco is not None:
            if before.differs:
                diloco, void = without_rounds_in_flight(diloco)
            replica.diloco.load_state_dict(diloco)
        _load_cursor(replica, before, state["sampler"])
        _begin_where_new(replica, before)
    return void


def _load_cursor(replica: Replica, before: Before, own: Mapping[str, Any]) -> None:
    if before.differs:
        replica.sampler.go_on_from(before.cursor_of, before.number)
    else:
        replica.sampler.load_state_dict(own)
    if replica.diloco is not None:
        replica.diloco.data_order = replica.sampler.order


def _begin_where_new(replica: Replica, before: Before) -> None:
    """A replica that has replica 0's state keeps what all agree on.

    Where gradients are averaged at every step, that is everything.
    """
    if before.source(replica.number) != replica.number and replica.diloco is not None:
        replica.diloco.begin_from_global()
        replica.inner.optimizer.state.clear()


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
