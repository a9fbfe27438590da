"""Preparation of one replica's model for training: recomputation, compilation, and distribution over several ranks.

Each rank computes its rows of the batch, and all ranks end the step with the same gradient.

- ``none``: one rank.
- ``ddp``: every rank holds the full state (`torch.nn.parallel.DistributedDataParallel`).
- ``fsdp``: every rank holds a shard of each parameter, its gradient and its optimizer state
  (`torch.distributed.fsdp.fully_shard`). A layer is gathered only while it computes.

S ranks compute the same as one rank, up to the order of float32 sums. Recomputation gives the same bits. Compilation
and chunking of the loss give the same values up to round-off.
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

from diloco.algorithm import layer_container
from diloco.devices import Precision
from diloco.model import LanguageModel, LossParts
from diloco.train.settings import TrainSettings
from diloco.transport import ReplicaGroup

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_LOSS_CHUNK_TOKENS = 8192  # the logits of a larger batch never exist at once


def prepare_model(model: LanguageModel, settings: TrainSettings) -> None:
    """Set up recomputation, compilation and loss chunks, before the model is distributed over the ranks."""
    model.loss_chunk_tokens, model.compiled_loss = _LOSS_CHUNK_TOKENS, settings.compile
    prepare_blocks(model, checkpointing=settings.activation_checkpointing, compiled=settings.compile)


def prepare_blocks(
    model: nn.Module,
    *,
    checkpointing: Literal["none", "full", "selective"] = "none",
    compiled: bool = False,
    backend: str = "inductor",
) -> None:
    """Set up recomputation (see `TrainSettings`) and compilation for each block, for training and evaluation.

    Blocks are compiled one by one: they are alike, so the code compiled for the first serves all, and the code that
    gathers and drops their parameters stays outside. A break in a block's graph, which costs speed, is an error if the
    model says that its graphs are whole. Generation has varying shapes and runs uncompiled.
    """
    run = {"none": _whole, "full": _recomputed, "selective": _partly_recomputed}[checkpointing]
    trained, evaluated = run, _whole
    if compiled:
        whole = bool(getattr(model, "whole_graphs", False))
        # TORCHINDUCTOR_FREEZING=1 would keep the weights of the first evaluation for all others
        options: dict[str, Any] | None = {"freezing": False} if backend == "inductor" else None
        trained, evaluated = (
            torch.compile(function, backend=backend, dynamic=False, fullgraph=whole, options=options)
            for function in (run, _whole)
        )
    for block in blocks_of(model):
        if trained is not _whole:
            block.forward = partial(_run_block, trained, evaluated, block)  # on the instance: parameter names stay


def blocks_of(model: nn.Module) -> Sequence[nn.Module]:
    """Return the layers, from which fragments are made: the numbered modules of one container."""
    container = layer_container({name: parameter.numel() for name, parameter in model.named_parameters()})
    if container is None:
        return []
    held = model.get_submodule(".".join(container))
    numbered = [module for name, module in held.named_children() if name.isdigit()]
    return [module for module in numbered if next(module.parameters(), None) is not None]


def _run_block(
    trained: Callable[..., Any], evaluated: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    run = trained if torch.is_grad_enabled() else evaluated
    return run(block, *args, **kwargs)


def _whole(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(block).forward(block, *args, **kwargs)


def _recomputed(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(type(block).forward, block, *args, use_reentrant=False, **kwargs)


def _partly_recomputed(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    contexts = partial(create_selective_checkpoint_contexts, _keep_products)
    return checkpoint(type(block).forward, block, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
    return CheckpointPolicy.MUST_SAVE if operation in _products() else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _products() -> list[Any]:
    """Return the operations of matrix products and attention on every device that this version of torch has."""
    aten = torch.ops.aten
    attention = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    names = (
        *("mm", "addmm", "bmm", "baddbmm", "linear"),
        *(f"_scaled_dot_product_{name}" for name in (*attention, "fused_attention_overrideable")),
    )
    kept = [getattr(aten, name).default for name in names if hasattr(aten, name)]
    return [*kept, flex] if (flex := getattr(torch.ops.higher_order, "flex_attention", None)) else kept


Strategy = Literal["none", "ddp", "fsdp"]


class ParallelModel:
    """A model as one rank of its replica trains it. This base class serves a replica of one rank."""

    num_shards = 1  # of each parameter; 1 if every rank holds all of it

    def __init__(self, model: LanguageModel, group: ReplicaGroup | None = None) -> None:
        self.model = model
        self.group = group or ReplicaGroup()

    def loss(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> LossParts:
        """Return `LanguageModel.loss` of this rank's rows. Its backward pass adds the mean over ranks to ``.grad``."""
        return self.model.loss(tokens, targets, documents)

    @contextmanager
    def piece(self, *, last: bool) -> Iterator[None]:
        """Wrap the passes of a piece of this rank's rows. The ranks exchange gradients during the last piece."""
        yield

    def total_norm(self, norm: Tensor) -> Tensor:
        """Return the norm of the whole gradient, ``()``, from the ``norm`` of this rank's part of it."""
        return norm


