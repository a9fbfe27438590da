"""What every integration needs of the framework that drives the loop: the bare model and optimizer behind its
wrappers, whether a step was really taken, and figures for its logs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from diloco.algorithm.clipping import Clipping
from diloco.algorithm.codec import Codec
from diloco.algorithm.fragments import Fragment, local_shard, trainable_parameters
from diloco.algorithm.merge import MergeRule
from diloco.algorithm.outer_optimizer import OuterOptimizer
from diloco.algorithm.schedule import SyncSchedule
from diloco.errors import ConfigurationError
from diloco.events import Event, RoundCommitted
from diloco.train.replica import DiLoCo
from diloco.transport.base import Transport
from diloco.transport.leader import LeaderTransport

__all__ = [
    "DiLoCoArguments",
    "Figures",
    "GlobalsInModel",
    "Parameters",
    "StepWatch",
    "bare_model",
    "bare_optimizer",
    "check_parameters",
    "check_ranks",
    "held_values",
    "hold_values",
    "is_sharded",
    "make_diloco",
    "names_of_kinds",
    "required",
]

Parameters = Literal["global", "local"]
"""Whose values are evaluated, saved for use, and left in the model at the end: what all replicas agree on, or this
replica's own."""

_UNFIT = {
    "deepspeed": "DeepSpeed keeps the parameters that its optimizer steps to itself",
    "megatron": "Megatron keeps its parameters in pieces that are no DTensors",
    "FullyShardedDataParallel": "FSDP1 keeps its parameters in flat pieces that are no DTensors",
    "MegatronEngine": "Megatron keeps its parameters in pieces that are no DTensors",
    "DeepSpeedOptimizerWrapper": "DeepSpeed keeps the parameters that its optimizer steps to itself",
}
"""Packages and classes that can't be served, and why."""


class DiLoCoArguments(TypedDict, total=False):
    """What of `DiLoCo`'s arguments an integration passes on; its docstring tells them."""

    schedule: SyncSchedule | None
    fragments: Sequence[Fragment] | None
    outer_optimizer: OuterOptimizer | None
    merge: MergeRule | None
    codec: Codec | str
    error_feedback: bool
    global_device: torch.device | str | None
    weight: float
    clipping: Clipping | None
    on_event: Callable[[Event], None] | None


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
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    if names & {"AcceleratedOptimizer", "LightningOptimizer"}:
        return bare_optimizer(optimizer.optimizer)
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            f"an optimizer of {type(optimizer).__module__}.{type(optimizer).__name__} was given; one that is a "
            "torch.optim.Optimizer would work. Nothing was started."
        )
    return optimizer


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


def check_parameters(parameters: str) -> None:
    """Raise `ConfigurationError` for anything but global or local."""
    if parameters not in ("global", "local"):
        raise ConfigurationError(
            f"parameters={parameters!r} was given; global or local would work. Nothing was started."
        )


class StepWatch:
    """Whether an optimizer took its steps, or a gradient scaler skipped them.

    Asks the optimizer, not the framework: fused kernels are called with ``found_inf`` and skip the step themselves,
    which Accelerate, for one, counts as taken.

    Args:
        optimizer: of torch.

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


class Figures:
    """What became of the rounds so far, as a framework's logs take it: name -> number.

    Args:
        also: called with every event, too.
    """

    def __init__(self, also: Callable[[Event], None] | None) -> None:
        self._also = also
        self._wait_s = 0.0
        self._contributors = 0

    def handle(self, event: Event) -> None:
        """Take note of ``event``."""
        if isinstance(event, RoundCommitted):
            self._wait_s += event.wait_s
            self._contributors = len(event.contributors)
        if self._also is not None:
            self._also(event)

    def of(self, diloco: DiLoCo) -> dict[str, float]:
        """Rounds and bytes since the beginning; the wait since this process began. Times in seconds."""
        return {
            "diloco/rounds": diloco.rounds_committed,
            "diloco/rounds_void": diloco.rounds_void,
            "diloco/contributors": self._contributors,
            "diloco/sent_bytes": diloco.transport.sent_bytes,
            "diloco/received_bytes": diloco.transport.received_bytes,
            "diloco/wait_s": self._wait_s,
        }


def make_diloco(
    model: nn.Module,
    optimizer: Optimizer,
    transport: Transport | None,
    figures: Figures,
    arguments: DiLoCoArguments,
) -> DiLoCo:
    """The `DiLoCo` of a bare model and optimizer, once all that can't work is refused."""
    check_ranks(model, transport)
    return DiLoCo(model, optimizer, transport=transport, **(arguments | {"on_event": figures.handle}))


def _refuse_unfit(thing: object) -> None:
    for kind in type(thing).__mro__:
        why = _UNFIT.get(kind.__module__.partition(".")[0]) or _UNFIT.get(kind.__name__)
        if why:
            raise ConfigurationError(
                f"a {kind.__name__} of {kind.__module__.partition('.')[0]} was given; {why}, so DiLoCo can't serve it. "
                "DistributedDataParallel, or FSDP2 where the integration says so, would work. Nothing was started."
            )


def names_of_kinds(thing: object) -> Iterable[str]:
    """The names of the classes that ``thing`` is one of."""
    return (kind.__name__ for kind in type(thing).__mro__)
