"""Saving and loading of a session: all replicas of a process in one checkpoint, or one replica sharded over its ranks.

A run resumes with as many processes per replica as it was saved by (`diloco.config` refuses another number), or moves
between one process for all replicas and one for each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from diloco.algorithm import load_optimizer_state, local_shard, named_parameters
from diloco.checkpoint import Checkpoint, CheckpointWriter, open_checkpoint, run_folder
from diloco.errors import CheckpointError
from diloco.outer import DiLoCo
from diloco.train.inner import InnerLoop
from diloco.train.replica import load_process_random, process_random
from diloco.trained import REST, rest_of_state, saved_once
from diloco.transport import transports
from diloco.units import in_short

if TYPE_CHECKING:
    from diloco.train.session import Session

_REPLICA = re.compile(r"replica-(\d+)\Z")  # a replica's part of a checkpoint; its shards have longer names

_AGREED = ("global_params", "slots")  # in the state of a fragment: what all replicas agree on


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
        """Return the state of this replica's model as ``model/NAME``."""
        return {f"model/{name}": tensor for name, tensor in saved_once(self.inner.model).items()}

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

    def rest_of_model(self) -> dict[str, Tensor]:
        """Return name -> tensor of the rest of the saved model: frozen parameters, agreed buffers, what is at home."""
        rest = rest_of_state(self.inner.model, {name: self.parameters[name] for name in self.global_params()})
        agreed = self.diloco.fragments[-1].named_buffers() if self.diloco else {}
        return {name: agreed.get(name, tensor) for name, tensor in rest.items()}

    def rest(self) -> dict[str, Any]:
        """Return all other state of this rank; what is shaped as a parameter is this rank's shard."""
        saved, diloco = self.inner.state_dict(), None
        slots = {
            self.names[id(parameter)]: {slot: _with_tensors(value, local_shard) for slot, value in slots.items()}
            for parameter, slots in self.inner.optimizer.state.items()
        }
        if self.diloco is not None:
            diloco = self.diloco.state_dict()
            diloco["fragments"] = [_without_agreed(fragment) for fragment in diloco["fragments"]]
        groups, on_host = saved["optimizer"]["param_groups"], saved["on_host"]
        more = {name: value for name, value in saved["optimizer"].items() if name not in ("state", "param_groups")}
        inner = {"groups": groups, "slots": slots, "more": more, "on_host": on_host, "scaler": saved["scaler"]}
        return {"inner": inner, "diloco": diloco}

    def load(self, checkpoint: Checkpoint, part: str, rest: Mapping[str, Any]) -> None:
        """Restore all kinds of state. If a `DiLoCo` was saved, this state must have one.

        Args:
            part: the part of the checkpoint that has the result of `values`.
            rest: the result of `rest` of the same rank.
        """
        parts = {part: self.values()}
        if self.diloco is not None:
            parts |= {"global": self.global_params(), "outer": self.outer_state()}
        optimizer, inner = self.inner.optimizer, rest["inner"]
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        index = {self.names[id(parameter)]: number for number, parameter in enumerate(held)}
        named = [(values.keys(), checkpoint.values(name).keys()) for name, values in parts.items()]
        for mine, theirs in (*named, (index.keys(), inner["slots"].keys() | index.keys())):
            if odd := sorted(mine ^ theirs):
                raise CheckpointError(
                    f"{checkpoint.path} belongs to another model, optimizer or algorithm: only one of the checkpoint "
                    f"and this run has {', '.join(odd[:5])}. Nothing was loaded."
                )
        for name, values in parts.items():
            checkpoint.load_into(name, values)
        state = {
            index[name]: {slot: self._slot(value, name) for slot, value in slots.items()}
            for name, slots in inner["slots"].items()
        }
        loaded = {**inner["more"], "state": state, "param_groups": inner["groups"]}
        load_optimizer_state(optimizer, loaded, on_host=inner["on_host"])
        self.inner.scaler.load_state_dict(dict(inner["scaler"]))
        if self.diloco is not None:
            now, saved = self.diloco.state_dict()["fragments"], rest["diloco"]
            # the values have already been loaded in place, so loading them from here changes nothing
            fragments = [
                {**{name: mine[name] for name in _AGREED}, **theirs}
                for mine, theirs in zip(now, saved["fragments"], strict=True)
            ]
            self.diloco.load_state_dict({**saved, "fragments": fragments})

    def _slot(self, value: Any, name: str) -> Any:
        """Return a value in the state of the optimizer for a parameter."""
        parameter = self.parameters[name]

        def laid_out(tensor: Tensor) -> Tensor:
            if tensor.dim() == 0 or tensor.shape != local_shard(parameter).shape:
                return tensor
            return self._whole(tensor.to(parameter.device), name)

        return _with_tensors(value, laid_out)

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


def _without_agreed(fragment: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fragment.items() if name not in _AGREED}


def _with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a value in the state of an optimizer with all of its tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _with_tensors(item, change) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_tensors(item, change) for item in value)
    return value


