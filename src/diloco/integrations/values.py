"""Whose values the model of a framework holds: what all replicas agree on, or this replica's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor, nn

from diloco.algorithm.fragments import local_shard, trainable_parameters
from diloco.outer.diloco import DiLoCo

__all__ = ["GlobalsInModel", "Parameters", "held_values", "hold_values"]

Parameters = Literal["global", "local"]
"""Whose values are evaluated, saved for use, and left in the model at the end: what all replicas agree on, or this
replica's own."""


class GlobalsInModel:
    """Puts the global parameters into the model and takes them out again, where no ``with`` fits.

    In between, nothing may be trained or merged.
    """

    def __init__(self, diloco: DiLoCo) -> None:
        self.diloco = diloco
        self._before: dict[str, Tensor] | None = None

    @property
    def shown(self) -> bool:
        """Whether the model holds the global parameters now."""
        return self._before is not None

    def show(self) -> None:
        """The model holds the global parameters; does nothing where it does already."""
        if self._before is None:
            self._before = {name: values.clone() for name, values in held_values(self.diloco.model).items()}
            hold_values(self.diloco.model, self.diloco.outer_loop.named_global_params())

    def hide(self) -> None:
        """The model holds the local parameters again."""
        if self._before is not None:
            hold_values(self.diloco.model, self._before)
            self._before = None

    def keep(self) -> None:
        """The model holds the global parameters for good."""
        self.show()
        self._before = None

    def local(self) -> dict[str, Tensor]:
        """Parameter name -> what this rank holds of the local value, wherever it is now; not copied."""
        return held_values(self.diloco.model) if self._before is None else self._before


def held_values(model: nn.Module) -> dict[str, Tensor]:
    """Name -> what this rank holds of the trainable parameter, on the same memory."""
    return {name: local_shard(parameter) for name, parameter in trainable_parameters(model).items()}


def hold_values(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy ``values`` into the trainable parameters, in their own dtype and on their own device."""
    for name, shard in held_values(model).items():
        shard.copy_(values[name])
