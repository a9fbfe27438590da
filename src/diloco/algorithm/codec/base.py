"""The base class of codecs, which encode pseudo-gradients as bytes and decode them."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from diloco.algorithm.codec import native
from diloco.algorithm.settings import CODECS
from diloco.devices import empty
from diloco.errors import CodecError

LARGEST_BFLOAT16 = float(torch.finfo(torch.bfloat16).max)


class Codec(abc.ABC):
    """A codec encodes float32 values as bytes and decodes them, with equal results on every replica and device.

    Decoding gives finite values for every payload that the codec encoded and every payload that passes `validate`. The
    payload of NaN or infinite values is undefined, so check values before encoding. Each codec documents its sign,
    rounding and error bounds. Bytes are little-endian.

    Every public method raises `CodecError`, before anything is written, if a tensor has another shape, type, layout or
    device than documented.
    """

    _kernels: Mapping[str, Callable[..., None]] | None = None

    name: str  # by which replicas compare codecs
    implementation: str = "torch"  # for CPU tensors, or "native (C)", with equal bytes; torch on other devices
    saturation_limit: float = math.inf  # the largest magnitude that is encoded without clamping
    block_size: int = 1  # the number of values that are encoded together; a payload can be cut between blocks
    exact: bool = False  # whether a payload consists of the bytes of the float32 values, without quantisation error
    needs_error_feedback: bool = False  # whether it leaves out so much that it is refused without error feedback
    left_out: str = "much of what it encodes"  # then: what that is
    usual_error_feedback: float = 1.0  # then: what to try first
    carries_gradients: bool = False  # whether gradients of data-parallel training can be sent in it
    cost_of_means: str = (
        ""  # the largest change of the loss by means in it, in runs of 4 to 16 replicas; "": not measured
    )

    def parameters(self) -> Mapping[str, int]:
        """Return the parameters that replicas must agree on in addition to the name, e.g. ``{"block_size": 256}``."""
        return {}

    def __str__(self) -> str:
        return self.name + "".join(f" ({name} {value})" for name, value in self.parameters().items())

    @abc.abstractmethod
    def payload_bytes(self, numel: int) -> int:
        """Return the exact size of the payload of ``numel`` values, including scales."""

    def encode(self, values: Tensor) -> Tensor:
        """Return the payload of ``values``, which are left unchanged.

        Args:
            values: ``(numel,)`` float32, contiguous, finite.

        Returns:
            ``(payload_bytes(numel),)`` uint8 on the same device, sharing no memory with ``values``.
        """
        _check(f"what {self.name} encodes", values, values.numel(), torch.float32)
        with torch.no_grad():
            payload = empty(self.payload_bytes(values.numel()), torch.uint8, values.device)
            self._encode(values, payload)
        return payload

    def decode(self, payload: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        """Return the values that ``payload``, ``(payload_bytes(numel),)`` uint8, contiguous, encodes.

        They are written to ``out``, ``(numel,)`` float32, contiguous, or to a new tensor on the payload's device.
        """
        self._check_payload(payload, numel)
        if out is None:
            out = empty(numel, torch.float32, payload.device)
        self._check_out(payload, numel, out)
        with torch.no_grad():
            self._decode(payload, out)
        return out

    def accumulate(self, payload: Tensor, out: Tensor, weight: float = 1.0) -> None:
        """Compute ``out += weight * decode(payload)`` in place; ``out`` is ``(numel,)`` float32, contiguous.

        The product and the sum are rounded to float32 separately, never fused. No temporary is as long as ``out``.
        """
        self._check_payload(payload, out.numel())
        self._check_out(payload, out.numel(), out)
        with torch.no_grad():
            self._accumulate(payload, out, weight)

    def validate(self, payload: Tensor, numel: int) -> None:
        """Check a payload from an untrusted source. A payload that passes decodes to finite values.

        Raises:
            CodecError: if the payload has the wrong length or type, or contains bytes that no encoder writes.
        """
        self._check_payload(payload, numel)
        fault = self._find_fault(payload, numel)
        if fault:
            raise CodecError(f"the {self.name} payload of {numel} values {fault}, which no encoder writes")

    def cut(self, payload: Tensor, numel: int, start: int, stop: int) -> Tensor:
        """Return the payload of ``values[start:stop]``, given ``payload``, the payload of ``numel`` values.

        It has the same bytes as ``encode(values[start:stop])``, and may share memory with ``payload``. So a range of
        values can be sent, validated, decoded and accumulated by itself, with the same bits as in the whole. ``start``
        and ``stop`` are multiples of `block_size`, or ``numel``.

        >>> from diloco.algorithm.codec.blockwise import Int8
        >>> codec, values = Int8(block_size=4), torch.arange(10.0)
        >>> torch.equal(codec.cut(codec.encode(values), 10, 4, 10), codec.encode(values[4:]))
        True
        """
        self._check_payload(payload, numel)
        between_blocks = start % self.block_size == 0 and (stop % self.block_size == 0 or stop == numel)
        if not (0 <= start <= stop <= numel and between_blocks):
            raise CodecError(
                f"{self.name} can't cut values {start} to {stop} out of {numel}; both must be multiples of its block "
                f"size, {self.block_size}, in ascending order, or {numel} as the end"
            )
        return self._cut(payload, numel, start, stop)

    @abc.abstractmethod
    def _encode(self, values: Tensor, payload: Tensor) -> None:
        """Write the payload of checked ``values``."""

    @abc.abstractmethod
    def _decode(self, payload: Tensor, out: Tensor) -> None:
        """Write the values of a checked ``payload`` of ``out.numel()`` values."""

    def _accumulate(self, payload: Tensor, out: Tensor, weight: float) -> None:
        """Add the weighted values of a checked ``payload``. This default cuts it into pieces and decodes them."""
        for start, stop in pieces(out.numel(), out.device, self.block_size):
            values = torch.empty_like(out[start:stop])
            self._decode(self._cut(payload, out.numel(), start, stop), values)
            out[start:stop].add_(values.mul_(weight))

    def _load_kernels(self, functions: Mapping[str, tuple[Any, ...]], implementation: str | None) -> None:
        """Load the compiled functions of this codec; see `native.load`."""
        self._kernels = native.load(self.name, functions, implementation)
        self.implementation = "native (C)" if self._kernels else "torch"

    def _kernel(self, name: str, tensor: Tensor) -> Callable[..., None] | None:
        """Return a compiled function if there is one, and the tensor is on the CPU."""
        return self._kernels[name] if self._kernels and tensor.device.type == "cpu" else None

    def _ranges(self, numel: int, device: torch.device) -> list[tuple[int, int]]:
        """Return ranges of whole blocks, as `pieces`, and then the last block if it is shorter."""
        whole = numel // self.block_size * self.block_size
        return [*pieces(whole, device, self.block_size), *([(whole, numel)] if whole < numel else [])]

    def _cut(self, payload: Tensor, numel: int, start: int, stop: int) -> Tensor:
        """Return the bytes of a checked ``payload`` for the whole blocks from value ``start`` to ``stop``.

        This default is for payloads in which the bytes of each block are contiguous.
        """
        return payload[self.payload_bytes(start) : self.payload_bytes(stop)]

    def _find_fault(self, payload: Tensor, numel: int) -> str | None:
        """Describe what makes a payload of the right size invalid, or return None. This default decodes it."""
        values = empty(numel, torch.float32, payload.device)
        self._decode(payload, values)
        return None if math.isfinite(largest_magnitude(values)) else "contains NaN or infinity"

    def _check_payload(self, payload: Tensor, numel: int) -> None:
        _check(f"the {self.name} payload of {numel} values", payload, self.payload_bytes(numel), torch.uint8)

    def _check_out(self, payload: Tensor, numel: int, out: Tensor) -> None:
        _check(f"what {self.name} decodes {numel} values to", out, numel, torch.float32)
        if out.device != payload.device:
            raise CodecError(f"{self.name} can't decode a payload on {payload.device} to a tensor on {out.device}")


def _check(what: str, tensor: Tensor, numel: int, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != (numel,) or not tensor.is_contiguous():
        layout = "contiguous" if tensor.is_contiguous() else "strided"
        raise CodecError(
            f"{what} must be a tensor of shape ({numel},) and type {dtype}, contiguous, got {tuple(tensor.shape)} and "
            f"{tensor.dtype}, {layout}"
        )


def pieces(numel: int, device: torch.device, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Divide ``numel`` values into ranges ``(start, stop)`` for torch operations.

    On the CPU a range and its scratch memory fit the cache; tensor-sized temporaries are 20 times slower. On other
    devices ranges are long, to launch few kernels. The length of every range but the last is a multiple of
    ``multiple``.
    """
    step = max(_piece_values(device) // multiple, 1) * multiple
    return ((start, min(start + step, numel)) for start in range(0, numel, step))


def in_pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of equal ranges, as `pieces` divides them, of tensors of the same ``(numel,)``."""
    step = _piece_values(tensors[0].device)
    return zip(*(torch.split(tensor, step) for tensor in tensors), strict=True)


def _piece_values(device: torch.device) -> int:
    return 1 << 18 if device.type == "cpu" else 1 << 24


def largest_magnitude(values: Tensor) -> float:
    """Return the largest ``|x|`` in ``values``, of any shape and float type; NaN if any value is NaN, 0 without values.

    It takes less than a tenth of the time of `torch.isfinite` or `torch.linalg.vector_norm`, and no scratch memory.

    >>> largest_magnitude(torch.tensor([1.0, -3.0])), largest_magnitude(torch.tensor([1.0, math.nan, math.inf]))
    (3.0, nan)
    """
    if not values.numel():
        return 0.0
    if _is_plain_float32(values) and (kernels := _float32_kernels()):
        largest = torch.empty((), dtype=torch.float32, device="cpu")
        kernels["largest"](values.data_ptr(), values.numel(), largest.data_ptr())
        return float(largest)
    least, greatest = torch.aminmax(values.detach())
    return float(torch.maximum(-least, greatest))  # propagates NaN, unlike `max`


def _is_plain_float32(values: Tensor) -> bool:
    """Return whether values are in host memory, one after the other."""
    plain = type(values) in (Tensor, torch.nn.Parameter) and values.is_cpu
    return plain and values.dtype == torch.float32 and values.is_contiguous()


@functools.cache
def _float32_kernels() -> Mapping[str, Callable[..., None]] | None:
    return native.load("float32", native.FLOAT32, None)


def whole_magnitudes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return magnitudes of ``(rows, columns)`` as int32 up to 2^20, and their unit, ``(rows, 1)``; all 0 below 2^-100.

    Sums of integers do not depend on the order of summation.
    """
    largest = rows.abs().amax(dim=1, keepdim=True)
    levels = torch.full_like(largest, 1 << 20)
    inverse = (levels / largest).masked_fill_(largest < 2.0**-100, 0.0)  # close to overflow
    return rows.abs().mul_(inverse).to(torch.int32), largest / levels


def divisor(number: float, values: Tensor) -> Tensor:
    """Return ``number`` as ``(1,)`` of the type and device of ``values``, which divides to equal bits on every device.

    CUDA multiplies by the rounded inverse of a Python number or of a ``()`` tensor on the CPU.

    >>> values = torch.tensor([1.0, 2.0])
    >>> values / divisor(3.0, values)
    tensor([0.3333, 0.6667])
    """
    return values.new_full((1,), number)


def make_codec(name: str, **parameters: Any) -> Codec:
    """Make the codec with a name of `CODECS`, or one of your own named as ``module:Class`` or ``file.py:Class``.

    ``parameters`` are those of the codec, such as ``block_size`` for int8 and fp4.

    Raises:
        ConfigurationError: if a name or value is invalid. The message gives the nearest known name or the valid values.

    >>> make_codec("fp4", block_size=64).payload_bytes(1000)
    516
    """
    codec: Codec = CODECS.make(name, parameters)
    return codec


def aligned(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as ``dtype``: a view if they lie at a multiple of its size, else, in a larger message, a copy."""
    if payload.storage_offset() % dtype.itemsize or payload.data_ptr() % dtype.itemsize:
        payload = payload.clone()
    return payload.view(dtype)


class _Cast(Codec):
    """A codec that rounds each value to ``wire_type`` (to nearest, half to even) and clamps it to the finite range."""

    wire_type: ClassVar[torch.dtype]
    carries_gradients = True

    def payload_bytes(self, numel: int) -> int:
        return numel * self.wire_type.itemsize

    def _encode(self, values: Tensor, payload: Tensor) -> None:
        numbers = payload.view(self.wire_type)
        for start, stop in pieces(values.numel(), values.device):
            numbers[start:stop].copy_(values[start:stop].clamp(-self.saturation_limit, self.saturation_limit))

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        out.copy_(aligned(payload, self.wire_type))

    def _find_fault(self, payload: Tensor, numel: int) -> str | None:
        numbers = aligned(payload, self.wire_type)
        if math.isfinite(largest_magnitude(numbers)):
            return None
        return f"contains NaN or infinity at value {int(torch.nonzero(~torch.isfinite(numbers))[0])}"


class Float32(_Cast):
    """Unchanged float32, 4 bytes per value. No error.

    ``implementation``: see `diloco.algorithm.codec.native.load`.

    >>> Float32().payload_bytes(10)
    40
    """

    name = "float32"
    wire_type = torch.float32
    exact = True

    def __init__(self, implementation: str | None = None) -> None:
        self._load_kernels(native.FLOAT32, implementation)

    def _encode(self, values: Tensor, payload: Tensor) -> None:
        payload.copy_(values.view(torch.uint8))

    def _accumulate(self, payload: Tensor, out: Tensor, weight: float) -> None:
        if kernel := self._kernel("accumulate", out):
            kernel(payload.data_ptr(), out.numel(), weight, out.data_ptr())
        else:
            super()._accumulate(payload, out, weight)


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


def encode_with_feedback(codec: Codec, values: Tensor, residual: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """Return the payload of ``values`` plus the residual, and the residual that follows if the mean takes the payload.

    With v the values, Q the codec (encoding followed by decoding), e the residual, starting at zero, and beta the
    ``decay``, it sends ``Q(v + beta e)``, and ``e <- (v + beta e) - Q(v + beta e)``, as SparseLoCo (2508.15706; beta =
    0.95). Values that are too small for the codec add up until they are sent. In contrast to SparseLoCo, the new e
    replaces the old one only if a mean takes the payload: if the round is void or excludes it, the next pseudo-gradient
    contains all of its work again.

    >>> codec, residual = make_codec("fp4", block_size=8), torch.zeros(2)
    >>> values = torch.tensor([1.0, 0.005])  # the second is 1/200 of the first: too small for fp4
    >>> for _ in range(3):
    ...     payload, residual = encode_with_feedback(codec, values, residual, 1.0)
    >>> codec.decode(payload, 2)
    tensor([1.0000, 0.0156])
    """
    error = torch.add(values, residual, alpha=decay)
    payload = codec.encode(error)
    codec.accumulate(payload, error, -1.0)
    return payload, error