class _ReplicatedModel(ParallelModel):
    """A model of which every rank holds the same full copy."""

    def __init__(self, model: LanguageModel, group: ReplicaGroup) -> None:
        super().__init__(model, group)
        watched = _Loss(model)
        # non-persistent buffers, such as a rotary table, are derived and equal on all ranks; without this, DDP would
        # broadcast them at every step
        derived = [
            ".".join(filter(None, ("model", path, name)))
            for path, module in model.named_modules()
            for name in module._non_persistent_buffers_set
        ]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(watched, derived)  # type: ignore[no-untyped-call]  # torch's
        self._wrapped = DistributedDataParallel(
            watched, process_group=group.process_group, gradient_as_bucket_view=True
        )

    def loss(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> LossParts:
        parts: LossParts = self._wrapped(tokens, targets, documents)
        return parts

    @contextmanager
    def piece(self, *, last: bool) -> Iterator[None]:
        with nullcontext() if last else self._wrapped.no_sync():
            yield


class _ShardedModel(ParallelModel):
    """A model of which every rank holds a shard of each parameter.

    Dimension 0 is divided as by ``torch.chunk``, so a shard may be empty. A layer's parameters are gathered before its
    forward and its backward pass, and dropped after each. The parameters outside layers form one more such unit. The
    layers are gathered in the autocast type, to which they would be cast anyway; gradients are averaged in float32.
    """

    def __init__(
        self, model: LanguageModel, group: ReplicaGroup, device: torch.device, autocast: torch.dtype | None
    ) -> None:
        # this import takes most of a second
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

        super().__init__(model, group)
        self.num_shards = group.size
        mesh = group.mesh(device)
        # the root is also dropped after its forward pass, or parameters that evaluation gathered would miss a merge
        for layer in blocks_of(model):
            can_be_cast = all(parameter.is_floating_point() for parameter in layer.parameters())
            cast = autocast if can_be_cast else None
            policy = MixedPrecisionPolicy(cast, torch.float32 if cast else None, cast_forward_inputs=False)
            fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        self._sharded = fully_shard(model, mesh=mesh, reshard_after_forward=True)
        if not model.loss_calls_model:
            register_fsdp_forward_method(model, "loss")

    @contextmanager
    def piece(self, *, last: bool) -> Iterator[None]:
        self._sharded.set_requires_gradient_sync(last)
        yield

    def total_norm(self, norm: Tensor) -> Tensor:
        # each value is in exactly one shard; float64, so that no square of a float32 overflows
        return self.group.gather(norm.double().square()).sum().sqrt().to(norm.dtype)


class _Loss(nn.Module):
    """`LanguageModel.loss` as a forward pass, which DistributedDataParallel requires."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> LossParts:
        return self.model.loss(tokens, targets, documents)


def parallelise(
    model: LanguageModel,
    strategy: Strategy,
    group: ReplicaGroup,
    device: torch.device,
    precision: Precision = "float32",
) -> ParallelModel:
    """Move ``model`` to ``device`` and distribute it over the ranks of its replica; create the optimizer afterwards.

    Args:
        model: a model with its initial weights, the same on all ranks. With ``fsdp`` it may be larger than the device's
            memory, because it is copied from the host layer by layer, or on ``meta``; then fill it afterwards.
        precision: the autocast type of the forward pass.
    """
    if strategy == "fsdp":
        return _ShardedModel(model, group, device, AUTOCAST.get(precision))
    model.to(device)
    return _ReplicatedModel(model, group) if strategy == "ddp" else ParallelModel(model, group)
