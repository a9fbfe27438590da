"""What the checks have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from diloco.errors import ContractError

__all__ = ["contract", "expect", "same_bits"]


@contextmanager
def contract(kind: str, value: object) -> Iterator[None]:
    """Inside, whatever is raised is a broken contract of ``value``, which is a ``kind``."""
    try:
        yield
    except ContractError as broken:
        raise ContractError(f"{kind} {type(value).__name__}: {broken}") from broken
    except Exception as error:
        raise ContractError(f"{kind} {type(value).__name__} raised {type(error).__name__}: {error}") from error


def expect(kept: bool, broken: str) -> None:
    """Raise `ContractError` with ``broken``, a clause without its full stop, unless ``kept``."""
    if not kept:
        raise ContractError(f"{broken}.")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two float32 tensors are alike to the sign of a zero and the payload of a NaN."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))
