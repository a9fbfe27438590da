"""Tokens whose values are their positions, so that a sequence shows its window."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LENGTH = 3


def tokens_for(windows: int, rest: int = 0, dtype: type[np.integer[Any]] = np.uint32) -> NDArray[np.integer[Any]]:
    """Tokens whose values are their positions, so that a sequence shows its window."""
    return np.arange(windows * LENGTH + 1 + rest, dtype=dtype)


def windows_of(batch: tuple[Tensor, Tensor]) -> list[int]:
    """Return the windows of a batch, after checking that they are complete."""
    inputs, targets = batch
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(LENGTH))
    assert torch.equal(targets, inputs + 1)
    assert (inputs[:, 0] % LENGTH == 0).all()
    return [int(first) // LENGTH for first in inputs[:, 0]]
