"""The float codecs, which store each value in 4 or 2 bytes."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from diloco.algorithm.codec.base import Codec, largest_magnitude, pieces

__all__ = ["BFloat16", "Float16", "Float32"]


class _Cast(Codec):
    """A codec that rounds each value to ``wire_type`` (to nearest, half to even) and clamps it to the finite range."""

    wire_type: ClassVar[torch.dtype]

    def payload_bytes(self, numel: int) -> int:
        return numel * self.wire_type.itemsize

    def _encode(self, values: Tensor, payload: Tensor) -> None:
        numbers = payload.view(self.wire_type)
        limit = self.saturation_limit
        scratch = None
        for start, stop in pieces(values.numel(), values.device):
            scratch = torch.empty_like(values[start:stop]) if scratch is None else scratch
            clamped = torch.clamp(values[start:stop], -limit, limit, out=scratch[: stop - start])
            numbers[start:stop].copy_(clamped)

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        for start, stop in pieces(out.numel(), out.device):
            out[start:stop].copy_(self._numbers(payload, start, stop))

    def _accumulate(self, payload: Tensor, out: Tensor, weight: float) -> None:
        scratch = None
        for start, stop in pieces(out.numel(), out.device):
            scratch = torch.empty_like(out[start:stop]) if scratch is None else scratch
            term = scratch[: stop - start]
            term.copy_(self._numbers(payload, start, stop)).mul_(weight)
            out[start:stop].add_(term)

    def _find_fault(self, payload: Tensor, numel: int) -> str | None:
        for start, stop in pieces(numel, payload.device):
            numbers = self._numbers(payload, start, stop)
            if not math.isfinite(largest_magnitude(numbers)):
                first = start + int(torch.nonzero(~torch.isfinite(numbers))[0])
                return f"contains NaN or infinity at value {first}"
        return None

    def _numbers(self, payload: Tensor, start: int, stop: int) -> Tensor:
        """Return the values ``start`` to ``stop`` of the payload, as ``wire_type``."""
        size = self.wire_type.itemsize
        part = payload[start * size : stop * size]
        if part.storage_offset() % size or part.data_ptr() % size:  # unaligned part of a larger message
            part = part.clone()
        return part.view(self.wire_type)


class Float32(_Cast):
    """Unchanged float32, 4 bytes per value. No error.

    >>> Float32().payload_bytes(10)
    40
    """

    name = "float32"
    wire_type = torch.float32
    exact = True

    def _encode(self, values: Tensor, payload: Tensor) -> None:
        payload.copy_(values.view(torch.uint8))


class Float16(_Cast):
    """IEEE half precision, 2 bytes per value. Saturates at +-65504 instead of overflowing.

    Error of a value within +-65504: at most ``2^-11`` of its magnitude from ``2^-14`` up, at most ``2^-25`` below.

    >>> codec = Float16()
    >>> codec.decode(codec.encode(torch.tensor([0.1, -1e9])), 2).tolist()
    [0.0999755859375, -65504.0]
    """

    name = "float16"
    wire_type = torch.float16
    saturation_limit = 65504.0


class BFloat16(_Cast):
    """The upper half of a float32, 2 bytes per value. Saturates at +-3.3895e38, the largest bfloat16.

    Error: at most ``2^-8`` of the magnitude (7 stored mantissa bits, rounded to nearest, half to even) from ``2^-126``
    up, at most ``2^-134`` below. Above ``3.3895e38`` the value is clamped, which is also within ``2^-8``.

    >>> codec = BFloat16()
    >>> codec.decode(codec.encode(torch.tensor([0.1, -1e9])), 2).tolist()
    [0.10009765625, -998244352.0]
    """

    name = "bfloat16"
    wire_type = torch.bfloat16
    saturation_limit = torch.finfo(torch.bfloat16).max