def save_session(
    session: Session,
    writer: CheckpointWriter,
    folder: Path,
    keep: int,
    *,
    in_use: Collection[Path] = (),
    copies: bool = True,
) -> None:
    """Begin to save the state that the session needs to resume; see `CheckpointWriter.save`. Call it on all ranks.

    Parts ``global`` and ``outer`` have what all replicas agree on, ``replica-M-values`` the named tensors of replica M,
    ``replica-M`` its place in the data, and ``replica-M-own-S`` what else its rank S has.
    """
    transport = {"name": session.settings.network.transport, **session.fleet.state_dict()}
    run = {"totals": vars(session.totals), "transport": transport, "random": process_random()}
    states = [ReplicaState(replica.inner, replica.diloco) for replica in session.replicas]
    first, group = states[0], session.fleet.group
    parts: dict[str, Any] = {"run": run, "global": first.global_params(), "outer": first.outer_state()}
    if rest := first.rest_of_model():
        parts[REST] = rest
    own = {}
    for replica, state in zip(session.replicas, states, strict=True):
        name = f"replica-{replica.number}"
        parts[name] = {"sampler": replica.sampler.state_dict()}
        parts[f"{name}-values"] = state.values()
        if group.position < replica.inner.parallel.num_shards:  # else position 0 saves the same
            own[f"{name}-own"] = {"state": state.rest(), "random": replica.random_state.state_dict()}
    alone = session.fleet.elastic or len(session.replicas) == session.settings.network.replicas
    agreed = None if alone else session.agreed_step  # those that resume together need a step which all have saved
    about = _about(session)
    more: dict[str, Any] = {"agreed": agreed, "in_use": in_use, "copies": copies}
    writer.save(folder, session.totals.steps, parts, own=own, about=about, keep=keep, **more)


def _about(session: Session) -> dict[str, Any]:
    settings, model, diloco = session.settings, session.replicas[0].model, session.replicas[0].diloco
    at_home = session.at_home
    return {
        "algorithm": settings.algorithm,
        "num_replicas": session.num_replicas,
        **({"at_home": f"replica {session.fleet.local[0]}'s {in_short(at_home)}"} if at_home else {}),
        **({"elastic": True} if session.fleet.elastic else {}),  # it is complete without the others' checkpoints
        "parameters": model.num_parameters(),
        "sequence_length": settings.train.sequence_length,
        "seed": settings.seed,
        "model": settings.model.described(),
        "definition": model.definition(),
        "identity": dict(session.identity),
        "files": session.corpus.files,
        "global_params_digest": session.global_digest(),
        "fragments": [
            {"index": f.index, "parameters": list(f.names), "numel": f.numel, "outer_step": f.state.outer.step}
            for f in (diloco.fragments if diloco else ())
        ],
        "rounds_in_flight": [str(round_id) for round_id in diloco.in_flight] if diloco else [],
    }


def load_session(session: Session, checkpoint: Checkpoint) -> None:
    """Restore the session that `save_session` saved, on all ranks of a replica.

    ``checkpoint`` holds the first of the session's replicas; one process finds the others' in their own folders.
    """
    fleet = session.fleet
    if fleet.elastic and fleet.local != (theirs := replicas_in(checkpoint)):  # each peer resumes only from its own
        held = f"the state of replica {', '.join(map(str, theirs))}" if theirs else "no replica's state"
        advice = f"Pass --replica {theirs[0]}, or leave it out." if theirs else "Use a checkpoint of this replica."
        raise CheckpointError(f"{checkpoint.path} holds {held}, but this is replica {fleet.local[0]}. {advice}")
    saved = {number: checkpoint_of(number, checkpoint) for number in fleet.local}
    run = checkpoint.load("run")
    session.totals = replace(session.totals, **run["totals"])
    if replicas_in(checkpoint)[:1] == fleet.local[:1]:  # else the generators of another replica's process
        load_process_random(run["random"])
    fleet.load_state_dict(_transport_state(session, run["transport"], saved))
    for replica in session.replicas:
        checkpoint, name = saved[replica.number], f"replica-{replica.number}"
        own = checkpoint.load(f"{name}-own-{fleet.group.position % replica.inner.parallel.num_shards}")
        if own["state"]["diloco"] is not None:
            session.begin_diloco(replica)
        replica.random_state.load_state_dict(own["random"])
        ReplicaState(replica.inner, replica.diloco).load(checkpoint, f"{name}-values", own["state"])
        replica.sampler.load_state_dict(checkpoint.load(name)["sampler"])
        if replica.diloco is not None:
            replica.diloco.recovery.begun_after = session.totals.steps - replica.diloco.steps


def checkpoint_of(replica: int, checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint of the same step that holds a replica, which a process of its own may have saved."""
    if replica in replicas_in(checkpoint):
        return checkpoint
    folder = run_folder(checkpoint.path) / f"replica-{replica}" / "checkpoints"
    advice = "Copy the folders of all replicas into that of replica 0, or resume from a step that all have saved."
    try:
        other = open_checkpoint(folder / f"step-{checkpoint.step:08d}")
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path} holds no replica {replica}: {error} {advice}") from error
    # one process holds the global parameters once, so no exchange would find out that they differ
    if other.about.get("global_params_digest") != checkpoint.about.get("global_params_digest"):
        raise CheckpointError(f"{other.path} and {checkpoint.path} have other global parameters. {advice}")
    return other


def _transport_state(session: Session, state: Mapping[str, Any], saved: Mapping[int, Checkpoint]) -> Mapping[str, Any]:
    """Return the state for the session's fleet, over whichever transport it was saved."""
    together = session.settings.network.traits.alone  # all replicas in this process
    saved_together = state["name"] in transports(alone=True)
    if together and not saved_together:
        return {
            "traffic": [checkpoint.load("run")["transport"]["traffic"] for checkpoint in saved.values()],
            "network": None,
        }
    if saved_together and not together:
        state = {"traffic": state["traffic"][session.fleet.local[0]]}
    return {"step": session.totals.steps, **state}  # one process and process groups count no steps


def replicas_in(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the replicas whose state a checkpoint holds."""
    return tuple(int(found[1]) for found in map(_REPLICA.match, checkpoint.parts) if found)
