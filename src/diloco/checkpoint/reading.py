"""Finding, opening and loading checkpoints.

``manifest.json`` lists the content of a checkpoint. It is written last: a folder without it is not a checkpoint. Its
member ``digest`` is the xxh3_128 digest of the others as JSON, so that damage to the manifest is found too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import xxhash
from safetensors import SafetensorError
from torch import Tensor

from diloco.checkpoint.disk import HIDDEN_NAME, STEP_NAME, FileFacts, check_content, check_size, write_file
from diloco.checkpoint.tensors import Lazy, SavedTensor, find_tensors
from diloco.errors import CheckpointError, NoCheckpointError, nearest
from diloco.private_files import read_regular
from diloco.state_tree import UNREADABLE, unflatten
from diloco.waiting import described

T = TypeVar("T")

_FORMAT_VERSION = 3  # incremented if a reader of the previous version can't read new checkpoints
MANIFEST = "manifest.json"
LASTING = ("model", "configuration", "base model", "tokenizer", "chat template", "data", "at home")
"""The facts of a run that are the same whenever it resumes, wherever its files are."""
_PART = re.compile(r"(?!manifest\Z)[a-z0-9][a-z0-9_-]*")  # lower case, as some file systems ignore case


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a manifest."""

    step: int  # inner steps finished when it was saved
    serial: int  # number of checkpoints saved to this folder before, which orders them without a clock
    versions: Mapping[str, str]  # of diloco, torch and Python, when it was saved
    about: Mapping[str, Any]  # metadata from the caller
    parts: Mapping[str, Mapping[str, FileFacts]] = field(repr=False)
    """The facts about the files of each part, by part and file name, in the order in which they were saved."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` into ``folder``."""
    write_file(folder / MANIFEST, [_sealed({"format_version": _FORMAT_VERSION, **asdict(manifest)})])


def _sealed(members: Mapping[str, Any]) -> bytes:
    """Return ``members`` as JSON, with their digest."""
    digest = xxhash.xxh3_128_hexdigest(json.dumps(members, indent=2, allow_nan=False).encode())
    return json.dumps({**members, "digest": digest}, indent=2).encode()


def read_manifest(folder: Path) -> Manifest:
    """Read and verify ``folder/manifest.json``. The files that it names, all in ``folder``, are not checked yet."""
    path = folder / MANIFEST
    try:
        raw = read_regular(path)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {MANIFEST}, so it is not a complete checkpoint.") from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}.") from error
    return parse_manifest(raw, path)


