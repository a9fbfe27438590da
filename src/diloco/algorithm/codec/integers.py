"""The int2 and int8 codecs, with two bits or a signed byte for each value and a float32 scale for each block."""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.algorithm.codec.base import register
from diloco.algorithm.codec.blockwise import BlockwiseCodec

__all__ = ["Int2", "Int8"]

_LARGEST_FLOAT = torch.finfo(torch.float32).max
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
_LARGEST_SCALE = _LARGEST_FLOAT / 128  # the product of any byte, including -128, and a scale is finite

_LEVELS = 1 << 14  # magnitudes are summed as integers, so that the order of summation does not matter
_LEAST_MAXIMUM = 2.0**-100  # the least maximum of a block; below it `_LEVELS / maximum` would come close to overflow
_INT2_LARGEST_SCALE = 2.0**126


@register
class Int2(BlockwiseCodec):
    """Block-wise int2: a sign and one bit of magnitude; values become ``+-scale / 2`` or ``+-3 scale / 2``.

    ``scale = 1.25 mean|x|`` of the block, the best uniform step for normally distributed values. The mean is taken over
    the integers ``floor(16384 |x| / max|x|)``, so that it does not depend on the order of summation::

        code = (x < 0) * 2 + (|x| >= scale)

    No code represents zero, so values far below the mean decode to half a scale. Use error feedback.

    Byte j of a block of n values holds values ``j``, ``j + q``, ``j + 2q`` and ``j + 3q``, ``q = ceil(n / 4)``, from
    the low bits to the high ones.

    Size: ``ceil(numel / 4) + 4 * ceil(numel / block_size)`` bytes, 2.125 bits per value for blocks of 256.

    Error: at most ``scale / 2`` for magnitudes up to ``2 scale``; larger ones decode to ``1.5 scale``. A block whose
    largest magnitude is below ``2^-100`` decodes to zeros.

    >>> codec = Int2(block_size=8)
    >>> codec.decode(codec.encode(torch.tensor([1.0, -1.0, 3.0, -3.0, 0.5, 1.5, -1.0, 1.0])), 8)
    tensor([ 0.9375, -0.9375,  2.8124, -2.8124,  0.9375,  0.9375, -0.9375,  0.9375])
    """

    name = "int2"
    saturation_limit = _INT2_LARGEST_SCALE
    scale_type = torch.float32
    codes_per_byte = 4

    def _encode_blocks(self, values: Tensor, scales: Tensor, codes: Tensor, scratch: Tensor, count: int) -> None:
        work = scratch[0, : values.numel()].view(torch.float32).view(values.shape)
        levels = scratch[1, : values.numel()].view(values.shape)
        largest = torch.abs(values, out=work).amax(dim=1)
        flushed = largest < _LEAST_MAXIMUM
        inverse = torch.full_like(largest, _LEVELS).div_(largest).masked_fill_(flushed, 0.0)
        levels.copy_(work.mul_(inverse.unsqueeze(1)))  # rounds towards zero
        mean = levels.sum(dim=1).to(torch.float32).div_(torch.full_like(largest, count))
        mean.mul_(torch.div(largest, torch.full_like(largest, _LEVELS))).mul_(1.25)
        scales.copy_(mean.clamp_(max=_INT2_LARGEST_SCALE).masked_fill_(flushed, 0.0))
        code = scratch[1].view(torch.uint8)[: values.numel()].view(values.shape)
        code.copy_(torch.abs(values, out=work) >= scales.unsqueeze(1)).bitwise_or_((values < 0).to(torch.uint8) << 1)
        first, second, third, fourth = code.view(len(values), 4, -1).unbind(1)
        torch.bitwise_or(first, second << 2, out=codes)
        codes.bitwise_or_(third << 4).bitwise_or_(fourth << 6)

    def _decode_blocks(self, scales: Tensor, codes: Tensor, out: Tensor) -> None:
        for part, values in enumerate(out.view(len(codes), 4, -1).unbind(1)):
            code = codes >> (2 * part)
            values.copy_(code & 1).add_(0.5)  # 0.5 or 1.5
            torch.where((code & 2) == 0, values, -values, out=values)
        out.mul_(scales.unsqueeze(1))

    def _find_fault(self, payload: Tensor, numel: int) -> str | None:
        scales = self._scales(payload, numel)
        good = (scales >= 0) & (scales <= _INT2_LARGEST_SCALE)  # false for NaN
        return _odd_scale(scales, good)


@register
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

    def _encode_blocks(self, values: Tensor, scales: Tensor, codes: Tensor, scratch: Tensor, count: int) -> None:
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
        return _odd_scale(scales, good)


def _odd_scale(scales: Tensor, good: Tensor) -> str | None:
    if bool(good.all()):
        return None
    block = int(torch.nonzero(~good)[0])
    return f"has the scale {float(scales[block])} in block {block}"
