"""Cross-entropy with z-loss, in one pass and with one gradient buffer.

Made of the functions of `torch.nn.functional`, it would hold three arrays of the size of the logits at the peak, five
with the z-loss. Here it holds two: the logits and their gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["cross_entropy_with_z_loss"]


def cross_entropy_with_z_loss(logits: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """Means over tokens of ``log(Z) - logits[target] + z_loss * log(Z)^2`` and of its first two terms alone.

    ``log(Z)`` is the log-sum-exp of a token's logits; the z-loss keeps it near 0 (PaLM, 2204.02311, section 5).
    Gradient: ``(softmax(logits) * (1 + 2 z_loss log(Z)) - onehot(target)) / tokens``.

    Args:
        logits: ``(tokens, vocab)`` float32.
        targets: ``(tokens,)`` int64.
        z_loss: weight of the last term.

    Returns:
        Two float32 scalars, the loss to differentiate and the plain cross-entropy, which has no gradient.
    """
    parts: tuple[Tensor, Tensor] = _CrossEntropy.apply(logits, targets, z_loss)  # type: ignore[no-untyped-call]  # torch's
    return parts


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
        log_partition = logits.logsumexp(1)
        cross_entropy = (log_partition - logits.gather(1, targets.unsqueeze(1)).squeeze(1)).mean()
        ctx.save_for_backward(logits, log_partition, targets)
        ctx.z_loss = z_loss
        ctx.mark_non_differentiable(cross_entropy)
        return cross_entropy + z_loss * log_partition.square().mean(), cross_entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        logits, log_partition, targets = ctx.saved_tensors
        scale = upstream / targets.numel()
        gradient = (logits - log_partition.unsqueeze(1)).exp_()
        gradient.mul_((scale * (1 + 2 * ctx.z_loss * log_partition)).unsqueeze(1))
        gradient.scatter_add_(1, targets.unsqueeze(1), -scale.expand(targets.numel(), 1))
        return gradient, None, None
