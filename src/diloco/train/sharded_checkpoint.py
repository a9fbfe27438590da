"""Checkpoints of replicas whose ranks share the parameters out: written by all ranks, read by any number of them.

In a folder as `diloco.train.checkpoint` describes it, what the rank at position 0 has of a sharded part NAME is::

    NAME-shard-0.json, .safetensors     its pieces: what they are of, where in that, and their values
    NAME-rank-0.json, .safetensors      what only that rank can go on with (rounds in flight)

and so on for each rank. All ranks of a replica must see the one folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from diloco.errors import CheckpointError
from diloco.state_tree import JSON, flatten
from diloco.train.checkpoint import Checkpoint, list_checkpoints
from diloco.train.checkpoint_folder import (
    complete,
    delete,
    hidden_name,
    move_in,
    point_latest_at,
    put_right,
)
from diloco.train.manifest import Manifest, file_names, write_manifest
from diloco.train.pieces import pieces_of
from diloco.train.tensor_file import FileFacts, sync_folder, tensor_chunks, write_file
from diloco.transport.replica_group import ReplicaGroup

__all__ = ["Shards", "Whole", "load_own", "save_sharded_checkpoint"]

Result = TypeVar("Result")
Files = dict[str, dict[str, FileFacts]]
"""Part -> file name -> what the manifest says about it."""


@dataclass(frozen=True, eq=False)
class Shards:
    """What this rank has of a sharded part.

    Attributes:
        values: name -> a DTensor, of which each rank saves its shard, or a tensor that all ranks have alike.
        own: a nested state that only a rank with the same shards can go on with.
        num_shards: S where the ranks have shards; 1 where all have everything, and position 0 saves it.
    """

    values: Mapping[str, Tensor]
    own: Any
    num_shards: int = 1


class Whole(Mapping[str, Tensor]):
    """Tensors by name, each made whole when it is asked for: on all ranks, in the same order.

    Args:
        values: DTensors, or tensors that are whole already.

    Attributes:
        parts: what is made whole.
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self.parts: Mapping[str, Tensor] = values.parts if isinstance(values, Whole) else values

    def __getitem__(self, name: str) -> Tensor:
        value = self.parts[name].detach()
        full: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
        return full

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


def save_sharded_checkpoint(
    folder: Path,
    step: int,
    parts: Mapping[str, Any],
    *,
    shards: Mapping[str, Shards],
    whole: Mapping[str, Mapping[str, Tensor]],
    about: Mapping[str, Any],
    keep: int,
    group: ReplicaGroup,
) -> Path:
    """Save ``folder/step-XXXXXXXX`` as `save_checkpoint` does, from all ranks of a replica; to be called on all.

    Args:
        folder: that all ranks see; position 0 is the process that writes to it.
        step: inner steps finished.
        parts: part name -> nested state; position 0's are saved.
        shards: part name -> what this rank has of it.
        whole: part name -> tensors by name, saved whole as an ordinary part; DTensors are gathered one at a time.
        about: facts worth reading without loading anything, as JSON.
        keep: how many checkpoints stay.
        group: the replica's ranks.

    Returns:
        The new checkpoint; it is on the disk, and ``folder/latest`` names it.

    Raises:
        CheckpointError: on all ranks, when anything went wrong on one. What was complete before still is.
    """
    if step < 0 or keep < 1:
        raise CheckpointError(
            f"step={step} and keep={keep} were given; a step from 0 on and at least 1 would work. Nothing was saved."
        )
    place = folder / f"step-{step:08d}"
    partial = folder / group.share(hidden_name(place, "partial").name)
    failed = f"Saving {place} failed, and the checkpoints that were complete before still are: "
    try:
        serial = _together(group, failed, lambda: _begin(partial) if group.leads else 0)
        mine = _together(group, failed, lambda: _write_shards(partial, shards, group.position))
        files: Files = {}
        for text in group.gather_texts(_packed(mine)):
            files |= _unpacked(text)
        for part, values in whole.items():
            files[part] = _write_whole(partial, part, values, group, failed)
        if group.leads:
            manifest = Manifest.of(step, serial, about, files)
        _together(group, failed, lambda: _finish(partial, place, manifest, parts) if group.leads else None)
    except BaseException:
        if group.leads:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    left = f"{place} is saved, but an old checkpoint can't be deleted, which by hand would work: "
    _together(group, left, lambda: _delete(list_checkpoints(folder)[:-keep]) if group.leads else None)
    return place


def load_own(checkpoint: Checkpoint, part: str, position: int, num_shards: int) -> Any:
    """What a rank with the shards of ``position`` saved as its own; None where the shards were others.

    Raises:
        CheckpointError: if a file of it is missing or damaged.
    """
    saved_by = sum(name.startswith(f"{part}-rank-") for name in checkpoint.parts)
    return checkpoint.load(f"{part}-rank-{position % num_shards}") if saved_by == num_shards else None


