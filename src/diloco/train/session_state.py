"""Saving and loading of a session: all replicas of a process in one checkpoint, or one replica sharded over its ranks.

The number of replicas may change between saving and loading:

- A replica that existed before keeps its whole state except for the rounds in flight, which were between other replicas
  and count as void. The next rounds contain their work, because the global parameters did not change.
- A new replica starts with the global parameters and outer state, and a fresh inner optimizer.
- A replica that no longer exists loses only its work since its fragments were last sent.
- The data continues where it was: no sequence is drawn twice, and the current replicas draw the remaining ones.

If each replica is a process, the run folder of replica 0 contains the run folders of the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diloco.algorithm import RoundId
from diloco.checkpoint import Checkpoint, list_checkpoints, open_checkpoint, save_checkpoint
from diloco.data import Cursor
from diloco.errors import CheckpointError
from diloco.state_tree import readable_state
from diloco.train.replica import Replica, load_process_random, process_random
from diloco.train.session import Session, Totals
from diloco.trained import REST, rest_of_state

__all__ = ["Held", "held_checkpoint", "held_step", "load_session", "newest_checkpoints", "save_session"]

_REPLICA = re.compile(r"replica-(\d+)\Z")  # a replica's part of a checkpoint; its shards have longer names


def save_session(session: Session, folder: Path, keep: int) -> Path:
    """Save the state that the session needs to resume. Call it on all ranks of a replica.

    Parts ``global`` and ``outer`` have what all replicas agree on, ``replica-M-values`` the named tensors of replica M,
    ``replica-M`` what else its ranks have in common, and ``replica-M-own-S`` what only its rank S can use. Another
    number of ranks can load all but the last.

    Args:
        folder: the checkpoints folder.
        keep: the number of newest checkpoints to keep.

    Raises:
        CheckpointError: if saving failed. Earlier complete checkpoints are unchanged.
    """
    run = {"totals": vars(session.totals), "transport": session.fleet.state_dict(), "random": process_random()}
    first = session.replicas[0].state
    parts: dict[str, Any] = {"run": run, "global": first.global_params(), "outer": first.outer_state()}
    if rest := rest_of_state(session.replicas[0].model, first.parameters):
        parts[REST] = rest
    own = {}
    for replica in session.replicas:
        name, state = f"replica-{replica.number}", replica.state
        parts[name] = {"common": state.common(), "sampler": replica.sampler.state_dict()}
        parts[f"{name}-values"] = state.values()
        if session.fleet.group.position < _num_shards(session):  # else position 0 saves the same
            own[f"{name}-own"] = {"diloco": state.own(), "random": replica.random_state.state_dict()}
    group = session.fleet.group
    return save_checkpoint(folder, session.totals.steps, parts, own=own, about=about(session), keep=keep, group=group)


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
    if replicas_in(checkpoint)[:1] == session.fleet.local[:1]:  # a checkpoint of all replicas has those of the first
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
        state = saved.of(source).load(f"replica-{source}")
        void = _load_replica(session, replica, saved, state["common"])
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
    base: Path | None  # run folder of replica 0, which contains the others; None: in a swarm each has only its own
    number: int  # number of replicas that saved it
    now: int  # number of replicas that resume

    @property
    def differ(self) -> bool:
        """Whether another number of replicas resumes."""
        return self.number != self.now

    def source(self, replica: int) -> int:
        """Return the number of the saved replica from whose state a replica starts: its own, or 0 if it is new."""
        return replica if self.base is None or replica < self.number else 0

    def of(self, replica: int) -> Checkpoint:
        """Return the checkpoint that has the state of a saved replica.

        Raises:
            CheckpointError: if it can't be opened.
        """
        part = f"replica-{replica}"
        if part in self.checkpoint.parts or self.base is None:
            return self.checkpoint
        place = (self.base / part if replica else self.base) / "checkpoints" / self.checkpoint.path.name
        try:
            return open_checkpoint(place)
        except CheckpointError as error:
            raise CheckpointError(
                f"The checkpoint of replica {replica}, {place}, is needed for {self.now} replicas to go on here, but "
                f"it can't be opened: {error} Copy the folders of all replicas into that of replica 0."
            ) from error

    def cursor_of(self, replica: int) -> Cursor:
        """Return the data position of a saved replica."""
        cursor: Cursor = self.of(replica).load(f"replica-{replica}")["sampler"]
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
        base = checkpoint.path.parent.parent if session.fleet.hub else base_home(home, mine)
        return _SavedReplicas(checkpoint, base, checkpoint.fact("num_replicas", int), now)
    if mine not in (theirs := replicas_in(checkpoint)):  # in a swarm, each replica resumes only from its own
        held = f"the state of replica {', '.join(map(str, theirs))}" if theirs else "no replica's state"
        advice = f"Pass --replica {theirs[0]}, or leave it out." if theirs else "Use a checkpoint of this replica."
        raise CheckpointError(f"{checkpoint.path} holds {held}, but this is replica {mine}. {advice}")
    return _SavedReplicas(checkpoint, None, now, now)


def _fleet_state(session: Session, saved: _SavedReplicas, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state for the fleet. New replicas have sent nothing, and their clock starts at that of replica 0."""
    mine, numbers = session.replicas[0].number, range(min(saved.now, saved.number))
    together = "network" in state  # saved by one process for all replicas
    if session.fleet.hub is None:
        if together:
            state = {"traffic": state["traffic"][saved.source(mine)], "step": session.totals.steps}
        return state if saved.source(mine) == mine or not state else {**state, "traffic": [0, 0]}
    traffic = state["traffic"] if together else [saved.of(m).load("run")["transport"]["traffic"] for m in numbers]
    if together and not saved.differ:
        return state
    new = saved.now - len(numbers)
    network = state.get("network")
    if network is not None:
        network = {name: [*values[: len(numbers)], *[values[0]] * new] for name, values in network.items()}
    return {"traffic": [*traffic[: len(numbers)], *[[0, 0]] * new], "network": network, "decided": []}


