"""Contributions to a round for tests."""

from typing import Any

import torch
from torch import Tensor

from diloco.algorithm import Contribution, RoundId, make_codec

SIZE = 515
"""Two blocks of 256 and an odd remainder."""


def contribution(replica: int, values: Tensor | None = None, *, codec: str = "float32", **fields: Any) -> Contribution:
    """Return a contribution of ``values``, by default `SIZE` random ones, with other attributes from ``fields``."""
    encoder = make_codec(codec)
    if values is None:
        values = torch.randn(SIZE, generator=torch.Generator().manual_seed(replica))
    given = {"numel": values.numel(), "payload": encoder.encode(values), "digest": "d", **fields}
    return Contribution(round=RoundId(0, 0), replica=replica, codec=encoder, **given)
