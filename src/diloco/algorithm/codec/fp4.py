"""The fp4 codec, with four bits (E3M0) for each value and an 8-bit exponent for each block."""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.algorithm.codec.blockwise import BlockwiseCodec

__all__ = ["FP4"]

_HALF_STEP = 0x00400000  # added before the shift, rounds to the nearest power of two; ties (at 1.5) round up
_LEAST_EXPONENT = 7  # makes code 1 the smallest normal float32, so that no value decodes to a subnormal
_GREATEST_EXPONENT = 254
_SIGN_AND_CODE = -(1 << 31) | 7 << 23  # the bits of a float32 that hold the sign and the code


class FP4(BlockwiseCodec):
    """Block-wise E3M0: a sign, three exponent bits and no mantissa, so values become powers of two.

    This is the number format of the Streaming DiLoCo paper (2501.18512), applied as in the paper to each replica's
    pseudo-gradient and summed in float32. The paper does not specify the scale. Here each block has its own exponent E:
    that of its largest magnitude rounded to the nearest power of two, biased by 127 and clamped to 7..254. With e the
    rounded and biased exponent of a value::

        code  = sign | clamp(e - E + 7, 0, 7)
        value = +-2^(E - 127 - 7 + code)        0 for code 0

    Values round to the nearest power of two; ties (at 1.5 times a power of two) round up. The largest value of a block
    has code 7, so a block has seven powers of two, from the largest down to 1/64 of it. Zero keeps its sign.

    Byte j of a block of n values holds value j in its low half and value ``j + ceil(n / 2)`` in its high half.

    Size: ``ceil(numel / 2) + ceil(numel / block_size)`` bytes, 4.03 bits per value for blocks of 256.

    Error: with ``top = 2^(E - 127)``, at most 1/3 of the magnitude from ``0.75 / 64 * top`` up, and less than
    ``0.75 / 64 * top`` for smaller magnitudes, nearly all of which decode to zero. Magnitudes below ``2^-127`` always
    do. Saturates at ``2^127`` for magnitudes from ``1.5 * 2^127`` up.

    >>> codec = FP4(block_size=8)
    >>> codec.decode(codec.encode(torch.tensor([1.0, 1.4, -1.5, 0.2, 0.03, 0.01, 0.0, 0.0])), 8)
    tensor([ 1.0000, 1.0000, -2.0000, 0.2500, 0.0312, 0.0000, 0.0000, 0.0000])
    """

    name = "fp4"
    saturation_limit = float(torch.tensor(0x7F400000 - 1, dtype=torch.int32, device="cpu").view(torch.float32))
    scale_type = torch.uint8
    codes_per_byte = 2

    def _encode_blocks(self, values: Tensor, scales: Tensor, codes: Tensor, scratch: Tensor) -> None:
        blocks, columns = values.shape
        work = scratch[0, : values.numel()].view(blocks, columns)
        code, sign = scratch[1].view(torch.uint8)[: 2 * values.numel()].view(2, blocks, columns).unbind()
        # rounding can't carry into the sign; after the shift the low byte is the rounded exponent, below the sign
        torch.add(values.view(torch.int32), _HALF_STEP, out=work).bitwise_right_shift_(23)
        code.copy_(work)
        exponent = code.amax(dim=1).clamp_(_LEAST_EXPONENT, _GREATEST_EXPONENT)
        scales.copy_(exponent)
        zero = (exponent - 7).unsqueeze(1)
        torch.maximum(code, zero, out=code).sub_(zero).clamp_(max=7)
        code.bitwise_or_(sign.copy_(work.bitwise_right_shift_(5)).bitwise_and_(8))
        low, high = code.view(blocks, 2, columns // 2).unbind(1)
        torch.bitwise_or(low, high.bitwise_left_shift_(4), out=codes)

    def _decode_blocks(self, scales: Tensor, codes: Tensor, out: Tensor) -> None:
        bits = out.view(torch.int32)
        low, high = bits.view(len(codes), 2, -1).unbind(1)
        # sign extension as int8, then multiplication by 2^19, moves code and sign to their places in a float32
        low.copy_(codes.bitwise_left_shift(4).view(torch.int8))
        high.copy_(codes.view(torch.int8))
        bits.mul_(1 << 19).bitwise_and_(_SIGN_AND_CODE)
        # now +-2^(code - 127); multiply exactly by 2^(E - 7), in two factors because E - 7 may be up to 247
        exponent = scales.to(torch.int32).unsqueeze(1) - 7
        out.mul_(_power_of_two(exponent >> 1)).mul_(_power_of_two(exponent - (exponent >> 1)))

    def _find_fault(self, payload: Tensor, numel: int) -> str | None:
        exponents = self._scales(payload, numel)
        good = (exponents >= _LEAST_EXPONENT) & (exponents <= _GREATEST_EXPONENT)
        if bool(good.all()):
            return None
        block = int(torch.nonzero(~good)[0])
        return f"has the exponent {int(exponents[block])} in block {block}"


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return ``2^exponent`` as float32, for int32 exponents of normal numbers."""
    return ((exponent + 127) << 23).view(torch.float32)
