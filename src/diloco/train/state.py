"""Saving and loading of a session: all replicas of a process in one checkpoint, or one replica sharded over its ranks.

A run may move between one process for all replicas and a process for each: the run folder of replica 0 contains those
of the others. With another number of ranks per replica, the rounds in flight count as void; the next rounds contain
their work, because the global parameters did not change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diloco.algorithm import RoundId, named_parameters
from diloco.checkpoint import Checkpoint, CheckpointWriter, open_checkpoint
from diloco.errors import CheckpointError
from diloco.outer import DiLoCo
from diloco.train.inner import InnerLoop
from diloco.train.replica import load_process_random, process_random
from diloco.trained import REST, rest_of_state, saved_once

if TYPE_CHECKING:
    from diloco.train.replica import Replica
    from diloco.train.session import Session

__all__ = ["ReplicaState", "base_home", "load_session", "replicas_in", "save_session"]

_REPLICA = re.compile(r"replica-(\d+)\Z")  # a replica's part of a checkpoint; its shards have longer names

_VALUES = ("global_params", "slots", "residual")  # in the state of a fragment, with the shape of its parameters


class ReplicaState:
    """The state of an inner loop and, if there is one, of the `DiLoCo` around it, as a rank of the replica saves it.

    No method copies a tensor. Values with the shape of a parameter are DTensors if the model is sharded.
    """

    def __init__(self, inner: InnerLoop, diloco: DiLoCo | None) -> None:
        self.inner = inner
        self.diloco = diloco
        self.names = {id(parameter): name for name, parameter in named_parameters(inner.model).items()}
        # those that were trainable at the start, in the order of the model: one frozen since stays in the state
        trained = inner.parameters if diloco is None else diloco.named_parameters()
        self.parameters = {name: trained[name] for name in self.names.values() if name in trained}

    def values(self) -> dict[str, Tensor]:
        """Return this replica's values: ``model/NAME``, ``inner/SLOT/NAME`` and ``residual/NAME`` (error feedback)."""
        values = {f"model/{name}": tensor for name, tensor in saved_once(self.inner.model).items()}
        for parameter, slots in self.inner.optimizer.state.items():
            name = self.names[id(parameter)]
            values |= {f"inner/{slot}/{name}": v for slot, v in slots.items() if _is_shaped_as(v, parameter)}
        for fragment in self.diloco.fragments if self.diloco else ():
            if fragment.residual is not None:
                values |= self._laid_out(fragment.layout.named(fragment.residual), "residual/")
        return values

    def global_params(self) -> dict[str, Tensor]:
        """Return the global parameters by name, or the model's parameters without an outer loop."""
        if self.diloco is None:
            return {name: parameter.detach() for name, parameter in self.parameters.items()}
        return self._laid_out(self.diloco.named_global_params())

    def outer_state(self) -> dict[str, Tensor]:
        """Return the outer state as ``SLOT/NAME``; empty without an outer loop."""
        values: dict[str, Tensor] = {}
        for fragment in self.diloco.fragments if self.diloco else ():
            for slot, vector in fragment.state.outer.slots.items():
                values |= self._laid_out(fragment.layout.named(vector), f"{slot}/")
        return values

    def rest(self) -> dict[str, Any]:
        """Return all other state; only this rank can use its rounds in flight, which were encoded shard by shard."""
        saved, diloco = self.inner.state_dict(), None
        rest = {
            self.names[id(parameter)]: {slot: v for slot, v in slots.items() if not _is_shaped_as(v, parameter)}
            for parameter, slots in self.inner.optimizer.state.items()
        }
        if self.diloco is not None:
            diloco = self.diloco.state_dict()
            diloco["fragments"] = [{k: v for k, v in f.items() if k not in _VALUES} for f in diloco["fragments"]]
        inner = {"groups": saved["optimizer"]["param_groups"], "rest": rest, "scaler": saved["scaler"]}
        return {"inner": inner, "diloco": diloco}

    def load(
        self, checkpoint: Checkpoint, part: str, rest: Mapping[str, Any], *, resubmit: bool
    ) -> tuple[RoundId, ...]:
        """Restore all kinds of state, on any number of ranks. If a `DiLoCo` was saved, this state must have one.

        Args:
            part: the part of the checkpoint that has the result of `values`.
            rest: the result of `rest`, of this or, without ``resubmit``, of any rank.
            resubmit: whether as many ranks saved it, among the same replicas. Else the rounds in flight count as void.

        Returns:
            The void rounds. Their work is in the next rounds, because the global parameters did not change.
        """
        slots: dict[str, tuple[str, str, Tensor]] = {}  # name -> parameter, slot, and room for the saved value
        for name, tensor in checkpoint.tensors(part).items():
            kind, _, place = name.partition("/")
            slot, _, parameter = place.partition("/")
            if kind == "inner" and parameter in self.parameters:
                room = torch.empty_like(self.parameters[parameter], dtype=tensor.dtype, requires_grad=False)
                slots[name] = (parameter, slot, room)
        parts = {part: self.values() | {name: value for name, (_, _, value) in slots.items()}}
        if self.diloco is not None:
            parts |= {"global": self.global_params(), "outer": self.outer_state()}
        for name, values in parts.items():
            if odd := sorted(values.keys() ^ checkpoint.tensors(name).keys()):
                raise CheckpointError(
                    f"{checkpoint.path} belongs to another model, optimizer or algorithm: only one of the checkpoint "
                    f"and this run has {', '.join(odd[:5])}. Nothing was loaded."
                )
        for name, values in parts.items():
            checkpoint.load_into(name, values)
        optimizer, inner = self.inner.optimizer, rest["inner"]
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        index = {self.names[id(parameter)]: number for number, parameter in enumerate(held)}
        state: dict[int, dict[str, Any]] = {index[name]: dict(kept) for name, kept in inner["rest"].items()}
        for parameter, slot, value in slots.values():
            state.setdefault(index[parameter], {})[slot] = value
        optimizer.load_state_dict({"state": state, "param_groups": inner["groups"]})
        self.inner.scaler.load_state_dict(dict(inner["scaler"]))
        if self.diloco is None:
            return ()
        now, saved = self.diloco.state_dict()["fragments"], rest["diloco"]
        # the values have already been loaded in place, so loading them from here changes nothing
        fragments = [
            {**{name: mine[name] for name in _VALUES}, **theirs}
            for mine, theirs in zip(now, saved["fragments"], strict=True)
        ]
        self.diloco.load_state_dict({**saved, "fragments": fragments}, resubmit=resubmit)
        flights = () if resubmit else (fragment["in_flight"] for fragment in fragments)
        return tuple(RoundId(number, int(flight["outer_step"])) for number, flight in enumerate(flights) if flight)

    def _laid_out(self, shards: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
        """Return this rank's shards of parameters with longer names, as DTensors if the parameters are."""
        return {f"{prefix}{name}": self._whole(local, name) for name, local in shards.items()}

    def _whole(self, local: Tensor, name: str) -> Tensor:
        parameter: Any = self.parameters[name]
        if not hasattr(parameter, "to_local"):
            return local
        from torch.distributed.tensor import DTensor

        # on a mesh of the device of ``local``, which may differ from the parameter's, so that nothing is copied
        mesh = self.inner.parallel.group.mesh(local.device)
        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(local, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)


def _is_shaped_as(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


def save_session(session: Session, writer: CheckpointWriter, folder: Path, keep: int, *, copies: bool = True) -> None:
    """Begin to save the state that the session needs to resume; see `CheckpointWriter.save`. Call it on all ranks.

    Parts ``global`` and ``outer`` have what all replicas agree on, ``replica-M-values`` the named tensors of replica M,
    ``replica-M`` its place in the data, and ``replica-M-own-S`` what else its rank S has. Another number of ranks can
    load all but rounds in flight and random numbers.
    """
    run = {"totals": vars(session.totals), "transport": session.fleet.state_dict(), "random": process_random()}
    states = [ReplicaState(replica.inner, replica.diloco) for replica in session.replicas]
    first, group = states[0], session.fleet.group
    parts: dict[str, Any] = {"run": run, "global": first.global_params(), "outer": first.outer_state()}
    if rest := rest_of_state(session.replicas[0].model, first.parameters):
        parts[REST] = rest
    own = {}
    for replica, state in zip(session.replicas, states, strict=True):
        name = f"replica-{replica.number}"
        parts[name] = {"sampler": replica.sampler.state_dict()}
        parts[f"{name}-values"] = state.values()
        if group.position < _num_shards(session):  # else position 0 saves the same
            own[f"{name}-own"] = {"state": state.rest(), "random": replica.random_state.state_dict()}
    fleet = session.fleet  # processes that resume together need a step of which all have a checkpoint
    agreed = session.agreed_step if fleet.hub is None and not fleet.elastic and fleet.num_members > 1 else None
    about = _about(session)
    writer.save(folder, session.totals.steps, parts, own=own, about=about, keep=keep, agreed=agreed, copies=copies)


def _about(session: Session) -> dict[str, Any]:
    settings, model, diloco = session.settings, session.replicas[0].model, session.replicas[0].diloco
    return {
        "algorithm": settings.algorithm,
        "num_replicas": settings.network.replicas,
        **({"elastic": True} if session.fleet.elastic else {}),  # it is complete without the others' checkpoints
        "parameters": model.num_parameters(),
        "sequence_length": settings.train.sequence_length,
        "seed": settings.seed,
        "model": settings.model.described(),
        "definition": model.definition(),
        "identity": dict(session.identity),
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
        checkpoint: the checkpoint of the session's replicas, or that of replica 0, which one process saved for all.
        home: the replica's run folder.

    Returns:
        Sentences about rounds that are now void.
    """
    run, fleet, mine = checkpoint.load("run"), session.fleet, session.replicas[0].number
    session.totals = replace(session.totals, **run["totals"])
    if fleet.elastic and mine not in (theirs := replicas_in(checkpoint)):  # each peer resumes only from its own
        held = f"the state of replica {', '.join(map(str, theirs))}" if theirs else "no replica's state"
        advice = f"Pass --replica {theirs[0]}, or leave it out." if theirs else "Use a checkpoint of this replica."
        raise CheckpointError(f"{checkpoint.path} holds {held}, but this is replica {mine}. {advice}")
    if replicas_in(checkpoint)[:1] == fleet.local[:1]:  # a checkpoint of all replicas has those of the first
        load_process_random(run["random"])
    base = base_home(home, mine) if fleet.hub is None else checkpoint.path.parent.parent
    saved = {replica.number: _checkpoint_of(replica.number, checkpoint, base) for replica in session.replicas}
    fleet.load_state_dict(_fleet_state(session, run["transport"], saved))
    void: tuple[RoundId, ...] = ()
    for replica in session.replicas:
        void = _load_replica(session, replica, saved[replica.number])
        replica.sampler.load_state_dict(saved[replica.number].load(f"replica-{replica.number}")["sampler"])
        if replica.diloco is not None:
            replica.diloco.recovery.begun_after = session.totals.steps - replica.diloco.steps
    return tuple(f"{round_id} was in flight between other ranks and counts as void." for round_id in void)


def _load_replica(session: Session, replica: Replica, checkpoint: Checkpoint) -> tuple[RoundId, ...]:
    shards, name = _num_shards(session), f"replica-{replica.number}"
    same = sum(part.startswith(f"{name}-own-") for part in checkpoint.parts) == shards
    own = checkpoint.load(f"{name}-own-{session.fleet.group.position % shards if same else 0}")
    if own["state"]["diloco"] is not None:
        session.begin_diloco(replica)
    if same:
        replica.random_state.load_state_dict(own["random"])
    state = ReplicaState(replica.inner, replica.diloco)
    return state.load(checkpoint, f"{name}-values", own["state"], resubmit=same)


def _num_shards(session: Session) -> int:
    """Return S if the ranks of a replica shard the parameters, 1 if each holds all of them."""
    return session.fleet.group.size if session.settings.train.parallelism == "fsdp" else 1


def _checkpoint_of(replica: int, checkpoint: Checkpoint, base: Path) -> Checkpoint:
    """Return the checkpoint of the same step that has the state of ``replica``; ``base``: run folder of replica 0."""
    part = f"replica-{replica}"
    if part in checkpoint.parts:
        return checkpoint
    place = (base / part if replica else base) / "checkpoints" / checkpoint.path.name
    try:
        return open_checkpoint(place)
    except CheckpointError as error:
        raise CheckpointError(
            f"The checkpoint of replica {replica}, {place}, can't be opened: {error} Copy the folders of all replicas "
            "into that of replica 0."
        ) from error


def _fleet_state(session: Session, state: Mapping[str, Any], saved: Mapping[int, Checkpoint]) -> Mapping[str, Any]:
    """Return the state for the fleet, which one process may have saved for all replicas, or each for its own."""
    together = "network" in state
    if together == (session.fleet.hub is not None) or not state:
        return state
    if together:
        return {"traffic": state["traffic"][session.replicas[0].number], "step": session.totals.steps}
    traffic = [checkpoint.load("run")["transport"]["traffic"] for checkpoint in saved.values()]
    return {"traffic": traffic, "network": None, "decided": []}


def replicas_in(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the replicas whose state a checkpoint holds."""
    return tuple(int(found[1]) for found in map(_REPLICA.match, checkpoint.parts) if found)


def base_home(home: Path, replica: int) -> Path:
    """Return the run folder of replica 0."""
    return home.parent if replica else home
