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
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

import torch
from msgspec import Meta
from torch import Tensor

from diloco.algorithm import largest_magnitude
from diloco.errors import CheckpointError, TransportError
from diloco.membership import Count
from diloco.protocol import WireMessage, decode, encode
from diloco.state_tree import flatten, unflatten

MAX_DEPTH = 8
MAX_ENTRIES = 4096
MAX_STATE_BYTES = 1 << 40

Name = Annotated[str, Meta(max_length=1000)]
Dtype = Literal["torch.float32", "torch.float64", "torch.int64", "torch.int32", "torch.uint8"]
Shape = Annotated[list[Annotated[int, Meta(ge=0, le=MAX_STATE_BYTES)]], Meta(max_length=MAX_DEPTH)]
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name.removeprefix("torch.")) for name in get_args(Dtype)}


class TensorBytes:
    """The bytes of contiguous CPU tensors, concatenated without a copy.

    >>> values = TensorBytes([torch.tensor([1, 2, 3], dtype=torch.uint8), torch.tensor([4, 5], dtype=torch.uint8)])
    >>> values.size_bytes, values.read(2, 2)
    (5, b'\\x03\\x04')
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.parts = [each.detach().view(-1).view(torch.uint8).numpy().data for each in tensors if each.numel()]
        self._starts = [0]
        for part in self.parts:
            self._starts.append(self._starts[-1] + len(part))

    @property
    def size_bytes(self) -> int:
        return self._starts[-1]

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Return a copy of ``size_bytes`` bytes from ``offset`` on."""
        return b"".join(self._pieces(offset, size_bytes))

    def write(self, offset: int, data: bytes) -> None:
        written = 0
        for piece in self._pieces(offset, len(data)):
            piece[:] = data[written : written + len(piece)]
            written += len(piece)

    def _pieces(self, offset: int, size_bytes: int) -> Iterator[memoryview]:
        end = offset + size_bytes
        assert 0 <= offset <= end <= self.size_bytes, f"bytes {offset} to {end} of {self.size_bytes}"
        index = bisect.bisect_right(self._starts, offset) - 1
        while offset < end:
            part, start = self.parts[index], self._starts[index]
            upto = min(end, start + len(part))
            yield part[offset - start : upto - start]
            offset, index = upto, index + 1


class Offer(WireMessage):
    """The description of a snapshot, which a donor sends before its bytes. `check` one from the network."""

    skeleton: Any  # see `diloco.state_tree.flatten`
    tensors: dict[Name, tuple[Dtype, Shape]]
    bytes: Count  # of all tensors
    snapshot: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]  # the digest

    def check(self, limit_bytes: int | None = None) -> None:
        """Check what the types of the fields don't say, without allocating memory for the state."""
        if sorted(_tensor_names(self.skeleton)) != sorted(self.tensors):
            raise TransportError("it offers a malformed state, which does not use each of its tensors exactly once")
        limit_bytes = MAX_STATE_BYTES if limit_bytes is None else limit_bytes
        size_bytes = 0
        for dtype, shape in self.tensors.values():
            room = _DTYPES[dtype].itemsize * math.prod(max(size, 1) for size in shape)
            if room > MAX_STATE_BYTES:  # counts a size of 0 as 1, so that it can't hide a huge one
                raise TransportError(f"it offers a tensor of the excessive shape {shape}")
            size_bytes += 0 if 0 in shape else room
        if size_bytes > limit_bytes:
            raise TransportError(f"it offers a state of {size_bytes} bytes, but at most {limit_bytes} are expected")
        if self.bytes != size_bytes:
            raise TransportError(f"it announces {self.bytes} bytes, but its tensors have {size_bytes}")

    @property
    def key(self) -> str:
        """A text that is equal for equal offers."""
        return self.snapshot + self._outline

    @property
    def _outline(self) -> str:
        return json.dumps([self.skeleton, self.tensors], sort_keys=True)

    def begin_digest(self) -> hashlib._Hash:
        """Return a digest of the skeleton and the tensors, to which the bytes are to be added."""
        return hashlib.sha256(self._outline.encode())

    @property
    def finished_rounds(self) -> int | None:
        match self.skeleton:
            case {"dict": {"finished_rounds": value}} if type(value) is int:
                return value
        return None

    def allocate(self) -> tuple[dict[str, Any], TensorBytes]:
        """Allocate the state. Return it and the bytes of its tensors, which are uninitialised."""
        try:
            tensors = {
                name: torch.empty(shape, dtype=_DTYPES[dtype], device="cpu")
                for name, (dtype, shape) in sorted(self.tensors.items())
            }
        except (RuntimeError, MemoryError) as error:
            raise TransportError(f"there is no memory for a state of {self.bytes} bytes: {error}") from error
        return unflatten(self.skeleton, tensors), TensorBytes(list(tensors.values()))


def describe(state: Mapping[str, Any]) -> tuple[Offer, TensorBytes]:
    """Return the description and the bytes of a state, whose tensors must not change from now on."""
    try:
        skeleton, tensors = flatten(state)
        held = {name: tensors[name].cpu().contiguous() for name in sorted(tensors)}
        values = TensorBytes(list(held.values()))
        outline = {name: (str(tensor.dtype), list(tensor.shape)) for name, tensor in held.items()}
        fields = {"skeleton": skeleton, "tensors": outline, "bytes": values.size_bytes, "snapshot": "0" * 64}
        offer: Offer = decode(encode({"kind": "offer", **fields}), Offer)
        offer.check()
    except (CheckpointError, TransportError, ValueError, OverflowError) as error:
        raise TransportError(f"its state can't be sent: {error}") from error
    digest = offer.begin_digest()
    for part in values.parts:
        digest.update(part)
    offer.snapshot = digest.hexdigest()
    return offer, values


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
                case {"dict": dict(items)} if len(node) == 1 and all(isinstance(name, str) for name in items):
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


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return abs(value) < 1 << 63
    return value is None or (isinstance(value, str) and len(value) <= 1 << 16)
