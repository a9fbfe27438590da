"""Digests: 128 bits (XXH3) that tell whether two replicas hold the same bits. They find accidents, not attacks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor

from diloco.algorithm.outer_optimizer import OuterState

__all__ = ["digest_state", "digest_tensors"]


def digest_state(global_params: Tensor, state: OuterState) -> str:
    """Digest of the global parameters ``(numel,)`` and outer state of a fragment, as hexadecimal text.

    >>> digest_state(torch.zeros(2), OuterState()) == digest_state(torch.zeros(2), OuterState(step=1))
    False
    """
    return digest_tensors({f"{state.step}": global_params, **state.slots})


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Digest of the names and bytes of ``tensors``, in order; those on another device are hashed through the host."""
    digest = xxhash.xxh3_128()
    for name, tensor in tensors.items():
        digest.update(name.encode() + b"\0")
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
