"""Checkpoints: folders that are complete or absent, whatever happens while they are written.

::

    checkpoints/
      latest                      a line of text, the newest one's name (not every Windows user may make symlinks)
      step-00001000/
        manifest.json             what it holds, with size and digest of every file
        NAME.json                 the skeleton of part NAME (see `diloco.train.state_tree`)
        NAME.safetensors          its tensors

A checkpoint is written beside its place as ``.step-00001000.TOKEN.partial`` and renamed when all of it is on the disk;
only then does ``latest`` move, and only then do the oldest ones go, renamed to ``....deleted`` first. One that is saved
again steps aside as ``....replaced`` and stands in for its successor until that has its name. What a dead save left
behind is put right by the next one. One process writes to a folder; any number may read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from diloco.errors import CheckpointError, nearest
from diloco.state_tree import flatten, unflatten
from diloco.train.checkpoint_folder import (
    LATEST,
    STEP_NAME,
    check_file,
    complete,
    delete,
    hidden_name,
    move_in,
    point_latest_at,
    put_right,
    read_complete,
    stand_in,
)
from diloco.train.manifest import MANIFEST_NAME, Manifest, file_names, write_manifest
from diloco.train.tensor_file import FileFacts, digest_of, read_tensors, sync_folder, tensor_chunks, write_file

__all__ = ["Checkpoint", "held_step", "list_checkpoints", "open_checkpoint", "save_checkpoint"]

_PICKLES = {".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle"}


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint. Opening one reads its manifest; its parts are read one at a time, by `load`."""

    path: Path
    step: int
    """Inner steps finished when it was saved."""
    about: Mapping[str, Any]
    """Free facts, as they were given to `save_checkpoint`."""
    versions: Mapping[str, str]
    """Of diloco, torch and Python, when it was saved."""
    files: Mapping[str, Mapping[str, FileFacts]] = field(repr=False)
    """For every part its files, by name."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of its parts, in the order in which they were saved."""
        return tuple(self.files)

    @property
    def size_bytes(self) -> int:
        """Size of all parts together."""
        return sum(facts.size_bytes for files in self.files.values() for facts in files.values())

    def load(self, part: str, device: torch.device | str = "cpu") -> Any:
        """The tree that was saved as ``part``, its tensors on ``device``.

        Raises:
            CheckpointError: when there is no such part, or a file of it is missing or damaged. Nothing is parsed before
                its size and digest are found right.
        """
        if part not in self.files:
            raise CheckpointError(f"{self.path} has no part {part!r}; {nearest(part, self.files)} Nothing was loaded.")
        skeleton_name, tensors_name = file_names(part)
        try:
            for name, facts in self.files[part].items():
                check_file(self.path / name, facts)
                if digest_of(self.path / name) != facts.digest:
                    raise CheckpointError(f"{self.path / name} is damaged: its digest isn't the manifest's.")
            skeleton = json.loads((self.path / skeleton_name).read_bytes())
            return unflatten(skeleton, read_tensors(self.path / tensors_name, device))
        except (CheckpointError, OSError, ValueError, RecursionError) as error:
            raise _refused(self.path, f"Part {part!r} of {self.path}: {error}") from error


def save_checkpoint(folder: Path, step: int, parts: Mapping[str, Any], *, about: Mapping[str, Any], keep: int) -> Path:
    """Save ``parts`` (name -> nested state) as ``folder/step-XXXXXXXX``, and let only the last ``keep`` stay.

    The parts are taken one after the other, so a mapping that makes each when it is asked for saves memory.

    Args:
        about: facts worth reading without loading anything, as JSON: algorithm, replicas, fragments in flight.

    Returns:
        The new checkpoint; it is on the disk, and ``folder/latest`` names it.

    Raises:
        CheckpointError: when anything went wrong. What was complete before still is, and nothing half-written is left.
    """
    if step < 0 or keep < 1:
        raise CheckpointError(
            f"step={step} and keep={keep} were given; a step from 0 on and at least 1 would work. Nothing was saved."
        )
    place = folder / f"step-{step:08d}"
    partial = hidden_name(place, "partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        put_right(folder)
        serial = 1 + max((serial for serial, _ in complete(folder)), default=-1)
        partial.mkdir()
        files = {part: _write_part(partial, part, parts[part]) for part in parts}
        write_manifest(partial, Manifest.of(step, serial, about, files))
        sync_folder(partial)
        move_in(partial, place)
        point_latest_at(place)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError | CheckpointError):
            raise CheckpointError(
                f"Saving {place} failed: {str(error).rstrip('.')}. The checkpoints that were complete before still are."
            ) from error
        raise
    for old in list_checkpoints(folder)[:-keep]:
        try:
            delete(old)
        except OSError as error:
            raise CheckpointError(
                f"{place} is saved, but {old} can't be deleted: {error}. Deleting it by hand would work."
            ) from error
    return place


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint that ``path`` means: one ``step-XXXXXXXX`` folder, or the latest one of a run folder, of its
    ``checkpoints`` folder, or of ``latest`` in there.

    Raises:
        CheckpointError: when there is none, or it is incomplete, damaged, of an unknown format version, or a pickle.
    """
    place = _resolve(path)
    try:
        return _open(place)
    except CheckpointError as error:
        raise _refused(place, error) from error


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a checkpoints folder, oldest first, in the order in which they were saved."""
    return [path for _, path in complete(folder)]


