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

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from diloco.data.packed import PackedTokens
from diloco.data.tokenizer import Tokenizer
from diloco.data.tokens import load_tokenizer
from diloco.errors import ConfigurationError, DataError

__all__ = ["FORMAT", "FORMAT_VERSION", "Side", "TokenFolder", "TokenWriter", "fingerprint_of", "is_token_folder"]

FORMAT = "diloco tokens"
FORMAT_VERSION = 1
"""Raised when a reader of the version before could not read what is written now."""

MANIFEST = "manifest.json"
SIDES = ("train", "heldout")

_DTYPES = {"uint16": "<u2", "uint32": "<u4"}
_CHUNK_TOKENS = 1 << 24


@dataclass(frozen=True)
class Side:
    """What a manifest says of the training or the held-out documents."""

    tokens: int
    documents: int
    bytes: int
    """UTF-8 bytes of the documents; the tokens that end them stand for none."""
    digest: str
    """As `diloco.data.packed.tokens_digest`."""
    shards: tuple[tuple[int, int], ...]
    """Tokens and documents of each file."""


def is_token_folder(path: Path) -> bool:
    """Whether ``path`` is a folder of tokens, of any version."""
    try:
        with (path / MANIFEST).open("rb") as file:
            return f'"format": "{FORMAT}"'.encode() in file.read(200)
    except OSError:
        return False