def _load_replica(
    session: Session, replica: Replica, saved: _SavedReplicas, common: Mapping[str, Any]
) -> tuple[RoundId, ...]:
    """Load this rank's share of what a replica's ranks saved and return the rounds in flight that are now void."""
    source = saved.source(replica.number)
    checkpoint = saved.of(source)
    if common["diloco"] is not None:
        session.begin_diloco(replica)
    own, shards, name = None, _num_shards(session), f"replica-{source}-own"
    if source == replica.number and sum(part.startswith(f"{name}-") for part in checkpoint.parts) == shards:
        own = checkpoint.load(f"{name}-{session.fleet.group.position % shards}")
        replica.random_state.load_state_dict(own["random"])
    rounds = None if own is None else own["diloco"]
    return replica.state.load(checkpoint, f"replica-{source}-values", common, rounds, same_replicas=not saved.differ)


def _num_shards(session: Session) -> int:
    """Return S if the ranks of a replica shard the parameters, 1 if each holds all of them."""
    return session.fleet.group.size if session.settings.train.parallelism == "fsdp" else 1


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
    with readable_state(str(checkpoint.path)):
        swarm = str(checkpoint.load("run")["transport"].get("swarm", ""))
    return Held(checkpoint.step, replicas[0] if len(replicas) == 1 else None, swarm)


def replicas_in(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the replicas whose state a checkpoint holds."""
    return tuple(int(found[1]) for found in map(_REPLICA.match, checkpoint.parts) if found)


def held_step(home: Path, replica: int, resume: Path) -> int:
    """Return the step from which a replica could resume: that of ``resume``, or else the newest; -1 for none."""
    name = resume.name if resume.name.startswith("step-") else ""
    return max((checkpoint.step for checkpoint in newest_checkpoints(home, replica, name)), default=-1)


def newest_checkpoints(home: Path, replica: int, name: str) -> list[Checkpoint]:
    """Return the newest checkpoints from which a replica in a process of its own can resume, at most two.

    One is in the run folder of replica 0, if the replica is new or was saved there, by one process for all replicas.
    The other is in the replica's own.

    Args:
        home: the replica's own run folder, which is inside that of replica 0.
        name: the name of the checkpoint; "": any.
    """
    own, shared = list_checkpoints(home / "checkpoints"), []
    if replica and (there := list_checkpoints(base_home(home, replica) / "checkpoints")):
        is_new = replica >= there[-1].fact("num_replicas", int)
        shared = [checkpoint for checkpoint in there if is_new or f"replica-{replica}" in checkpoint.parts]
    named = ([each for each in found if name in ("", each.path.name)] for found in (shared, own))
    return [checkpoint for found in named for checkpoint in found[-1:]]


def base_home(home: Path, replica: int) -> Path:
    """Return the run folder of replica 0."""
    return home.parent if replica else home
