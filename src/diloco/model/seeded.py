"""Initial values that depend on a seed alone, whoever draws them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["drawing_from"]


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Inside, the global CPU generators of Python, NumPy and torch begin from ``seed``; afterwards they are as before.

    For code that draws from global generators, as other people's models do. CUDA's are left alone: what is built inside
    is built on the CPU, for the same bits on every device.

    >>> with drawing_from(3):
    ...     first = torch.rand(2)
    >>> with drawing_from(3):
    ...     second = torch.rand(2)
    >>> torch.equal(first, second)
    True
    """
    words = [int(word) for word in np.random.SeedSequence(seed).generate_state(3, np.uint64)]
    python, numpy, generator = random.getstate(), np.random.get_state(legacy=False), torch.default_generator
    state = generator.get_state()
    try:
        random.seed(words[0])
        np.random.seed(words[1] % 2**32)
        generator.manual_seed(words[2])
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        generator.set_state(state)
