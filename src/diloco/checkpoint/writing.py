"""Saving a checkpoint: from one process, or from all ranks of a replica together, as `diloco.checkpoint` has it.

What the rank at position 0 has of a sharded part NAME is saved as::

    NAME-shard-0.json, .safetensors     its pieces: what they are of, where in that, and their values
    NAME-rank-0.json, .safetensors      what only that rank can go on with (rounds in flight)

and so on for each rank. All ranks of a replica must see the one folder, to which position 0 alone gives names.
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
from diloco.transport.replica_group import ReplicaGroup

__all__ = ["save_checkpoint"]

Files = dict[str, dict[str, FileFacts]]  # part -> file name -> what the manifest says about it


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
    """Save ``folder/step-XXXXXXXX``, and let only the last ``keep`` checkpoints stay; to be called on all ranks.

    Args:
        folder: that all ranks see.
        step: inner steps finished.
        parts: part name -> nested state; position 0's are saved. They are taken one after the other, so a mapping that
            makes each when it is asked for saves memory.
        about: facts worth reading without loading anything, as JSON: algorithm, replicas, fragments in flight.
        keep: at least 1.
        shards: part name -> what this rank has of it.
        gathered: part name -> tensors by name, saved as an ordinary part; DTensors are gathered one at a time.
        group: the replica's ranks; None: this process is alone.

    Returns:
        The new checkpoint; it is on the disk, and ``folder/latest`` names it.

    Raises:
        CheckpointError: on all ranks, when anything went wrong on one. What was complete before still is, and nothing
            half-written is left.
    """
    if step < 0 or keep < 1:
        raise CheckpointError(
            f"step={step} and keep={keep} were given; step must be at least 0 and keep at least 1. Nothing was saved."
        )
    group = group or ReplicaGroup()
    place = folder / f"step-{step:08d}"
    partial = folder / group.share(hidden_name(place, "partial").name)
    failed = f"Saving {place} failed: ", ". The checkpoints that were complete before still are."
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
    """Around what each rank does by itself: where it fails on one rank, it fails on all.

    Raises:
        CheckpointError: on all ranks, if that or `OSError` was raised on any; ``before`` and ``after`` frame its words.
    """
    raised: Exception | None = None
    try:
        yield
    except (CheckpointError, OSError) as error:
        raised = error
    mine = "" if raised is None else (str(raised) or repr(raised)).rstrip(".")
    texts = enumerate(group.gather_texts(mine))
    if why := [f"position {s}: {text}" if group.size > 1 else text for s, text in texts if text]:
        raise CheckpointError(before + "; ".join(why) + after) from raised


def _begin(partial: Path) -> int:
    """Put right what a save that died has left, and make the folder to write into; the new checkpoint's serial."""
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
    """Write what this rank alone has."""
    if not partial.is_dir():
        raise CheckpointError(
            f"{partial.parent} is not the folder that position 0 of this replica saves to; all ranks of a replica must "
            "see the same folder, on one machine or a shared file system"
        )
    files = {part: write_part(partial, part, parts[part]) for part in parts}
    for part, held in shards.items():
        if position < held.num_shards:
            pieces = pieces_of(held.values, leads=position == 0)
            for name, tree in ((f"{part}-shard-{position}", pieces), (f"{part}-rank-{position}", held.own)):
                files[name] = write_part(partial, name, tree)
    return files


def _write_gathered(partial: Path, part: str, values: Mapping[str, Tensor], group: ReplicaGroup) -> Files:
    """Write a part of tensors by name, each of them gathered on all ranks; position 0 has room for one at a time."""
    if not group.leads:
        for value in in_file_order(values).values():
            whole(value)
        return {}
    chunks = tensor_chunks(values)
    try:
        skeleton: JSON = {"dict": {name: {"tensor": name} for name in values}}
        return {part: write_files(partial, part, skeleton, chunks)}
    finally:
        for _ in chunks:  # the others gather to the end, also where writing has failed
            pass


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
