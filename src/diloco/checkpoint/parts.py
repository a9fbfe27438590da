"""One part of a checkpoint: a nested state as a JSON file with its skeleton and a safetensors file with its tensors.

This module writes the tensors itself, because the safetensors library would hold all of them in host memory at once.
Here, one tensor at a time is gathered, copied to the host and made contiguous while the file's digest is computed. The
library reads the files, as it guards against malformed ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diloco.checkpoint.disk import FileFacts, check_content, write_file
from diloco.errors import CheckpointError
from diloco.state_tree import DTYPE_NAMES, JSON, flatten, unflatten

__all__ = ["Whole", "file_names", "in_file_order", "read_part", "tensor_chunks", "whole", "write_files", "write_part"]

_PART_NAME = re.compile(r"(?!manifest\Z)[a-z0-9][a-z0-9_-]*\Z")  # lower case, as some file systems ignore case


def file_names(part: str) -> tuple[str, str]:
    """Return the names of a part's two files, for its skeleton and its tensors.

    >>> file_names("replica-0")
    ('replica-0.json', 'replica-0.safetensors')

    Raises:
        CheckpointError: if the part's name is not a portable file name, or is that of the manifest.
    """
    if not _PART_NAME.match(part):
        raise CheckpointError(
            f"The name of a checkpoint part must consist of lower-case letters, digits, _ and -, and must not be "
            f"'manifest'; got {part!r}. Nothing was saved or loaded."
        )
    return f"{part}.json", f"{part}.safetensors"


def write_part(folder: Path, part: str, tree: Any) -> dict[str, FileFacts]:
    """Write the two files of a part and return the facts about them for the manifest.

    Raises:
        CheckpointError: if the tree holds a value that can't be saved.
        OSError: if a file can't be written.
    """
    try:
        skeleton, tensors = flatten(tree)
    except CheckpointError as error:
        raise CheckpointError(f"Part {part!r}: {error}") from error
    return write_files(folder, part, skeleton, tensor_chunks(tensors))


def write_files(folder: Path, part: str, skeleton: JSON, chunks: Iterable[bytes | memoryview]) -> dict[str, FileFacts]:
    """Write a part like `write_part`, from a skeleton and the `tensor_chunks` of its tensors."""
    skeleton_name, tensors_name = file_names(part)
    text = json.dumps(skeleton, separators=(",", ":"), allow_nan=False).encode()
    return {
        skeleton_name: write_file(folder / skeleton_name, [text]),
        tensors_name: write_file(folder / tensors_name, chunks),
    }


def read_part(folder: Path, part: str, files: Mapping[str, FileFacts], device: torch.device | str) -> Any:
    """Read the tree that `write_part` wrote, with its tensors on ``device``. Files are checked before they are parsed.

    Raises:
        CheckpointError: if a file is missing, damaged or malformed.
    """
    skeleton_path, tensors_path = (folder / name for name in file_names(part))
    try:
        for path in (skeleton_path, tensors_path):
            check_content(path, files[path.name])
        skeleton = json.loads(skeleton_path.read_bytes())
        return unflatten(skeleton, _read_tensors(tensors_path, device))
    except (CheckpointError, SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"Part {part!r} of {folder} can't be read: {error}") from error


def _read_tensors(path: Path, device: torch.device | str) -> dict[str, Tensor]:
    # Copied, because mapped tensors have another alignment than torch's own, and a matrix product may round differently
    # there, so that a resumed run would not repeat the bits of an uninterrupted one.
    with safe_open(path, framework="pt", device="cpu") as file:
        return {name: file.get_tensor(name).to(device, copy=True) for name in file.keys()}  # noqa: SIM118  # not a dict


def tensor_chunks(
    tensors: Mapping[str, Tensor], gather: Callable[[Tensor], Tensor] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the content of a safetensors file with ``tensors``.

    The tensors may have any shape, strides and device, and the dtypes of `DTYPE_NAMES`. DTensors are gathered one at a
    time, which requires a call on all ranks, by ``gather`` instead of `whole` if it is given.

    >>> chunks = list(tensor_chunks({"half": torch.ones(2, dtype=torch.float16)}))
    >>> bytes(chunks[1]).strip(), bytes(chunks[2]).hex()
    (b'{"half":{"dtype":"F16","shape":[2],"data_offsets":[0,4]}}', '003c003c')
    """
    ordered, gather = in_file_order(tensors), gather or whole
    header, offset = {}, 0
    for name, tensor in ordered.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for tensor in ordered.values():
        on_host = gather(tensor).resolve_neg().cpu().contiguous()
        # tensors with no value or one may have arbitrary strides, which view() refuses
        yield on_host.as_strided((on_host.numel(),), (1,)).view(torch.uint8).numpy().data


def in_file_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sort tensors by element size, largest first, to align all of them without the gaps that the format forbids."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))


def whole(value: Tensor) -> Tensor:
    """Return a detached whole tensor. A DTensor is gathered, which requires a call on all ranks."""
    value = value.detach()
    full: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full


class Whole(Mapping[str, Tensor]):
    """Tensors by name, each gathered by `whole` on access. All ranks must access them in the same order."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> Tensor:
        return whole(self._values[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
