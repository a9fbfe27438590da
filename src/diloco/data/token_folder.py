"""Folders of tokens: what `diloco tokenize` makes, and training maps into memory instead of reading it.

::

    FOLDER/
      manifest.json             counts, fingerprint, how it was made (written last)
      tokenizer.json            and tokenizer_config.json
      train-00000.tokens        packed tokens, little-endian uint16 or uint32, each document with its end
      train-00000.ends          little-endian uint64: where in that file each document ends
      train-00001.tokens ...
      heldout-00000.tokens ...

Documents are in the order of their source and never lie across two files. A folder is written beside its place and
renamed when it is complete; where an empty folder is there already, in that one, and the manifest comes last.
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
FORMAT_VERSION = 1  # raised when a reader of the version before could not read what is written now

MANIFEST = "manifest.json"
SPLITS = ("train", "heldout")

_DTYPES = {"uint16": "<u2", "uint32": "<u4"}
_CHUNK_TOKENS = 1 << 24


def file_name(split: str, number: int, kind: str) -> str:
    """The name of a split's file: of its "tokens", or of the "ends" of its documents."""
    return f"{split}-{number:05d}.{kind}"


@dataclass(frozen=True)
class TokenSplit:
    """What a manifest says of the training or the held-out documents."""

    tokens: int
    documents: int
    bytes: int  # UTF-8 bytes of the documents; the tokens that end them stand for none
    digest: str  # as `PackedTokens.digest`
    shards: tuple[tuple[int, int], ...]  # tokens and documents of each file


class TokenFolder:
    """A folder of tokens. Opening one reads its manifest and looks at the sizes of its files.

    Attributes:
        vocab_size: of its tokenizer.
        eos_id: the token that ends each document.
        splits: of "train" and "heldout".
        fingerprint: equal for equal tokens, split and vocabulary, also where they were not read from a folder.
        made: how it was made.

    Raises:
        DataError: it is incomplete, damaged, or of another version.
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
                f"{path / MANIFEST} cannot be read ({error!r:.200}). Make the folder again with `diloco tokenize`. The "
                "data was not read."
            ) from error
        if found != (FORMAT, FORMAT_VERSION):
            raise DataError(
                f"{path} has the format {found[0]!r} of version {found[1]!r}, and diloco {version('diloco')} reads "
                f"version {FORMAT_VERSION} of {FORMAT!r}. Make it again with `diloco tokenize`. The data was not read."
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
        """That of its tokens.

        Raises:
            DataError: there is none, or it is another one.
        """
        tokenizer = load_tokenizer(self.path)
        if (tokenizer.vocab_size, tokenizer.eos_id) != (self.vocab_size, self.eos_id):
            raise DataError(
                f"The tokenizer.json in {self.path} has {tokenizer.vocab_size} ids and ends documents with "
                f"{tokenizer.eos_id}, but its tokens have {self.vocab_size} and end with {self.eos_id}. Bring back the "
                "one that they were made with. The data was not read."
            )
        return tokenizer

    def tokens(self, split: str) -> PackedTokens:
        """The packed tokens of "train" or "heldout", memory-mapped."""
        shards = range(len(self.splits[split].shards))
        pieces = [map_file(self._file(split, number, "tokens"), self.dtype) for number in shards]
        return PackedTokens(pieces, self.splits[split].digest, vocab_size=self.vocab_size)

    def _file(self, split: str, number: int, kind: str) -> Path:
        return self.path / file_name(split, number, kind)


def is_token_folder(path: Path) -> bool:
    """Whether ``path`` is a folder of tokens, of any version."""
    try:
        with (path / MANIFEST).open("rb") as file:
            return f'"format": "{FORMAT}"'.encode() in file.read(200)
    except OSError:
        return False


def token_folders(source: SourceSettings) -> list[TokenFolder]:
    """The folders of tokens that a source consists of, opened; none where it is text.

    Raises:
        ConfigurationError: for some of both.
    """
    ready = [place for place in source.data if is_token_folder(Path(place))]
    if ready and len(ready) < len(source.data):
        other = next(place for place in source.data if place not in ready)
        raise ConfigurationError(
            f"{ready[0]} holds tokens and {other} text, which one source cannot mix. Run `diloco tokenize` on the "
            "text, or give it a table of its own in data.sources."
        )
    return [TokenFolder(Path(place)) for place in ready]


def fingerprint_of(tokenizer: Tokenizer, train: Iterable[NDArray[Any]], heldout: Iterable[NDArray[Any]]) -> str:
    """Of packed tokens in any number of arrays: equal for equal tokens, split and vocabulary size."""
    train = list(train)
    digest = xxhash.xxh3_128(f"{tokenizer.vocab_size} {tokenizer.dtype} {sum(map(len, train))}".encode())
    for piece in [*train, *heldout]:
        for begin in range(0, len(piece), _CHUNK_TOKENS):
            digest.update(np.ascontiguousarray(piece[begin : begin + _CHUNK_TOKENS]).data)
    return digest.hexdigest()


def map_file(file: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The values of a file, which are read when they are looked at."""
    if not file.stat().st_size:  # nothing can be mapped of an empty file
        return np.zeros(0, dtype=dtype)
    return np.memmap(file, dtype=dtype, mode="r")


def _check_size(file: Path, size_bytes: int) -> None:
    found = file.stat().st_size if file.is_file() else -1
    if found != size_bytes:
        what = "is missing" if found < 0 else f"has {found:,} bytes"
        raise DataError(
            f"{file} {what}, and {size_bytes:,} bytes are needed. Copy the folder again, or make it again with `diloco "
            "tokenize`. The data was not read."
        )
