"""Saving and loading of a session: all replicas of a process in one checkpoint, or one replica sharded over its ranks.

The number of replicas may change between saving and loading:

- A replica that existed before keeps its whole state except for the rounds in flight, which were between other replicas
  and count as void. The next rounds contain their work, because the global parameters did not change.
- A new replica starts with the global parameters and outer state, and a fresh inner optimizer.
- A replica that no longer exists loses only its work since its fragments were last sent.
- The data continues where it was: no sequence is drawn twice, and the current replicas draw the remaining ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diloco.algorithm import RoundId
from diloco.checkpoint import Checkpoint, SavedValues, Shards, load_own, open_checkpoint, save_checkpoint
from diloco.data import Cursor
from diloco.errors import CheckpointError
from diloco.train.replica import Replica, load_process_random, process_random
from diloco.train.resuming import base_home, replicas_in
from diloco.train.session import Session, Totals
from diloco.trained import REST, rest_of_state

__all__ = ["load_session", "save_session"]


def save_session(session: Session, folder: Path, keep: int) -> Path:
    """Save the state that the session needs to resume. Call it on all ranks of a replica.

    A replica in its own processes is always saved as shards, even by a single rank, so that another number of ranks can
    load it.

    Args:
        folder: the checkpoints folder.
        keep: the number of newest checkpoints to keep.

    Raises:
        CheckpointError: if saving failed. Earlier complete checkpoints are unchanged.
    """
    step = session.totals.steps
    run = {"totals": vars(session.totals), "transport": session.fleet.state_dict(), "random": process_random()}
    rest = rest_of_state(session.replicas[0].model, session.replicas[0].state.parameters)
    agreed = {"global": session.global_params()} | ({REST: rest} if rest else {})
    if session.fleet.in_one_process:
        replicas = {f"replica-{replica.number}": _whole_state(replica) for replica in session.replicas}
        return save_checkpoint(folder, step, {"run": run, **agreed, **replicas}, about=about(session), keep=keep)
    (replica,), name = session.replicas, f"replica-{session.replicas[0].number}"
    own = {"diloco": replica.state.own(), "random": replica.random_state.state_dict()}
    return save_checkpoint(
        folder,
        step,
        {"run": run, name: {"common": replica.state.common(), "sampler": replica.sampler.state_dict()}},
        shards={name: Shards(replica.state.values(), own, _num_shards(session))},
        gathered=agreed,
        about=about(session),
        keep=keep,
        group=session.fleet.group,
    )


def about(session: Session) -> dict[str, Any]:
    """Return the metadata that can be read without loading a checkpoint, as JSON. Call it on all ranks of a replica."""
    settings, model, diloco = session.settings, session.replicas[0].model, session.replicas[0].diloco
    return {
        "algorithm": settings.algorithm,
        "num_replicas": settings.network.replicas,
        "parameters": model.num_parameters(),
        "sequence_length": settings.train.sequence_length,
        "seed": settings.seed,
        "model": settings.model.described(),
        "definition": model.definition(),
        "identity": dict(session.identity),
        "threads": torch.get_num_threads(),
        "global_params_digest": session.global_digest(),
        "fragments": [
            {"index": f.index, "parameters": list(f.names), "numel": f.numel, "outer_step": f.state.outer.step}
            for f in (diloco.fragments if diloco else ())
        ],
        "rounds_in_flight": [str(round_id) for round_id in diloco.in_flight] if diloco else [],
    }


def load_session(session: Session, checkpoint: Checkpoint, home: Path) -> tuple[str, ...]:
    """Restore the session that `save_session` saved. Call it on all ranks of a replica.

    Args:
        checkpoint: the checkpoint of the session's replicas, or that of replica 0 for a new replica in its own process.
        home: the replica's run folder.

    Returns:
        Sentences about the differences to the saved run: another number of replicas, and rounds in flight that are now
        void.

    Raises:
        CheckpointError: if the checkpoint belongs to another model or another kind of run.
    """
    run = checkpoint.load("run")
    session.totals = Totals(**run["totals"])
    load_process_random(run["random"])
    session.part_models()
    saved = _saved_replicas(session, checkpoint, home)
    if saved.differ and session.settings.algorithm == "none":
        raise CheckpointError(
            f"{checkpoint.path} holds {saved.number} independent replicas, which share no state from which another "
            f"number of replicas ({saved.now}) could resume. Use the same number of replicas."
        )
    session.fleet.load_state_dict(_fleet_state(session, saved, run["transport"]))
    void: tuple[RoundId, ...] = ()
    for replica in session.replicas:
        source = saved.source(replica.number)
        state = checkpoint.load(f"replica-{source}")
        load = _load_whole if session.fleet.in_one_process else _load_shards
        void = load(session, replica, saved, state)
        if saved.differ:
            replica.sampler.resume_from(saved.cursor_of, saved.number)
        else:
            replica.sampler.load_state_dict(state["sampler"])
        if replica.diloco is not None:
            replica.diloco.recovery.data_order = replica.sampler.order
            replica.diloco.recovery.begun_after = session.totals.steps - replica.diloco.steps
            if source != replica.number:  # a new replica keeps only the shared state
                replica.diloco.begin_from_global()
                replica.inner.optimizer.state.clear()
    lost = (f"{round_id} was in flight between other replicas and counts as void." for round_id in void)
    return (*saved.changes(), *dict.fromkeys(lost))


@dataclass(frozen=True)
class _SavedReplicas:
    """The replicas that saved a checkpoint."""

    checkpoint: Checkpoint  # the replica's own, or that of replica 0 for a new replica
    base: Path | None  # run folder of replica 0, which contains the others; None: the checkpoint holds all replicas
    number: int  # number of replicas that saved it
    now: int  # number of replicas that resume

    @property
    def differ(self) -> bool:
        """Whether another number of replicas resumes."""
        return self.number != self.now

    def source(self, replica: int) -> int:
        """Return the number of the saved replica from whose state a replica starts."""
        return replica if f"replica-{replica}" in self.checkpoint.parts else 0

    def cursor_of(self, replica: int) -> Cursor:
        """Return the data position of a saved replica.

        Raises:
            CheckpointError: if its checkpoint can't be read.
        """
        part, checkpoint = f"replica-{replica}", self.checkpoint
        if part not in checkpoint.parts:
            assert self.base is not None, "a checkpoint of a single process holds all replicas"
            home = self.base / part if replica else self.base
            place = home / "checkpoints" / checkpoint.path.name
            try:
                checkpoint = open_checkpoint(place)
            except CheckpointError as error:
                raise CheckpointError(
                    f"The checkpoint of replica {replica}, {place}, is needed to divide the unread data among "
                    f"{self.now} replicas instead of {self.number}, but it can't be opened: {error} Copy the folders "
                    "of all replicas into that of replica 0, or use the same number of replicas."
                ) from error
        cursor: Cursor = checkpoint.load(part)["sampler"]
        return cursor

    def changes(self) -> tuple[str, ...]:
        """Return a sentence about the new number of replicas, if it has changed."""
        if not self.differ:
            return ()
        if self.now > self.number:
            change = (
                f"the {self.now - self.number} new ones start with the global parameters and a fresh inner optimizer"
            )
        else:
            change = f"only the work of the other {self.number - self.now} since they last sent is lost"
        return (
            f"{self.now} replicas continue where {self.number} stopped: {change}. The data continues where it was.",
        )


def _saved_replicas(session: Session, checkpoint: Checkpoint, home: Path) -> _SavedReplicas:
    now, mine = session.settings.network.replicas, session.replicas[0].number
    if not session.fleet.elastic:
        base = None if session.fleet.in_one_process else base_home(home, mine)
        return _SavedReplicas(checkpoint, base, checkpoint.fact("num_replicas", int), now)
    if mine not in (theirs := replicas_in(checkpoint)):  # in a swarm, each replica resumes only from its own
        held = f"the state of replica {', '.join(map(str, theirs))}" if theirs else "no replica's state"
        advice = f"Pass --replica {theirs[0]}, or leave it out." if theirs else "Use a checkpoint of this replica."
        raise CheckpointError(f"{checkpoint.path} holds {held}, but this is replica {mine}. {advice}")
    return _SavedReplicas(checkpoint, None, now, now)


def _fleet_state(session: Session, saved: _SavedReplicas, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state for the fleet. New replicas have sent nothing, and their clock starts at that of replica 0."""
    if not session.fleet.in_one_process:
        mine = session.replicas[0].number
        return state if saved.source(mine) == mine or not state else {**state, "traffic": [0, 0]}
    if not saved.differ:
        return state
    kept = min(saved.now, len(state["traffic"]))
    network = state["network"]
    if network is not None:
        network = {name: [*values[:kept], *([values[0]] * (saved.now - kept))] for name, values in network.items()}
    traffic = [*state["traffic"][:kept], *([[0, 0]] * (saved.now - kept))]
    return {"traffic": traffic, "network": network, "decided": []}


