"""The topk2 codec, which keeps the 64 largest of each 4096 values in two bits each, 0.227 bits per value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from diloco.algorithm.codec import native
from diloco.algorithm.codec.base import LARGEST_BFLOAT16, Codec, whole_magnitudes

_TILE = 4096
_KEPT = 64
_SPREAD = _TILE // _KEPT


class TopK2(Codec):
    """A sparse codec that keeps the 64 largest values of each 4096 (a tile), as position, sign and one of two levels.

    It follows SparseLoCo (2508.15706), whose tiles are 64 x 64 parts of a matrix and whose two bits index a table for
    each tensor. Here each tile has its own two levels, so that a payload can be cut between tiles. With m the mean
    magnitude of the kept values::

        low  = mean of the kept magnitudes up to m        high = mean of those above it        (bfloat16)
        decode: +-low or +-high at the kept positions, 0 elsewhere

    Means are taken over the integers ``floor(2^20 |x| / max|x|)``, so that they do not depend on the order of
    summation. Of equal magnitudes the one at the lower position is kept first. The codec drops 98 % of the values, so
    use error feedback (0.95, as in the paper).

    The record of a tile contains ``low, high`` in two bytes each, then the ascending positions in 12 bits each, then
    the codes ``sign * 2 + is_high`` in 2 bits each. Positions and codes are packed from the low bits up. A last tile of
    n values keeps ``ceil(n / 64)``.

    Size: 116 bytes for 4096 values, 0.227 bits per value.

    Error: a dropped value decodes to 0 and is at most as large as the smallest kept value of its tile. A kept value
    decodes to a magnitude between the smallest and the largest kept one, up to rounding to bfloat16 (2^-8 of it) and of
    the means (2^-19 of the largest). A tile whose largest magnitude is below ``2^-100`` decodes to zeros. Saturates at
    the largest bfloat16.

    >>> codec, values = TopK2(), torch.zeros(256)
    >>> values[[3, 77, 100, 200]] = torch.tensor([1.0, -1.0, 3.0, 0.5])
    >>> codec.decode(codec.encode(values), 256)[[3, 77, 100, 200]]
    tensor([ 0.8320, -0.8320,  3.0000,  0.8320])
    >>> codec.payload_bytes(1 << 20) * 8 / (1 << 20)
    0.2265625
    """

    name = "topk2"
    saturation_limit = LARGEST_BFLOAT16
    block_size = _TILE
    needs_error_feedback = True
    left_out = "98 % of the values"
    usual_error_feedback = 0.95

    def __init__(self, *, implementation: Literal["torch", "native"] | None = None) -> None:
        self._load_kernels(native.SPARSE, implementation)

    def payload_bytes(self, numel: int) -> int:
        whole, rest = divmod(numel, _TILE)
        return whole * _record_bytes(_TILE) + (_record_bytes(rest) if rest else 0)

    def _encode(self, values: Tensor, payload: Tensor) -> None:
        if kernel := self._kernel("encode", values):
            kernel(values.data_ptr(), values.numel(), payload.data_ptr())
            return
        for tiles, records in self._tile_ranges(payload, values.numel()):
            _encode_tiles(values[tiles].view(len(records), -1), records)

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        out.zero_()
        self._accumulate(payload, out, 1.0)

    def _accumulate(self, payload: Tensor, out: Tensor, weight: float) -> None:
        if kernel := self._kernel("accumulate", out):
            kernel(payload.data_ptr(), out.numel(), weight, out.data_ptr())
            return
        for tiles, records in self._tile_ranges(payload, out.numel()):
            rows = out[tiles].view(len(records), -1)
            levels, positions, codes = _unpack(records, rows.shape[1])
            values = levels.to(torch.float32).gather(1, codes & 1)
            values = torch.where(codes < 2, values, -values).mul_(weight)
            rows.scatter_(1, positions, rows.gather(1, positions).add_(values))

    def _find_fault(self, payload: Tensor, numel: int) -> str | None:
        for tiles, records in self._tile_ranges(payload, numel):
            columns = (tiles.stop - tiles.start) // len(records)
            levels, positions, codes = _unpack(records, columns)
            low, high = levels.unbind(1)
            good = (low >= 0) & (low <= high) & (high <= LARGEST_BFLOAT16)  # false for NaN
            good &= (positions < columns).all(1) & (positions.diff(dim=1) > 0).all(1)
            good &= (_packed(levels, positions, codes) == records).all(1)  # unused bits must be zero
            if not bool(good.all()):
                tile = tiles.start // _TILE + int(torch.nonzero(~good)[0])
                return f"has levels or positions out of order or out of range in tile {tile}"
        return None

    def _tile_ranges(self, payload: Tensor, numel: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield ``(slice of tiles of equal length, their (tiles, bytes) records)``, a shorter last tile separately."""
        for start, stop in self._ranges(numel, payload.device):
            records = payload[self.payload_bytes(start) : self.payload_bytes(stop)]
            yield slice(start, stop), records.view(-(-(stop - start) // _TILE), -1)


def _kept(columns: int) -> int:
    """Return the number of values kept of a tile of ``columns`` values."""
    return -(-columns // _SPREAD)


def _record_bytes(columns: int) -> int:
    kept = _kept(columns)
    return 4 + -(-12 * kept // 8) + -(-2 * kept // 8)


def _encode_tiles(values: Tensor, records: Tensor) -> None:
    """Write the records of some tiles.

    Args:
        values: ``(tiles, columns)`` float32.
        records: ``(tiles, bytes)`` uint8.
    """
    columns = values.shape[1]
    kept = _kept(columns)
    magnitudes = values.view(torch.int32).bitwise_and(0x7FFFFFFF).to(torch.int64)
    backwards = torch.arange(columns - 1, -1, -1, dtype=torch.int64, device=values.device)
    positions = (magnitudes << 12 | backwards).topk(kept, dim=1, sorted=False).indices.sort(dim=1).values
    chosen = values.gather(1, positions)
    sizes, unit = whole_magnitudes(chosen)
    high = sizes * kept > sizes.sum(dim=1, keepdim=True)
    levels = torch.cat([_mean(sizes, ~high) * unit, _mean(sizes, high) * unit], dim=1)
    levels[:, 1:] = torch.maximum(levels[:, :1], levels[:, 1:])  # for tiles in which no value is above the mean
    codes = (chosen < 0).to(torch.int64) << 1 | high
    records.copy_(_packed(levels.clamp_(max=LARGEST_BFLOAT16).to(torch.bfloat16), positions, codes))


def _mean(sizes: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean of the chosen sizes of each tile, ``(tiles, 1)`` float32; 0 if none is chosen."""
    total = (sizes * chosen).sum(dim=1, keepdim=True).to(torch.float32)
    return total / chosen.sum(dim=1, keepdim=True).clamp_(min=1).to(torch.float32)


def _packed(levels: Tensor, positions: Tensor, codes: Tensor) -> Tensor:
    """Pack ``(tiles, 2)`` bfloat16 levels and ``(tiles, kept)`` positions and codes to ``(tiles, bytes)`` uint8."""
    kept = positions.shape[1]
    first, second = torch.nn.functional.pad(positions, (0, kept % 2)).view(len(positions), -1, 2).unbind(2)
    both = first | second << 12
    packed = torch.stack([both & 255, both >> 8 & 255, both >> 16], dim=2).flatten(1)[:, : -(-12 * kept // 8)]
    four = torch.nn.functional.pad(codes, (0, -kept % 4)).view(len(codes), -1, 4)
    quarters = (four << torch.arange(0, 8, 2, dtype=torch.int64, device=codes.device)).sum(dim=2)
    parts = [levels.contiguous().view(torch.uint8), packed.to(torch.uint8), quarters.to(torch.uint8)]
    return torch.cat(parts, dim=1)


def _unpack(records: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Unpack records to ``(tiles, 2)`` bfloat16 levels and ``(tiles, kept)`` int64 positions and codes."""
    kept = _kept(columns)
    levels = records[:, :4].flatten().clone().view(torch.bfloat16).view(-1, 2)
    packed = records[:, 4 : 4 + -(-12 * kept // 8)].to(torch.int64)
    one, two, three = torch.nn.functional.pad(packed, (0, -packed.shape[1] % 3)).view(len(records), -1, 3).unbind(2)
    positions = torch.stack([one | (two & 15) << 8, two >> 4 | three << 4], dim=2).flatten(1)[:, :kept]
    quarters = records[:, 4 + packed.shape[1] :].to(torch.int64)
    shifts = torch.arange(0, 8, 2, dtype=torch.int64, device=records.device)
    return levels, positions, (quarters.unsqueeze(2) >> shifts & 3).flatten(1)[:, :kept]
