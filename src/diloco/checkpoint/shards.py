"""Tensors that are sharded over several ranks: the pieces that a rank saves, and those that it loads.

`torch.distributed.checkpoint` plans both. Its file format is not used, because its metadata is a pickle.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diloco.checkpoint.disk import check_content
from diloco.checkpoint.parts import file_names
from diloco.checkpoint.reading import Checkpoint
from diloco.errors import CheckpointError

__all__ = ["SavedValues", "Shards", "load_own", "pieces_of"]


@dataclass(frozen=True, eq=False)
class Shards:
    """This rank's share of a sharded part."""

    # name -> a DTensor, of which each rank saves its shard, or a tensor that is the same on all ranks
    values: Mapping[str, Tensor]
    own: Any  # a nested state that only a rank with the same shards can load
    num_shards: int = 1  # S if the ranks hold shards; 1 if each holds everything and position 0 saves it


def load_own(checkpoint: Checkpoint, part: str, position: int, num_shards: int) -> Any:
    """Return the own state that the rank at ``position`` saved, or None if the number of shards was different.

    Raises:
        CheckpointError: if one of its files is missing or damaged.
    """
    saved_by = sum(name.startswith(f"{part}-rank-") for name in checkpoint.parts)
    return checkpoint.load(f"{part}-rank-{position % num_shards}") if saved_by == num_shards else None


def pieces_of(values: Mapping[str, Tensor], *, leads: bool) -> dict[str, Any]:
    """Return the pieces of ``values`` that this rank saves, as a nested state with the place of each piece.

    Args:
        values: name -> a DTensor, of which this rank saves its shard, or a tensor that is the same on all ranks.
        leads: whether this is position 0, which saves the tensors that are the same on all ranks.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import WriteItemType

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({name: value.detach() for name, value in values.items()}, is_coordinator=leads)
    pieces = {}
    for item in planner.create_local_plan().items:
        data = item.tensor_data
        assert data is not None, "values are tensors"
        # an empty shard may have the offset of another one; position 0 has a shard of every tensor that is not empty
        if leads or (item.type == WriteItemType.SHARD and data.chunk.sizes.numel()):
            pieces[item.index.fqn] = {
                "whole": list(data.size),
                "offsets": list(data.chunk.offsets),
                "sizes": list(data.chunk.sizes),
                "dtype": str(data.properties.dtype).removeprefix("torch."),
                "values": planner.resolve_data(item),
            }
    return pieces


class SavedValues:
    """The values of a sharded part, saved by any number of ranks.

    Raises:
        CheckpointError: if there is no such part, or one of its files is missing or damaged.
    """

    def __init__(self, checkpoint: Checkpoint, part: str) -> None:
        self.checkpoint = checkpoint
        self.sizes: dict[str, tuple[int, ...]] = {}  # name -> shape of the whole tensor
        self.dtypes: dict[str, torch.dtype] = {}  # name -> dtype of the tensor
        self._pieces: dict[str, dict[tuple[int, ...], _Piece]] = {}
        num_ranks = 0
        while (shard := f"{part}-shard-{num_ranks}") in checkpoint.parts:
            self._read_outline(shard)
            num_ranks += 1
        if not num_ranks:
            raise CheckpointError(
                f"{checkpoint.path} has no sharded part {part!r}; its parts are {', '.join(checkpoint.parts)}. "
                "Nothing was loaded."
            )
        for name, pieces in self._pieces.items():
            if sum(math.prod(piece.sizes) for piece in pieces.values()) != math.prod(self.sizes[name]):
                raise CheckpointError(
                    f"{checkpoint.path} is incomplete: it holds only {len(pieces)} pieces of {name}, from {num_ranks} "
                    "ranks. Nothing was loaded."
                )

    def load_into(self, values: Mapping[str, Tensor]) -> None:
        """Fill ``values`` in place from the saved values of the same names; in a DTensor, fill this rank's shard.

        The ranks exchange nothing: each reads the pieces that it needs.

        Raises:
            CheckpointError: if a value was not saved or has another shape or dtype, or a file is damaged.
        """
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            Metadata,
            TensorProperties,
            TensorStorageMetadata,
        )

        saved: dict[str, Any] = {}
        for name, value in values.items():
            if self.sizes.get(name) != tuple(value.shape) or self.dtypes[name] != value.dtype:
                there = f"{self.sizes[name]}, {self.dtypes[name]}" if name in self.sizes else "no value of that name"
                raise CheckpointError(
                    f"{self.checkpoint.path} belongs to another model: {name} is {tuple(value.shape)}, {value.dtype} "
                    f"here, but the checkpoint holds {there}."
                )
            chunks = [
                ChunkStorageMetadata(torch.Size(offsets), torch.Size(piece.sizes))
                for offsets, piece in self._pieces[name].items()
            ]
            saved[name] = TensorStorageMetadata(TensorProperties(value.dtype), torch.Size(value.shape), chunks)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({name: value.detach() for name, value in values.items()}, Metadata(saved))
        by_file: dict[str, list[Any]] = {}
        for item in planner.create_local_plan().items:
            piece = self._pieces[item.storage_index.fqn][tuple(item.storage_index.offset or ())]
            by_file.setdefault(piece.shard, []).append((piece.tensor, item))
        for shard, items in sorted(by_file.items()):
            path = self._checked(shard, file_names(shard)[1])
            try:
                with safe_open(path, framework="pt", device="cpu") as file:
                    for tensor, item in items:
                        ends = zip(item.storage_offsets, item.lengths, strict=True)
                        where = tuple(slice(start, start + length) for start, length in ends)
                        read = file.get_slice(tensor)[where] if where else file.get_tensor(tensor)
                        planner.resolve_tensor(item).copy_(read)
            except SafetensorError as error:
                raise CheckpointError(f"{path} is not a safetensors file: {error}.") from error

    def _read_outline(self, shard: str) -> None:
        """Read where the pieces of one rank belong."""
        path = self._checked(shard, file_names(shard)[0])
        try:
            for name, node in json.loads(path.read_bytes())["dict"].items():
                fields = node["dict"]
                offsets, sizes = tuple(fields["offsets"]), tuple(fields["sizes"])
                self.sizes[name] = tuple(fields["whole"])
                self.dtypes[name] = getattr(torch, fields["dtype"])
                self._pieces.setdefault(name, {})[offsets] = _Piece(shard, fields["values"]["tensor"], sizes)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is malformed: {error!r}. Nothing was loaded.") from error

    def _checked(self, shard: str, name: str) -> Path:
        """Check the content of a file and return its path."""
        path = self.checkpoint.path / name
        try:
            check_content(path, self.checkpoint.parts[shard][name])
        except CheckpointError as error:
            raise CheckpointError(f"{error} Nothing was loaded.") from error
        return path


@dataclass(frozen=True)
class _Piece:
    """The place of a saved piece of a tensor: its part, its name in that part's file, and its shape."""

    shard: str
    tensor: str
    sizes: tuple[int, ...]
