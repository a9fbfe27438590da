"""What stands behind the wrappers of a framework: the bare model and optimizer, which ranks hold what of them, and
whether a step was really taken.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from diloco.algorithm.fragments import trainable_parameters
from diloco.errors import ConfigurationError
from diloco.transport.base import Transport
from diloco.transport.leader import LeaderTransport

__all__ = [
    "StepWatch",
    "bare_model",
    "bare_optimizer",
    "check_ranks",
    "is_sharded",
    "names_of_kinds",
    "required",
    "unwrapped",
]

_UNFIT = {
    "deepspeed": "DeepSpeed keeps the parameters that its optimizer steps to itself",
    "megatron": "Megatron keeps its parameters in pieces that are no DTensors",
    "FullyShardedDataParallel": "FSDP1 keeps its parameters in flat pieces that are no DTensors",
    "MegatronEngine": "Megatron keeps its parameters in pieces that are no DTensors",
    "DeepSpeedOptimizerWrapper": "DeepSpeed keeps the parameters that its optimizer steps to itself",
}
"""Packages and classes that can't be served, and why."""


def required(module: str, extra: str) -> ModuleType:
    """The module, imported.

    Raises:
        ConfigurationError: if it is not installed; it says how it would be.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            f"{module} can't be imported ({error}); pip install 'diloco[{extra}]' would work. Nothing was started."
        ) from error


def bare_model(model: nn.Module) -> nn.Module:
    """The module whose parameters are trained, without DistributedDataParallel or torch.compile around it.

    Raises:
        ConfigurationError: if something keeps the parameters in a form of its own.

    >>> inner = nn.Linear(2, 2)
    >>> bare_model(DataParallel(inner)) is inner
    True
    """
    for module in model.modules():
        _refuse_unfit(module)
    while True:
        compiled = model._modules.get("_orig_mod")  # of torch.compile, asked without importing it
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif compiled is not None:
            model = compiled
        else:
            return model


def bare_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer of torch behind those of Accelerate and Lightning.

    Raises:
        ConfigurationError: if there is none.
    """
    _refuse_unfit(optimizer)
    if {"AcceleratedOptimizer", "LightningOptimizer"}.intersection(names_of_kinds(optimizer)):
        return bare_optimizer(optimizer.optimizer)
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            f"an optimizer of {type(optimizer).__module__}.{type(optimizer).__name__} was given; one that is a "
            "torch.optim.Optimizer would work. Nothing was started."
        )
    return optimizer


def unwrapped(model: nn.Module, optimizer: Any, transport: Transport | None) -> tuple[nn.Module, Optimizer]:
    """The bare model and the bare optimizer, once all that can't work with them or ``transport`` is refused.

    Raises:
        ConfigurationError: for it.
    """
    bare, inner = bare_model(model), bare_optimizer(optimizer)
    check_ranks(bare, transport)
    return bare, inner


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks share out the parameters of ``model`` (DTensors)."""
    return any(hasattr(parameter, "to_local") for parameter in trainable_parameters(model).values())


def check_ranks(model: nn.Module, transport: Transport | None) -> None:
    """Refuse a transport that does not fit what the ranks of torch.distributed hold of the model.

    They are the ranks of one replica: a host framework averages their gradients, whatever else they are told.

    Raises:
        ConfigurationError: if it does not fit.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks == 1 or transport is None:
        return
    led = isinstance(transport, LeaderTransport)
    if is_sharded(model) == led:
        kind, fitting = ("shards", "sharded") if is_sharded(model) else ("all", "whole")
        raise ConfigurationError(
            f"each of the {ranks} ranks of this replica holds {kind} of its parameters, and was given a "
            f"{type(transport).__name__}; what connect_replica(..., ranks={fitting!r}) gives would work. "
            "Nothing was started."
        )


class StepWatch:
    """Whether an optimizer took its steps, or a gradient scaler skipped them.

    Asks the optimizer, not the framework: fused kernels are called with ``found_inf`` and skip the step themselves,
    which Accelerate, for one, counts as taken.

    Args:
        optimizer: of torch.

    >>> import torch
    >>> parameter = nn.Parameter(torch.zeros(1))
    >>> optimizer = torch.optim.SGD([parameter], lr=1.0)
    >>> watch = StepWatch(optimizer)
    >>> watch.trained()
    0.0
    >>> optimizer.step()
    >>> watch.trained(), watch.trained()
    (1.0, 0.0)
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._taken = False
        self._handle = optimizer.register_step_post_hook(self._stepped)

    @property
    def taken(self) -> bool:
        """Whether a step was taken since `trained` was last asked."""
        return self._taken

    def trained(self) -> float:
        """How much of the step since the last call was trained: 1 all, 0 nothing. As `DiLoCo.step` takes it."""
        taken, self._taken = self._taken, False
        return float(taken)

    def close(self) -> None:
        """Watch no longer."""
        self._handle.remove()

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None or not bool(found_inf):
            self._taken = True


def names_of_kinds(thing: object) -> Iterable[str]:
    """The names of the classes that ``thing`` is one of."""
    return (kind.__name__ for kind in type(thing).__mro__)


def _refuse_unfit(thing: object) -> None:
    for kind in type(thing).__mro__:
        why = _UNFIT.get(kind.__module__.partition(".")[0]) or _UNFIT.get(kind.__name__)
        if why:
            raise ConfigurationError(
                f"a {kind.__name__} of {kind.__module__.partition('.')[0]} was given; {why}, so DiLoCo can't serve it. "
                "DistributedDataParallel, or FSDP2 where the integration says so, would work. Nothing was started."
            )
