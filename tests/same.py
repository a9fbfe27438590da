"""Whether two trees of values are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def same(one: Any, other: Any, *, any_order: bool = False) -> bool:
    """Equal in type and bits, all the way down, and in the order of keys too but for ``any_order``."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape, raw(one)) == (other.dtype, other.shape, raw(other))
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, dict) and any_order:
        return one.keys() == other.keys() and all(same(one[key], other[key], any_order=True) for key in one)
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(same(a, b, any_order=any_order) for a, b in pairs)
    if isinstance(one, float):
        return str(one) == str(other)  # NaN too, and the sign of zero
    return bool(one == other)


def same_values(one: Any, other: Any) -> bool:
    """As `same`, in any order of keys: a wire keeps none."""
    return same(one, other, any_order=True)


def raw(tensor: torch.Tensor) -> bytes:
    """All bits, in the order of its indices."""
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)  # strides of its own
    return fresh.reshape(-1).view(torch.uint8).numpy().tobytes()
