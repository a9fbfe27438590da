"""Error feedback, which adds the quantisation error of one round to the next pseudo-gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.algorithm.codec.base import Codec

__all__ = ["encode_with_feedback"]


def encode_with_feedback(codec: Codec, values: Tensor, residual: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """Return the payload of ``values`` plus the residual, and the residual that follows if the mean takes the payload.

    With v the values, Q the codec (encoding followed by decoding) and e the residual, starting at zero::

        send  Q(v + beta e);    e <- (v + beta e) - Q(v + beta e)

    as in SparseLoCo (2508.15706), where ``decay`` (beta) is 0.95. Values that are too small for the codec add up until
    they are sent; with a decay below 1 a residual that waits for long slowly decays. In contrast to SparseLoCo, the new
    e replaces the old one only if a mean takes the payload. If the round is void or excludes it, the next
    pseudo-gradient contains all of its work again, which would otherwise count twice.

    Args:
        codec: Q.
        values: ``(numel,)`` float32.
        residual: ``(numel,)`` float32, e.
        decay: beta, from 0 to 1; 1 keeps the whole residual.

    Returns:
        The payload, ``(payload_bytes(numel),)`` uint8, and the new e, ``(numel,)`` float32.

    >>> from diloco.algorithm.codec.base import make_codec
    >>> codec, residual = make_codec("fp4", block_size=8), torch.zeros(2)
    >>> values = torch.tensor([1.0, 0.005])  # the second is 1/200 of the first: too small for fp4
    >>> for _ in range(3):
    ...     payload, residual = encode_with_feedback(codec, values, residual, 1.0)
    ...     print(codec.decode(payload, 2))
    tensor([1., 0.])
    tensor([1., 0.])
    tensor([1.0000, 0.0156])
    """
    error = torch.add(values, residual, alpha=decay)
    payload = codec.encode(error)
    codec.accumulate(payload, error, -1.0)
    return payload, error