def _open(place: Path) -> Checkpoint:
    manifest = read_complete(place)
    return Checkpoint(place, manifest.step, manifest.about, manifest.versions, manifest.parts)


def _resolve(path: Path) -> Path:
    """The folder of the one checkpoint that ``path`` means; it need not be complete."""
    if path.suffix in _PICKLES and path.is_file():
        raise CheckpointError(
            f"{path} is a pickle, which could run any code while it is read. A checkpoint folder of diloco would work; "
            "so would, for weights alone, a .safetensors file given as the start of a new run. Nothing was loaded."
        )
    if STEP_NAME.match(path.name):
        return stand_in(path)
    if path.name == LATEST and not path.is_dir():
        return _newest(path.parent)
    if (path / MANIFEST_NAME).exists():
        return path
    if path.is_dir():
        return _newest(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    raise CheckpointError(
        f"{path} is {'no folder' if path.exists() else 'not there'}; a run folder, its checkpoints folder or one "
        "step-XXXXXXXX folder in that would work. Nothing was loaded."
    )


def _newest(folder: Path) -> Path:
    latest = folder / LATEST
    if latest.is_dir():  # a symlink, made by hand
        return latest
    if latest.exists():
        name = latest.read_bytes().decode(errors="replace").strip()
        if STEP_NAME.match(name):
            return stand_in(folder / name)
        raise _refused(latest, f"{latest} says {name!r:.100}, which is no name of a checkpoint.")
    # without `latest` a kill may have fallen right after the first checkpoint was complete
    if found := list_checkpoints(folder):
        return found[-1]
    pickles = sorted(entry.name for entry in folder.iterdir() if entry.suffix in _PICKLES) if folder.is_dir() else []
    why = f" ({pickles[0]} is a pickle, which could run any code, and is not read)" if pickles else ""
    raise CheckpointError(
        f"{folder} holds no complete checkpoint{why}; a folder in which a run has saved one would work. "
        "Nothing was loaded."
    )


def _refused(place: Path, why: object) -> CheckpointError:
    """The error for ``place``, which names a checkpoint beside it that would work."""
    others = [path.name for path in list_checkpoints(place.parent) if path != place]
    way_out = f"{others[-1]} beside it is complete and would work." if others else "No other checkpoint is beside it."
    return CheckpointError(f"{str(why).removesuffix('Nothing was loaded.').rstrip()} {way_out} Nothing was loaded.")


def _write_part(folder: Path, part: str, tree: Any) -> dict[str, FileFacts]:
    skeleton_name, tensors_name = file_names(part)
    try:
        skeleton, tensors = flatten(tree)
    except CheckpointError as error:
        raise CheckpointError(f"Part {part!r}: {error}") from error
    text = json.dumps(skeleton, separators=(",", ":"), allow_nan=False).encode()
    return {
        skeleton_name: write_file(folder / skeleton_name, [text]),
        tensors_name: write_file(folder / tensors_name, tensor_chunks(tensors)),
    }


def held_step(folder: Path, resume: Path) -> int:
    """The step that the checkpoints of a run in ``folder`` could go on from: that of ``resume``, or the newest.

    -1: there is none.
    """
    found = list_checkpoints(folder / "checkpoints")
    if resume.name.startswith("step-"):
        found = [path for path in found if path.name == resume.name]
    return open_checkpoint(found[-1]).step if found else -1
