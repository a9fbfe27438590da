"""One replica's model on several ranks: each computes its rows of the batch, and all end the step with one gradient.

- ``none``: one rank.
- ``ddp``: every rank holds everything (`torch.nn.parallel.DistributedDataParallel`).
- ``fsdp``: every rank holds a shard of each parameter, of its gradient and of the optimizer's state
  (`torch.distributed.fsdp.fully_shard`); a layer is whole only while it computes.

S ranks do what one would do, but for the order of float32 sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from diloco.errors import ConfigurationError
from diloco.model.language_model import LanguageModel, LossParts
from diloco.train.prepare import blocks_of
from diloco.transport.replica_group import ReplicaGroup

__all__ = ["ParallelModel", "Strategy", "parallelise"]

Strategy = Literal["none", "ddp", "fsdp"]


class ParallelModel:
    """A model as one rank of its replica trains it; this class: where there is one rank.

    Attributes:
        model: its parameters and gradients are this rank's: whole ones, or DTensors.
        group: the replica's ranks.
        num_shards: of each parameter; 1 where every rank holds all of it.
    """

    num_shards = 1

    def __init__(self, model: LanguageModel, group: ReplicaGroup | None = None) -> None:
        self.model = model
        self.group = group or ReplicaGroup()

    def loss(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> LossParts:
        """`LanguageModel.loss` of this rank's rows; its backward pass adds to ``.grad`` the mean over ranks."""
        return self.model.loss(tokens, targets, documents)

    @contextmanager
    def piece(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward pass of a piece of this rank's rows: the ranks exchange gradients in the last."""
        yield

    def total_norm(self, norm: Tensor) -> Tensor:
        """The norm of the whole gradient, ``()``, from the ``norm`` of what this rank holds of it."""
        return norm

    def pieces(self, batch_size: int, accumulation: int) -> int:
        """How many pieces every rank computes its rows in: ``accumulation``, or as many as each has rows for."""
        return min(accumulation, batch_size // self.group.size)


class _ReplicatedModel(ParallelModel):
    """Every rank holds everything, and the same bits of it."""

    def __init__(self, model: LanguageModel, group: ReplicaGroup) -> None:
        super().__init__(model, group)
        watched = _Loss(model)
        # buffers of no state, as a rotary table, are derived and alike; broadcast, they would travel at every step
        derived = [f"model.{name}" for name in dict(model.named_buffers()).keys() - model.state_dict().keys()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(watched, derived)  # type: ignore[no-untyped-call]  # torch's
        self._wrapped = DistributedDataParallel(
            watched, process_group=group.required_process_group(), gradient_as_bucket_view=True
        )

    def loss(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> LossParts:
        parts: LossParts = self._wrapped(tokens, targets, documents)
        return parts

    @contextmanager
    def piece(self, *, last: bool) -> Iterator[None]:
        with nullcontext() if last else self._wrapped.no_sync():
            yield


class _ShardedModel(ParallelModel):
    """Every rank holds a shard of each parameter; dimension 0 is divided as by ``torch.chunk``, so some may be empty.

    A layer's parameters are gathered before its forward and before its backward pass, and dropped after each; what is
    in no layer is one such unit of its own. Under autocast the cast copies of the weights stay from forward to
    backward, 2 bytes per parameter.
    """

    def __init__(self, model: LanguageModel, group: ReplicaGroup, device: torch.device) -> None:
        # importing it takes most of a second
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        super().__init__(model, group)
        self.num_shards = group.size
        mesh = group.mesh(device)
        # the root, too, is dropped after its forward pass: what evaluation left gathered would miss the next merge
        for layer in blocks_of(model):
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        self._sharded = fully_shard(model, mesh=mesh, reshard_after_forward=True)
        if not model.loss_calls_model:
            register_fsdp_forward_method(model, "loss")

    @contextmanager
    def piece(self, *, last: bool) -> Iterator[None]:
        self._sharded.set_requires_gradient_sync(last)
        yield

    def total_norm(self, norm: Tensor) -> Tensor:
        # every value is in one shard; in float64, where the square of no float32 overflows
        return self.group.gather(norm.double().square()).sum().sqrt().to(norm.dtype)


class _Loss(nn.Module):
    """`LanguageModel.loss` as a forward pass, which is what DistributedDataParallel watches."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> LossParts:
        return self.model.loss(tokens, targets, documents)


def parallelise(model: LanguageModel, strategy: Strategy, group: ReplicaGroup, device: torch.device) -> ParallelModel:
    """Bring ``model`` to ``device`` and to the ranks of its replica; its optimizer is made afterwards, from what its
    parameters have become.

    Args:
        model: with its initial weights, the same on all ranks. With ``fsdp`` it may be larger than the device's memory:
            it is taken from the host layer by layer.

    Raises:
        ConfigurationError: if ``strategy`` does not fit the group.
    """
    if strategy == "none" and group.size != 1:
        raise ConfigurationError(
            f"strategy 'none' was given to a replica of {group.size} ranks, each of which would train a model of its "
            "own. Use ddp or fsdp, or one rank. Nothing was started."
        )
    if strategy == "fsdp":
        return _ShardedModel(model, group, device)
    model.to(device)
    return _ReplicatedModel(model, group) if strategy == "ddp" else ParallelModel(model, group)
