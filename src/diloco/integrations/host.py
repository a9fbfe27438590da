"""Access to the model and optimizer inside a framework's wrappers, and checks that DiLoCo can work with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Subset

from diloco.algorithm import check_replica, content_of, named_parameters
from diloco.errors import ConfigurationError
from diloco.transport import Transport

__all__ = [
    "StepWatch",
    "bare_model",
    "bare_optimizer",
    "check_ranks",
    "is_sharded",
    "names_of",
    "refuse_unfit",
    "replica_share",
    "unwrapped",
]

_UNFIT = {
    "DeepSpeed keeps the parameters private": (
        "deepspeed",
        "DEEPSPEED",
        "DeepSpeedOptimizerWrapper",
        "DeepSpeedStrategy",
    ),
    "Megatron shards its parameters without DTensors": ("megatron", "MEGATRON_LM", "MegatronEngine"),
    "FSDP1 shards its parameters without DTensors": ("FullyShardedDataParallel", "FSDPStrategy"),
    "diloco does not support torch_xla": ("XLA", "XLAStrategy", "SingleDeviceXLAStrategy"),
    "Lightning's checkpoints keep only the first rank's state of a callback": ("ModelParallelStrategy",),
}
"""Reason -> the names that it applies to: packages, classes, and Accelerate's distributed types."""


def refuse_unfit(names: Iterable[str], given: str) -> None:
    """Refuse an object if one of its ``names`` is in `_UNFIT`; ``given`` describes the object in the message.

    Raises:
        ConfigurationError: if DiLoCo can't work with the object. The message gives the reason.
    """
    found = set(names)
    for why, unfit in _UNFIT.items():
        if found.intersection(unfit):
            raise ConfigurationError(
                f"{given} was given, but {why}, so DiLoCo can't work with it. Use DistributedDataParallel, or FSDP2 "
                "with Accelerate or the Trainer of transformers."
            )


def names_of(thing: object) -> list[str]:
    """Return the names of the class of ``thing`` and its base classes, and of the packages that define them."""
    kinds = type(thing).__mro__
    return [kind.__name__ for kind in kinds] + [kind.__module__.partition(".")[0] for kind in kinds]


def bare_model(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers of torch, such as DistributedDataParallel and torch.compile.

    Raises:
        ConfigurationError: if a submodule stores parameters in a form that DiLoCo can't work with.

    >>> inner = nn.Linear(2, 2)
    >>> bare_model(nn.DataParallel(inner)) is inner
    True
    """
    for module in model.modules():
        refuse_unfit(names_of(module), f"A model with a {type(module).__name__}")
    while (content := content_of(model)) is not None:
        model = content
    return model


def bare_optimizer(optimizer: Any) -> Optimizer:
    """Return the torch optimizer inside the wrappers of Accelerate and Lightning.

    Raises:
        ConfigurationError: if ``optimizer`` is not a torch optimizer, or if DiLoCo can't work with it.
    """
    names = names_of(optimizer)
    refuse_unfit(names, f"A {type(optimizer).__name__}")
    if {"AcceleratedOptimizer", "LightningOptimizer"}.intersection(names):
        return bare_optimizer(optimizer.optimizer)
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            f"The optimizer must be a torch.optim.Optimizer, got a {type(optimizer).__module__}."
            f"{type(optimizer).__name__}."
        )
    return optimizer


def unwrapped(model: nn.Module, optimizer: Any, transport: Transport | None) -> tuple[nn.Module, Optimizer]:
    """Return the bare model and the bare optimizer.

    Raises:
        ConfigurationError: if DiLoCo can't work with one of them or with ``transport``.
    """
    bare, inner = bare_model(model), bare_optimizer(optimizer)
    check_ranks(bare, transport)
    return bare, inner


def is_sharded(model: nn.Module) -> bool:
    """Return whether the parameters of ``model`` are sharded across ranks (DTensors)."""
    return any(hasattr(parameter, "to_local") for parameter in named_parameters(model).values())


def check_ranks(model: nn.Module, transport: Transport | None) -> None:
    """Check that ``transport`` matches the way in which the ranks of torch.distributed hold the model.

    These ranks form one replica, because the framework averages their gradients.

    Raises:
        ConfigurationError: if the ranks hold shards but the transport expects whole parameters, or vice versa.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks == 1 or transport is None:
        return
    if is_sharded(model) == transport.shared_by_ranks:
        held, fitting = ("shards", "sharded") if is_sharded(model) else ("all", "whole")
        raise ConfigurationError(
            f"The given {type(transport).__name__} does not fit this replica, each of whose {ranks} ranks holds {held} "
            f"of its parameters. Use the transport of connect_replica(..., ranks={fitting!r})."
        )


class StepWatch:
    """Observes whether an optimizer takes its steps or a gradient scaler skips them.

    It observes the optimizer rather than the framework: a fused kernel receives ``found_inf`` and skips the step
    itself, which Accelerate, for example, counts as a step taken.

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
        """Whether a step was taken since the last call of `trained`."""
        return self._taken

    def trained(self) -> float:
        """Return 1.0 if the optimizer took a step since the last call, else 0.0, as an argument for `DiLoCo.step`."""
        taken, self._taken = self._taken, False
        return float(taken)

    def close(self) -> None:
        """Remove the hook from the optimizer."""
        self._handle.remove()

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None or not bool(found_inf):
            self._taken = True


def replica_share(dataset: Any, *, replica: int, num_replicas: int, seed: int | None = 0) -> Any:
    """Return one replica's share of a map-style data set. Shares are disjoint and have equal sizes.

    With equal shares, an epoch has the same number of steps on every replica, so that no replica waits for one that
    finished its epoch early. The remainder, fewer than M samples, is left out.

    Args:
        dataset: a data set with ``__len__`` and ``__getitem__``. The share of a `datasets.Dataset` or of a tensor has
            the same type; any other share is a `torch.utils.data.Subset`.
        replica: the number m of the replica, from 0 to M - 1.
        num_replicas: the number M of replicas.
        seed: the seed of the shuffle before the split, which must be the same on all replicas. None does not shuffle:
            replica m gets every M-th sample, starting at sample m.

    Raises:
        ConfigurationError: if ``replica`` is out of range, or if the data set has no length or fewer than M samples.

    >>> [list(replica_share(range(7), replica=m, num_replicas=3, seed=None)) for m in range(3)]
    [[0, 3], [1, 4], [2, 5]]
    >>> replica_share(torch.arange(7) * 10, replica=1, num_replicas=3, seed=None)
    tensor([10, 40])
    """
    check_replica(replica, num_replicas)
    if not hasattr(dataset, "__len__"):
        raise ConfigurationError(
            f"The data set must have a length, and a {type(dataset).__name__} has none. For a Hugging Face stream, use "
            f"datasets.distributed.split_dataset_by_node(dataset, rank={replica}, world_size={num_replicas})."
        )
    each = len(dataset) // num_replicas
    if each == 0:
        raise ConfigurationError(
            f"The data set must have at least one sample per replica, got {len(dataset)} for {num_replicas} replicas."
        )
    order = torch.arange(len(dataset), dtype=torch.int64, device="cpu")
    if seed is not None:
        generator = torch.Generator("cpu").manual_seed(seed)
        order = torch.randperm(len(dataset), generator=generator, dtype=torch.int64, device="cpu")
    indices = order[replica : each * num_replicas : num_replicas].tolist()
    if isinstance(dataset, torch.Tensor):
        return dataset[indices]
    return dataset.select(indices) if hasattr(dataset, "select") else Subset(dataset, indices)
