"""The wire format of a state: its entries, and the bytes of its tensors. Nothing is pickled.

::

    entries  the path of each entry, and its value or, of a tensor, dtype and shape; in alphabetical order of the paths
    bytes    of all tensors, in the order of the entries, little-endian, without gaps
    digest   SHA-256 of entries and bytes; identifies the snapshot
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

import torch
from msgspec import Meta, Struct
from torch import Tensor

from diloco.algorithm import largest_magnitude
from diloco.errors import TransportError
from diloco.membership import Count
from diloco.protocol import WireMessage, decode, encode

MAX_DEPTH = 8
MAX_ENTRIES = 4096
MAX_STATE_BYTES = 1 << 40

Path = Annotated[tuple[Annotated[str, Meta(max_length=1000)], ...], Meta(min_length=1, max_length=MAX_DEPTH)]
Dtype = Literal["torch.float32", "torch.float64", "torch.int64", "torch.int32", "torch.uint8"]
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name.removeprefix("torch.")) for name in get_args(Dtype)}


class TensorForm(Struct, tag="tensor", forbid_unknown_fields=True):
    dtype: Dtype
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=MAX_STATE_BYTES)], ...], Meta(max_length=MAX_DEPTH)]


class Empty(Struct, tag="empty", forbid_unknown_fields=True):
    """A dictionary without entries."""


Leaf = TensorForm | Empty | bool | int | float | Annotated[str, Meta(max_length=1 << 16)] | None
Entries = Annotated[tuple[tuple[Path, Leaf], ...], Meta(max_length=MAX_ENTRIES)]


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

    entries: Entries
    bytes: Count  # of all tensors
    snapshot: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]  # the digest

    def check(self, limit_bytes: int | None = None) -> None:
        """Check what the types of the fields don't say, without allocating memory for the state."""
        limit_bytes = MAX_STATE_BYTES if limit_bytes is None else limit_bytes
        size_bytes = 0
        _nested(self.entries, [])
        for path, value in self.entries:
            if isinstance(value, float) and not math.isfinite(value):
                raise TransportError(f"it offers a state whose {'.'.join(path)} is {value}")
            if isinstance(value, TensorForm):
                room = _DTYPES[value.dtype].itemsize * math.prod(max(size, 1) for size in value.shape)
                if room > MAX_STATE_BYTES:  # counts a size of 0 as 1, so that it can't hide a huge one
                    raise TransportError(f"it offers a tensor of the excessive shape {value.shape}")
                size_bytes += 0 if 0 in value.shape else room
        if size_bytes > limit_bytes:
            raise TransportError(f"it offers a state of {size_bytes} bytes, but at most {limit_bytes} are expected")
        if self.bytes != size_bytes:
            raise TransportError(f"it announces {self.bytes} bytes, but its tensors have {size_bytes}")

    def begin_digest(self) -> hashlib._Hash:
        """Return a digest of the entries, to which the bytes are to be added."""
        return hashlib.sha256(encode(self.entries))

    @property
    def finished_rounds(self) -> int | None:
        value = dict(self.entries).get(("finished_rounds",))
        return value if isinstance(value, int) else None

    def allocate(self) -> tuple[dict[str, Any], TensorBytes]:
        """Allocate the state. Return it and the bytes of its tensors, which are uninitialised."""
        forms = [value for _, value in self.entries if isinstance(value, TensorForm)]
        try:
            tensors = [torch.empty(each.shape, dtype=_DTYPES[each.dtype], device="cpu") for each in forms]
        except (RuntimeError, MemoryError) as error:
            raise TransportError(f"there is no memory for a state of {self.bytes} bytes: {error}") from error
        return _nested(self.entries, tensors), TensorBytes(tensors)


def describe(state: Mapping[str, Any]) -> tuple[Offer, TensorBytes]:
    """Return the description and the bytes of a state, whose tensors must not change from now on."""

    def form(value: Any) -> Any:
        is_tensor = isinstance(value, Tensor)
        return {"type": "tensor", "dtype": str(value.dtype), "shape": value.shape} if is_tensor else value

    try:
        leaves = sorted(_leaves(state), key=lambda leaf: leaf[0])
        values = TensorBytes([value.cpu().contiguous() for _, value in leaves if isinstance(value, Tensor)])
        entries = [(path, form(value)) for path, value in leaves]
        fields = {"entries": entries, "bytes": values.size_bytes, "snapshot": "0" * 64}
        offer: Offer = decode(encode({"kind": "offer", **fields}), Offer)
        offer.check()
    except (TransportError, ValueError, TypeError, OverflowError) as error:
        raise TransportError(f"its state can't be sent: {error}") from error
    digest = offer.begin_digest()
    for part in values.parts:
        digest.update(part)
    offer.snapshot = digest.hexdigest()
    return offer, values


def not_finite(state: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors in ``state`` that hold NaN or infinity.

    >>> not_finite({"slots": {"momentum": torch.tensor([1.0, float("nan")]), "none": torch.empty(0)}})
    ['slots.momentum']
    """
    floats = [(path, each) for path, each in _leaves(state) if isinstance(each, Tensor) and each.is_floating_point()]
    return [".".join(path) for path, each in floats if not math.isfinite(largest_magnitude(each))]


def _leaves(state: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in state.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), Empty() if isinstance(value, Mapping) else value


def _nested(entries: Sequence[tuple[tuple[str, ...], Any]], tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Return the state that has these entries, with the next tensor in place of each form."""
    state: dict[str, Any] = {}
    remaining = iter(tensors)
    for path, value in entries:
        inner: Any = state
        for name in path[:-1]:
            inner = inner.setdefault(name, {}) if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or path[-1] in inner:
            raise TransportError(f"it offers a malformed state, in which {'.'.join(path)} has two values")
        if isinstance(value, TensorForm):
            value = next(remaining, None)
        inner[path[-1]] = {} if isinstance(value, Empty) else value
    return state