def _whole_state(replica: Replica) -> dict[str, Any]:
    return {
        "model": replica.model.saved_state(),
        "inner": replica.inner.state_dict(),
        "sampler": replica.sampler.state_dict(),
        "random": replica.random_state.state_dict(),
        "diloco": replica.diloco.state_dict() if replica.diloco else None,
    }


def _load_whole(
    session: Session, replica: Replica, saved: _SavedReplicas, state: Mapping[str, Any]
) -> tuple[RoundId, ...]:
    """Load the result of `_whole_state` and return the rounds in flight that are now void."""
    try:
        replica.model.load_saved_state(state["model"])
    except RuntimeError as error:
        raise CheckpointError(f"The checkpoint belongs to another model: {error}") from error
    replica.inner.load_state_dict(state["inner"])
    if saved.source(replica.number) == replica.number:
        replica.random_state.load_state_dict(state["random"])
    diloco = state["diloco"]
    void: tuple[RoundId, ...] = ()
    if diloco is not None:
        if saved.differ:
            flights = [(p, fragment["in_flight"]) for p, fragment in enumerate(diloco["fragments"])]
            void = tuple(RoundId(p, int(flight["outer_step"])) for p, flight in flights if flight is not None)
        session.begin_diloco(replica).load_state_dict(diloco, resubmit=not saved.differ)
    return void


def _load_shards(
    session: Session, replica: Replica, saved: _SavedReplicas, state: Mapping[str, Any]
) -> tuple[RoundId, ...]:
    """Load this rank's share of what a replica's ranks saved and return the rounds in flight that are now void."""
    common, source = state["common"], saved.source(replica.number)
    name = f"replica-{source}"
    if common["diloco"] is not None:
        session.begin_diloco(replica)
    own = None
    if source == replica.number:
        own = load_own(saved.checkpoint, name, session.fleet.group.position, _num_shards(session))
    rounds = None if own is None else own["diloco"]
    values = SavedValues(saved.checkpoint, name)
    void = replica.state.load(values, common, rounds, same_replicas=not saved.differ)
    if own is not None:
        replica.random_state.load_state_dict(own["random"])
    return void


def _num_shards(session: Session) -> int:
    """Return S if the ranks of a replica shard the parameters, 1 if each holds all of them."""
    return session.fleet.group.size if session.settings.train.parallelism == "fsdp" else 1
