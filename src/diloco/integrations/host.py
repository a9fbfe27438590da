"""What stands behind the wrappers of a framework: the bare model and optimizer, and which ranks hold what of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import Subset

from diloco.algorithm.fragments import trainable_parameters
from diloco.errors import ConfigurationError
from diloco.transport.base import Transport

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
    "DeepSpeed keeps the parameters to itself": (
        *("deepspeed", "DEEPSPEED", "DeepSpeedOptimizerWrapper", "DeepSpeedStrategy"),
    ),
    "Megatron keeps its parameters in pieces that are no DTensors": ("megatron", "MEGATRON_LM", "MegatronEngine"),
    "FSDP1 keeps its parameters in flat pieces that are no DTensors": ("FullyShardedDataParallel", "FSDPStrategy"),
    "torch_xla does not run here": ("XLA", "XLAStrategy", "SingleDeviceXLAStrategy"),
    "Lightning's checkpoints keep only what the first rank says of a callback": ("ModelParallelStrategy",),
}
"""Why something can't be served, and what: packages and classes, and how Accelerate calls them."""


def refuse_unfit(names: Iterable[str], given: str) -> None:
    """Refuse what is known by one of these names not to work; ``given`` says what it is.

    Raises:
        ConfigurationError: with the reason.
    """
    found = set(names)
    for why, unfit in _UNFIT.items():
        if found.intersection(unfit):
            raise ConfigurationError(
                f"{given} was given, but {why}, so DiLoCo can't serve it. Use DistributedDataParallel, or FSDP2 with "
                "Accelerate or the Trainer of transformers."
            )


def names_of(thing: object) -> list[str]:
    """The names of the classes that ``thing`` is one of, and of the packages that they are from."""
    kinds = type(thing).__mro__
    return [kind.__name__ for kind in kinds] + [kind.__module__.partition(".")[0] for kind in kinds]


def bare_model(model: nn.Module) -> nn.Module:
    """The module whose parameters are trained, without DistributedDataParallel or torch.compile around it.

    Raises:
        ConfigurationError: if something keeps the parameters in a form of its own.

    >>> inner = nn.Linear(2, 2)
    >>> bare_model(DataParallel(inner)) is inner
    True
    """
    for module in model.modules():
        refuse_unfit(names_of(module), f"a model with a {type(module).__name__}")
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
    names = names_of(optimizer)
    refuse_unfit(names, f"a {type(optimizer).__name__}")
    if {"AcceleratedOptimizer", "LightningOptimizer"}.intersection(names):
        return bare_optimizer(optimizer.optimizer)
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            f"a {type(optimizer).__module__}.{type(optimizer).__name__} was given as the optimizer; it must be a "
            "torch.optim.Optimizer."
        )
    return optimizer


def unwrapped(model: nn.Module, optimizer: Any, transport: Transport | None) -> tuple[nn.Module, Optimizer]:
    """The bare model and the bare optimizer.

    Raises:
        ConfigurationError: if DiLoCo can't work with one of them or with ``transport``.
    """
    bare, inner = bare_model(model), bare_optimizer(optimizer)
    check_ranks(bare, transport)
    return bare, inner


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks share out the parameters of ``model`` (DTensors)."""
    return any(hasattr(parameter, "to_local") for parameter in trainable_parameters(model).values())


def check_ranks(model: nn.Module, transport: Transport | None) -> None:
    """Refuse a transport that does not fit what the ranks of torch.distributed hold of the model.

    They are the ranks of one replica, because the framework averages their gradients.

    Raises:
        ConfigurationError: if it does not fit.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks == 1 or transport is None:
        return
    if is_sharded(model) == transport.shared_by_ranks:
        held, fitting = ("shards", "sharded") if is_sharded(model) else ("all", "whole")
        raise ConfigurationError(
            f"a {type(transport).__name__} was given, but each of this replica's {ranks} ranks holds {held} of its "
            f"parameters. Use what connect_replica(..., ranks={fitting!r}) gives."
        )


class StepWatch:
    """Whether an optimizer took its steps, or a gradient scaler skipped them.

    It asks the optimizer, not the framework: a fused kernel is called with ``found_inf`` and skips the step by itself,
    which Accelerate, for one, counts as taken.

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
        """How much of the step since the last call was trained, as `DiLoCo.step` takes it: 1 all, 0 nothing."""
        taken, self._taken = self._taken, False
        return float(taken)

    def close(self) -> None:
        """Stop watching."""
        self._handle.remove()

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None or not bool(found_inf):
            self._taken = True


def replica_share(dataset: Any, *, replica: int, num_replicas: int, seed: int | None = 0) -> Any:
    """What of a map-style data set one replica trains on: as many samples for each replica, and no sample for two.

    Equal shares make epochs of equally many steps, so that no replica waits for one that ended an epoch early. What
    can't be dealt out evenly, fewer than M samples, is left out.

    Args:
        dataset: with ``__len__`` and ``__getitem__``. The share of a `datasets.Dataset` or of a tensor is one, too.
        replica: m.
        num_replicas: M.
        seed: of the order in which samples are dealt, the same on all replicas; None: the order that they have, every
            M-th sample to the same replica.

    Raises:
        ConfigurationError: if there is no such replica, less than one sample for each, or no length.

    >>> [list(replica_share(range(7), replica=m, num_replicas=3, seed=None)) for m in range(3)]
    [[0, 3], [1, 4], [2, 5]]
    >>> replica_share(torch.arange(7) * 10, replica=1, num_replicas=3, seed=None)
    tensor([10, 40])
    """
    if not 0 <= replica < num_replicas:
        raise ConfigurationError(f"replica={replica} of {num_replicas} was given; use 0 to {num_replicas - 1}.")
    if not hasattr(dataset, "__len__"):
        raise ConfigurationError(
            f"a {type(dataset).__name__} has no length. For a stream of Hugging Face's, use datasets.distributed."
            f"split_dataset_by_node(dataset, rank={replica}, world_size={num_replicas})."
        )
    each = len(dataset) // num_replicas
    if each == 0:
        raise ConfigurationError(
            f"{len(dataset)} samples were given to {num_replicas} replicas, and each needs at least one."
        )
    order = torch.arange(len(dataset))
    if seed is not None:
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))
    indices = order[replica : each * num_replicas : num_replicas].tolist()
    if isinstance(dataset, torch.Tensor):
        return dataset[indices]
    return dataset.select(indices) if hasattr(dataset, "select") else Subset(dataset, indices)
