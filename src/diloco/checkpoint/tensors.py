"""Tensors in safetensors files: written one at a time, by a process or several ranks, and read whole or by as many.

This module writes the files itself, because the safetensors library would hold all tensors in host memory at once. The
library reads them, as it guards against malformed ones. A file of shards says in its metadata where in the whole tensor
each shard begins.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diloco.checkpoint.disk import FileFacts, check_content
from diloco.errors import CheckpointError
from diloco.state_tree import DTYPE_NAMES, UNREADABLE

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def tensor_chunks(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the content of a safetensors file with ``tensors`` of any shape, strides and device.

    >>> chunks = list(tensor_chunks({"half": torch.ones(2, dtype=torch.float16)}))
    >>> bytes(chunks[1]).strip(), bytes(chunks[2]).hex()
    (b'{"half":{"dtype":"F16","shape":[2],"data_offsets":[0,4]}}', '003c003c')
    """
    # sorted by element size, largest first, to align all of them without the gaps that the format forbids
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in ordered.items():
        end = offset + tensor.numel() * tensor.element_size()
        dtype, shape = DTYPE_NAMES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for tensor in ordered.values():
        on_host = tensor.detach().resolve_neg().cpu().contiguous()
        # tensors with no value or one may have arbitrary strides, which view() refuses
        yield on_host.as_strided((on_host.numel(),), (1,)).view(torch.uint8).numpy().data


def whole(value: Tensor) -> Tensor:
    """Return a detached whole tensor. A DTensor is gathered, which requires a call on all ranks."""
    value = value.detach()
    full: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full


class Lazy(Mapping[str, Tensor]):
    """Tensors by name, each made by ``read`` when it is asked for, so that only one needs memory at a time.

    With `whole`, all ranks must ask in the same order.
    """

    def __init__(self, values: Mapping[str, Any], read: Callable[[Any], Tensor]) -> None:
        self._values, self._read = values, read

    def __getitem__(self, name: str) -> Tensor:
        return self._read(self._values[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def shards_of(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return this rank's shards of the DTensors among ``tensors``, and the metadata that says where they belong."""
    shards, places = {}, {}
    for name, value in tensors.items():
        shard, offsets = _shard(value)
        if hasattr(value, "to_local") and (shard.numel() or not value.numel()):  # an empty shard has no place
            shards[name], places[name] = shard, [list(value.shape), offsets]
    return shards, {"places": json.dumps(places)}


def _shard(value: Tensor) -> tuple[Tensor, Sequence[int]]:
    """Return this rank's shard of a tensor, on the same memory, and where in the whole tensor it begins."""
    if not hasattr(value, "to_local"):
        return value.detach(), [0] * value.dim()
    # torch's own way to plan checkpoints; not imported at the top, which takes a second
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    dtensor: Any = value.detach()
    _, offsets = compute_local_shape_and_global_offset(dtensor.shape, dtensor.device_mesh, dtensor.placements)
    return dtensor.to_local(), list(offsets)


class SavedTensor:
    """A saved tensor, which one file contains or several files share, with the shape of the whole."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, opened: dict[Path, Any]) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self._opened = opened  # safetensors' handle of each file that was checked
        self.pieces: dict[tuple[int, ...], tuple[Path, FileFacts, tuple[int, ...]]] = {}  # offsets -> file and sizes

    def load_into(self, value: Tensor) -> None:
        """Fill a tensor from the files, in a DTensor this rank's shard."""
        if (self.shape, self.dtype) != (tuple(value.shape), value.dtype):
            raise CheckpointError(
                f"{self.name} is {tuple(value.shape)}, {value.dtype} in this run, but {self.shape}, {self.dtype} in "
                "the checkpoint, which belongs to another model."
            )
        target, first = _shard(value)
        copied = 0
        for offsets, (path, facts, sizes) in self.pieces.items():
            begins = [offset - start for offset, start in zip(offsets, first, strict=True)]
            room = [slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]
            if any(part.start < 0 or part.stop > size for part, size in zip(room, target.shape, strict=True)):
                continue  # another rank's
            if path not in self._opened:
                check_content(path, facts)
                self._opened[path] = safe_open(path, framework="pt", device="cpu")
            target[tuple(room)].copy_(self._opened[path].get_tensor(self.name))
            copied += math.prod(sizes)
        if copied != target.numel():
            raise CheckpointError(f"The checkpoint lacks values of {self.name}, or other ranks have saved it.")

    def load(self) -> Tensor:
        # Filled, because mapped tensors have another alignment than torch's own, and a matrix product may round
        # differently there, so that a resumed run would not repeat the bits of an uninterrupted one.
        value = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.load_into(value)
        return value


def find_tensors(files: Mapping[Path, FileFacts]) -> dict[str, SavedTensor]:
    """Return the tensors in some safetensors files, by name. Only the headers are read."""
    tensors: dict[str, SavedTensor] = {}
    opened: dict[Path, Any] = {}
    for path, facts in files.items():
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                places = json.loads((file.metadata() or {}).get("places", "{}"))
                for name in file.keys():  # noqa: SIM118  # not a dict
                    part = file.get_slice(name)
                    sizes = tuple(part.get_shape())
                    shape, offsets = places.get(name) or (sizes, [0] * len(sizes))
                    dtype = _DTYPES[part.get_dtype()]
                    saved = tensors.setdefault(name, SavedTensor(name, tuple(shape), dtype, opened))
                    saved.pieces[tuple(offsets)] = path, facts, sizes
        except (SafetensorError, *UNREADABLE) as error:
            raise CheckpointError(f"{path} is damaged: {error}.") from error
    return tensors
