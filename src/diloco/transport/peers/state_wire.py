"""A state on the wire: what it consists of, and its tensors' bytes one after the other, cut into blocks. No pickle.

::

    outline   {"tensor": "torch.float32", "shape": [1000]}     one tensor
              {"tree": {name: outline, ...}}                   a dictionary; names in alphabetical order
              {"value": 5}                                     a number, a text, true, false or null
    bytes     of all tensors, in the outline's order, little-endian, without gaps
    blocks    XXH3 (64 bits) of each block of the bytes; how large a block is follows from their number
    digest    XXH3 (64 bits) of outline and blocks: one name for all of it

So every block can be checked by itself, and all of them together are what the digest names.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from diloco.errors import TransportError

__all__ = ["Description", "TensorBytes", "allocate", "block_bytes", "not_finite", "outline_of"]

MAX_DEPTH = 8
MAX_ENTRIES = 4096
MAX_NAME_CHARACTERS = 1000
MAX_STATE_BYTES = 1 << 40

_LEAST_BLOCK_BYTES = 1 << 16
_USUAL_BLOCK_BYTES = 1 << 22
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8)}


def block_bytes(size_bytes: int) -> int:
    """How large the blocks of that many bytes are: small enough to share them out, few enough to list them.

    >>> block_bytes(1_000_000), block_bytes(80_000_000), block_bytes(10**12)
    (65536, 2502656, 61038592)
    """
    wanted = max(min(size_bytes // 32, _USUAL_BLOCK_BYTES), -(-size_bytes >> 14), _LEAST_BLOCK_BYTES)
    return -(-wanted // 4096) * 4096


class TensorBytes:
    """The bytes of contiguous CPU tensors one after the other, without a copy.

    >>> values = TensorBytes([torch.tensor([1, 2, 3], dtype=torch.uint8), torch.tensor([4, 5], dtype=torch.uint8)])
    >>> values.size_bytes, values.read(2, 2)
    (5, b'\\x03\\x04')
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._parts = [_bytes_of(tensor) for tensor in tensors if tensor.numel()]
        self._starts = [0]
        for part in self._parts:
            self._starts.append(self._starts[-1] + len(part))

    @property
    def size_bytes(self) -> int:
        return self._starts[-1]

    def read(self, offset: int, size_bytes: int) -> bytes:
        """A copy of ``size_bytes`` bytes from ``offset`` on."""
        return b"".join(self._pieces(offset, size_bytes))

    def write(self, offset: int, data: bytes) -> None:
        """Put ``data`` at ``offset``."""
        written = 0
        for piece in self._pieces(offset, len(data)):
            piece[:] = data[written : written + len(piece)]
            written += len(piece)

    def checksums(self) -> Iterator[str]:
        """Of each block."""
        step = block_bytes(self.size_bytes)
        for start in range(0, self.size_bytes, step):
            checksum = xxhash.xxh3_64()
            for piece in self._pieces(start, min(step, self.size_bytes - start)):
                checksum.update(piece)
            yield checksum.hexdigest()

    def _pieces(self, offset: int, size_bytes: int) -> Iterator[memoryview]:
        end = offset + size_bytes
        if not 0 <= offset <= end <= self.size_bytes:
            raise ValueError(f"bytes {offset} to {end} of {self.size_bytes}")
        index = bisect.bisect_right(self._starts, offset) - 1
        while offset < end:
            part, start = self._parts[index], self._starts[index]
            upto = min(end, start + len(part))
            yield part[offset - start : upto - start]
            offset, index = upto, index + 1


