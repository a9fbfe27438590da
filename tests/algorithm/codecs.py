"""Codecs, values, error bounds and contributions to a round."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from diloco.algorithm import CODECS, FP4, Codec, Contribution, Float32, Int8, RoundId, Sign, TopK2, make_codec, pieces

BLOCK = 8
LARGEST = torch.finfo(torch.float32).max
TINY = torch.finfo(torch.float32).tiny

BOUNDED: dict[str, Callable[[], Codec]] = {
    **{name: partial(make_codec, name) for name in ("float32", "float16", "bfloat16")},
    "float32-torch": lambda: Float32(implementation="torch"),
    "int8": lambda: Int8(BLOCK, implementation="torch"),
    "fp4": lambda: FP4(BLOCK, implementation="torch"),
    "int8-built": lambda: Int8(BLOCK),
    "fp4-built": lambda: FP4(BLOCK),
    "sign": lambda: Sign(BLOCK, implementation="torch"),
    "sign-built": lambda: Sign(BLOCK),
}
COARSE: dict[str, Callable[[], Codec]] = {
    "topk2": lambda: TopK2(implementation="torch"),
    "topk2-built": lambda: TopK2(),
}
"""The codecs named "built" run the C kernels if a compiler was found, else torch."""

ONE_ZERO = ("int8",)
"""Whose codes are integers in two's complement, which has no -0."""
ERROR_AT_LIMIT = {"int8": 2.0**-22, "fp4": 1 / 3}
"""By how much a value at the saturation limit may be off, as a share of it; for all others not at all."""

OURS = CODECS.names
"""The names before any test registers a codec of its own."""

SIZE = 515  # two blocks of 256 and an odd remainder
PIECE = next(pieces(1 << 30, torch.device("cpu"), BLOCK))[1]
SIZES = [0, 1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3, PIECE, 2 * PIECE + BLOCK + 3]

finite_floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = st.lists(finite_floats, max_size=5 * BLOCK).map(lambda values: torch.tensor(values, dtype=torch.float32))


def of_block(function: Callable[[Tensor, int], Tensor], values: Tensor) -> Tensor:
    """Return for each value a function of the magnitudes of its block, such as the largest."""
    padded = torch.nn.functional.pad(values.abs(), (0, -len(values) % BLOCK), value=math.nan)
    return function(padded.view(-1, BLOCK), 1).repeat_interleave(BLOCK)[: len(values)]


def largest_of(rows: Tensor, dim: int) -> Tensor:
    return rows.nan_to_num(0.0).amax(dim)


def error_bound(codec: Codec, values: Tensor) -> Tensor:
    """Return the documented error bound in float64."""
    magnitude = values.abs().double()
    if codec.name == "float32":
        return torch.zeros_like(magnitude)
    if codec.name == "float16":
        bound = (magnitude * 2.0**-11).where(magnitude >= 2.0**-14, 2.0**-25)
        return bound.where(magnitude <= 65504, magnitude - 65504)
    if codec.name == "bfloat16":
        return (magnitude * 2.0**-8).where(magnitude >= TINY, 2.0**-134)
    largest = of_block(largest_of, values).double()
    if codec.name == "sign":
        mean = of_block(torch.nanmean, values.double())
        return torch.maximum(magnitude, mean * (1 + 2.0**-8) + largest * 2.0**-19)
    if codec.name == "int8":
        scale = (largest.float() / 127).double()
        bound = (scale / 2 + 2.0**-22 * largest).where(scale >= TINY, largest)
        return bound.where(largest <= codec.saturation_limit, scale)
    assert codec.name == "fp4", f"state the error bound of {codec.name} above"
    exponent = torch.floor(torch.log2(largest.clamp(min=2.0**-149) / 0.75)).clamp(-120, 127)
    least = 0.75 / 64 * torch.exp2(exponent)
    bound = (magnitude / 3).where(magnitude >= least, least)
    return bound.where(magnitude <= codec.saturation_limit, magnitude - 2.0**127)


def contribution(replica: int, values: Tensor | None = None, *, codec: str = "float32", **fields: Any) -> Contribution:
    """Return a contribution of ``values``, by default `SIZE` random ones, with other attributes from ``fields``."""
    encoder = make_codec(codec)
    if values is None:
        values = torch.randn(SIZE, generator=torch.Generator().manual_seed(replica))
    given = {"numel": values.numel(), "payload": encoder.encode(values), "digest": "d", **fields}
    return Contribution(round=RoundId(0, 0), replica=replica, codec=encoder, **given)


def contributions(values: Sequence[Tensor], weights: Sequence[float], **fields: Any) -> list[Contribution]:
    """Return the contributions of replicas 0, 1, ..., with these values and weights."""
    pairs = enumerate(zip(values, weights, strict=True))
    return [contribution(m, each, weight=weight, **fields) for m, (each, weight) in pairs]
