"""Block-wise codecs, int8, fp4 and sign: a payload of scales and codes, computed by C kernels or torch operations.

A block is ``block_size`` consecutive values; the last one may be shorter. The payload contains the scales of all
blocks, then the codes of all blocks. The compiled kernels, if available, process CPU tensors in one pass. All other
tensors are processed by torch operations, range by range, with scratch memory for one call. Both give the same bits.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from diloco.algorithm.codec import native
from diloco.algorithm.codec.base import LARGEST_BFLOAT16, Codec, aligned, whole_magnitudes
from diloco.errors import ConfigurationError

_MAX_BLOCK = 65536


class BlockwiseCodec(Codec):
    """A codec with a scale for each block of values and a few bits for each value.

    Args:
        block_size: The number of values that share a scale: 2 to 65536, even; for sign, a multiple of 8.
        implementation: ``"torch"`` or ``"native"``, for CPU tensors. Default: native if it was built.

    Raises:
        ConfigurationError: if the block size is invalid, or ``"native"`` was given but is not available.
    """

    scale_type: ClassVar[torch.dtype]
    codes_per_byte: ClassVar[int]

    def __init__(self, block_size: int = 256, *, implementation: Literal["torch", "native"] | None = None) -> None:
        unit = max(2, self.codes_per_byte)
        if type(block_size) is not int or not unit <= block_size <= _MAX_BLOCK or block_size % unit:
            raise ConfigurationError(
                f"{self.name}: block_size must be a multiple of {unit} from {unit} to {_MAX_BLOCK}, got {block_size!r}."
            )
        self.block_size = block_size
        self._load_kernels(native.BLOCKWISE, implementation)

    def parameters(self) -> Mapping[str, int]:
        return {"block_size": self.block_size}

    def payload_bytes(self, numel: int) -> int:
        return self._scale_bytes(numel) + -(-numel // self.codes_per_byte)

    def _scale_bytes(self, numel: int) -> int:
        return -(-numel // self.block_size) * self.scale_type.itemsize

    def _addresses(self, payload: Tensor, numel: int) -> tuple[int, int]:
        """Return the addresses of the scales and of the codes of a payload."""
        return payload.data_ptr(), payload.data_ptr() + self._scale_bytes(numel)

    def _encode(self, values: Tensor, payload: Tensor) -> None:
        if kernel := self._kernel("encode", values):
            kernel(values.data_ptr(), values.numel(), self.block_size, *self._addresses(payload, values.numel()))
            return
        for part, block_scales, block_codes in self._block_ranges(payload, values.numel()):
            self._encode_blocks(values[part].view(len(block_scales), -1), block_scales, block_codes)

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        if kernel := self._kernel("decode", out):
            kernel(*self._addresses(payload, out.numel()), out.numel(), self.block_size, out.data_ptr())
            return
        for part, scales, codes in self._block_ranges(payload, out.numel()):
            rows = out[part].view(len(scales), -1)
            columns = codes.shape[1] * self.codes_per_byte
            whole = rows if columns == rows.shape[1] else rows.new_empty(1, columns)
            self._decode_blocks(scales, codes, whole)
            if whole is not rows:
                rows.copy_(whole[:, : rows.shape[1]])

    def _accumulate(self, payload: Tensor, out: Tensor, weight: float) -> None:
        if kernel := self._kernel("accumulate", out):
            kernel(*self._addresses(payload, out.numel()), out.numel(), self.block_size, weight, out.data_ptr())
        else:
            super()._accumulate(payload, out, weight)

    def _cut(self, payload: Tensor, numel: int, start: int, stop: int) -> Tensor:
        scales, codes = payload[: self._scale_bytes(numel)], payload[self._scale_bytes(numel) :]
        parts = scales[self._scale_bytes(start) : self._scale_bytes(stop)], codes[self._codes(start, stop)]
        return torch.cat(parts)

    def _codes(self, start: int, stop: int) -> slice:
        return slice(start // self.codes_per_byte, -(-stop // self.codes_per_byte))

    def _block_ranges(self, payload: Tensor, numel: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield ``(slice of values, (blocks,) scales, (blocks, bytes) codes)``: whole blocks, then the short last one.

        Codes of zeros may fill its last byte.
        """
        scales, codes = self._scales(payload, numel), payload[self._scale_bytes(numel) :]
        for start, stop in self._ranges(numel, payload.device):
            part = scales[start // self.block_size : -(-stop // self.block_size)]
            yield slice(start, stop), part, codes[self._codes(start, stop)].view(len(part), -1)

    def _scales(self, payload: Tensor, numel: int) -> Tensor:
        """Return the scales, ``(num_blocks,)`` of ``scale_type``: a view of the payload if it is aligned."""
        return aligned(payload[: self._scale_bytes(numel)], self.scale_type)

    def _find_fault(self, payload: Tensor, numel: int) -> str | None:
        scales = self._scales(payload, numel)
        good = self._valid(scales)
        if bool(good.all()):
            return None
        block = int(torch.nonzero(~good)[0])
        return f"has the scale {scales[block].item()} in block {block}"

    @abc.abstractmethod
    def _valid(self, scales: Tensor) -> Tensor:
        """Return which scales an encoder writes, ``(num_blocks,)`` bool."""

    @abc.abstractmethod
    def _encode_blocks(self, values: Tensor, scales: Tensor, codes: Tensor) -> None:
        """Write the scales and codes of some blocks.

        Args:
            values: ``(blocks, columns)`` float32, left unchanged.
            scales: ``(blocks,)`` of ``scale_type``.
            codes: ``(blocks, ceil(columns / codes_per_byte))`` uint8.
        """

    @abc.abstractmethod
    def _decode_blocks(self, scales: Tensor, codes: Tensor, out: Tensor) -> None:
        """Write the values of some blocks, ``(blocks, codes.shape[1] * codes_per_byte)`` float32."""

    def _whole_bytes(self, values: Tensor, codes: Tensor) -> Tensor:
        """Return the values of blocks with the zeros that fill their last byte."""
        return F.pad(values, (0, codes.shape[1] * self.codes_per_byte - values.shape[1]))


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
    cost_of_means = "0.01 %"
    saturation_limit = 127 * 2.0**121 - 2.0**104  # the largest float32 whose 127th is no more than the largest scale
    scale_type = torch.float32
    codes_per_byte = 1

    def _encode_blocks(self, values: Tensor, scales: Tensor, codes: Tensor) -> None:
        work = values.abs()
        largest = work.amax(dim=1)
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

    def _valid(self, scales: Tensor) -> Tensor:
        normal = (scales >= _SMALLEST_NORMAL) & (scales <= _LARGEST_SCALE)  # false for NaN
        return normal | (scales.view(torch.int32) == 0)


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
    cost_of_means = "0.23 %"
    saturation_limit = float(torch.tensor(0x7F400000 - 1, dtype=torch.int32, device="cpu").view(torch.float32))
    scale_type = torch.uint8
    codes_per_byte = 2

    def _encode_blocks(self, values: Tensor, scales: Tensor, codes: Tensor) -> None:
        values = self._whole_bytes(values, codes)
        blocks, columns = values.shape
        # rounding can't carry into the sign; after the shift the low byte is the rounded exponent, below the sign
        work = (values.view(torch.int32) + _HALF_STEP).bitwise_right_shift_(23)
        code = work.to(torch.uint8)
        exponent = code.amax(dim=1).clamp_(_LEAST_EXPONENT, _GREATEST_EXPONENT)
        scales.copy_(exponent)
        zero = (exponent - 7).unsqueeze(1)
        torch.maximum(code, zero, out=code).sub_(zero).clamp_(max=7)
        code.bitwise_or_(work.bitwise_right_shift_(5).to(torch.uint8).bitwise_and_(8))
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

    def _valid(self, scales: Tensor) -> Tensor:
        return (scales >= _LEAST_EXPONENT) & (scales <= _GREATEST_EXPONENT)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return ``2^exponent`` as float32, for int32 exponents of normal numbers."""
    return ((exponent + 127) << 23).view(torch.float32)


class Sign(BlockwiseCodec):
    """The sign of each value and the mean magnitude of each block: ``value = +-mean(|x|)``, as in EF-SGD (1901.09847).

    The mean is a bfloat16, taken over the integers ``floor(2^20 |x| / max|x|)``, so that it does not depend on the
    order of summation. Bit i of byte j of a block of n values holds the sign of value ``j + i * ceil(n / 8)``, 1 for
    negative ones and -0.0. What one bit does not say must be sent later: use error feedback (1.0).

    Size: ``ceil(numel / 8) + 2 * ceil(numel / block_size)`` bytes, 1.06 bits per value for blocks of 256.

    Error: at most the larger of the value's magnitude and the mean, which has an error of 2^-8 of itself and 2^-20 of
    the largest magnitude. A block whose largest magnitude is below ``2^-100`` decodes to zeros. Saturates at the
    largest bfloat16.

    >>> codec = Sign(block_size=8)
    >>> codec.decode(codec.encode(torch.tensor([1.0, -2.0, 0.0, 5.0])), 4)
    tensor([ 2., -2.,  2.,  2.])
    """

    name = "sign"
    saturation_limit = LARGEST_BFLOAT16
    needs_error_feedback = True
    left_out = "the magnitudes"
    scale_type = torch.bfloat16
    codes_per_byte = 8

    def _encode_blocks(self, values: Tensor, scales: Tensor, codes: Tensor) -> None:
        sizes, unit = whole_magnitudes(values)
        total = sizes.sum(1).to(torch.float32)
        scales.copy_((total / torch.full_like(total, values.shape[1])).mul_(unit[:, 0]).clamp_(max=LARGEST_BFLOAT16))
        negative = (self._whole_bytes(values, codes).view(torch.int32) < 0).view(torch.uint8)
        codes.zero_()
        for bit, strip in enumerate(negative.view(len(codes), 8, -1).unbind(1)):
            codes.bitwise_or_(strip.bitwise_left_shift(bit))

    def _decode_blocks(self, scales: Tensor, codes: Tensor, out: Tensor) -> None:
        bits = out.view(torch.int32)
        for bit, strip in enumerate(bits.view(len(codes), 8, -1).unbind(1)):
            strip.copy_(codes.bitwise_left_shift(7 - bit).view(torch.int8))  # moves the bit to the sign
        bits.bitwise_and_(-1 << 31).bitwise_or_(scales.to(torch.float32).view(torch.int32).unsqueeze(1))

    def _valid(self, scales: Tensor) -> Tensor:
        normal = (scales >= _SMALLEST_NORMAL) & (scales <= LARGEST_BFLOAT16)  # false for NaN
        return normal | (scales.view(torch.int16) == 0)
