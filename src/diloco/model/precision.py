"""Which dtype matrix products are in."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["product_dtype"]


def product_dtype(values: Tensor) -> torch.dtype:
    """That of the products that ``values`` go into: autocast's where it is on, else their own.

    >>> values = torch.ones(2)
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     product_dtype(values)
    torch.bfloat16
    >>> product_dtype(values)
    torch.float32
    """
    kind = values.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else values.dtype
