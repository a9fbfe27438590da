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
from diloco.errors import ConfigurationError

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
        self._tensors = self._synchronised()
        self._checked: list[tuple[object, ...]] = []  # what the last check has seen
        self.begin()

    def begin(self) -> None:
        """Take the current values of frozen parameters as those of all replicas."""
        self._frozen = self._sampled()

    def check(self) -> None:
        """Check that no parameter or buffer has been added, replaced or resized, and that all can be synchronised.

        Freezing, and another floating-point type, are allowed.

        Raises:
            ConfigurationError: if one has or can't; the message names it.
        """
        current = named_parameters(self._model)
        seen = [(name, *_place(each)) for name, each in (current | persistent_buffers(self._model)).items()]
        if seen == self._checked:
            return
        if changed := sorted(self._tensors ^ self._synchronised()):
            raise ConfigurationError(
                f"The model is no longer the one of which DiLoCo(...) was constructed: {', '.join(changed)} is gone or "
                "new, so it would not be synchronised. Change values in place, and add, resize or unfreeze before. If "
                "the first batch makes a buffer, run one before; if it is derived, use persistent=False."
            )
        check_parameters(self._parameters)
        check_buffers(self._model, self._parameters)
        self._checked = seen

    def drift(self) -> str:
        """Return a sentence about frozen parameters that have changed, each of them once; "" if none has.

        Up to 16,384 values of each parameter are compared.
        """
        now = self._sampled()
        changed = [name for name, digest in self._frozen.items() if now.get(name, digest) != digest]
        self._frozen = {name: digest for name, digest in self._frozen.items() if name not in changed}
        if not changed:
            return ""
        return (
            f"The frozen parameter {', '.join(changed)} has changed since the start. Frozen parameters are not "
            "synchronised, so it may differ between replicas. Register it as a buffer, which is averaged, or change it "
            "alike on every replica."
        )

    def _synchronised(self) -> set[str]:
        """Return each parameter and buffer to be synchronised, and those that the model would need to be, as text."""
        current = named_parameters(self._model)
        present = {id(parameter) for parameter in current.values()}
        names = {name for name, each in self._parameters.items() if id(each) in present}
        texts = {f"parameter {name} {tuple(self._parameters[name].shape)}" for name in names}
        texts |= {f"parameter {n}" for n, each in current.items() if each.requires_grad and id(each) not in self._known}
        for name, each in persistent_buffers(self._model).items():  # the type counts of those that are copied as bytes
            kind = "" if each.is_floating_point() else f" {each.dtype}"
            texts.add(f"buffer {name} {tuple(each.shape)}{kind}")
        return texts

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