@dataclass(frozen=True)
class Description:
    """What a donor says about a snapshot before it sends any of it.

    Attributes:
        outline: as in this module's head.
        size_bytes: of all tensors.
        blocks: XXH3 of each block, 16 hexadecimal digits.
        digest: names all of this.
    """

    outline: Mapping[str, Any]
    size_bytes: int
    blocks: tuple[str, ...]
    digest: str

    @classmethod
    def of(cls, outline: Mapping[str, Any], values: TensorBytes) -> Description:
        """Of a state that is at hand: reads all of its bytes once."""
        blocks = tuple(values.checksums())
        return cls(outline, values.size_bytes, blocks, _digest(outline, blocks))

    def to_message(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "outline": self.outline,
            "bytes": self.size_bytes,
            "blocks": list(self.blocks),
            "snapshot": self.digest,
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any], limit_bytes: int | None = None) -> Description:
        """What `to_message` gave, checked; nothing is allocated for it.

        Args:
            message: from the network.
            limit_bytes: a larger state is refused; None: `MAX_STATE_BYTES`.

        Raises:
            TransportError: for anything else.
        """
        limit_bytes = MAX_STATE_BYTES if limit_bytes is None else limit_bytes
        outline, blocks = message.get("outline"), message.get("blocks")
        size_bytes = _Measure(limit_bytes).of(outline, 0)
        if not isinstance(outline, Mapping) or "tree" not in outline:
            raise TransportError("it offers a state that is no dictionary")
        if message.get("bytes") != size_bytes:
            raise TransportError(
                f"it speaks of {str(message.get('bytes'))[:40]} bytes, and its outline of {size_bytes}"
            )
        count = -(-size_bytes // block_bytes(size_bytes))
        if not isinstance(blocks, list) or len(blocks) != count or not all(_is_checksum(each) for each in blocks):
            raise TransportError(f"it gives no checksums of the {count} blocks of {size_bytes} bytes")
        digest = _digest(outline, tuple(blocks))
        if message.get("snapshot") != digest:
            named = str(message.get("snapshot"))[:40]
            raise TransportError(f"it names its snapshot {named!r}, which by outline and checksums is {digest!r}")
        return cls(outline, size_bytes, tuple(blocks), digest)

    @property
    def finished_rounds(self) -> int | None:
        """Rounds that the donor is through with, if the state says so."""
        entry = self.outline["tree"].get("finished_rounds", {})
        value = entry.get("value")
        return value if type(value) is int else None


def outline_of(value: Any, tensors: list[Tensor], depth: int = 0) -> dict[str, Any]:
    """``value`` with every tensor replaced by its type and shape; contiguous CPU tensors are added in the order met.

    Raises:
        TransportError: if there is something in it that a receiver would not take.
    """
    if isinstance(value, Tensor):
        if str(value.dtype) not in _DTYPES:
            raise TransportError(f"a tensor of {value.dtype} can't be handed over; {', '.join(_DTYPES)} can")
        tensors.append(value.detach().to("cpu").contiguous())
        return {"tensor": str(value.dtype), "shape": list(value.shape)}
    if isinstance(value, Mapping):
        if depth == MAX_DEPTH or not all(isinstance(name, str) for name in value):
            raise TransportError(f"dictionaries with names of text, {MAX_DEPTH} deep at most, can be handed over")
        return {"tree": {name: outline_of(value[name], tensors, depth + 1) for name in sorted(value)}}
    if not _is_plain(value):
        raise TransportError(f"{str(value)[:80]!r} can't be handed over; tensors, finite numbers and text can")
    return {"value": value}


def allocate(outline: Mapping[str, Any], tensors: list[Tensor]) -> Any:
    """What `outline_of` has outlined, with room for the tensors, which are added in the order met.

    Raises:
        TransportError: if there is not enough memory.
    """
    if "tensor" in outline:
        try:
            tensors.append(torch.empty(outline["shape"], dtype=_DTYPES[outline["tensor"]]))
        except (RuntimeError, MemoryError) as error:
            raise TransportError(f"there is no memory for a tensor of shape {outline['shape']}: {error}") from error
        return tensors[-1]
    if "tree" in outline:
        return {name: allocate(inner, tensors) for name, inner in sorted(outline["tree"].items())}
    return outline["value"]


def not_finite(state: Mapping[str, Any], path: str = "") -> list[str]:
    """Names of the tensors in ``state`` that hold NaN or infinity.

    >>> not_finite({"slots": {"momentum": torch.tensor([1.0, float("nan")]), "none": torch.empty(0)}})
    ['slots.momentum']
    """
    bad: list[str] = []
    for name, value in state.items():
        if isinstance(value, Mapping):
            bad += not_finite(value, f"{path}{name}.")
        elif isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            largest = float(torch.linalg.vector_norm(value, math.inf))  # of NaN it is NaN; and no room is needed
            if not math.isfinite(largest):
                bad.append(path + name)
    return bad


class _Measure:
    """Sums up an outline from the network, and stops where it is too much."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self.entries = 0

    def of(self, outline: Any, depth: int) -> int:
        self.entries += 1
        if self.entries > MAX_ENTRIES or depth > MAX_DEPTH:
            raise TransportError(f"its outline is beyond {MAX_ENTRIES} entries or {MAX_DEPTH} levels")
        keys = set(outline) if isinstance(outline, Mapping) else set()
        if keys == {"tensor", "shape"}:
            self._add(outline["tensor"], outline["shape"])
        elif keys == {"tree"} and isinstance(outline["tree"], Mapping):
            for name, inner in outline["tree"].items():
                if not isinstance(name, str) or len(name) > MAX_NAME_CHARACTERS:
                    raise TransportError(f"its outline has a name that is none: {str(name)[:40]!r}")
                self.of(inner, depth + 1)
        elif keys != {"value"} or not _is_plain(outline["value"]):
            raise TransportError(f"its outline is malformed at {str(outline)[:80]!r}")
        return self.size_bytes

    def _add(self, dtype: Any, shape: Any) -> None:
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise TransportError(f"it offers a tensor of {str(dtype)[:40]!r}; {', '.join(_DTYPES)} are taken")
        fine = isinstance(shape, list) and len(shape) <= MAX_DEPTH and all(type(size) is int for size in shape)
        if not fine or any(size < 0 for size in shape):
            raise TransportError(f"it offers a tensor of the shape {str(shape)[:80]!r}")
        room = _DTYPES[dtype].itemsize * math.prod(max(size, 1) for size in shape)
        if room > MAX_STATE_BYTES:  # a size of 0 hides no other one
            raise TransportError(f"it offers a tensor of the shape {str(shape)[:80]}")
        self.size_bytes += 0 if 0 in shape else room
        if self.size_bytes > self.limit_bytes:
            raise TransportError(
                f"it offers a state of {self.size_bytes} bytes or more, and at most {self.limit_bytes} are expected"
            )


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def _digest(outline: Mapping[str, Any], blocks: Sequence[str]) -> str:
    text = json.dumps([outline, list(blocks)], sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())


def _is_checksum(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 16 and value.isascii()


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return abs(value) < 1 << 63
    return value is None or (isinstance(value, str) and len(value) <= 1 << 16)
