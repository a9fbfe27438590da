"""The pieces of tensors that several ranks hold: what each saves, and what it needs of what others have saved.

`torch.distributed.checkpoint` plans both. Its file format is not used, since its metadata is a pickle.
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

from diloco.errors import CheckpointError
from diloco.train.checkpoint import Checkpoint
from diloco.train.checkpoint_folder import check_file
from diloco.train.manifest import file_names
from diloco.train.tensor_file import digest_of

__all__ = ["SavedValues", "pieces_of"]


def pieces_of(values: Mapping[str, Tensor], *, leads: bool) -> dict[str, Any]:
    """What this rank is to save of ``values``, as a nested state that says where each piece belongs.

    Args:
        values: name -> a DTensor, of which this rank's shard counts, or a tensor that all ranks have alike.
        leads: whether this is position 0, which saves the latter.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import WriteItemType

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({name: value.detach() for name, value in values.items()}, is_coordinator=leads)
    pieces = {}
    for item in planner.create_local_plan().items:
        data = item.tensor_data
        assert data is not None, "values are tensors"
        # an empty shard may begin where another one does; position 0 has one of everything that is not nothing
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
    """The values of a sharded part, by however many ranks they were saved.

    Args:
        checkpoint: that holds them.
        part: its name.

    Attributes:
        num_ranks: that saved them.
        sizes: name -> shape of the whole tensor.
        dtypes: name -> its dtype.

    Raises:
        CheckpointError: if there is no such part, or a file of it is missing or damaged.
    """

    def __init__(self, checkpoint: Checkpoint, part: str) -> None:
        self.checkpoint = checkpoint
        self.part = part
        self.sizes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._pieces: dict[str, dict[tuple[int, ...], _Piece]] = {}
        self.num_ranks = 0
        while (shard := f"{part}-shard-{self.num_ranks}") in checkpoint.files:
            self._read_outline(shard)
            self.num_ranks += 1
        if not self.num_ranks:
            raise CheckpointError(
                f"{checkpoint.path} has no sharded part {part!r}; its parts are {', '.join(checkpoint.parts)}. "
                "Nothing was loaded."
            )
        for name, pieces in self._pieces.items():
            if sum(math.prod(piece.sizes) for piece in pieces.values()) != math.prod(self.sizes[name]):
                raise CheckpointError(
                    f"{checkpoint.path} holds {name} in part only: {len(pieces)} pieces of {self.num_ranks} ranks. "
                    "Nothing was loaded."
                )

    def load_into(self, values: Mapping[str, Tensor]) -> None:
        """Fill ``values`` in place, each with what was saved by its name; of a DTensor, this rank's shard.

        Nothing is exchanged between ranks: each reads what it needs.

        Raises:
            CheckpointError: if a name was not saved, or with another shape or dtype, or a file is damaged.
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
                there = f"{self.sizes[name]}, {self.dtypes[name]}" if name in self.sizes else "nothing of that name"
                raise CheckpointError(
                    f"{self.checkpoint.path} is of another model: it holds {there} where {name} {tuple(value.shape)}, "
                    f"{value.dtype}, is due. Nothing was started."
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
                raise CheckpointError(f"{path} is no safetensors file: {error}. Nothing was started.") from error

    def _read_outline(self, shard: str) -> None:
        """Take in where the pieces of one rank belong."""
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
        """The path of a file, once its digest is found right."""
        path, facts = self.checkpoint.path / name, self.checkpoint.files[shard][name]
        try:
            check_file(path, facts)
            if digest_of(path) != facts.digest:
                raise CheckpointError(f"{path} is damaged: its digest isn't the manifest's. Nothing was loaded.")
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {error}. Nothing was loaded.") from error
        return path


@dataclass(frozen=True)
class _Piece:
    """Where a piece of a tensor is saved: the part, the name in its file, and its shape."""

    shard: str
    tensor: str
    sizes: tuple[int, ...]
