"""Token folders, which `diloco tokenize` writes and training maps into memory.

::

    FOLDER/
      manifest.json             counts, fingerprint, how it was made (written last)
      tokenizer.json            and tokenizer_config.json
      train-00000.tokens        packed tokens, little-endian uint16 or uint32, each document with its end
      train-00000.ends          little-endian uint64: the position in that file at which each document ends
      train-00001.tokens ...
      heldout-00000.tokens ...

Documents keep the order of their source, and none spans two files. A folder is written next to its final path and
renamed when it is complete. If an empty folder exists at that path, it is filled instead, and the manifest comes last.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from diloco.data.packed import PackedTokens
from diloco.data.settings import SourceSettings
from diloco.data.tokenizer import Tokenizer
from diloco.data.tokenizer_choice import load_tokenizer
from diloco.errors import ConfigurationError, DataError

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "MANIFEST",
    "SPLITS",
    "TokenFolder",
    "TokenSplit",
    "file_name",
    "fingerprint_of",
    "is_token_folder",
    "map_file",
    "token_folders",
]

FORMAT = "diloco tokens"
FORMAT_VERSION = 1  # incremented when an earlier reader could not read the new format

MANIFEST = "manifest.json"
SPLITS = ("train", "heldout")

_DTYPES = {"uint16": "<u2", "uint32": "<u4"}
_CHUNK_TOKENS = 1 << 24


def file_name(split: str, number: int, kind: str) -> str:
    """Return the name of a file of a split: of its "tokens", or of the "ends" of its documents."""
    return f"{split}-{number:05d}.{kind}"


@dataclass(frozen=True)
class TokenSplit:
    """The training or the held-out documents, as a manifest describes them."""

    tokens: int
    documents: int
    bytes: int  # UTF-8 bytes of the documents, without the end-of-document tokens
    digest: str  # as `PackedTokens.digest`
    shards: tuple[tuple[int, int], ...]  # tokens and documents of each file


class TokenFolder:
    """A token folder. Opening it reads its manifest and checks the sizes of its files.

    Attributes:
        vocab_size: the vocabulary size of its tokenizer.
        eos_id: the token that ends each document.
        splits: "train" and "heldout" -> the description of the split.
        fingerprint: equal for equal tokens, split and vocabulary, also for tokens that were not read from a folder.
        made: how the folder was made.

    Raises:
        DataError: the folder is incomplete, damaged, or of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            members = json.loads((path / MANIFEST).read_bytes())
            found = members["format"], members["format_version"]
            if found == (FORMAT, FORMAT_VERSION):
                self._read(members)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path / MANIFEST} cannot be read ({error!r:.200}). Make the folder again with `diloco tokenize`."
            ) from error
        if found != (FORMAT, FORMAT_VERSION):
            raise DataError(
                f"{path} has the format {found[0]!r}, version {found[1]!r}, but diloco {version('diloco')} reads "
                f"{FORMAT!r}, version {FORMAT_VERSION}. Make the folder again with `diloco tokenize`."
            )
        for name, split in self.splits.items():
            for number, (tokens, documents) in enumerate(split.shards):
                _check_size(self._file(name, number, "tokens"), tokens * self.dtype.itemsize)
                _check_size(self._file(name, number, "ends"), documents * 8)

    def _read(self, members: Mapping[str, Any]) -> None:
        self.dtype = np.dtype(_DTYPES[members["dtype"]])
        self.vocab_size, self.eos_id = int(members["vocab_size"]), int(members["eos_id"])
        self.fingerprint = str(members["fingerprint"])
        self.made: Mapping[str, Any] = members["made"]
        self.splits = {
            name: TokenSplit(**{**members[name], "shards": tuple((int(t), int(d)) for t, d in members[name]["shards"])})
            for name in SPLITS
        }

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer with which the tokens were made.

        Raises:
            DataError: the tokenizer is missing, or is another one.
        """
        tokenizer = load_tokenizer(self.path)
        if (tokenizer.vocab_size, tokenizer.eos_id) != (self.vocab_size, self.eos_id):
            raise DataError(
                f"The tokenizer.json in {self.path} has {tokenizer.vocab_size} ids and ends documents with "
                f"{tokenizer.eos_id}, but the tokens have {self.vocab_size} ids and end documents with {self.eos_id}. "
                "Restore the tokenizer with which they were made."
            )
        return tokenizer

    def tokens(self, split: str) -> PackedTokens:
        """Return the packed tokens of "train" or "heldout", memory-mapped."""
        shards = range(len(self.splits[split].shards))
        pieces = [map_file(self._file(split, number, "tokens"), self.dtype) for number in shards]
        return PackedTokens(pieces, self.splits[split].digest, vocab_size=self.vocab_size)

    def _file(self, split: str, number: int, kind: str) -> Path:
        return self.path / file_name(split, number, kind)


def is_token_folder(path: Path) -> bool:
    """Return whether ``path`` is a token folder, of any version."""
    try:
        with (path / MANIFEST).open("rb") as file:
            return f'"format": "{FORMAT}"'.encode() in file.read(200)
    except OSError:
        return False


def token_folders(source: SourceSettings) -> list[TokenFolder]:
    """Open the token folders of a source; return none if the source is text.

    Raises:
        ConfigurationError: the source mixes token folders and text.
    """
    ready = [place for place in source.data if is_token_folder(Path(place))]
    if ready and len(ready) < len(source.data):
        other = next(place for place in source.data if place not in ready)
        raise ConfigurationError(
            f"{ready[0]} contains tokens and {other} contains text, but one source can't mix the two. Run `diloco "
            "tokenize` on the text, or give the text its own table in data.sources."
        )
    return [TokenFolder(Path(place)) for place in ready]


def fingerprint_of(tokenizer: Tokenizer, train: Iterable[NDArray[Any]], heldout: Iterable[NDArray[Any]]) -> str:
    """Return the fingerprint of packed tokens: equal for equal tokens, split and vocabulary size."""
    train = list(train)
    digest = xxhash.xxh3_128(f"{tokenizer.vocab_size} {tokenizer.dtype} {sum(map(len, train))}".encode())
    for piece in [*train, *heldout]:
        for begin in range(0, len(piece), _CHUNK_TOKENS):
            digest.update(np.ascontiguousarray(piece[begin : begin + _CHUNK_TOKENS]).data)
    return digest.hexdigest()


def map_file(file: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the values of a file, memory-mapped."""
    if not file.stat().st_size:  # an empty file can't be mapped
        return np.zeros(0, dtype=dtype)
    return np.memmap(file, dtype=dtype, mode="r")


def _check_size(file: Path, size_bytes: int) -> None:
    found = file.stat().st_size if file.is_file() else -1
    if found != size_bytes:
        what = "is missing, and should have" if found < 0 else f"has {found:,} bytes, but should have"
        raise DataError(
            f"{file} {what} {size_bytes:,} bytes. Copy the folder again, or make it again with `diloco tokenize`."
        )
