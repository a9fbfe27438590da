"""Saving a checkpoint beside the training, from one process or from all ranks of a replica; see `diloco.checkpoint`.

All ranks of a replica must see the same folder, in which only position 0 renames.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from diloco.checkpoint.disk import HIDDEN_NAME, FileFacts, delete, hidden_name, move_in, sync_folder, write_file
from diloco.checkpoint.reading import Checkpoint, Manifest, list_checkpoints, write_manifest
from diloco.checkpoint.tensors import shards_of, tensor_chunks
from diloco.errors import CheckpointError
from diloco.state_tree import flatten
from diloco.transport import ReplicaGroup
from diloco.waiting import described, in_thread


class CheckpointWriter:
    """Writes the checkpoints of a replica, one at a time, in a thread of each rank while they train.

    All ranks of the replica (``group``; None: this process is alone) call its methods in the same order, between the
    same steps.
    """

    def __init__(self, group: ReplicaGroup | None = None) -> None:
        self._group = group or ReplicaGroup()
        self._saving: Generator[Future[Any], None, Path] | None = None  # yields the work that it waits for
        self._work: Future[Any] = Future()

    def save(
        self,
        folder: Path,
        step: int,
        parts: Mapping[str, Any],
        *,
        about: Mapping[str, Any],
        keep: int,
        own: Mapping[str, Any] | None = None,
        agreed: int | None = None,
        in_use: Collection[Path] = (),
        copies: bool = True,
    ) -> None:
        """Begin to save ``folder/step-XXXXXXXX``, then to delete all but the last ``keep`` checkpoints.

        The state is copied to host memory before this returns. `poll` must have reported the previous checkpoint.

        Args:
            folder: the checkpoints folder, which all ranks must see.
            step: the number of finished inner steps.
            parts: part name -> nested state, see `diloco.state_tree`. Each rank saves its shards of the DTensors, and
                position 0 everything else.
            about: metadata to read without loading anything, as JSON: algorithm, replicas, fragments in flight.
            keep: the number of checkpoints to keep, at least 1.
            own: part name -> nested state of this rank, saved as the part ``NAME-POSITION``.
            agreed: the step that all replicas are known to have finished, if others save checkpoints of their own at
                the same steps: the newest checkpoint that is complete on all of them then stays too.
            in_use: checkpoints that stay until the next one is saved, although they are older.
            copies: False if the state does not change before `poll` reports the checkpoint.

        Raises:
            CheckpointError: on all ranks, as `poll`.
        """
        assert self._saving is None, "one checkpoint is written at a time"
        saving = self._save(folder / f"step-{step:08d}", parts, about, keep, own or {}, agreed, in_use, copies)
        self._work = next(saving)
        self._saving = saving

    def poll(self, *, wait: bool = False) -> Path | None:
        """Return the path of the checkpoint that has been completed since the last call, or None.

        It is then on disk. Between checkpoints the ranks exchange nothing.

        Args:
            wait: whether to wait for it.

        Raises:
            CheckpointError: on all ranks, if saving failed on any rank. Earlier complete checkpoints are unchanged, and
                no partial checkpoint is left.
        """
        while self._saving is not None:
            if wait:
                self._work.exception()
            if not self._group.all(self._work.done()):
                return None
            try:
                self._work = next(self._saving)
            except StopIteration as stop:
                self._saving = None
                path: Path = stop.value
                return path
            except BaseException:
                self._saving = None
                raise
        return None

    def close(self) -> None:
        """End the checkpoint that is being written after a failure: a lone rank completes it, others remove it."""
        if self._saving is not None and self._group.size == 1:
            with suppress(CheckpointError):
                self.poll(wait=True)
        if self._saving is not None:
            self._work.exception()
            self._saving.close()
            self._saving = None

    def _save(
        self,
        place: Path,
        parts: Mapping[str, Any],
        about: Mapping[str, Any],
        keep: int,
        own: Mapping[str, Any],
        agreed: int | None,
        in_use: Collection[Path],
        copies: bool,
    ) -> Generator[Future[Any], None, Path]:
        """Save in stages: each ends when the work that it yields is done on all ranks."""
        group, folder = self._group, place.parent
        partial = folder / group.share(hidden_name(place, "partial").name)
        failed = f"Saving {place} failed: ", ". Earlier complete checkpoints are unchanged."
        serial = 0
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
                mine = {part: _content(part, tree, group, copies) for part, tree in parts.items()}
                for part, tree in own.items():
                    mine[f"{part}-{group.position}"] = _content(f"{part}-{group.position}", tree, None, copies)
            written = in_thread(lambda: _write(partial, mine), "checkpoint")
            yield written
            facts: dict[str, dict[str, FileFacts]] = {}
            with _on_all_or_none(group, *failed):
                facts = written.result()
            files: dict[str, dict[str, FileFacts]] = {}
            for row in group.gather_texts(msgspec.json.encode(facts).decode()):
                for part, entries in msgspec.json.decode(row, type=described(dict[str, dict[str, FileFacts]])).items():
                    files.setdefault(part, {}).update(entries)
            versions = {"diloco": version("diloco"), "torch": torch.__version__, "python": platform.python_version()}
            manifest = Manifest(step=int(place.name[5:]), serial=serial, versions=versions, about=about, parts=files)
            completed = in_thread(lambda: _complete(partial, place, manifest) if group.leads else None, "checkpoint")
            yield completed
            with _on_all_or_none(group, *failed):
                completed.result()
        except BaseException:
            if group.leads:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        deleted = in_thread(
            lambda: _delete_all_but(folder, keep, agreed, in_use) if group.leads else None, "checkpoint"
        )
        yield deleted
        with _on_all_or_none(group, f"{place} is saved, but ", ". Delete it by hand."):
            deleted.result()
        return place


def save_checkpoint(folder: Path, step: int, *given: Any, group: ReplicaGroup | None = None, **named: Any) -> Path:
    """Save a checkpoint at once, with the arguments of `CheckpointWriter.save`, and return its path."""
    writer = CheckpointWriter(group)
    writer.save(folder, step, *given, **named, copies=False)
    try:
        path = writer.poll(wait=True)
    finally:
        writer.close()
    assert path is not None, "it has been saved"
    return path


@contextmanager
def _on_all_or_none(group: ReplicaGroup, before: str, after: str) -> Iterator[None]:
    """Raise `CheckpointError` on all ranks if the block raised on any; ``before`` and ``after`` frame its message."""
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
        if hidden["fate"] == "replaced" and not (folder / hidden["name"]).exists():
            os.replace(entry, folder / hidden["name"])
        else:
            delete(entry)
    partial.mkdir()
    return 1 + max((checkpoint.serial for checkpoint in list_checkpoints(folder)), default=-1)


def _content(part: str, tree: Any, group: ReplicaGroup | None, copies: bool) -> dict[str, Iterable[Any]]:
    """Return the content of the files that this rank writes of a part, in chunks by name; ``group`` None: it alone."""
    skeleton, tensors = flatten(tree)
    shards, metadata = shards_of(tensors)
    files: dict[str, Iterable[Any]] = {}
    if group is None or group.leads:
        files[f"{part}.json"] = [json.dumps(skeleton, separators=(",", ":"), allow_nan=False).encode()]
        plain = {name: tensor for name, tensor in tensors.items() if not hasattr(tensor, "to_local")}
        files[f"{part}.safetensors"] = tensor_chunks(_copied(plain) if copies else plain)
    if shards:
        name = f"{part}-rank-{group.position if group else 0}.safetensors"
        files[name] = tensor_chunks(_copied(shards) if copies else shards, metadata)
    return files


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _write(folder: Path, parts: dict[str, dict[str, Iterable[Any]]]) -> dict[str, dict[str, FileFacts]]:
    """Write the files of parts, and return the facts about them. Each copy is dropped once it is on disk."""
    facts: dict[str, dict[str, FileFacts]] = {}
    for part, files in parts.items():
        facts[part] = {name: write_file(folder / name, files.pop(name)) for name in list(files)}
    return facts


def _complete(partial: Path, place: Path, manifest: Manifest) -> None:
    write_manifest(partial, manifest)
    sync_folder(partial)
    move_in(partial, place)


def _delete_all_but(folder: Path, keep: int, agreed: int | None, in_use: Collection[Path]) -> None:
    for old in _superseded(list_checkpoints(folder), keep, agreed):
        if old.path in in_use:
            continue
        try:
            delete(old.path)
        except OSError as error:
            raise CheckpointError(f"{old.path} can't be deleted: {error}") from error


def _superseded(saved: Sequence[Checkpoint], keep: int, agreed: int | None) -> Sequence[Checkpoint]:
    """Return all checkpoints but the last ``keep`` and those that replicas which save their own may need to resume."""
    old = saved[:-keep]
    if agreed is None:  # each is complete by itself
        return old
    # who has finished the agreed step has begun to save the last checkpoint before it, and so completed the one before
    complete = [checkpoint.step for checkpoint in saved if checkpoint.step < agreed][:-1]
    if not complete:
        return ()
    return [checkpoint for checkpoint in old if checkpoint.step < max(complete)]
