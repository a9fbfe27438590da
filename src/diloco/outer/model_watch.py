"""Checks that a model stays what it was when its `DiLoCo` was constructed: parameters, buffers, frozen values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from diloco.algorithm import (
    check_buffers,
    check_parameters,
    digest_tensors,
    local_shard,
    named_parameters,
    overlaps,
    persistent_buffers,
)
from diloco.errors import ConfigurationError, FragmentError

__all__ = ["ModelWatch", "frozen_digests"]

_SAMPLED = 1 << 14  # values per frozen parameter that are compared at every round


def frozen_digests(model: nn.Module) -> dict[str, str]:
    """Return name -> digest of all values of each frozen parameter that is in memory.

    If the ranks of a replica shard parameters, call it on all of them.
    """
    frozen = {name: parameter for name, parameter in named_parameters(model).items() if not parameter.requires_grad}
    whole = ((name, each.full_tensor() if hasattr(each, "full_tensor") else each) for name, each in frozen.items())
    return {name: digest_tensors(parts) for name, each in whole if (parts := dict(_dense_parts("", each)))}


class ModelWatch:
    """What is to be trained, averaged and left alone in a model, as decided when its `DiLoCo` was constructed.

    Args:
        model: The model.
        parameters: Name -> parameter, of those that fragments hold.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._model = model
        self._parameters = parameters
        self._known = {id(parameter) for parameter in parameters.values()}
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._buffers = _layout(model)
        self._checked: list[tuple[object, ...]] = []  # what the last check has seen
        self.begin()

    def begin(self) -> None:
        """Take the current values of frozen parameters as those of all replicas."""
        self._frozen = self._sampled()

    def check(self) -> None:
        """Check that no parameter or buffer has been added, replaced or resized, and that all can be synchronised.

        Freezing, and another floating-point type, are allowed.

        Raises:
            ConfigurationError: if one has or can't; the message names it. `FragmentError` for a parameter.
        """
        current = named_parameters(self._model)
        seen = [(name, *_place(each)) for name, each in (current | persistent_buffers(self._model)).items()]
        if seen == self._checked:
            return
        self._check(current)
        self._checked = seen

    def _check(self, current: Mapping[str, nn.Parameter]) -> None:
        present = {id(parameter) for parameter in current.values()}
        for name, parameter in self._parameters.items():
            if id(parameter) not in present:
                raise FragmentError(
                    f"The parameter {name!r} was replaced or removed after DiLoCo(...) was constructed, so its new "
                    "values would not be synchronised. Change its values in place, or construct DiLoCo afterwards."
                )
            if parameter.shape != (shape := self._shapes[name]):
                raise FragmentError(
                    f"The parameter {name!r} had the shape {tuple(shape)} when DiLoCo(...) was constructed, and now "
                    f"has {tuple(parameter.shape)}. Construct DiLoCo afterwards."
                )
        if new := [name for name, each in current.items() if each.requires_grad and id(each) not in self._known]:
            raise FragmentError(
                f"{', '.join(new)} became trainable after DiLoCo(...) was constructed, so no fragment holds it. Make "
                "it trainable before, or freeze it with requires_grad_(False)."
            )
        check_parameters(self._parameters)
        check_buffers(self._model, self._parameters)
        if changed := sorted(self._buffers.symmetric_difference(_layout(self._model))):
            raise ConfigurationError(
                f"The buffers of the model have changed since DiLoCo(...) was constructed: {', '.join(changed)}. "
                "Run one batch through the model before if that makes them; use persistent=False if they are derived."
            )

    def drifted(self) -> list[str]:
        """Return the names of frozen parameters that have changed, each of them once.

        Up to 16,384 values of each parameter are compared.
        """
        now = self._sampled()
        changed = [name for name, digest in self._frozen.items() if now.get(name, digest) != digest]
        self._frozen = {name: digest for name, digest in self._frozen.items() if name not in changed}
        return changed

    def _sampled(self) -> dict[str, str]:
        frozen = {
            name: dict(_dense_parts(name, parameter))
            for name, parameter in named_parameters(self._model).items()
            if id(parameter) not in self._known
        }
        parts = {part: values for each in frozen.values() for part, values in each.items()}
        pairs = overlaps({**self._parameters, **parts}) if parts else ()
        tied = {part for pair in pairs if self._parameters.keys() & set(pair) for part in pair}  # with a trained one
        return {
            name: digest_tensors({part: _sample(values) for part, values in each.items()})
            for name, each in frozen.items()
            if not tied.intersection(each)
        }


def _layout(model: nn.Module) -> set[str]:
    """Return the name and shape of each persistent buffer as text, and the type of those that are copied as bytes."""
    buffers = persistent_buffers(model).items()
    kinds = {name: "" if each.is_floating_point() else f" {each.dtype}" for name, each in buffers}
    return {f"{name} {tuple(each.shape)}{kinds[name]}" for name, each in buffers}


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Return what tells a tensor, its memory and its kind from others, at the cost of a few look-ups."""
    shard = tensor if is_lazy(tensor) else local_shard(tensor)
    if type(shard) is not Tensor or shard.layout != torch.strided or shard.is_nested:
        return id(tensor), tensor.requires_grad
    memory = shard.data_ptr(), shard.shape, shard.stride(), shard.dtype, shard.is_inference()
    return id(tensor), tensor.requires_grad, *memory


def _sample(values: Tensor) -> Tensor:
    return values.reshape(-1)[:: max(1, -(-values.numel() // _SAMPLED))]


def _dense_parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the dense tensors in memory that hold the values of a tensor of any kind, such as a quantised one."""
    tensor = tensor if is_lazy(tensor) else local_shard(tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        for attribute in tensor.__tensor_flatten__()[0]:
            yield from _dense_parts(f"{name}.{attribute}", getattr(tensor, attribute))
    elif tensor.is_nested:
        for number, part in enumerate(tensor.unbind()):
            yield f"{name}.{number}", part
    elif tensor.layout != torch.strided:
        yield name, tensor.to_dense()
    elif tensor.is_quantized:
        yield name, tensor.dequantize()
    elif not tensor.is_meta and not is_lazy(tensor):
        yield name, tensor.clone() if tensor.is_conj() or tensor._is_zerotensor() else tensor
