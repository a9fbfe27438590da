"""The wire format of a state: its skeleton, and the bytes of its tensors, cut into blocks. Nothing is pickled.

::

    skeleton  see `diloco.state_tree`; contains only dictionaries, tensors, numbers, strings and null
    tensors   {name: ["torch.float32", [1000]], ...}           dtype and shape of each
    bytes     of all tensors, in alphabetical order of their names, little-endian, without gaps
    blocks    XXH3 (64 bits) of each block of the bytes; the block size follows from the number of bytes
    digest    XXH3 (64 bits) of skeleton, tensors and blocks; identifies the snapshot

Every block can be checked by itself, and all blocks together are what the digest identifies.
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

from diloco.algorithm import largest_magnitude
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
    """Return the block size for a state of this size: small enough to share out, large enough to list all checksums.

    >>> block_bytes(1_000_000), block_bytes(80_000_000), block_bytes(10**12)
    (65536, 2502656, 61038592)
    """
    wanted = max(min(size_bytes // 32, _USUAL_BLOCK_BYTES), -(-size_bytes >> 14), _LEAST_BLOCK_BYTES)
    return -(-wanted // 4096) * 4096


class TensorBytes:
    """The bytes of contiguous CPU tensors, concatenated without a copy.

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
        """Return a copy of ``size_bytes`` bytes from ``offset`` on."""
        return b"".join(self._pieces(offset, size_bytes))

    def write(self, offset: int, data: bytes) -> None:
        """Write ``data`` at ``offset``."""
        written = 0
        for piece in self._pieces(offset, len(data)):
            piece[:] = data[written : written + len(piece)]
            written += len(piece)

    def checksums(self) -> Iterator[str]:
        """Yield the checksum of each block."""
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
    """The description of a snapshot, which a donor sends before its bytes."""

    skeleton: JSON  # see `diloco.state_tree.flatten`
    tensors: Mapping[str, list[Any]]  # name -> dtype and shape, in alphabetical order
    size_bytes: int  # of all tensors
    blocks: tuple[str, ...]  # XXH3 of each block, 16 hexadecimal digits
    digest: str  # identifies all of this

    def to_message(self) -> dict[str, Any]:
        """Return the description as JSON."""
        return {
            "skeleton": self.skeleton,
            "tensors": self.tensors,
            "bytes": self.size_bytes,
            "blocks": list(self.blocks),
            "snapshot": self.digest,
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any], limit_bytes: int | None = None) -> Description:
        """Parse and check what `to_message` returned, without allocating memory for the state.

        Args:
            message: A message from the network.
            limit_bytes: A larger state is refused; None: `MAX_STATE_BYTES`.

        Raises:
            TransportError: The message is invalid.
        """
        skeleton, blocks = message.get("skeleton"), message.get("blocks")
        tensors: Any = message.get("tensors")
        size_bytes = _checked_size_bytes(skeleton, tensors, MAX_STATE_BYTES if limit_bytes is None else limit_bytes)
        if message.get("bytes") != size_bytes:
            raise TransportError(
                f"it announces {str(message.get('bytes'))[:40]} bytes, but its tensors have {size_bytes}"
            )
        count = -(-size_bytes // block_bytes(size_bytes))
        if not isinstance(blocks, list) or len(blocks) != count or not all(_is_checksum(each) for each in blocks):
            raise TransportError(f"it does not give the checksums of the {count} blocks of {size_bytes} bytes")
        digest = _digest(skeleton, tensors, blocks)
        if message.get("snapshot") != digest:
            named = str(message.get("snapshot"))[:40]
            raise TransportError(f"it names its snapshot {named!r}, but content and checksums give {digest!r}")
        return cls(skeleton, dict(sorted(tensors.items())), size_bytes, tuple(blocks), digest)

    @property
    def finished_rounds(self) -> int | None:
        """The number of rounds that the donor has finished, or None if the state does not say."""
        match self.skeleton:
            case {"dict": {"finished_rounds": value}} if type(value) is int:
                return value
        return None

    def allocate(self) -> tuple[dict[str, Any], TensorBytes]:
        """Allocate a state of this description. Return it and the bytes of its tensors, which are uninitialised.

        Raises:
            TransportError: There is not enough memory.
        """
        try:
            tensors = {
                name: torch.empty(shape, dtype=_DTYPES[dtype], device="cpu")
                for name, (dtype, shape) in self.tensors.items()
            }
        except (RuntimeError, MemoryError) as error:
            raise TransportError(f"there is no memory for a state of {self.size_bytes} bytes: {error}") from error
        return unflatten(self.skeleton, tensors), TensorBytes(list(tensors.values()))


def describe(state: Mapping[str, Any]) -> tuple[Description, TensorBytes]:
    """Return the description and the bytes of a state, whose tensors must not change from now on.

    Raises:
        TransportError: The state contains something that a receiver would refuse.
    """
    try:
        skeleton, found = flatten(state)
        held = {name: found[name].cpu().contiguous() for name in sorted(found)}
        tensors = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in held.items()}
        size_bytes = _checked_size_bytes(skeleton, tensors, MAX_STATE_BYTES)
    except (CheckpointError, TransportError) as error:
        raise TransportError(f"its state can't be sent: {error}") from error
    values = TensorBytes(list(held.values()))
    blocks = tuple(values.checksums())
    return Description(skeleton, tensors, size_bytes, blocks, _digest(skeleton, tensors, blocks)), values


def not_finite(state: Mapping[str, Any], path: str = "") -> list[str]:
    """Return the names of the tensors in ``state`` that hold NaN or infinity.

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
    """Return the size of a state from the network.

    Raises:
        TransportError: The state is malformed or too large.
    """
    names = _tensor_names(skeleton)
    if not isinstance(tensors, dict) or len(names) != len(tensors) or set(names) != set(tensors):
        raise TransportError("it offers a malformed state, which does not use each of its tensors exactly once")
    size_bytes = 0
    for entry in tensors.values():
        if not isinstance(entry, list) or len(entry) != 2:
            raise TransportError(f"it offers a state that is malformed at {str(entry)[:80]!r}")
        dtype, shape = entry
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise TransportError(f"it offers a tensor of {str(dtype)[:40]!r}, not one of {', '.join(_DTYPES)}")
        fine = isinstance(shape, list) and len(shape) <= MAX_DEPTH and all(type(size) is int for size in shape)
        if not fine or any(size < 0 for size in shape):
            raise TransportError(f"it offers a tensor of the invalid shape {str(shape)[:80]!r}")
        room = _DTYPES[dtype].itemsize * math.prod(max(size, 1) for size in shape)
        if room > MAX_STATE_BYTES:  # counts a size of 0 as 1, so that it can't hide a huge one
            raise TransportError(f"it offers a tensor of the excessive shape {str(shape)[:80]}")
        size_bytes += 0 if 0 in shape else room
        if size_bytes > limit_bytes:
            raise TransportError(
                f"it offers a state of at least {size_bytes} bytes, but at most {limit_bytes} bytes are expected"
            )
    return size_bytes


def _tensor_names(skeleton: Any) -> list[str]:
    """Return the names of the tensors in a skeleton, which is searched level by level within the limits of a state."""
    if not isinstance(skeleton, dict) or "dict" not in skeleton:
        raise TransportError("it offers a state that is not a dictionary")
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
