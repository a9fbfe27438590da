"""The base class of block-wise codecs: a payload of scales and codes, computed by C kernels or torch operations.

A block is ``block_size`` consecutive values; the last one may be shorter. The payload contains the scales of all
blocks, then the codes of all blocks. The compiled kernels, if available, process CPU tensors in one pass. All other
tensors are processed by torch operations, range by range, with scratch memory for one call. Both give the same bits.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from diloco.algorithm.codec import native
from diloco.algorithm.codec.base import Codec, pieces
from diloco.algorithm.memory import empty
from diloco.errors import ConfigurationError

__all__ = ["BlockwiseCodec"]

_LARGEST_BLOCK = 65536


@dataclass(frozen=True)
class _BlockRange:
    """Consecutive blocks of equal length: values ``start`` to ``stop``, as rows of ``columns`` values.

    Only a short last block may have ``columns`` beyond ``stop``, which fill its last byte.
    """

    start: int
    stop: int
    columns: int
    scales: Tensor
    codes: Tensor

    @property
    def padding(self) -> int:
        return len(self.scales) * self.columns - (self.stop - self.start)


class BlockwiseCodec(Codec):
    """A codec with a scale for each block of values and a few bits for each value.

    Args:
        block_size: The number of values that share a scale: even, 2 to 65536.
        implementation: ``"torch"`` or ``"native"``, for CPU tensors. Default: native if it was built.

    Raises:
        ConfigurationError: if the block size is invalid, or ``"native"`` was given but is not available.
    """

    scale_type: ClassVar[torch.dtype]
    codes_per_byte: ClassVar[int]

    def __init__(self, block_size: int = 256, *, implementation: Literal["torch", "native"] | None = None) -> None:
        if isinstance(block_size, bool) or not isinstance(block_size, int):
            raise ConfigurationError(f"{self.name}: block_size must be a whole number, got {block_size!r}.")
        if not 2 <= block_size <= _LARGEST_BLOCK or block_size % 2:
            raise ConfigurationError(
                f"{self.name}: block_size must be an even number from 2 to {_LARGEST_BLOCK}, got {block_size}."
            )
        self.block_size = block_size
        self._kernels = native.load(self.name, native.BLOCKWISE, implementation)
        self.implementation = "native (C)" if self._kernels else "torch"

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
        if self._kernels and values.device.type == "cpu":
            scales, codes = self._addresses(payload, values.numel())
            self._kernels["encode"](values.data_ptr(), values.numel(), self.block_size, scales, codes)
            return
        scratch = self._scratch(values, rows=2).view(2, -1)
        for blocks in self._block_ranges(payload, values.numel()):
            rows = values[blocks.start : blocks.stop]
            if blocks.padding:
                rows = torch.nn.functional.pad(rows, (0, blocks.padding))
            self._encode_blocks(rows.view(-1, blocks.columns), blocks.scales, blocks.codes, scratch)

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        if self._kernels and out.device.type == "cpu":
            addresses = self._addresses(payload, out.numel())
            self._kernels["decode"](*addresses, out.numel(), self.block_size, out.data_ptr())
            return
        scratch = self._scratch(out)
        for blocks in self._block_ranges(payload, out.numel()):
            out[blocks.start : blocks.stop].copy_(self._decoded(blocks, scratch))

    def _accumulate(self, payload: Tensor, out: Tensor, weight: float) -> None:
        if self._kernels and out.device.type == "cpu":
            addresses = self._addresses(payload, out.numel())
            self._kernels["accumulate"](*addresses, out.numel(), self.block_size, weight, out.data_ptr())
            return
        scratch = self._scratch(out)
        for blocks in self._block_ranges(payload, out.numel()):
            out[blocks.start : blocks.stop].add_(self._decoded(blocks, scratch).mul_(weight))

    def _cut(self, payload: Tensor, numel: int, start: int, stop: int) -> Tensor:
        codes = payload[self._scale_bytes(numel) :]
        parts = (
            payload[self._scale_bytes(start) : self._scale_bytes(stop)],
            codes[start // self.codes_per_byte : -(-stop // self.codes_per_byte)],
        )
        return torch.cat(parts, out=empty(self.payload_bytes(stop - start), torch.uint8, payload.device))

    def _decoded(self, blocks: _BlockRange, scratch: Tensor) -> Tensor:
        """Decode blocks into ``scratch`` and return its values."""
        shape = len(blocks.scales), blocks.columns
        rows = scratch[: shape[0] * shape[1]].view(torch.float32).view(shape)
        self._decode_blocks(blocks.scales, blocks.codes, rows)
        return rows.view(-1)[: blocks.stop - blocks.start]

    def _scratch(self, like: Tensor, rows: int = 1) -> Tensor:
        """Return ``(rows * n,)`` int32, where n is large enough for any `_BlockRange` of ``like``."""
        longest = next(pieces(like.numel(), like.device, self.block_size), (0, 0))[1]
        # the codes of a short last block fill its last byte
        return torch.empty(rows * (longest + -longest % self.codes_per_byte), dtype=torch.int32, device=like.device)

    def _block_ranges(self, payload: Tensor, numel: int) -> Iterator[_BlockRange]:
        """Yield the whole blocks, piece by piece, then the short last block."""
        scales, codes = self._scales(payload, numel), payload[self._scale_bytes(numel) :]
        size, per_byte = self.block_size, self.codes_per_byte
        whole = numel // size * size
        for start, stop in pieces(whole, payload.device, size):
            yield _BlockRange(
                start,
                stop,
                size,
                scales[start // size : stop // size],
                codes[start // per_byte : stop // per_byte].view(-1, size // per_byte),
            )
        if whole < numel:
            last = codes[whole // per_byte :].view(1, -1)
            yield _BlockRange(whole, numel, last.shape[1] * per_byte, scales[-1:], last)

    def _scales(self, payload: Tensor, numel: int) -> Tensor:
        """Return the scales, ``(num_blocks,)`` of ``scale_type``: a view of the payload if it is aligned."""
        scales, size = payload[: self._scale_bytes(numel)], self.scale_type.itemsize
        if scales.storage_offset() % size or scales.data_ptr() % size:
            scales = scales.clone()
        return scales.view(self.scale_type)

    @abc.abstractmethod
    def _encode_blocks(self, values: Tensor, scales: Tensor, codes: Tensor, scratch: Tensor) -> None:
        """Write the scales and codes of some blocks.

        Args:
            values: ``(blocks, columns)`` float32, left unchanged. Zeros fill the last byte of a short last block.
            scales: ``(blocks,)`` of ``scale_type``.
            codes: ``(blocks, columns / codes_per_byte)`` uint8.
            scratch: ``(2, at least blocks * columns)`` int32.
        """

    @abc.abstractmethod
    def _decode_blocks(self, scales: Tensor, codes: Tensor, out: Tensor) -> None:
        """Write the values of some blocks.

        Args:
            scales: ``(blocks,)`` of ``scale_type``.
            codes: ``(blocks, columns / codes_per_byte)`` uint8.
            out: ``(blocks, columns)`` float32.
        """