def _together(group: ReplicaGroup, words: str, act: Callable[[], Result]) -> Result:
    """What ``act`` gives on this rank, once it has succeeded on all.

    Raises:
        CheckpointError: on all ranks, if it raised that or `OSError` on any; it begins with ``words``.
    """
    results: list[Result] = []
    raised: Exception | None = None
    try:
        results.append(act())
    except (CheckpointError, OSError) as error:
        raised = error
    words_of_mine = "" if raised is None else str(raised) or repr(raised)
    why = [f"position {s}: {text}" for s, text in enumerate(group.gather_texts(words_of_mine)) if text]
    if why:
        raise CheckpointError(words + "; ".join(why)) from raised
    return results[0]


def _begin(partial: Path) -> int:
    """Make the folder to write into; the new checkpoint's serial."""
    folder = partial.parent
    folder.mkdir(parents=True, exist_ok=True)
    put_right(folder)
    partial.mkdir()
    return 1 + max((serial for serial, _ in complete(folder)), default=-1)


def _write_shards(partial: Path, shards: Mapping[str, Shards], position: int) -> Files:
    if not partial.is_dir():
        raise CheckpointError(
            f"{partial.parent} is not the folder that position 0 of this replica saves to; a folder that all ranks of "
            "a replica see, on one machine or a shared file system, would work."
        )
    files: Files = {}
    for part, mine in shards.items():
        if position >= mine.num_shards:
            continue
        files[f"{part}-shard-{position}"] = _write_part(
            partial, f"{part}-shard-{position}", pieces_of(mine.values, leads=position == 0)
        )
        files[f"{part}-rank-{position}"] = _write_part(partial, f"{part}-rank-{position}", mine.own)
    return files


def _write_whole(
    partial: Path, part: str, values: Mapping[str, Tensor], group: ReplicaGroup, words: str
) -> dict[str, FileFacts]:
    """Write an ordinary part of tensors by name, which takes all ranks; position 0 has room for one at a time."""
    # in the order in which they lie in the file
    ordered = dict(sorted(Whole(values).parts.items(), key=lambda item: -item[1].element_size()))
    wholes = (tensor for _, tensor in Whole(ordered).items())

    def write() -> dict[str, FileFacts]:
        skeleton: JSON = {"dict": {name: {"tensor": name} for name in values}}
        outline = {name: torch.empty(v.shape, dtype=v.dtype, device="meta") for name, v in ordered.items()}
        return _write_files(partial, part, skeleton, _chunks(outline, wholes)) if group.leads else {}

    def write_and_gather() -> dict[str, FileFacts]:
        try:
            return write()
        finally:
            for _ in wholes:  # the others gather to the end, also where writing has failed
                pass

    return _together(group, words, write_and_gather)


def _chunks(outline: Mapping[str, Tensor], wholes: Iterator[Tensor]) -> Iterator[bytes | memoryview]:
    """The content of a safetensors file with the header of ``outline`` and the values of ``wholes``."""
    yield from islice(tensor_chunks(outline), 2)
    for tensor in wholes:
        yield from islice(tensor_chunks({"": tensor}), 2, None)


def _write_part(partial: Path, part: str, tree: Any) -> dict[str, FileFacts]:
    skeleton, tensors = flatten(tree)
    return _write_files(partial, part, skeleton, tensor_chunks(tensors))


def _write_files(
    partial: Path, part: str, skeleton: JSON, chunks: Iterator[bytes | memoryview]
) -> dict[str, FileFacts]:
    skeleton_name, tensors_name = file_names(part)
    text = json.dumps(skeleton, separators=(",", ":"), allow_nan=False).encode()
    return {
        skeleton_name: write_file(partial / skeleton_name, [text]),
        tensors_name: write_file(partial / tensors_name, chunks),
    }


def _finish(partial: Path, place: Path, manifest: Manifest, parts: Mapping[str, Any]) -> None:
    """Write what is left and the manifest, and give the checkpoint its name."""
    files = {part: _write_part(partial, part, parts[part]) for part in parts}
    whole = Manifest(manifest.step, manifest.serial, manifest.versions, manifest.about, {**files, **manifest.parts})
    write_manifest(partial, whole)
    sync_folder(partial)
    move_in(partial, place)
    point_latest_at(place)


def _delete(checkpoints: list[Path]) -> None:
    for old in checkpoints:
        delete(old)


def _packed(files: Files) -> str:
    return json.dumps(
        {p: {n: [facts.size_bytes, facts.digest] for n, facts in named.items()} for p, named in files.items()}
    )


def _unpacked(text: str) -> Files:
    return {
        part: {name: FileFacts(*facts) for name, facts in named.items()} for part, named in json.loads(text).items()
    }
