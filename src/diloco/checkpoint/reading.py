"""Finding and opening checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diloco.checkpoint.disk import HIDDEN_NAME, LATEST, STEP_NAME, check_size
from diloco.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from diloco.checkpoint.parts import read_part
from diloco.errors import CheckpointError, nearest

__all__ = ["Checkpoint", "find_checkpoint", "list_checkpoints", "open_checkpoint"]

_PICKLES = {".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle"}


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Manifest):
    """A complete checkpoint. Opening one reads its manifest; its parts are read one at a time, by `load`."""

    path: Path

    @property
    def size_bytes(self) -> int:
        """Size of all parts together."""
        return sum(facts.size_bytes for files in self.parts.values() for facts in files.values())

    def load(self, part: str, device: torch.device | str = "cpu") -> Any:
        """The tree that was saved as ``part``, its tensors on ``device``.

        Raises:
            CheckpointError: when there is no such part, or a file of it is missing or damaged. Nothing is parsed before
                its size and digest are found right.
        """
        if part not in self.parts:
            raise CheckpointError(f"{self.path} has no part {part!r}; {nearest(part, self.parts)} Nothing was loaded.")
        try:
            return read_part(self.path, part, self.parts[part], device)
        except CheckpointError as error:
            raise _refused(self.path, error) from error


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint that ``path`` means: one ``step-XXXXXXXX`` folder, or the latest one of a run folder, of its
    ``checkpoints`` folder, or of ``latest`` in there.

    Raises:
        CheckpointError: when there is none, or it is incomplete, damaged, of an unknown format version, or a pickle.
    """
    place = _resolve(path)
    try:
        return _open_complete(place)
    except CheckpointError as error:
        raise _refused(place, error) from error


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """The complete checkpoints in a checkpoints folder, oldest first, in the order in which they were saved."""
    names = set()
    for entry in folder.iterdir() if folder.is_dir() else ():
        hidden = HIDDEN_NAME.match(entry.name)
        if STEP_NAME.match(entry.name):
            names.add(entry.name)
        elif hidden and hidden["fate"] == "replaced":
            names.add(hidden["name"])
    found = [checkpoint for name in names if (checkpoint := find_checkpoint(folder / name)) is not None]
    return sorted(found, key=lambda checkpoint: (checkpoint.serial, checkpoint.path))


def find_checkpoint(place: Path) -> Checkpoint | None:
    """The complete checkpoint called ``place``: there, or aside when a kill fell while it was being replaced."""
    try:
        return _open_complete(_stand_in(place))
    except CheckpointError:
        return None


def _open_complete(place: Path) -> Checkpoint:
    """A checkpoint whose files are all there and of the right size; their digests are not looked at.

    Raises:
        CheckpointError: when it is not complete.
    """
    manifest = read_manifest(place)
    for files in manifest.parts.values():
        for name, facts in files.items():
            check_size(place / name, facts)
    return Checkpoint(path=place, **vars(manifest))


def _stand_in(place: Path) -> Path:
    """Where the checkpoint called ``place`` is, complete or not."""
    if not place.exists():
        for aside in sorted(place.parent.glob(f".{place.name}.*.replaced")):
            try:
                return _open_complete(aside).path
            except CheckpointError:
                continue
    return place


def _resolve(path: Path) -> Path:
    """The folder of the one checkpoint that ``path`` means; it need not be complete."""
    if path.suffix in _PICKLES and path.is_file():
        raise CheckpointError(
            f"{path} is a pickle, which could run any code while it is read. Use a checkpoint folder of diloco or, for "
            "weights alone, a .safetensors file as the start of a new run. Nothing was loaded."
        )
    if STEP_NAME.match(path.name):
        return _stand_in(path)
    if path.name == LATEST and not path.is_dir():
        return _newest(path.parent)
    if (path / MANIFEST_NAME).exists():
        return path
    if path.is_dir():
        return _newest(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    raise CheckpointError(
        f"{path} is {'not a folder' if path.exists() else 'not there'}; name a run folder, its checkpoints folder or "
        "one step-XXXXXXXX folder in that. Nothing was loaded."
    )


def _newest(folder: Path) -> Path:
    latest = folder / LATEST
    if latest.is_dir():  # a symlink, made by hand
        return latest
    if latest.exists():
        name = latest.read_bytes().decode(errors="replace").strip()
        if STEP_NAME.match(name):
            return _stand_in(folder / name)
        raise _refused(latest, f"{latest} says {name!r:.100}, which is not the name of a checkpoint.")
    # without `latest` a kill may have fallen right after the first checkpoint was complete
    if found := list_checkpoints(folder):
        return found[-1].path
    pickles = sorted(entry.name for entry in folder.iterdir() if entry.suffix in _PICKLES) if folder.is_dir() else []
    why = f" ({pickles[0]} is a pickle, which could run any code, and is not read)" if pickles else ""
    raise CheckpointError(
        f"{folder} holds no complete checkpoint{why}; name a folder in which a run has saved one. Nothing was loaded."
    )


def _refused(place: Path, why: object) -> CheckpointError:
    """The error for ``place``, which names a complete checkpoint beside it."""
    others = [checkpoint.path.name for checkpoint in list_checkpoints(place.parent) if checkpoint.path != place]
    way_out = f"{others[-1]} beside it is complete." if others else "No other checkpoint is beside it."
    return CheckpointError(f"{str(why).removesuffix('Nothing was loaded.').rstrip()} {way_out} Nothing was loaded.")