class TokenFolder:
    """A folder of tokens. Opening one reads its manifest and looks at the sizes of its files.

    Args:
        path: the folder.

    Attributes:
        vocab_size: of its tokenizer.
        eos_id: the token that ends each document.
        sides: of "train" and "heldout".
        fingerprint: equal for equal tokens, split and vocabulary, also where they were not read from a folder.
        made: how it was made.

    Raises:
        DataError: it is incomplete, damaged, or of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            members = json.loads((path / MANIFEST).read_bytes())
            if members["format"] != FORMAT or members["format_version"] != FORMAT_VERSION:
                raise DataError(
                    f"{path} has the format {members['format']!r} of version {members['format_version']!r}; diloco "
                    f"{version('diloco')} reads version {FORMAT_VERSION} of {FORMAT!r}. `diloco tokenize` of the "
                    "source would work. The data was not read."
                )
            self.dtype = np.dtype(_DTYPES[members["dtype"]])
            self.vocab_size, self.eos_id = int(members["vocab_size"]), int(members["eos_id"])
            self.fingerprint = str(members["fingerprint"])
            self.made: Mapping[str, Any] = members["made"]
            self.sides = {
                name: Side(**{**members[name], "shards": tuple((int(t), int(d)) for t, d in members[name]["shards"])})
                for name in SIDES
            }
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path / MANIFEST} cannot be read ({error!r:.200}); `diloco tokenize` of the source would make the "
                "folder anew. The data was not read."
            ) from error
        for name, side in self.sides.items():
            for number, (tokens, documents) in enumerate(side.shards):
                self._check(self._file(name, number, "tokens"), tokens * self.dtype.itemsize)
                self._check(self._file(name, number, "ends"), documents * 8)

    def tokenizer(self) -> Tokenizer:
        """That of its tokens.

        Raises:
            DataError: there is none, or it is another one.
        """
        tokenizer = load_tokenizer(self.path)
        if (tokenizer.vocab_size, tokenizer.eos_id) != (self.vocab_size, self.eos_id):
            raise DataError(
                f"{self.path} holds a tokenizer of {tokenizer.vocab_size} ids that ends documents with "
                f"{tokenizer.eos_id}, and its tokens are of one of {self.vocab_size} that ends them with "
                f"{self.eos_id}; the tokenizer.json and tokenizer_config.json that were made with them would work. "
                "The data was not read."
            )
        return tokenizer

    def tokens(self, side: str) -> PackedTokens:
        """The packed tokens of "train" or "heldout", memory-mapped."""
        shards = range(len(self.sides[side].shards))
        pieces = [_mapped(self._file(side, number, "tokens"), self.dtype) for number in shards]
        return PackedTokens(pieces, self.sides[side].digest, vocab_size=self.vocab_size)

    def ends(self, side: str) -> NDArray[np.int64]:
        """(documents,) int64: where in the packed tokens each document ends, the token that ends it included."""
        ends, before = [np.zeros(0, dtype=np.int64)], 0
        for number, (tokens, _) in enumerate(self.sides[side].shards):
            ends.append(_mapped(self._file(side, number, "ends"), np.dtype("<u8")).astype(np.int64) + before)
            before += tokens
        return np.concatenate(ends)

    def _file(self, side: str, number: int, kind: str) -> Path:
        return self.path / f"{side}-{number:05d}.{kind}"

    def _check(self, file: Path, size_bytes: int) -> None:
        found = file.stat().st_size if file.is_file() else -1
        if found != size_bytes:
            what = "is missing" if found < 0 else f"has {found:,} bytes"
            raise DataError(
                f"{file} {what}, and {size_bytes:,} bytes are needed; a whole copy of the folder, or `diloco tokenize` "
                "of the source, would work. The data was not read."
            )


class TokenWriter:
    """Writes a folder of tokens, a few documents at a time.

    Args:
        place: where the folder shall be; not there yet, or empty.
        tokenizer: of the documents.
        shard_tokens: a file ends with the document that makes it so long.

    Raises:
        ConfigurationError: something is there already.
    """

    def __init__(self, place: Path, tokenizer: Tokenizer, shard_tokens: int) -> None:
        place = Path(os.path.realpath(place))  # a link stays one, and "." gets a name
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise ConfigurationError(
                f"{place} is there already; another place, or none there, would work. Nothing was written."
            )
        self.place = place
        self.tokenizer = tokenizer
        self.shard_tokens = shard_tokens
        self._dtype = tokenizer.dtype.newbyteorder("<")
        partial = f".{place.name}.{secrets.token_hex(4)}.partial"
        self._is_there = place.exists()  # perhaps a mounted disk, or where somebody works: no other can take its place
        self._folder = place / partial if self._is_there else place.with_name(partial)
        self._sides = {name: _Side(self._folder, name) for name in SIDES}

    @contextmanager
    def writing(self, made: Mapping[str, Any]) -> Iterator[TokenWriter]:
        """Inside, `add` takes documents; afterwards the folder is complete, or nothing of it is left.

        Args:
            made: what the manifest shall say about how it was made; may be filled inside.

        Raises:
            DataError: it can't be written, such as for want of room.
        """
        try:
            self._folder.mkdir(parents=True)
            yield self
            for side in self._sides.values():
                side.close()
            self._finish(made)
        except BaseException as error:
            for side in self._sides.values():
                side.drop()
            shutil.rmtree(self._folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise DataError(
                    f"{self.place} can't be written: {error}. A place that can be written to, with room in it, would "
                    "work. Nothing is left of what was written."
                ) from error
            raise

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of the documents so far."""
        return sum(side.bytes for side in self._sides.values())

    def add(self, side: str, documents: list[str]) -> None:
        """Tokenise documents and write them to "train" or "heldout"."""
        packed = self.tokenizer.encode_documents(documents)
        ends = np.flatnonzero(packed == self.tokenizer.eos_id) + 1
        self._sides[side].add(packed.astype(self._dtype, copy=False), ends, self.shard_tokens)
        self._sides[side].bytes += self.tokenizer.num_bytes(packed)

    def _finish(self, made: Mapping[str, Any]) -> None:
        self.tokenizer.save(self._folder)
        sides = {name: side.told() for name, side in self._sides.items()}
        pieces: dict[str, list[NDArray[Any]]] = {name: [] for name in SIDES}
        for name, told in sides.items():
            for number in range(len(told.shards)):
                pieces[name].append(_mapped(self._folder / f"{name}-{number:05d}.tokens", self._dtype))
        members = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "dtype": self.tokenizer.dtype.name,
            "vocab_size": self.tokenizer.vocab_size,
            "eos_id": self.tokenizer.eos_id,
            "fingerprint": fingerprint_of(self.tokenizer, pieces["train"], pieces["heldout"]),
            **{name: asdict(told) for name, told in sides.items()},
            "made": {"diloco": version("diloco"), **made},
        }
        with (self._folder / MANIFEST).open("w", encoding="utf-8") as file:
            file.write(json.dumps(members, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if not self._is_there:
            os.replace(self._folder, self.place)
            return
        if os.listdir(self.place) != [self._folder.name]:
            raise FileExistsError(errno.EEXIST, "somebody else wrote there meanwhile", str(self.place))
        for part in sorted(self._folder.iterdir(), key=lambda part: part.name == MANIFEST):
            os.replace(part, self.place / part.name)
        self._folder.rmdir()


class _Side:
    """The files of one side while they are written."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._digest = xxhash.xxh3_64()
        self._shards: list[tuple[int, int]] = []
        self._files: tuple[Any, Any] | None = None
        self._tokens = self._documents = 0
        self.bytes = 0

    def add(self, packed: NDArray[Any], ends: NDArray[np.int64], shard_tokens: int) -> None:
        begin = 0
        while begin < len(packed):
            room = shard_tokens - self._tokens
            # up to the end of the document that fills the file
            last = min(int(np.searchsorted(ends, begin + room)), len(ends) - 1)
            mine = ends[np.searchsorted(ends, begin, side="right") : last + 1]
            self._write(packed[begin : mine[-1]], mine - begin + self._tokens)
            begin = int(mine[-1])
            if self._tokens >= shard_tokens:
                self.close()

    def _write(self, tokens: NDArray[Any], ends: NDArray[np.int64]) -> None:
        if self._files is None:
            stem = f"{self._name}-{len(self._shards):05d}"
            self._files = (
                (self._folder / f"{stem}.tokens").open("wb"),
                (self._folder / f"{stem}.ends").open("wb"),
            )
        data = np.ascontiguousarray(tokens).data
        self._digest.update(data)
        self._files[0].write(data)
        self._files[1].write(ends.astype("<u8").data)
        self._tokens += len(tokens)
        self._documents += len(ends)

    def close(self) -> None:
        """End the present file."""
        if self._files is None:
            return
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        self._files = None
        self._shards.append((self._tokens, self._documents))
        self._tokens = self._documents = 0

    def drop(self) -> None:
        """Let go of the present file; what is not written yet may be lost."""
        for file in self._files or ():
            with suppress(OSError):  # of a full disk, once more
                file.close()
        self._files = None

    def told(self) -> Side:
        tokens, documents = (sum(each) for each in zip(*self._shards, strict=True)) if self._shards else (0, 0)
        return Side(tokens, documents, self.bytes, self._digest.hexdigest(), tuple(self._shards))


def fingerprint_of(tokenizer: Tokenizer, train: Iterable[NDArray[Any]], heldout: Iterable[NDArray[Any]]) -> str:
    """Of packed tokens in any number of arrays: equal for equal tokens, split and vocabulary size."""
    train = list(train)
    digest = xxhash.xxh3_128(f"{tokenizer.vocab_size} {tokenizer.dtype} {sum(map(len, train))}".encode())
    for piece in [*train, *heldout]:
        for begin in range(0, len(piece), _CHUNK_TOKENS):
            digest.update(np.ascontiguousarray(piece[begin : begin + _CHUNK_TOKENS]).data)
    return digest.hexdigest()


def _mapped(file: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    if not file.stat().st_size:  # nothing can be mapped of an empty file
        return np.zeros(0, dtype=dtype)
    return np.memmap(file, dtype=dtype, mode="r")
