"""Files that are on the disk when the call returns, and tensors in the safetensors format.

Size and xxh3_128 digest of a file are taken while it is written. Tensors are
written here rather than by the safetensors library because the library holds a whole dictionary in host memory at once:
here one tensor at a time is brought there and made contiguous. They are read by the library, which guards against
malformed files. The digest finds damage; it is no signature.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from diloco.errors import CheckpointError
from diloco.state_tree import DTYPE_NAMES

__all__ = [
    "FileFacts",
    "digest_of",
    "read_tensors",
    "sync_folder",
    "tensor_chunks",
    "write_file",
]

_PIECE_BYTES = 1 << 20  # hashed and written while it is still in the processor's cache


@dataclass(frozen=True)
class FileFacts:
    """What a manifest says about a file."""

    size_bytes: int
    digest: str
    """xxh3_128 of the content, 32 hexadecimal digits."""


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileFacts:
    """Write a new file and see it to the disk.

    Raises:
        OSError: when it exists, the disk is full, or anything else goes wrong.
    """
    digest, size_bytes = xxhash.xxh3_128(), 0
    with open(path, "xb") as file:
        for chunk in chunks:
            view = memoryview(chunk)
            for start in range(0, len(view), _PIECE_BYTES):
                piece = view[start : start + _PIECE_BYTES]
                digest.update(piece)
                file.write(piece)
            size_bytes += len(view)
        file.flush()
        os.fsync(file.fileno())
    return FileFacts(size_bytes, digest.hexdigest())


def sync_folder(folder: Path) -> None:
    """See the names in a folder to the disk; Windows does so by itself and can't be asked."""
    if os.name != "nt":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def digest_of(path: Path) -> str:
    """xxh3_128 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def tensor_chunks(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """The content of a safetensors file that holds ``tensors``: any shape, strides and device, dtypes of `DTYPE_NAMES`.

    >>> chunks = list(tensor_chunks({"half": torch.ones(2, dtype=torch.float16)}))
    >>> bytes(chunks[1]).strip(), bytes(chunks[2]).hex()
    (b'{"half":{"dtype":"F16","shape":[2],"data_offsets":[0,4]}}', '003c003c')
    """
    # the widest first: every tensor then begins at a multiple of its element size without the gaps the format forbids
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header, offset = {}, 0
    for name, tensor in ordered:
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
    for _, tensor in ordered:
        on_host = tensor.detach().resolve_neg().cpu().contiguous()
        # strides of empty and single values may be anything, which view() refuses
        yield on_host.as_strided((on_host.numel(),), (1,)).view(torch.uint8).numpy().data


def read_tensors(path: Path, device: torch.device | str) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, in memory of their own on ``device``.

    Raises:
        CheckpointError: when the file is malformed.
    """
    # Copied, not mapped: mapped tensors lie at other alignments than torch's own, and a matrix product may round
    # differently there, so that a resumed run would not repeat the bits of one that never stopped.
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name).to(device, copy=True) for name in file.keys()}  # noqa: SIM118  # no dict
    except SafetensorError as error:
        raise CheckpointError(f"{path} is no safetensors file: {error}.") from error
