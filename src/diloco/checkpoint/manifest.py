"""``manifest.json``: what a checkpoint says it holds. It is written last, so a folder without one is no checkpoint.

Its last member is the xxh3_128 digest of every byte before that member, so damage to the manifest itself is found too.
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
from diloco.checkpoint.parts import file_names
from diloco.errors import CheckpointError

__all__ = ["FORMAT_VERSION", "MANIFEST_NAME", "Manifest", "read_manifest", "running_versions", "write_manifest"]

FORMAT_VERSION = 1  # raised when a reader of the version before could not read what is written now

MANIFEST_NAME = "manifest.json"

_DIGEST_MEMBER = re.compile(rb',\n  "digest": "([0-9a-f]{32})"\n}\n\Z')


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a manifest."""

    step: int  # inner steps finished when it was saved
    serial: int  # how many checkpoints were saved into this folder before: the order of saving, without any clock
    versions: Mapping[str, str]  # of diloco, torch and Python, when it was saved
    about: Mapping[str, Any]  # free facts, as they were given when it was saved
    parts: Mapping[str, Mapping[str, FileFacts]] = field(repr=False)
    """Name of each part -> its files by name, in the order in which they were saved."""


def running_versions() -> dict[str, str]:
    """The versions for a manifest that is written now."""
    return {"diloco": version("diloco"), "torch": torch.__version__, "python": platform.python_version()}


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
            "dictionaries can be saved. Nothing was saved."
        ) from error
    body = text.removesuffix(b"\n}")
    member = f',\n  "digest": "{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'
    write_file(folder / MANIFEST_NAME, [body, member.encode()])


def read_manifest(folder: Path) -> Manifest:
    """Read and verify ``folder/manifest.json``; the files it names lie in ``folder``, and are not yet looked at.

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
            "Read it with the diloco that wrote it."
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
                f"it must name {' and '.join(file_names(part))}."
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