def parse_manifest(raw: bytes, path: object) -> Manifest:
    """Verify and return the manifest that was at ``path``."""
    try:
        members = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error
    number = members.get("format_version") if isinstance(members, dict) else None
    if number != _FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {number!r}, but diloco {version('diloco')} reads only version "
            f"{_FORMAT_VERSION}. The version of diloco that saved it can resume and evaluate it, and export it for use "
            "with this one."
        )
    if raw != _sealed({name: value for name, value in members.items() if name != "digest"}):
        raise CheckpointError(f"{path} is damaged: its content does not match its digest.")
    try:
        manifest = msgspec.convert(members, described(Manifest))
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path} is malformed: {error}.") from error
    for part, files in manifest.parts.items():
        for name in files or [""]:
            # only the plain names of a part are allowed, so no path can point outside the folder
            plain = re.fullmatch(rf"{part}(\.json|(-rank-\d+)?\.safetensors)", name) if _PART.fullmatch(part) else None
            if not plain or f"{part}.json" not in files:
                raise CheckpointError(
                    f"{path} is refused: part {part!r} names the file {name!r}, which may be outside the checkpoint's "
                    "folder."
                )
    return manifest


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Manifest):
    """A complete checkpoint. Opening it reads only the manifest; `load` reads one part at a time."""

    path: Path

    @property
    def size_bytes(self) -> int:
        """The total size of all parts."""
        return sum(facts.size_bytes for files in self.parts.values() for facts in files.values())

    def fact(self, name: str, kind: type[T], default: T | None = None, *, least: int = 0) -> T:
        """Return a value of `about`, whoever wrote it, if it is of this type and no number below ``least``."""
        value = default if self.about.get(name) is None else self.about[name]
        if type(value) is not kind or (isinstance(value, int) and not least <= value < 2**63):
            raise CheckpointError(f"{self.path} says {name} = {value!r:.100}, which is not valid. Nothing was loaded.")
        return value

    def check_content(self) -> None:
        """Read all files and raise `CheckpointError` unless each has the content that was written."""
        for files in self.parts.values():
            for name, facts in files.items():
                try:
                    check_content(self.path / name, facts)
                except OSError as error:
                    raise CheckpointError(f"{self.path / name} can't be read: {error}.") from error

    def load(self, part: str) -> Any:
        """Return the tree that was saved as ``part``, with its tensors, which are whole, on the CPU."""
        with self._reading(part):
            skeleton = self.path / f"{part}.json"
            check_content(skeleton, self.parts[part][skeleton.name])
            tensors = {name: saved.load() for name, saved in self._tensors(part).items()}
            return unflatten(json.loads(skeleton.read_bytes()), tensors)

    def _tensors(self, part: str) -> dict[str, SavedTensor]:
        with self._reading(part):
            files = self.parts[part].items()
            return find_tensors({self.path / name: facts for name, facts in files if name.endswith(".safetensors")})

    def values(self, part: str) -> Mapping[str, Tensor]:
        """Return the tensors of a part by name, each of which is read when it is asked for."""

        def read(saved: SavedTensor) -> Tensor:
            with self._reading(part):
                return saved.load()

        return Lazy(self._tensors(part), read)

    def load_into(self, part: str, values: Mapping[str, Tensor]) -> None:
        """Fill ``values`` in place from the tensors of a part with the same names; in a DTensor, this rank's shard.

        The ranks exchange nothing: each reads the files that it needs.
        """
        tensors = self._tensors(part)
        with self._reading(part):
            for name, value in values.items():
                if name not in tensors:
                    raise CheckpointError(f"It has no value {name}, so it belongs to another model.")
                tensors[name].load_into(value)

    @contextmanager
    def _reading(self, part: str) -> Iterator[None]:
        if part not in self.parts:
            raise CheckpointError(f"{self.path} has no part {part!r}; {nearest(part, self.parts)} Nothing was loaded.")
        try:
            yield
        except (CheckpointError, SafetensorError, OSError, *UNREADABLE, RuntimeError) as error:
            raise _refused(self.path, f"Part {part!r} of {self.path} can't be read: {error}") from error


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint that ``path`` names; none that is complete and readable is a `CheckpointError`.

    Args:
        path: a ``step-XXXXXXXX`` folder; or a run folder or its ``checkpoints`` folder, for the checkpoint that was
            saved last. Only that one must be whole: a damaged one is an error if it was saved after all whole ones, or
            if that is unknown and its step is higher.
    """
    folder, saved, damaged = _survey(path)
    newest = max(saved, key=_order, default=None)
    for place, why in damaged.items():
        if newest is None or _is_later(place, newest):
            raise _refused(place, why) from why
    if newest is None:
        raise _holds_none(folder)
    return newest


def open_sound(
    path: Path, check: Callable[[Checkpoint], object] = lambda checkpoint: None
) -> tuple[Checkpoint, tuple[str, ...]]:
    """Open the newest checkpoint that ``path`` names of which every file has the content that was written.

    Args:
        path: as for `open_checkpoint`; another than a damaged ``step-XXXXXXXX`` folder is not looked for.
        check: raises `CheckpointError` if a checkpoint can't be used for another reason.

    Returns:
        The checkpoint, and sentences about those that were passed over because they are damaged.
    """
    folder, saved, damaged = _survey(path)
    passed: dict[Path, CheckpointError | OSError] = {}
    for checkpoint in sorted(saved, key=_order, reverse=True):
        try:
            checkpoint.check_content()
            check(checkpoint)
        except CheckpointError as error:
            passed[checkpoint.path] = error
            continue
        passed |= {place: why for place, why in damaged.items() if _is_later(place, checkpoint)}
        if not passed:
            return checkpoint, ()
        last = max(int(place.name.removeprefix("step-")) for place in passed)
        again = f"; {last - checkpoint.step} steps are trained again" if last > checkpoint.step else ""
        why = (str(error).removesuffix("Nothing was loaded.").rstrip() for error in passed.values())
        return checkpoint, (*why, f"The run goes on from {checkpoint.path}{again}.")
    problems = [*{**damaged, **passed}.items()]
    if len(problems) == 1:
        raise _refused(*problems[0]) from problems[0][1]
    if problems:
        why = (str(problem).removesuffix("Nothing was loaded.").rstrip() for _, problem in problems)
        raise CheckpointError(" ".join([*why, f"{folder} has no whole checkpoint. Nothing was loaded."]))
    raise _holds_none(folder)


def _survey(path: Path) -> tuple[Path, list[Checkpoint], dict[Path, CheckpointError | OSError]]:
    """Return the checkpoints folder of what ``path`` names, its checkpoints, and what is wrong with others."""
    try:
        alone = bool(STEP_NAME.match(path.name)) or (path / MANIFEST).exists()
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        places = {path} if alone else _places(folder)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}. Nothing was loaded.") from error
    if not (alone or folder.is_dir()):
        raise NoCheckpointError(
            f"{path} {'is not a folder' if path.exists() else 'does not exist'}. Use a run folder, its checkpoints "
            "folder or a step-XXXXXXXX folder in that. Nothing was loaded."
        )
    saved: list[Checkpoint] = []
    damaged: dict[Path, CheckpointError | OSError] = {}
    for place in places:
        try:
            saved.append(_open(place))
        except (CheckpointError, OSError) as error:
            if alone or place.exists():  # else a run that saves there has just deleted it
                damaged[place] = error
    return folder, saved, damaged


def _holds_none(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{folder} holds no complete checkpoint. Use a folder in which a run has saved one. Nothing was loaded."
    )


def run_folder(checkpoint: Path) -> Path:
    """Return the run folder that holds a checkpoint, whose path may be relative or contain ``..``."""
    return Path(os.path.abspath(checkpoint)).parent.parent


def _is_later(damaged: Path, newest: Checkpoint) -> bool:
    """Return whether a damaged checkpoint was saved after ``newest``; its step decides if its manifest is damaged."""
    try:
        return read_manifest(damaged).serial > newest.serial
    except CheckpointError:
        return int(damaged.name.removeprefix("step-")) > newest.step


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the complete checkpoints in a checkpoints folder, in the order in which they were saved."""
    complete = []
    for place in _places(folder):
        with suppress(CheckpointError):
            complete.append(_open(place))
    return sorted(complete, key=_order)


