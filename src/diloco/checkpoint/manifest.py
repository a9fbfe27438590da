"""``manifest.json``, the list of a checkpoint's content. It is written last: a folder without it is not a checkpoint.

Its member ``digest`` is the xxh3_128 digest of the others as JSON, so that damage to the manifest is found too.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import xxhash

from diloco.checkpoint.disk import FileFacts, write_file
from diloco.errors import CheckpointError
from diloco.private_files import read_regular

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "Manifest",
    "check_part_name",
    "read_manifest",
    "running_versions",
    "write_manifest",
]

FORMAT_VERSION = 3  # incremented if a reader of the previous version can't read new checkpoints

MANIFEST_NAME = "manifest.json"

_PART_NAME = re.compile(r"(?!manifest\Z)[a-z0-9][a-z0-9_-]*\Z")  # lower case, as some file systems ignore case


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a manifest."""

    step: int  # inner steps finished when it was saved
    serial: int  # number of checkpoints saved to this folder before, which orders them without a clock
    versions: Mapping[str, str]  # of diloco, torch and Python, when it was saved
    about: Mapping[str, Any]  # metadata from the caller
    parts: Mapping[str, Mapping[str, FileFacts]] = field(repr=False)
    """The facts about the files of each part, by part and file name, in the order in which they were saved."""


def check_part_name(part: str) -> None:
    """Refuse the name of a part that is no portable file name, or that of the manifest."""
    if not _PART_NAME.match(part):
        raise CheckpointError(
            f"The name of a checkpoint part must consist of lower-case letters, digits, _ and -, and must not be "
            f"'manifest'; got {part!r}. Nothing was saved or loaded."
        )


def running_versions() -> dict[str, str]:
    """Return the versions for a new manifest."""
    return {"diloco": version("diloco"), "torch": torch.__version__, "python": platform.python_version()}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` into ``folder``.

    Raises:
        CheckpointError: if ``about`` holds values that JSON can't represent.
        OSError: if the file can't be written.
    """
    members = {"format_version": FORMAT_VERSION, **asdict(manifest)}
    try:
        content = _sealed(members)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"The metadata of a checkpoint can't be saved as JSON ({error}). Use only text, finite numbers, lists and "
            "dictionaries. Nothing was saved."
        ) from error
    write_file(folder / MANIFEST_NAME, [content])


def _sealed(members: Mapping[str, Any]) -> bytes:
    """Return ``members`` as JSON, with their digest."""
    digest = xxhash.xxh3_128_hexdigest(json.dumps(members, indent=2, allow_nan=False).encode())
    return json.dumps({**members, "digest": digest}, indent=2).encode()


def read_manifest(folder: Path) -> Manifest:
    """Read and verify ``folder/manifest.json``. The files that it names, all in ``folder``, are not checked yet.

    Raises:
        CheckpointError: if the manifest is missing or damaged, has another format version, or names files outside
            ``folder``.
    """
    path = folder / MANIFEST_NAME
    try:
        raw = read_regular(path)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {MANIFEST_NAME}, so it is not a complete checkpoint.") from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}.") from error
    try:
        members = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error
    found = members.get("format_version") if isinstance(members, dict) else None
    if found != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {found!r}, but diloco {version('diloco')} reads only version {FORMAT_VERSION}. "
            "The version of diloco that saved it can resume and evaluate it, and export it for use with this one."
        )
    try:
        if raw != _sealed({name: value for name, value in members.items() if name != "digest"}):
            raise CheckpointError("it is damaged: its content does not match its digest.")
        return _parse(members)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is malformed: {error!r}.") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path} is refused: {error}") from error


def _parse(members: dict[str, Any]) -> Manifest:
    parts = {}
    for part, files in members["parts"].items():
        check_part_name(part)
        for name in files:
            # only the plain names of a part are allowed, so no path can point outside the folder
            if not re.fullmatch(rf"{part}(\.json|(-rank-\d+)?\.safetensors)", name) or f"{part}.json" not in files:
                raise CheckpointError(
                    f"part {part!r} names the file {name!r}, which may be outside the checkpoint's folder."
                )
        parts[part] = {
            name: FileFacts(_of(int, facts["size_bytes"]), _of(str, facts["digest"])) for name, facts in files.items()
        }
    return Manifest(
        step=_of(int, members["step"]),
        serial=_of(int, members["serial"]),
        versions=_of(dict, members["versions"]),
        about=_of(dict, members["about"]),
        parts=parts,
    )


def _of(kind: type[Any], value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.100} is not of type {kind.__name__}")
    return value
