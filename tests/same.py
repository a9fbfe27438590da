"""Exact comparison of nested values."""

from typing import Any

import numpy as np
import torch


def same(one: Any, other: Any, *, any_order: bool = False) -> bool:
    """Return whether two nested values are equal in types, bits and, unless ``any_order``, the order of keys."""
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
        return str(one) == str(other)  # distinguishes signs of zero, and treats NaN as equal
    return bool(one == other)


def same_values(one: Any, other: Any) -> bool:
    """Compare as `same`, but in any order of keys, because messages don't preserve it."""
    return same(one, other, any_order=True)


def raw(tensor: torch.Tensor) -> bytes:
    """Return all bits in index order."""
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)  # with contiguous strides
    return fresh.reshape(-1).view(torch.uint8).numpy().tobytes()
