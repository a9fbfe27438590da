"""Saving a checkpoint, from one process or from all ranks of a replica, in the layout of `diloco.checkpoint`.

All ranks of a replica must see the same folder, in which only position 0 renames.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diloco.checkpoint.disk import (
    HIDDEN_NAME,
    LATEST,
    FileFacts,
    delete,
    hidden_name,
    move_in,
    replace_file,
    sync_folder,
    write_file,
)
from diloco.checkpoint.manifest import Manifest, check_part_name, running_versions, write_manifest
from diloco.checkpoint.reading import find_checkpoint, list_checkpoints
from diloco.checkpoint.tensors import shards_of, tensor_chunks
from diloco.errors import CheckpointError
from diloco.state_tree import flatten
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
    own: Mapping[str, Any] | None = None,
    group: ReplicaGroup | None = None,
) -> Path:
    """Save ``folder/step-XXXXXXXX`` and delete all but the last ``keep`` checkpoints. Call it on all ranks.

    Args:
        folder: the checkpoints folder, which all ranks must see.
        step: the number of finished inner steps.
        parts: part name -> nested state, see `diloco.state_tree`. Each rank saves its shards of the DTensors, and
            position 0 everything else.
        about: metadata to read without loading anything, as JSON: algorithm, replicas, fragments in flight.
        keep: the number of checkpoints to keep, at least 1.
        own: part name -> nested state of this rank, saved as the part ``NAME-POSITION``.
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
            if not partial.is_dir():
                raise CheckpointError(
                    f"{partial.parent} is not the folder to which position 0 of this replica saves; all ranks of a "
                    "replica must see the same folder, on one machine or a shared file system"
                )
            mine = {part: _write_part(partial, part, tree, group) for part, tree in parts.items()}
            for part, tree in (own or {}).items():
                name = f"{part}-{group.position}"
                mine[name] = _write_part(partial, name, tree)
        for text in group.gather_texts(json.dumps({p: {n: vars(f) for n, f in fs.items()} for p, fs in mine.items()})):
            for part, facts in json.loads(text).items():
                files.setdefault(part, {}).update({name: FileFacts(**fact) for name, fact in facts.items()})
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


def _write_part(folder: Path, part: str, tree: Any, group: ReplicaGroup | None = None) -> dict[str, FileFacts]:
    """Write what this rank saves of a part, and return the facts about the files.

    Args:
        group: the ranks that save the part. None: this rank alone.
    """
    check_part_name(part)
    files = {}
    try:
        skeleton, tensors = flatten(tree)
    except CheckpointError as error:
        raise CheckpointError(f"Part {part!r}: {error}") from error
    shards, metadata = shards_of(tensors)
    if group is None or group.leads:
        text = json.dumps(skeleton, separators=(",", ":"), allow_nan=False).encode()
        files[f"{part}.json"] = write_file(folder / f"{part}.json", [text])
        plain = {name: tensor for name, tensor in tensors.items() if not hasattr(tensor, "to_local")}
        files[f"{part}.safetensors"] = write_file(folder / f"{part}.safetensors", tensor_chunks(plain))
    if shards:
        name = f"{part}-rank-{group.position if group else 0}.safetensors"
        files[name] = write_file(folder / name, tensor_chunks(shards, metadata))
    return files


def _delete_all_but(folder: Path, keep: int) -> None:
    for old in list_checkpoints(folder)[:-keep]:
        try:
            delete(old.path)
        except OSError as error:
            raise CheckpointError(f"{old.path} can't be deleted: {error}") from error
