"""Saving a checkpoint, from one process or from all ranks of a replica, in the layout of `diloco.checkpoint`.

The share of the rank at position 0 in a sharded part NAME is saved as::

    NAME-shard-0.json, .safetensors     its pieces: the tensor of each, the place in it, and the values
    NAME-rank-0.json, .safetensors      the state that only that rank can load (rounds in flight)

and likewise for every other rank. All ranks of a replica must see the same folder, in which only position 0 renames.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from diloco.checkpoint.disk import (
    HIDDEN_NAME,
    LATEST,
    FileFacts,
    delete,
    hidden_name,
    move_in,
    replace_file,
    sync_folder,
)
from diloco.checkpoint.manifest import Manifest, running_versions, write_manifest
from diloco.checkpoint.parts import in_file_order, tensor_chunks, whole, write_files, write_part
from diloco.checkpoint.reading import find_checkpoint, list_checkpoints
from diloco.checkpoint.shards import Shards, pieces_of
from diloco.errors import CheckpointError
from diloco.state_tree import JSON
from diloco.transport import ReplicaGroup

__all__ = ["save_checkpoint"]

Files = dict[str, dict[str, FileFacts]]  # part -> file name -> facts for the manifest


def save_checkpoint(
    folder: Path,
    step: int,
    parts: Mapping[str, Any],
    *,
    about: Mapping[str, Any],
    keep: int,
    shards: Mapping[str, Shards] | None = None,
    gathered: Mapping[str, Mapping[str, Tensor]] | None = None,
    group: ReplicaGroup | None = None,
) -> Path:
    """Save ``folder/step-XXXXXXXX`` and delete all but the last ``keep`` checkpoints. Call it on all ranks.

    Args:
        folder: the checkpoints folder, which all ranks must see.
        step: the number of finished inner steps.
        parts: part name -> nested state; those of position 0 are saved. They are read one after the other, so a mapping
            that creates each on access saves memory.
        about: metadata to read without loading anything, as JSON: algorithm, replicas, fragments in flight.
        keep: the number of checkpoints to keep, at least 1.
        shards: part name -> this rank's share of the part.
        gathered: part name -> tensors by name, saved as an ordinary part. DTensors are gathered one at a time.
        group: the ranks of the replica. None: this process is alone.

    Returns:
        The path of the new checkpoint, which is on disk and named by ``folder/latest``.

    Raises:
        CheckpointError: on all ranks, if saving failed on any rank. Earlier complete checkpoints are unchanged, and no
            partial checkpoint is left.
    """
    if step < 0 or keep < 1:
        raise CheckpointError(
            f"step must be at least 0 and keep at least 1, got step={step} and keep={keep}. Nothing was saved."
        )
    group = group or ReplicaGroup()
    place = folder / f"step-{step:08d}"
    partial = folder / group.share(hidden_name(place, "partial").name)
    failed = f"Saving {place} failed: ", ". Earlier complete checkpoints are unchanged."
    serial, files = 0, Files()
    try:
        with _on_all_or_none(group, *failed):
            if group.leads:
                serial = _begin(partial)
        with _on_all_or_none(group, *failed):
            mine = _write_own_parts(partial, parts if group.leads else {}, shards or {}, group.position)
        for text in group.gather_texts(_packed(mine)):
            files |= _unpacked(text)
        for part, values in (gathered or {}).items():
            with _on_all_or_none(group, *failed):
                files |= _write_gathered(partial, part, values, group)
        with _on_all_or_none(group, *failed):
            if group.leads:
                manifest = Manifest(step=step, serial=serial, versions=running_versions(), about=about, parts=files)
                write_manifest(partial, manifest)
                sync_folder(partial)
                move_in(partial, place)
                replace_file(folder / LATEST, [f"{place.name}\n".encode()])
    except BaseException:
        if group.leads:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    with _on_all_or_none(group, f"{place} is saved, but ", ". Delete it by hand."):
        if group.leads:
            _delete_all_but(folder, keep)
    return place


@contextmanager
def _on_all_or_none(group: ReplicaGroup, before: str, after: str) -> Iterator[None]:
    """Make the block, which each rank runs by itself, fail on all ranks if it fails on any.

    Raises:
        CheckpointError: on all ranks, if the block raised on any. Its message is framed by ``before`` and ``after``.
    """
    raised: Exception | None = None
    try:
        yield
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        raised = error
    if why := group.failures(raised):
        raise CheckpointError(before + why + after) from raised


def _begin(partial: Path) -> int:
    """Clean up after an interrupted save, create the folder ``partial``, and return the new checkpoint's serial."""
    folder = partial.parent
    folder.mkdir(parents=True, exist_ok=True)
    for entry in sorted(folder.iterdir()):
        if not (hidden := HIDDEN_NAME.match(entry.name)):
            continue
        place = folder / hidden["name"]
        there = find_checkpoint(place) if hidden["fate"] == "replaced" else None
        if there is not None and there.path == entry:
            os.replace(entry, place)
        elif entry.is_dir():
            delete(entry)
        else:
            entry.unlink()
    partial.mkdir()
    return 1 + max((checkpoint.serial for checkpoint in list_checkpoints(folder)), default=-1)


def _write_own_parts(partial: Path, parts: Mapping[str, Any], shards: Mapping[str, Shards], position: int) -> Files:
    """Write the parts that this rank holds alone."""
    if not partial.is_dir():
        raise CheckpointError(
            f"{partial.parent} is not the folder to which position 0 of this replica saves; all ranks of a replica "
            "must see the same folder, on one machine or a shared file system"
        )
    files = {part: write_part(partial, part, parts[part]) for part in parts}
    for part, held in shards.items():
        if position < held.num_shards:
            pieces = pieces_of(held.values, leads=position == 0)
            for name, tree in ((f"{part}-shard-{position}", pieces), (f"{part}-rank-{position}", held.own)):
                files[name] = write_part(partial, name, tree)
    return files


def _write_gathered(partial: Path, part: str, values: Mapping[str, Tensor], group: ReplicaGroup) -> Files:
    """Write a part of tensors by name, which all ranks gather. Position 0 holds one gathered tensor at a time."""
    if not group.leads:
        for value in in_file_order(values).values():
            whole(value)
        return {}
    left = list(in_file_order(values).values())

    def gather(value: Tensor) -> Tensor:
        left.pop(0)
        return whole(value)

    try:
        skeleton: JSON = {"dict": {name: {"tensor": name} for name in values}}
        return {part: write_files(partial, part, skeleton, tensor_chunks(values, gather))}
    finally:
        for value in left:  # take part in all gathers even if writing failed, as the other ranks do
            whole(value)


def _delete_all_but(folder: Path, keep: int) -> None:
    for old in list_checkpoints(folder)[:-keep]:
        try:
            delete(old.path)
        except OSError as error:
            raise CheckpointError(f"{old.path} can't be deleted: {error}") from error


def _packed(files: Files) -> str:
    return json.dumps({part: {name: vars(facts) for name, facts in held.items()} for part, held in files.items()})


def _unpacked(text: str) -> Files:
    return {part: {name: FileFacts(**facts) for name, facts in held.items()} for part, held in json.loads(text).items()}
