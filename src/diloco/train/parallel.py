"""One replica's model as it is trained: recomputed, compiled, and on several ranks.

Each rank computes its rows of the batch, and all end the step with one gradient.

- ``none``: one rank.
- ``ddp``: every rank holds everything (`torch.nn.parallel.DistributedDataParallel`).
- ``fsdp``: every rank holds a shard of each parameter, of its gradient and of the optimizer's state
  (`torch.distributed.fsdp.fully_shard`); a layer is whole only while it computes.

S ranks do what one would do, but for the order of float32 sums. Recomputing gives the same bits; compiling and chunking
the loss give the same values to round-off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from diloco.algorithm.layers import layer_container
from diloco.errors import ConfigurationError
from diloco.model.language_model import LanguageModel, LossChunks, LossParts
from diloco.train.settings import TrainSettings
from diloco.transport.replica_group import ReplicaGroup

__all__ = ["ParallelModel", "Strategy", "blocks_of", "parallelise", "prepare_blocks", "prepare_model"]


def prepare_model(model: LanguageModel, settings: TrainSettings) -> None:
    """Apply what ``settings`` ask for, before the model is laid out over the ranks of its replica."""
    model.loss_chunks = LossChunks(settings.loss_chunk_tokens, settings.compile)
    prepare_blocks(
        model,
        checkpointing=settings.activation_checkpointing,
        compiled=settings.compile,
        whole_graphs=model.whole_graphs,
    )


def prepare_blocks(
    model: nn.Module,
    *,
    checkpointing: Literal["none", "full", "selective"] = "none",
    compiled: bool = False,
    backend: str = "inductor",
    whole_graphs: bool = True,
) -> None:
    """Recompute and compile each block of ``model`` where gradients are computed.

    Blocks are compiled one by one: they are alike, so what is compiled for the first serves all, and whatever gathers
    and drops their parameters stays outside. Evaluation and generation, whose shapes vary, run uncompiled.

    Args:
        model: any with a list of blocks, also one that calls them with keywords.
        checkpointing: ``none``; ``full``: a block's input is kept and everything in it is computed again in the
            backward pass; ``selective``: outputs of matrix products and attention are kept as well.
        compiled: with torch.compile, for the shapes that come.
        whole_graphs: whether a break in a block's graph, which costs speed, is an error.
    """
    run = {"none": _whole, "full": _recomputed, "selective": _partly_recomputed}[checkpointing]
    trained = torch.compile(run, backend=backend, dynamic=False, fullgraph=whole_graphs) if compiled else run
    for block in blocks_of(model):
        if trained is not _whole:
            block.forward = partial(_with_gradients, trained, block)  # beside the class's own, so that names stay


def blocks_of(model: nn.Module) -> Sequence[nn.Module]:
    """The layers, as fragments are made of: the numbered modules of one container."""
    container = layer_container({name: parameter.numel() for name, parameter in model.named_parameters()})
    if container is None:
        return []
    held = model.get_submodule(".".join(container))
    numbered = [module for name, module in held.named_children() if name.isdigit()]
    return [module for module in numbered if next(module.parameters(), None) is not None]


def _with_gradients(trained: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return (trained if torch.is_grad_enabled() else _whole)(block, *args, **kwargs)


def _whole(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(block).forward(block, *args, **kwargs)


def _recomputed(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(type(block).forward, block, *args, use_reentrant=False, **kwargs)


def _partly_recomputed(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    contexts = partial(create_selective_checkpoint_contexts, _keep_products)
    return checkpoint(type(block).forward, block, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep what is expensive to compute."""
    return CheckpointPolicy.MUST_SAVE if operation in _products() else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _products() -> frozenset[Any]:
    """Matrix products and attention on every device, as far as this version of torch has them."""
    aten = torch.ops.aten
    attention = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    names = (
        *("mm", "addmm", "bmm", "baddbmm", "linear"),
        *(f"_scaled_dot_product_{name}" for name in (*attention, "fused_attention_overrideable")),
    )
    kept = {getattr(aten, name).default for name in names if hasattr(aten, name)}
    flex = getattr(torch.ops.higher_order, "flex_attention", None)
    return frozenset(kept if flex is None else {*kept, flex})


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
            "own. Use ddp or fsdp, or one rank."
        )
    if strategy == "fsdp":
        return _ShardedModel(model, group, device)
    model.to(device)
    return _ReplicatedModel(model, group) if strategy == "ddp" else ParallelModel(model, group)