def holds_none(folder: Path) -> bool:
    """Return whether no save has ended in a checkpoints folder, not even one that is damaged now."""
    return not _places(folder)


def _places(folder: Path) -> set[Path]:
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    hidden = [match["name"] for match in map(HIDDEN_NAME.match, names) if match and match["fate"] == "replaced"]
    return {folder / name for name in (*filter(STEP_NAME.match, names), *hidden)}


def _order(checkpoint: Checkpoint) -> tuple[int, Path]:
    return checkpoint.serial, checkpoint.path


def _open(place: Path) -> Checkpoint:
    """Open a checkpoint, perhaps under the name that it got from a save that was killed while replacing it.

    All files exist then and have the right sizes. Digests are not checked.
    """
    for aside in () if place.exists() else sorted(place.parent.glob(f".{place.name}.*.replaced")):
        with suppress(CheckpointError):
            return _open(aside)
    manifest = read_manifest(place)
    for files in manifest.parts.values():
        for name, facts in files.items():
            check_size(place / name, facts)
    return Checkpoint(path=place, **vars(manifest))


def _refused(place: Path, why: object) -> CheckpointError:
    """Return the error with the name of a complete checkpoint beside ``place``."""
    others = [checkpoint.path.name for checkpoint in list_checkpoints(place.parent) if checkpoint.path != place]
    advice = f"{others[-1]} in the same folder is complete." if others else "Its folder has no other checkpoint."
    return CheckpointError(f"{str(why).removesuffix('Nothing was loaded.').rstrip()} {advice} Nothing was loaded.")
