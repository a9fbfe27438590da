"""Changes to a model's blocks and its loss before training, to save time or memory.

They change when and by which kernels values are computed: recomputing gives the same bits; compiling and chunking give
the same values to round-off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from diloco.algorithm.layers import layer_container
from diloco.model.language_model import LanguageModel, LossChunks
from diloco.train.settings import TrainSettings

__all__ = ["blocks_of", "prepare_blocks", "prepare_model"]


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
