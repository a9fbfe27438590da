"""What communicates at every inner step, which must be the ranks of one replica: wrappers, shards, layers, optimizers.

Between replicas only `DiLoCo` communicates. A wrapper that averages gradients over several replicas would make them
one, at the price of data-parallel training and without a sign of it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from diloco.algorithm import trainable_parameters
from diloco.errors import ConfigurationError
from diloco.transport import Transport


def averaging_wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    """Return each DistributedDataParallel that holds a parameter of ``model`` and averages gradients.

    It may be around ``model``, a part of it, or a module that contains it, and leaves no trace in any of them; so it is
    found among all objects. Setting ``require_backward_grad_sync`` to False, as ``no_sync()`` does, switches it off.
    """
    mine = {id(parameter) for parameter in model.parameters()}
    kinds = {DistributedDataParallel}
    while more := {kind for each in kinds for kind in each.__subclasses__()} - kinds:
        kinds |= more
    wrappers = [each for each in gc.get_objects() if type(each) in kinds]
    return [
        each
        for each in wrappers
        if each.require_backward_grad_sync and not mine.isdisjoint(map(id, each.module.parameters()))
    ]


def check_ranks(model: nn.Module, optimizers: Iterable[Any], transport: Transport) -> None:
    """Raise `ConfigurationError` if ranks of other replicas take part in what happens at every step."""
    ranks = {*transport.ranks()}
    if not (ranks and dist.is_initialized()):
        return
    mesh = next((p.device_mesh for p in trainable_parameters(model).values() if hasattr(p, "device_mesh")), None)
    shards = set[int]() if mesh is None else {*mesh.mesh.flatten().tolist()}
    if shards and shards != ranks:
        raise ConfigurationError(
            f"The model is sharded over {_named(shards)}, but this replica consists of {_named(ranks)}. Shard it over "
            "the ranks of the replica, as in fully_shard(model, mesh=mesh['shard']), or with connect_tcp(..., "
            "ranks='sharded') over all ranks of one torchrun for each replica. Accelerate and the Trainer of "
            "transformers always shard over all ranks of a torchrun."
        )
    if len(shards) > 1 and transport.shared_by_ranks:
        raise ConfigurationError(
            f"The ranks of this replica, {_named(ranks)}, hold shards of the model, but only the first of them would "
            "send its own. Connect with ranks='sharded'."
        )
    for wrapper in averaging_wrappers(model):
        averaged = _members(wrapper.process_group)
        if averaged != ranks:
            raise ConfigurationError(
                f"DistributedDataParallel averages gradients over {_named(averaged)} at every step, but this replica "
                f"consists of {_named(ranks)}. If each rank is a replica, train the model without it (or set its "
                "require_backward_grad_sync to False); the integrations for Accelerate, Lightning and the Trainer "
                "of transformers do so if they get no transport. If a replica has several ranks, give it these: "
                "DistributedDataParallel(model, process_group=...), and connect with ranks='whole'."
            )
    for what, group in _others(model, optimizers):
        if not (together := _members(group)) <= ranks:
            raise ConfigurationError(
                f"{what} communicates among {_named(together)} at every step, but this replica consists of "
                f"{_named(ranks)}. Give it a process_group of these ranks, or use one that does not communicate."
            )


def _others(model: nn.Module, optimizers: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the process group of layers and optimizers that communicate."""
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            yield f"The SyncBatchNorm {name!r}", module.process_group
    for optimizer in optimizers:
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
            yield "ZeroRedundancyOptimizer", optimizer.process_group


def _members(group: Any) -> set[int]:
    return {*dist.get_process_group_ranks(group)}


def _named(ranks: Iterable[int]) -> str:
    each: Sequence[int] = sorted(ranks)
    return f"rank{'s' if len(each) > 1 else ''} {', '.join(map(str, each))} of torch.distributed"
