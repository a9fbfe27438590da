"""The wire format of a state: its skeleton, and the bytes of its tensors. Nothing is pickled.

::

    skeleton  see `diloco.state_tree`; contains only dictionaries, tensors, numbers, strings and null
    tensors   {name: ["torch.float32", [1000]], ...}           dtype and shape of each
    bytes     of all tensors, in alphabetical order of their names, little-endian, without gaps
    digest    SHA-256 of skeleton, tensors and bytes; identifies the snapshot
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from diloco.algorithm import largest_magnitude
from diloco.errors import CheckpointError, TransportError
from diloco.state_tree import JSON, flatten, unflatten

__all__ = ["Description", "TensorBytes", "describe", "not_finite"]

MAX_DEPTH = 8
MAX_ENTRIES = 4096
MAX_NAME_CHARACTERS = 1000
MAX_STATE_BYTES = 1 << 40

_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8)}


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

    def add_to(self, digest: hashlib._Hash) -> None:
        """Let a digest cover all bytes."""
        for part in self._parts:
            digest.update(part)

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
    digest: str  # SHA-256 of everything, in hexadecimal

    def to_message(self) -> dict[str, Any]:
        """Return the description as JSON."""
        return {
            "skeleton": self.skeleton,
            "tensors": self.tensors,
            "bytes": self.size_bytes,
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
        skeleton = message.get("skeleton")
        tensors: Any = message.get("tensors")
        size_bytes = _checked_size_bytes(skeleton, tensors, MAX_STATE_BYTES if limit_bytes is None else limit_bytes)
        if message.get("bytes") != size_bytes:
            raise TransportError(
                f"it announces {str(message.get('bytes'))[:40]} bytes, but its tensors have {size_bytes}"
            )
        digest = message.get("snapshot")
        if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise TransportError(f"it names its snapshot {str(digest)[:40]!r} instead of giving its digest")
        return cls(skeleton, dict(sorted(tensors.items())), size_bytes, digest)

    @property
    def key(self) -> str:
        """A text that is equal for equal descriptions."""
        return json.dumps([self.digest, self.skeleton, self.tensors], sort_keys=True)

    def begin_digest(self) -> hashlib._Hash:
        """Return a digest of the skeleton and the tensors, to which the bytes are to be added."""
        return hashlib.sha256(json.dumps([self.skeleton, self.tensors], sort_keys=True).encode())

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
    description = Description(skeleton, tensors, size_bytes, "")
    digest = description.begin_digest()
    values.add_to(digest)
    return replace(description, digest=digest.hexdigest()), values


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


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return abs(value) < 1 << 63
    return value is None or (isinstance(value, str) and len(value) <= 1 << 16)
