"""A state on the wire: its skeleton, and its tensors' bytes one after the other, cut into blocks. No pickle.

::

    skeleton  as of `diloco.state_tree`, with nothing in it but dictionaries, tensors, numbers, texts and null
    tensors   {name: ["torch.float32", [1000]], ...}           dtype and shape of each
    bytes     of all tensors, in alphabetical order of their names, little-endian, without gaps
    blocks    XXH3 (64 bits) of each block of the bytes; the size of a block follows from the number of bytes
    digest    XXH3 (64 bits) of skeleton, tensors and blocks: one name for all of it

Every block can be checked by itself, and together they are what the digest names.
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

from diloco.algorithm.codec.base import largest_magnitude
from diloco.errors import CheckpointError, TransportError
from diloco.state_tree import JSON, flatten, unflatten

__all__ = ["Description", "TensorBytes", "block_bytes", "describe", "not_finite"]

MAX_DEPTH = 8
MAX_ENTRIES = 4096
MAX_NAME_CHARACTERS = 1000
MAX_STATE_BYTES = 1 << 40

_LEAST_BLOCK_BYTES = 1 << 16
_USUAL_BLOCK_BYTES = 1 << 22
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8)}


def block_bytes(size_bytes: int) -> int:
    """The size of a block of that many bytes: small enough to divide among donors, large enough to list all of them.

    >>> block_bytes(1_000_000), block_bytes(80_000_000), block_bytes(10**12)
    (65536, 2502656, 61038592)
    """
    wanted = max(min(size_bytes // 32, _USUAL_BLOCK_BYTES), -(-size_bytes >> 14), _LEAST_BLOCK_BYTES)
    return -(-wanted // 4096) * 4096


class TensorBytes:
    """The bytes of contiguous CPU tensors, one after the other, without a copy.

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
    """What a donor says about a snapshot before it sends any of it."""

    skeleton: JSON  # of `diloco.state_tree.flatten`
    tensors: Mapping[str, list[Any]]  # name -> dtype and shape, in alphabetical order
    size_bytes: int  # of all tensors
    blocks: tuple[str, ...]  # XXH3 of each block, 16 hexadecimal digits
    digest: str  # names all of this

    def to_message(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "skeleton": self.skeleton,
            "tensors": self.tensors,
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
        skeleton, blocks = message.get("skeleton"), message.get("blocks")
        tensors: Any = message.get("tensors")
        size_bytes = _checked_size_bytes(skeleton, tensors, MAX_STATE_BYTES if limit_bytes is None else limit_bytes)
        if message.get("bytes") != size_bytes:
            raise TransportError(
                f"it speaks of {str(message.get('bytes'))[:40]} bytes, and its tensors have {size_bytes}"
            )
        count = -(-size_bytes // block_bytes(size_bytes))
        if not isinstance(blocks, list) or len(blocks) != count or not all(_is_checksum(each) for each in blocks):
            raise TransportError(f"it gives no checksums of the {count} blocks of {size_bytes} bytes")
        digest = _digest(skeleton, tensors, blocks)
        if message.get("snapshot") != digest:
            named = str(message.get("snapshot"))[:40]
            raise TransportError(f"it names its snapshot {named!r}, but content and checksums give {digest!r}")
        return cls(skeleton, dict(sorted(tensors.items())), size_bytes, tuple(blocks), digest)

    @property
    def finished_rounds(self) -> int | None:
        """Rounds that the donor is through with, if the state says so."""
        match self.skeleton:
            case {"dict": {"finished_rounds": value}} if type(value) is int:
                return value
        return None

    def allocate(self) -> tuple[dict[str, Any], TensorBytes]:
        """A state like the one described, with room for its tensors, and the bytes of that room.

        Raises:
            TransportError: if there is not enough memory.
        """
        try:
            tensors = {name: torch.empty(shape, dtype=_DTYPES[dtype]) for name, (dtype, shape) in self.tensors.items()}
        except (RuntimeError, MemoryError) as error:
            raise TransportError(f"there is no memory for a state of {self.size_bytes} bytes: {error}") from error
        return unflatten(self.skeleton, tensors), TensorBytes(list(tensors.values()))


def describe(state: Mapping[str, Any]) -> tuple[Description, TensorBytes]:
    """The description and the bytes of a state at hand, whose tensors must not change meanwhile.

    Raises:
        TransportError: if there is something in it that a receiver would not take.
    """
    try:
        skeleton, found = flatten(state)
        held = {name: found[name].cpu().contiguous() for name in sorted(found)}
        tensors = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in held.items()}
        size_bytes = _checked_size_bytes(skeleton, tensors, MAX_STATE_BYTES)
    except (CheckpointError, TransportError) as error:
        raise TransportError(f"its state can't be handed over: {error}") from error
    values = TensorBytes(list(held.values()))
    blocks = tuple(values.checksums())
    return Description(skeleton, tensors, size_bytes, blocks, _digest(skeleton, tensors, blocks)), values


def not_finite(state: Mapping[str, Any], path: str = "") -> list[str]:
    """Names of the tensors in ``state`` that hold NaN or infinity.

    >>> not_finite({"slots": {"momentum": torch.tensor([1.0, float("nan")]), "none": torch.empty(0)}})
    ['slots.momentum']
    """
    bad: list[str] = []
    for name, value in state.items():
        if isinstance(value, Mapping):
            bad += not_finite(value, f"{path}{name}.")
        elif isinstance(value, Tensor) and value.is_floating_point() and not math.isfinite(largest_magnitude(value)):
            bad.append(path + name)
    return bad


def _checked_size_bytes(skeleton: Any, tensors: Any, limit_bytes: int) -> int:
    """The size of a state from the network.

    Raises:
        TransportError: if it is malformed or too large.
    """
    names = _tensor_names(skeleton)
    if not isinstance(tensors, dict) or len(names) != len(tensors) or set(names) != set(tensors):
        raise TransportError("it offers a state that is malformed: it must use each of its tensors once")
    size_bytes = 0
    for entry in tensors.values():
        if not isinstance(entry, list) or len(entry) != 2:
            raise TransportError(f"it offers a state that is malformed at {str(entry)[:80]!r}")
        dtype, shape = entry
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise TransportError(f"it offers a tensor of {str(dtype)[:40]!r}; {', '.join(_DTYPES)} are taken")
        fine = isinstance(shape, list) and len(shape) <= MAX_DEPTH and all(type(size) is int for size in shape)
        if not fine or any(size < 0 for size in shape):
            raise TransportError(f"it offers a tensor of the shape {str(shape)[:80]!r}")
        room = _DTYPES[dtype].itemsize * math.prod(max(size, 1) for size in shape)
        if room > MAX_STATE_BYTES:  # a size of 0 must not hide another one
            raise TransportError(f"it offers a tensor of the shape {str(shape)[:80]}")
        size_bytes += 0 if 0 in shape else room
        if size_bytes > limit_bytes:
            raise TransportError(
                f"it offers a state of {size_bytes} bytes or more, and at most {limit_bytes} are expected"
            )
    return size_bytes


def _tensor_names(skeleton: Any) -> list[str]:
    """The names of the tensors in a skeleton, which is looked through level by level, as far as a state may go."""
    if not isinstance(skeleton, dict) or "dict" not in skeleton:
        raise TransportError("it offers a state that is no dictionary")
    names: list[str] = []
    level, entries = [skeleton], 0
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for node in level:
            match node:
                case {"dict": dict(items)} if len(node) == 1:
                    if long := [name for name in items if not isinstance(name, str) or len(name) > MAX_NAME_CHARACTERS]:
                        raise TransportError(f"it offers a state with an invalid name: {str(long[0])[:40]!r}")
                    inner += items.values()
                case {"tensor": str(name)} if len(node) == 1:
                    names.append(name)
                case _ if not _is_plain(node):
                    raise TransportError(f"it offers a state that is malformed at {str(node)[:80]!r}")
        entries += len(level)
        level = inner
        if entries + len(level) > MAX_ENTRIES:
            break
    if level:
        raise TransportError(f"it offers a state of more than {MAX_ENTRIES} entries or {MAX_DEPTH} levels")
    return names


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def _digest(skeleton: JSON, tensors: Mapping[str, Any], blocks: Sequence[str]) -> str:
    text = json.dumps([skeleton, tensors, list(blocks)], sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())


def _is_checksum(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 16 and value.isascii()


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return abs(value) < 1 << 63
    return value is None or (isinstance(value, str) and len(value) <= 1 << 16)
