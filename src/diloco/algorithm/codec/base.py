"""What every codec promises, and the table of codecs by name."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from diloco.algorithm.memory import empty
from diloco.errors import CodecError, ConfigurationError, nearest

__all__ = ["Codec", "codec_class", "codec_names", "largest_magnitude", "pieces", "register"]


class Codec(abc.ABC):
    """Turns float32 values into bytes and back, deterministically and alike on every replica and device.

    What a codec decodes is always finite, for every payload that it encoded and every payload that `validate` lets
    pass. Values that are NaN or infinite give an undefined payload: check them before. Sign, rounding and error bounds
    are stated by each codec. Bytes are little-endian.

    Attributes:
        name: what it is registered as; a class attribute of registered codecs.
        implementation: what runs on CPU tensors, ``"torch"`` or ``"native (C)"``; the bytes are the same. On other
            devices it is always torch.
        saturation_limit: the largest magnitude that is taken without clamping; ``math.inf`` if every finite float32 is.
        block_size: values that are encoded together; 1 where each is on its own. A payload can be cut between blocks.
        exact: whether a payload is the bytes of the float32 values themselves, so that nothing is lost.
    """

    name: str
    implementation: str = "torch"
    saturation_limit: float = math.inf
    block_size: int = 1
    exact: bool = False

    def parameters(self) -> Mapping[str, int]:
        """What replicas must agree on beside the name, e.g. ``{"block_size": 256}``."""
        return {}

    @abc.abstractmethod
    def payload_bytes(self, numel: int) -> int:
        """Exact size of the payload of ``numel`` values, scales included."""

    def encode(self, values: Tensor) -> Tensor:
        """The payload of ``values``, which are left as they are.

        Args:
            values: ``(numel,)`` float32, contiguous, finite.

        Returns:
            ``(payload_bytes(numel),)`` uint8 on the same device, sharing no memory with ``values``.

        Raises:
            CodecError: if ``values`` is of another shape, type or layout. Nothing was encoded.
        """
        _check_floats(f"{self.name} cannot encode", values)
        with torch.no_grad():
            payload = empty(self.payload_bytes(values.numel()), torch.uint8, values.device)
            self._encode(values, payload)
        return payload

    def decode(self, payload: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        """The values behind ``payload``.

        Args:
            payload: ``(payload_bytes(numel),)`` uint8, contiguous.
            numel: how many values.
            out: ``(numel,)`` float32, contiguous, to write them to; by default a new tensor on the payload's device.

        Returns:
            ``(numel,)`` float32: ``out`` where it was given.

        Raises:
            CodecError: if a tensor is of another shape, type, layout or device. Nothing was written.
        """
        self._check_payload(payload, numel)
        if out is None:
            out = empty(numel, torch.float32, payload.device)
        self._check_out(payload, numel, out)
        with torch.no_grad():
            self._decode(payload, out)
        return out

    def accumulate(self, payload: Tensor, out: Tensor, weight: float = 1.0) -> None:
        """``out += weight * decode(payload)``: two float32 roundings, never fused, and no tensor-sized temporary.

        Args:
            payload: ``(payload_bytes(out.numel()),)`` uint8, contiguous.
            out: ``(numel,)`` float32, contiguous, on the payload's device.
            weight: taken as a float32.

        Raises:
            CodecError: if a tensor is of another shape, type, layout or device. Nothing was added.
        """
        self._check_payload(payload, out.numel())
        self._check_out(payload, out.numel(), out)
        with torch.no_grad():
            self._accumulate(payload, out, weight)

    def validate(self, payload: Tensor, numel: int) -> None:
        """Check a payload that came from elsewhere: afterwards it decodes to finite values.

        Raises:
            CodecError: if the payload has the wrong length or type, or holds what no encoder writes.
        """
        self._check_payload(payload, numel)
        fault = self._find_fault(payload, numel)
        if fault:
            raise CodecError(f"{self.name} payload of {numel} values {fault}; no encoder writes that. It was refused.")

    def cut(self, payload: Tensor, numel: int, start: int, stop: int) -> Tensor:
        """The payload of ``values[start:stop]`` alone: where ``payload`` is ``encode(values)``, the same bytes as
        ``encode(values[start:stop])``.

        So a stretch can travel, be validated, decoded and accumulated on its own, with the same bits as in the whole.

        Args:
            payload: ``(payload_bytes(numel),)`` uint8, contiguous.
            numel: values behind ``payload``.
            start: first value; a multiple of `block_size`.
            stop: the value after the last; a multiple of `block_size`, or ``numel``.

        Returns:
            ``(payload_bytes(stop - start),)`` uint8, contiguous; may share memory with ``payload``.

        Raises:
            CodecError: if the payload has the wrong length or type, or no block ends at ``start`` or ``stop``. Nothing
                was cut.

        >>> from diloco.algorithm.codec import Int8
        >>> codec, values = Int8(block_size=4), torch.arange(10.0)
        >>> torch.equal(codec.cut(codec.encode(values), 10, 4, 10), codec.encode(values[4:]))
        True
        """
        self._check_payload(payload, numel)
        between_blocks = start % self.block_size == 0 and (stop % self.block_size == 0 or stop == numel)
        if not (0 <= start <= stop <= numel and between_blocks):
            raise CodecError(
                f"{self.name} cannot cut values {start} to {stop} out of {numel}; both must be multiples of its block "
                f"size, {self.block_size}, in ascending order, or {numel} as the end. Nothing was cut."
            )
        return self._cut(payload, numel, start, stop)

    @abc.abstractmethod
    def _encode(self, values: Tensor, payload: Tensor) -> None:
        """Write the payload of checked ``values``."""

    @abc.abstractmethod
    def _decode(self, payload: Tensor, out: Tensor) -> None:
        """Write the values of a checked ``payload`` of ``out.numel()`` values."""

    def _accumulate(self, payload: Tensor, out: Tensor, weight: float) -> None:
        """Add the weighted values of a checked ``payload``; here by way of a tensor as long as ``out``."""
        values = torch.empty_like(out)
        self._decode(payload, values)
        out.add_(values.mul_(weight))

    def _cut(self, payload: Tensor, numel: int, start: int, stop: int) -> Tensor:
        """The bytes of a checked ``payload`` that belong to values ``start`` to ``stop``, which are whole blocks; here
        of a payload in which the bytes of one block follow those of another."""
        return payload[self.payload_bytes(start) : self.payload_bytes(stop)]

    def _find_fault(self, payload: Tensor, numel: int) -> str | None:
        """What in a payload of the right size would not decode to finite values; here by decoding it."""
        values = torch.empty(numel, dtype=torch.float32, device=payload.device)
        self._decode(payload, values)
        return None if math.isfinite(largest_magnitude(values)) else "holds NaN or infinity"

    def _check_payload(self, payload: Tensor, numel: int) -> None:
        expected = self.payload_bytes(numel)
        if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.numel() != expected:
            raise CodecError(
                f"{self.name} was given a payload of shape {tuple(payload.shape)} and type {payload.dtype} for {numel} "
                f"values; it must be ({expected},) torch.uint8. It was refused."
            )
        if not payload.is_contiguous():
            raise CodecError(f"{self.name} was given a strided payload; it must be contiguous. It was refused.")

    def _check_out(self, payload: Tensor, numel: int, out: Tensor) -> None:
        _check_floats(f"{self.name} cannot decode to", out)
        if out.numel() != numel or out.device != payload.device:
            raise CodecError(
                f"{self.name} cannot decode {numel} values on {payload.device} to {out.numel()} on {out.device}; "
                "both must have the same number on the same device. Nothing was written."
            )


def _check_floats(what: str, values: Tensor) -> None:
    if values.dtype != torch.float32 or values.dim() != 1 or not values.is_contiguous():
        layout = "contiguous" if values.is_contiguous() else "strided"
        raise CodecError(
            f"{what} a {layout} tensor of shape {tuple(values.shape)} and type {values.dtype}; "
            "it must be contiguous, of shape (numel,) and type torch.float32. Nothing was done."
        )


def pieces(numel: int, device: torch.device, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """``(start, stop)`` of the stretches in which torch operations go through ``numel`` values.

    On the CPU a stretch and its scratch stay in the cache (temporaries as long as the tensor are 20 times slower); on
    other devices stretches are long, to launch few kernels. Every stretch but the last is a multiple of ``multiple``.
    """
    step = 1 << 18 if device.type == "cpu" else 1 << 24
    step = max(step // multiple, 1) * multiple
    return ((start, min(start + step, numel)) for start in range(0, numel, step))


def largest_magnitude(values: Tensor) -> float:
    """The largest ``|x|`` in ``values``, of any shape and float type; NaN if one of them is NaN, 0 if there are none.

    It takes a tenth of the time of `torch.isfinite` of every value, and an eighth of that of `torch.linalg.vector_norm`
    (25M values in one thread: 22 ms against 230 and 155 ms), and needs no room.

    >>> largest_magnitude(torch.tensor([1.0, -3.0])), largest_magnitude(torch.tensor([1.0, math.nan, math.inf]))
    (3.0, nan)
    """
    if not values.numel():
        return 0.0
    least, greatest = torch.aminmax(values.detach())
    return float(torch.maximum(-least, greatest))  # which passes NaN on, as `max` may not


_REGISTRY: dict[str, type[Codec]] = {}

CodecClass = TypeVar("CodecClass", bound=type[Codec])


def register(codec: CodecClass) -> CodecClass:
    """Make a codec known by its ``name``; usable as a class decorator.

    A class that is defined anew, as when a cell of a notebook is run again, takes the place of the old one.

    Raises:
        ConfigurationError: if another class has that name already. Nothing was changed.
    """
    known = _REGISTRY.get(codec.name, codec)
    again = known.__qualname__ == codec.__qualname__ and not known.__module__.startswith("diloco.")
    if known is not codec and not again:
        raise ConfigurationError(
            f"the codec name {codec.name!r} belongs to {known.__qualname__} already. "
            f"{codec.__qualname__} was not registered; give it another name."
        )
    _REGISTRY[codec.name] = codec
    return codec


def codec_names() -> tuple[str, ...]:
    """Names of all registered codecs, in the order they were registered."""
    return tuple(_REGISTRY)


def codec_class(name: str) -> type[Codec]:
    """The class registered as ``name``; for an unknown one a `ConfigurationError` names the nearest."""
    if name not in _REGISTRY:
        raise ConfigurationError(f"there is no codec {name!r}; {nearest(name, _REGISTRY)}")
    return _REGISTRY[name]
