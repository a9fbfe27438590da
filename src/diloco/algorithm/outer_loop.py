"""The outer loop of one replica: its global parameters and outer state, which all replicas agree on.

The outer loop of Streaming DiLoCo, Algorithm 2, for one fragment p::

    Delta_p  <- global_p - local_p                     line 7   pseudo_gradient
    global_p <- OuterOpt(global_p, mean Delta_p)       line 11  outer_step
    local_p  <- merge(local_p, global_p)               line 12  merge

Permanent memory: 4 bytes per parameter for the global parameters and 4 for Nesterov's momentum. A fragment in flight
also keeps its payload and, with the rebase rule, 4 bytes per value. If the ranks of a replica shard its parameters,
each rank holds this for its own shards only. Replicas of one process share the memory of equal state
(`OuterLoop.share`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from diloco.algorithm.codec.base import largest_magnitude, pieces
from diloco.algorithm.digest import digest_state
from diloco.algorithm.fragments import Fragment, bind, flatten, unflatten_
from diloco.algorithm.memory import empty
from diloco.algorithm.merge import MergeRule, carry_over
from diloco.algorithm.model_tensors import local_shard, reshard
from diloco.algorithm.outer_optimizer import OuterOptimizer, OuterState
from diloco.errors import FragmentError, NonFiniteError

__all__ = ["OuterLoop"]


class OuterLoop:
    """Flat float32 global parameters and outer state of each fragment of a model.

    Args:
        model: The model. Its current parameters become the global parameters.
        fragments: A partition of its trainable parameters.
        outer_optimizer: The optimizer of the global parameters.
        device: The device of the global parameters and outer state. None: the model's device. Host memory is pinned if
            the model is on a CUDA device.
    """

    def __init__(
        self,
        model: nn.Module,
        fragments: Sequence[Fragment],
        outer_optimizer: OuterOptimizer,
        device: torch.device | None = None,
    ) -> None:
        self._model = model
        self.fragments = tuple(fragments)
        self.outer_optimizer = outer_optimizer
        self.parameters = [bind(model, fragment) for fragment in self.fragments]
        self.device = device or self.parameters[0][0].device
        self._pinned = self.device.type == "cpu" and self.parameters[0][0].is_cuda
        self.global_params = [
            flatten(parameters, self._empty(fragment.numel))
            for fragment, parameters in zip(self.fragments, self.parameters, strict=True)
        ]
        self.outer_states = [outer_optimizer.init(values) for values in self.global_params]
        self._shared: set[int] = set()  # fragments whose memory another loop may use as well

    def share(self, other: OuterLoop) -> None:
        """Use the other loop's memory for all fragments with equal bits, until either loop changes its state."""
        for index, (mine, theirs) in enumerate(zip(self.global_params, other.global_params, strict=True)):
            if mine is theirs or not _same_bits(self._tensors(index), other._tensors(index)):
                continue
            state = other.outer_states[index]
            self.global_params[index], self.outer_states[index] = theirs, OuterState(state.step, dict(state.slots))
            self._shared.add(index)
            other._shared.add(index)

    def local(self, index: int) -> Tensor:
        """Return a copy of a fragment's local parameters, ``(numel,)`` float32 on the device of the global ones."""
        return flatten(self.parameters[index], self._empty(self.fragments[index].numel))

    def pseudo_gradient(self, index: int, *, keep_local: bool) -> tuple[Tensor, Tensor | None, float]:
        """Return ``Delta = global - local`` (Algorithm 2, line 7).

        Args:
            index: The index of the fragment.
            keep_local: Whether to return the local parameters as well; otherwise their copy is overwritten.

        Returns:
            Delta, ``(numel,)`` float32; the local parameters, ``(numel,)`` float32, or None; the largest magnitude in
            Delta.

        Raises:
            NonFiniteError: if Delta contains NaN or infinity. The message names the parameters.
        """
        local, values = self.local(index), self.global_params[index]
        delta, largest = self._empty(values.numel()) if keep_local else local, 0.0
        for start, stop in pieces(values.numel(), self.device):
            piece = torch.sub(values[start:stop], local[start:stop], out=delta[start:stop])
            found = largest_magnitude(piece)
            if not math.isfinite(found):
                raise self._not_finite(index)
            largest = max(largest, found)
        return delta, local if keep_local else None, largest

    def outer_step(self, index: int, mean: Tensor) -> None:
        """Update ``global <- OuterOpt(global, mean)`` (Algorithm 2, line 11)."""
        self._own(index)
        mean = mean.to(self.device)
        self.outer_optimizer.update(mean, self.outer_states[index], self.global_params[index])

    def merge(self, index: int, rule: MergeRule, sent: Tensor | None) -> None:
        """Merge the global parameters into the local ones (Algorithm 2, line 12)."""
        for local, part in self._local_parts(index, elementwise=getattr(rule, "elementwise", False)):
            rule.merge(local, self.global_params[index][part], None if sent is None else sent[part])

    @contextmanager
    def carrying_over(self, index: int) -> Iterator[None]:
        """Shift the local parameters by the change of the global ones, so that the pseudo-gradient stays the same."""
        before = self.global_params[index].clone()
        yield
        for local, part in self._local_parts(index, elementwise=True):
            carry_over(local, before[part], self.global_params[index][part])

    def digest(self, index: int) -> str:
        """Return the digest of a fragment's global parameters and outer state."""
        return digest_state(self.global_params[index], self.outer_states[index])

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return parameter name -> parameter of the model, also if it has been frozen since."""
        reshard(self._model)
        return {
            name: parameter
            for fragment, parameters in zip(self.fragments, self.parameters, strict=True)
            for name, parameter in zip(fragment.names, parameters, strict=True)
        }

    def named_global_params(self) -> dict[str, Tensor]:
        """Return parameter name -> global value, float32 in the shape of this rank's shard.

        The values are views and must not be changed.
        """
        named: dict[str, Tensor] = {}
        for fragment, values in zip(self.fragments, self.global_params, strict=True):
            named |= fragment.named(values)
        return named

    def fragment_state(self, index: int) -> dict[str, Any]:
        """Return a fragment's global parameters and outer state as nested state, without copying tensors."""
        state = self.outer_states[index]
        return {"global_params": self.global_params[index], "outer_step": state.step, "slots": dict(state.slots)}

    def load_fragment_state(self, index: int, state: Mapping[str, Any]) -> None:
        """Copy the state returned by `fragment_state` into this loop.

        Raises:
            FragmentError: if the state belongs to another fragment or outer optimizer. Nothing was changed.
        """
        slots = self.outer_states[index].slots
        wanted = {"global_params": self.global_params[index], **slots}
        given = {"global_params": state["global_params"], **state["slots"]}
        shapes = [{name: tuple(values.shape) for name, values in each.items()} for each in (wanted, given)]
        if shapes[0] != shapes[1]:
            raise FragmentError(
                f"The state of fragment {index} has the shapes {shapes[1]} instead of {shapes[0]}. It must come from "
                "the same model, fragments and outer optimizer."
            )
        outer_step = int(state["outer_step"])  # may raise, so read it before changing anything
        self._own(index)
        slots = self.outer_states[index].slots
        self.global_params[index].copy_(state["global_params"])
        for name, values in slots.items():
            values.copy_(state["slots"][name])
        self.outer_states[index] = OuterState(outer_step, slots)

    def _tensors(self, index: int) -> dict[str, Tensor]:
        """Return the global parameters of a fragment, under its outer step, and the tensors of its outer state."""
        state = self.outer_states[index]
        return {f"{state.step}": self.global_params[index], **state.slots}

    def _own(self, index: int) -> None:
        """Copy the state of a fragment before a change if another loop may share its memory."""
        if index in self._shared:
            state, values = self.outer_states[index], self.global_params[index]
            self.global_params[index] = self._empty(values.numel()).copy_(values)
            self.outer_states[index] = OuterState(
                state.step, {name: each.clone() for name, each in state.slots.items()}
            )
            self._shared.discard(index)

    def _local_parts(self, index: int, *, elementwise: bool) -> Iterator[tuple[Tensor, slice]]:
        """Yield parts of a fragment's local parameters, to be changed in place, and their positions in the fragment.

        Args:
            index: The index of the fragment.
            elementwise: True yields parts that fit the cache, without copying parameters that are contiguous float32 on
                the device of the global ones. False yields one copy of the whole fragment, which is copied back.
        """
        reshard(self._model)
        shards = [local_shard(parameter) for parameter in self.parameters[index]]
        in_place = elementwise and all(
            shard.dtype == torch.float32 and shard.device == self.device and shard.is_contiguous() for shard in shards
        )
        flat = [shard.view(-1) for shard in shards] if in_place else [self.local(index)]
        begin = 0
        for values in flat:
            numel = values.numel()
            for start, stop in pieces(numel, self.device) if elementwise else [(0, numel)]:
                yield values[start:stop], slice(begin + start, begin + stop)
            begin += numel
        if not in_place:
            unflatten_(flat[0], self.parameters[index])

    def _not_finite(self, index: int) -> NonFiniteError:
        named = zip(self.fragments[index].names, self.parameters[index], strict=True)
        bad = [name for name, parameter in named if not math.isfinite(largest_magnitude(local_shard(parameter)))]
        return NonFiniteError(
            f"The pseudo-gradient of fragment {index} is not finite; the local values of "
            f"{', '.join(bad) or 'no parameter'} contain NaN or infinity. Nothing was sent. Resume from the last "
            "checkpoint or restart, with a lower inner learning rate, gradient clipping or a wider precision."
        )

    def _empty(self, numel: int) -> Tensor:
        if self._pinned:
            return torch.empty(numel, dtype=torch.float32, device=self.device, pin_memory=True)
        return empty(numel, torch.float32, self.device)


def _same_bits(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    return list(some) == list(others) and all(
        torch.equal(one.view(torch.int32), other.view(torch.int32))
        for one, other in zip(some.values(), others.values(), strict=True)
    )
