"""Cross-entropy with z-loss, of logits or together with the output projection, without storing all logits.

The logits are the largest array of a training step: for 64 sequences of 1024 tokens and a vocabulary of 32,000, they
take 8.4 GB in float32, and their gradient takes as much again. Composed of functions of `torch.nn.functional`, the loss
would hold three such arrays at the peak, or five with the z-loss. `cross_entropy_with_z_loss` holds two, and
`projected_cross_entropy` only a chunk of each: it processes tokens in chunks, and computes the gradients of hidden
states and projection together with the loss, in the forward pass (as in Liger Kernel, 2410.10989, and "Cut Your
Losses", 2411.09009).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

NOT_COUNTED = -100  # a target that is not counted, like every negative one
ENDS = -101  # also not counted; it marks that the input token is the last one of its document


def product_dtype(values: Tensor) -> torch.dtype:
    """Return the dtype of the products of ``values``: autocast's if it is enabled, else their own."""
    kind = values.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else values.dtype


def cross_entropy_with_z_loss(logits: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """Return the means over tokens of ``log(Z) - logits[target] + z_loss * log(Z)^2`` and of its first two terms alone.

    ``log(Z)`` is the log-sum-exp of a token's logits; the z-loss keeps it near 0 (PaLM, 2204.02311, section 5). The
    gradient is ``(softmax(logits) * (1 + 2 z_loss log(Z)) - onehot(target)) / tokens``. Tokens with a negative target
    are not counted; if none counts, both means are 0.

    Args:
        logits: ``(tokens, vocab)`` float32.
        targets: ``(tokens,)`` int64.
        z_loss: weight of the last term.

    Returns:
        Two float32 scalars: the loss to differentiate, and the plain cross-entropy, which has no gradient.
    """
    parts: tuple[Tensor, Tensor] = _CrossEntropy.apply(logits, targets, z_loss)  # type: ignore[no-untyped-call]  # torch's
    return parts


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
        log_partition = logits.logsumexp(1)
        counted, count = _counted(targets, logits.dtype)
        targets = targets.clamp(min=0)
        # If all are counted, this is 1 and changes no bit; finding that out would synchronise with the device.
        share = counted * (len(targets) / count)
        cross_entropy = ((log_partition - logits.gather(1, targets.unsqueeze(1)).squeeze(1)) * share).mean()
        ctx.save_for_backward(logits, log_partition, targets, share)
        ctx.z_loss = z_loss
        ctx.mark_non_differentiable(cross_entropy)
        return cross_entropy + z_loss * (log_partition.square() * share).mean(), cross_entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        logits, log_partition, targets, share = ctx.saved_tensors
        scale = upstream / targets.numel() * share
        gradient = (logits - log_partition.unsqueeze(1)).exp_()
        gradient.mul_((scale * (1 + 2 * ctx.z_loss * log_partition)).unsqueeze(1))
        gradient.scatter_add_(1, targets.unsqueeze(1), -scale.unsqueeze(1))
        return gradient, None, None


def _counted(targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return ``(tokens,)``, 1 for each counted target and else 0, and their number, at least 1, ``()``."""
    counted = (targets >= 0).to(dtype)
    return counted, counted.sum().clamp(min=1)


FLOAT16_CHUNK_TOKENS = 1024
"""Keeps every sum over a chunk within the range of float16: the forward pass does not know the loss scale yet."""


def projected_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float, *, chunk_tokens: int, compiled: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `cross_entropy_with_z_loss` of ``hidden @ weight.T``, computed chunk by chunk.

    Under autocast, the products use its dtype and everything else float32. At the peak, memory holds the gradients
    (``hidden`` in the dtype of the products, ``weight`` in float32) and two arrays of ``(chunk, vocab)`` float32.

    Args:
        hidden: ``(tokens, width)``.
        weight: ``(vocab, width)`` float32, whole, not a rank's shard.
        targets: ``(tokens,)`` int64; negative ones are not counted.
        z_loss: weight of the squared log-partition.
        chunk_tokens: the largest number of tokens per chunk; chunks are as even as possible.
        compiled: compile the computation between the products with torch.compile.

    Returns:
        Two float32 scalars: the loss to differentiate (once), and the plain cross-entropy, which has no gradient.
    """
    dtype = product_dtype(hidden)
    if dtype == torch.float16:
        chunk_tokens = min(chunk_tokens, FLOAT16_CHUNK_TOKENS)
    pieces = -(-len(hidden) // chunk_tokens)
    parts: tuple[Tensor, Tensor] = _ProjectedCrossEntropy.apply(  # type: ignore[no-untyped-call]  # torch's
        hidden, weight, targets, z_loss, pieces, dtype, torch.is_grad_enabled(), compiled
    )
    return parts


class _ProjectedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        z_loss: float,
        pieces: int,
        dtype: torch.dtype,
        differentiate: bool,
        compiled: bool,
    ) -> tuple[Tensor, Tensor]:
        kernel = compiled_once(losses_and_gradient, fullgraph=True) if compiled else losses_and_gradient
        narrow, matrix = hidden.to(dtype), weight.to(dtype)
        sums = torch.zeros(2, dtype=torch.float32, device=hidden.device)
        for_hidden = torch.empty_like(narrow) if differentiate else None
        # a frozen projection, as with adapters, needs no gradient
        trained = differentiate and ctx.needs_input_grad[1]
        for_weight = torch.zeros_like(weight, dtype=torch.float32) if trained else None
        start = 0
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, wanted in zip(narrow.tensor_split(pieces), targets.tensor_split(pieces), strict=True):
                losses, gradient = kernel(rows @ matrix.T, wanted, z_loss)
                sums += losses
                if for_hidden is not None:
                    torch.mm(gradient, matrix, out=for_hidden[start : start + len(rows)])
                if for_weight is not None and gradient.dtype == for_weight.dtype:
                    for_weight.addmm_(gradient.T, rows)
                elif for_weight is not None:  # float32, whatever the type of the products
                    for_weight.add_(gradient.T @ rows)
                start += len(rows)
                del gradient  # frees its memory for the next chunk
        _, count = _counted(targets, sums.dtype)
        if for_hidden is not None:
            ctx.save_for_backward(for_hidden, for_weight)
        ctx.dtype, ctx.tokens, ctx.differentiated = hidden.dtype, count, False
        loss, cross_entropy = (sums / count).unbind()
        cross_entropy = cross_entropy.clone()
        ctx.mark_non_differentiable(cross_entropy)
        return loss.clone(), cross_entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.differentiated:
            raise RuntimeError("A chunked loss can't be differentiated twice: its gradients are computed in place.")
        ctx.differentiated = True
        for_hidden, for_weight = ctx.saved_tensors
        scale = upstream / ctx.tokens
        for_hidden = for_hidden.mul_(scale).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        for_weight = for_weight.mul_(scale) if ctx.needs_input_grad[1] else None
        return for_hidden, for_weight, None, None, None, None, None, None


def losses_and_gradient(logits: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """Return the sums of loss and cross-entropy over a chunk, ``(2,)`` float32, and the gradient of the first.

    The gradient is ``softmax(logits) * (1 + 2 z_loss log(Z)) - onehot(target)``, and 0 for a negative target. It is not
    divided by the number of tokens, because it is in the dtype of ``logits``, whose memory it may overwrite.
    """
    values, targets = logits.float(), targets.unsqueeze(1)
    counted, targets = (targets >= 0).float(), targets.clamp(min=0)
    log_partition = values.logsumexp(1, keepdim=True)
    cross_entropy = ((log_partition - values.gather(1, targets)) * counted).sum()
    sums = torch.stack((cross_entropy + z_loss * (log_partition.square() * counted).sum(), cross_entropy))
    factor = (1 + 2 * z_loss * log_partition) * counted
    if torch.compiler.is_compiling():  # one kernel from logits to gradient
        wanted = torch.arange(values.shape[1], dtype=torch.int64, device=values.device) == targets
        gradient = (values - log_partition).exp() * factor - wanted.float() * counted
    else:
        gradient = values.sub_(log_partition).exp_().mul_(factor)
        gradient.scatter_add_(1, targets, -counted)
    return sums, gradient.to(logits.dtype)


@cache
def compiled_once(function: Callable[..., Any], *, fullgraph: bool = False) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, fullgraph=fullgraph)
