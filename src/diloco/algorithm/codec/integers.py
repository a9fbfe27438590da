"""The int8 codec, with a signed byte for each value and a float32 scale for each block."""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.algorithm.codec.blockwise import BlockwiseCodec

__all__ = ["Int8"]

_LARGEST_FLOAT = torch.finfo(torch.float32).max
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
_LARGEST_SCALE = _LARGEST_FLOAT / 128  # the product of any byte, including -128, and a scale is finite


class Int8(BlockwiseCodec):
    """Block-wise int8: ``scale = max|x| / 127``, ``code = round(x * (127 / max|x|))`` (half to even),
    ``value = code * scale``.

    Size: ``numel + 4 * ceil(numel / block_size)`` bytes, 8.125 bits per value for blocks of 256.

    Error: at most ``scale / 2 + 2^-22 * max|x|`` (float32 rounding), where ``max|x|`` is that of the value's block. A
    block whose scale would be subnormal (``max|x| < 127 * 2^-126``, about 1.5e-36) decodes to zeros. Saturates at
    ``127 / 128`` of the largest float32: a block with a larger value is scaled down by at most 0.8 %.

    >>> codec = Int8(block_size=2)
    >>> codec.decode(codec.encode(torch.tensor([1.0, -127.0, 0.25, 0.5])), 4)
    tensor([ 1.0000, -127.0000, 0.2520, 0.5000])
    """

    name = "int8"
    saturation_limit = 127 * 2.0**121 - 2.0**104  # the largest float32 whose 127th is no more than the largest scale
    scale_type = torch.float32
    codes_per_byte = 1

    def _encode_blocks(self, values: Tensor, scales: Tensor, codes: Tensor, scratch: Tensor) -> None:
        work = scratch[0, : values.numel()].view(torch.float32).view(values.shape)
        largest = torch.abs(values, out=work).amax(dim=1)
        # divide by a tensor: CUDA would multiply by the rounded inverse of a Python number
        levels = torch.full_like(largest, 127.0)
        torch.div(largest, levels, out=scales).clamp_(max=_LARGEST_SCALE)
        flushed = scales < _SMALLEST_NORMAL
        scales.masked_fill_(flushed, 0.0)
        inverse = torch.div(levels, largest).masked_fill_(flushed, 0.0)
        torch.mul(values, inverse.unsqueeze(1), out=work).round_()
        codes.view(torch.int8).copy_(work)

    def _decode_blocks(self, scales: Tensor, codes: Tensor, out: Tensor) -> None:
        out.copy_(codes.view(torch.int8)).mul_(scales.unsqueeze(1))

    def _find_fault(self, payload: Tensor, numel: int) -> str | None:
        scales = self._scales(payload, numel)
        normal = (scales >= _SMALLEST_NORMAL) & (scales <= _LARGEST_SCALE)  # false for NaN
        good = normal | (scales.view(torch.int32) == 0)
        if bool(good.all()):
            return None
        block = int(torch.nonzero(~good)[0])
        return f"has the scale {float(scales[block])} in block {block}"
