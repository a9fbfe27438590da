"""Read the configuration and the weights of a folder of ``transformers``. Pickles are never read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diloco.errors import CheckpointError, from_extra

__all__ = [
    "CONFIG_NAME",
    "has_weights",
    "import_transformers",
    "is_huggingface_folder",
    "read_json",
    "stored_tensors",
    "weights_digest",
    "without_progress_bars",
]

CONFIG_NAME = "config.json"
WEIGHTS_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"


def import_transformers() -> Any:
    """Return the library, which takes seconds to import.

    Raises:
        ConfigurationError: it is not installed, or its import fails.
    """
    with from_extra("hf", "A model of transformers needs that package"):
        import transformers
    return transformers


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Turn off the progress bars of ``transformers`` inside the context."""
    from transformers.utils import logging

    progress: Any = logging
    shown = progress.is_progress_bar_enabled()
    progress.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            progress.enable_progress_bar()


def is_huggingface_folder(path: Path) -> bool:
    """Return whether ``path`` is a folder with a ``config.json`` of ``transformers``."""
    return (path / CONFIG_NAME).is_file()


def has_weights(folder: Path) -> bool:
    """Return whether ``folder`` contains weights."""
    return any((folder / name).is_file() for name in (WEIGHTS_NAME, INDEX_NAME))


def stored_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the ``.safetensors`` weights in ``folder``, file by file, with its name.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    if (folder / INDEX_NAME).is_file():
        shards = read_json(folder / INDEX_NAME).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise CheckpointError(f"{folder / INDEX_NAME} has no valid weight_map of file names.")
        names = sorted(set(shards.values()))
    else:
        names = [WEIGHTS_NAME]
    for name in names:
        path = folder / name
        if Path(name).name != name or not path.is_file():
            pickles = sorted(entry.name for entry in folder.glob("*.bin"))
            why = f" ({pickles[0]} is a pickle, which could run any code, and is not read)" if pickles else ""
            raise CheckpointError(f"{folder} has no weights file {name}{why}.")
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for key in file.keys():  # noqa: SIM118  # not a dict
                    yield key, file.get_tensor(key)
        except SafetensorError as error:
            raise CheckpointError(f"{path} is not a valid safetensors file: {error}.") from error


def weights_digest(folder: Path) -> str:
    """Return a digest of all weights in ``folder``: names, types, shapes and values, in any division into files.

    Files that have not changed since the last call are not read again.

    Raises:
        CheckpointError: as `stored_tensors`.
    """
    files = tuple(
        (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.glob("*.safeten*"))
    )
    return _digest(folder, files)


@cache
def _digest(folder: Path, files: tuple[tuple[str, int, int], ...]) -> str:
    each = {}
    for name, value in stored_tensors(folder):
        data = value.contiguous().reshape(-1).view(torch.uint8).numpy()
        each[name] = f"{name} {value.dtype} {tuple(value.shape)} {xxhash.xxh3_128_hexdigest(data.data)}"
    return xxhash.xxh3_128_hexdigest("\n".join(each[name] for name in sorted(each)).encode())


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or raise `CheckpointError`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not contain a JSON object.")
    return value
