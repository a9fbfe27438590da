"""The state that a rank of a replica saves, in four kinds.

- what all replicas agree on: the global parameters, ``NAME``, and the outer state, ``SLOT/NAME``
- values of this replica with the shape of a parameter, which are sharded over the ranks like the parameter:
  ``model/NAME``, ``inner/SLOT/NAME`` and ``residual/NAME`` (of error feedback)
- state that is the same on all ranks: steps, learning rates, the gradient scaler, counters
- state that only this rank can use: rounds in flight, which were encoded shard by shard
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from diloco.algorithm import RoundId, named_parameters
from diloco.checkpoint import Checkpoint, SavedTensor
from diloco.errors import CheckpointError
from diloco.outer import DiLoCo
from diloco.train.inner import InnerLoop
from diloco.trained import saved_once

__all__ = ["ReplicaState"]

_VALUES = ("global_params", "slots", "residual")
_OF_RANKS = ("in_flight", "candidate")
"""The keys in the state of a fragment that have the shape of its parameters, and those that only its rank can use."""


class ReplicaState:
    """The state of an inner loop and, if there is one, of the `DiLoCo` around it."""

    def __init__(self, inner: InnerLoop, diloco: DiLoCo | None) -> None:
        self.inner = inner
        self.diloco = diloco
        self.names = {id(parameter): name for name, parameter in named_parameters(inner.model).items()}
        # those that were trainable at the start, in the order of the model: one frozen since stays in the state
        trained = inner.parameters if diloco is None else diloco.named_parameters()
        self.parameters = {name: trained[name] for name in self.names.values() if name in trained}

    def values(self) -> dict[str, Tensor]:
        """Return the values with the shape of a parameter (or buffer) by name, without copying.

        They are DTensors if the model is sharded.
        """
        values = {f"model/{name}": tensor for name, tensor in saved_once(self.inner.model).items()}
        for parameter, slots in self.inner.optimizer.state.items():
            for slot, value in slots.items():
                if _is_shaped_as(value, parameter):
                    values[f"inner/{slot}/{self.names[id(parameter)]}"] = value
        for fragment in self.diloco.fragments if self.diloco else ():
            if fragment.residual is not None:
                for name, piece in fragment.layout.named(fragment.residual).items():
                    values[f"residual/{name}"] = self._laid_out(piece, name)
        return values

    def global_params(self) -> dict[str, Tensor]:
        """Return the global parameters by name, or the model's parameters without an outer loop, without copying.

        They are DTensors if the model is sharded.
        """
        if self.diloco is None:
            return {name: parameter.detach() for name, parameter in self.parameters.items()}
        named = self.diloco.named_global_params()
        return {name: self._laid_out(values, name) for name, values in named.items()}

    def outer_state(self) -> dict[str, Tensor]:
        """Return the state of the outer optimizer by slot and name, without copying; empty without an outer loop."""
        return {
            f"{slot}/{name}": self._laid_out(piece, name)
            for fragment in (self.diloco.fragments if self.diloco else ())
            for slot, vector in fragment.state.outer.slots.items()
            for name, piece in fragment.layout.named(vector).items()
        }

    def common(self) -> dict[str, Any]:
        """Return the state that is the same on all ranks, as a nested state."""
        rest: dict[str, dict[str, Any]] = {}
        for parameter, slots in self.inner.optimizer.state.items():
            kept = {slot: value for slot, value in slots.items() if not _is_shaped_as(value, parameter)}
            rest[self.names[id(parameter)]] = kept
        saved = self.inner.state_dict()
        return {
            "inner": {"groups": saved["optimizer"]["param_groups"], "rest": rest, "scaler": saved["scaler"]},
            "diloco": None if self.diloco is None else self._common_of(self.diloco),
        }

    def own(self) -> dict[str, Any]:
        """Return the state that only this rank can use, as a nested state."""
        if self.diloco is None:
            return {}
        fragments = self.diloco.state_dict()["fragments"]
        return {"fragments": [{name: fragment[name] for name in _OF_RANKS} for fragment in fragments]}

    def load(
        self,
        checkpoint: Checkpoint,
        part: str,
        common: Mapping[str, Any],
        own: Mapping[str, Any] | None,
        *,
        same_replicas: bool = True,
    ) -> tuple[RoundId, ...]:
        """Restore all kinds of state, on any number of ranks. If a `DiLoCo` was saved, this state must have one.

        Args:
            part: the part of the checkpoint that has the result of `values`.
            common: the result of `common`.
            own: the result of `own` at the same position of the same number of ranks. None: the number of ranks
                differs; the rounds in flight were encoded for other shards and count as void.
            same_replicas: whether the rounds in flight were between the same replicas. If not, they count as void.

        Returns:
            The void rounds. Their work is in the next rounds, because the global parameters did not change.

        Raises:
            CheckpointError: if the state belongs to another model, optimizer or algorithm.
        """
        slots = self._make_slots(checkpoint.tensors(part))
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
        self._load_inner(slots, common["inner"])
        return () if self.diloco is None else self._load_diloco(self.diloco, common["diloco"], own, same_replicas)

    def _laid_out(self, local: Tensor, name: str) -> Tensor:
        """Return ``local``, this rank's shard of parameter ``name``, as a DTensor if the parameter is one."""
        parameter: Any = self.parameters[name]
        if not hasattr(parameter, "to_local"):
            return local
        from torch.distributed.tensor import DTensor

        # on a mesh of the device of ``local``, which may differ from the parameter's, so that nothing is copied
        mesh = self.inner.parallel.group.mesh(local.device)
        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(local, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)

    def _common_of(self, diloco: DiLoCo) -> dict[str, Any]:
        state = diloco.state_dict()
        own = (*_VALUES, *_OF_RANKS)
        fragments = [{name: v for name, v in fragment.items() if name not in own} for fragment in state["fragments"]]
        flights = [[round_id.fragment, round_id.outer_step] for round_id in diloco.in_flight]
        return {**state, "fragments": fragments, "rounds_in_flight": flights}

    def _make_slots(self, saved: Mapping[str, SavedTensor]) -> dict[str, tuple[str, str, Tensor]]:
        """Return the parameter, slot and an empty tensor for each saved value of the inner optimizer, by name."""
        slots = {}
        for name, tensor in saved.items():
            kind, _, place = name.partition("/")
            slot, _, parameter = place.partition("/")
            if kind == "inner" and parameter in self.parameters:
                room = torch.empty_like(self.parameters[parameter], dtype=tensor.dtype, requires_grad=False)
                slots[name] = (parameter, slot, room)
        return slots

    def _load_inner(self, slots: Mapping[str, tuple[str, str, Tensor]], common: Mapping[str, Any]) -> None:
        optimizer = self.inner.optimizer
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        index = {self.names[id(parameter)]: number for number, parameter in enumerate(held)}
        state: dict[int, dict[str, Any]] = {index[name]: dict(kept) for name, kept in common["rest"].items()}
        for parameter, slot, value in slots.values():
            state.setdefault(index[parameter], {})[slot] = value
        optimizer.load_state_dict({"state": state, "param_groups": common["groups"]})
        self.inner.scaler.load_state_dict(dict(common["scaler"]))

    def _load_diloco(
        self,
        diloco: DiLoCo,
        common: Mapping[str, Any],
        own: Mapping[str, Any] | None,
        same_replicas: bool,
    ) -> tuple[RoundId, ...]:
        rounds = own["fragments"] if own is not None and same_replicas else None
        void = () if rounds is not None else tuple(RoundId(int(p), int(k)) for p, k in common["rounds_in_flight"])
        lost: dict[int, Mapping[str, Any]] = {r.fragment: {"in_flight": {"outer_step": r.outer_step}} for r in void}
        # the values have already been loaded in place, so loading them from here changes nothing
        fragments = [
            {**{name: now[name] for name in _VALUES}, **dict.fromkeys(_OF_RANKS), **saved, **more}
            for now, saved, more in zip(
                diloco.state_dict()["fragments"],
                common["fragments"],
                rounds if rounds is not None else [lost.get(fragment.index, {}) for fragment in diloco.fragments],
                strict=True,
            )
        ]
        diloco.load_state_dict({**common, "fragments": fragments}, resubmit=rounds is not None)
        return void


def _is_shaped_as(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape
