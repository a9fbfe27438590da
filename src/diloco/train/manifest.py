"""``manifest.json``: what a checkpoint says it holds. It is written last, so a folder without one is no checkpoint.

Its last member is the xxh3_128 digest of every byte before that member, so damage to the manifest itself is found too.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import xxhash

from diloco.errors import CheckpointError
from diloco.train.tensor_file import FileFacts, write_file

__all__ = ["FORMAT_VERSION", "MANIFEST_NAME", "Manifest", "file_names", "read_manifest", "write_manifest"]

FORMAT_VERSION = 1
"""Raised when a reader of the version before could not read what is written now."""

MANIFEST_NAME = "manifest.json"

_DIGEST_MEMBER = re.compile(rb',\n  "digest": "([0-9a-f]{32})"\n}\n\Z')
_PART_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*\Z")  # lower case: some file systems don't tell the cases apart


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest."""

    step: int
    serial: int
    """How many checkpoints were saved into this folder before: the order of saving, without any clock."""
    versions: Mapping[str, str]
    """Of diloco, torch and Python, when it was saved."""
    about: Mapping[str, Any]
    """Free facts."""
    parts: Mapping[str, Mapping[str, FileFacts]]
    """For every part its files, by name."""

    @classmethod
    def of(
        cls, step: int, serial: int, about: Mapping[str, Any], parts: Mapping[str, Mapping[str, FileFacts]]
    ) -> Manifest:
        """A manifest with the versions that are running."""
        versions = {"diloco": version("diloco"), "torch": torch.__version__, "python": platform.python_version()}
        return cls(step, serial, versions, about, parts)


def file_names(part: str) -> tuple[str, str]:
    """The two files of a part: its skeleton and its tensors.

    >>> file_names("replica-0")
    ('replica-0.json', 'replica-0.safetensors')

    Raises:
        CheckpointError: when it can't be the name of a file everywhere, or is the manifest's.
    """
    if not _PART_NAME.match(part) or f"{part}.json" == MANIFEST_NAME:
        raise CheckpointError(
            f"A part of a checkpoint was named {part!r}; lower-case letters, digits, _ and - would work "
            "('manifest' is taken). Nothing was saved or loaded."
        )
    return f"{part}.json", f"{part}.safetensors"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` into ``folder``.

    Raises:
        CheckpointError: when ``about`` holds what JSON can't.
        OSError: when it can't be written.
    """
    members = {"format_version": FORMAT_VERSION, **asdict(manifest)}
    try:
        text = json.dumps(members, indent=2, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"The facts about a checkpoint hold what JSON can't ({error}); text, finite numbers, lists and "
            "dictionaries would work. Nothing was saved."
        ) from error
    body = text.removesuffix(b"\n}")
    member = f',\n  "digest": "{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'
    write_file(folder / MANIFEST_NAME, [body, member.encode()])


def read_manifest(folder: Path) -> Manifest:
    """Read and verify ``folder/manifest.json``; the files it names are in ``folder`` by their names, not yet looked at.

    Raises:
        CheckpointError: when it is missing, damaged, of another format version, or names files outside of ``folder``.
    """
    path = folder / MANIFEST_NAME
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {MANIFEST_NAME}, so it is no complete checkpoint.") from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}.") from error
    try:
        members = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error
    found = members.get("format_version") if isinstance(members, dict) else None
    if found != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {found!r}; diloco {version('diloco')} reads version {FORMAT_VERSION}. "
            "The diloco that wrote it would read it."
        )
    member = _DIGEST_MEMBER.search(raw)
    if member is None or xxhash.xxh3_128_hexdigest(raw[: member.start()]) != member[1].decode():
        raise CheckpointError(f"{path} is damaged: its content does not have the digest it ends with.")
    try:
        return _parse(members)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is malformed: {error!r}.") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path} is refused: {error}") from error


def _parse(members: dict[str, Any]) -> Manifest:
    parts = {}
    for part, files in members["parts"].items():
        if sorted(files) != sorted(file_names(part)):
            # nothing but the two plain names of a part, so no path can lead out of the folder
            raise CheckpointError(
                f"part {part!r} names the files {sorted(files)}, which may lie outside of the checkpoint's folder; "
                f"{' and '.join(file_names(part))} would work."
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
        raise TypeError(f"{value!r:.100} where {kind.__name__} is due")
    return value
