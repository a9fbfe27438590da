"""Contributions to one round, made of values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diloco.algorithm.averaging import Contribution, RoundId
from diloco.algorithm.codec import make_codec

SIZE = 515
"""Two blocks of 256 and a rest that is odd."""


def contribution(replica: int, values: Tensor | None = None, *, codec: str = "float32", **fields: Any) -> Contribution:
    """Of ``values``, or else of `SIZE` random ones; ``fields`` are others of its attributes."""
    encoder = make_codec(codec)
    if values is None:
        values = torch.randn(SIZE, generator=torch.Generator().manual_seed(replica))
    given = {"numel": values.numel(), "payload": encoder.encode(values), "digest": "d", **fields}
    return Contribution(round=RoundId(0, 0), replica=replica, codec=encoder, **given)
