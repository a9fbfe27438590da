"""Write the token folders that `diloco.data.token_folder` reads. A folder is written completely or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from diloco.checkpoint import new_folder
from diloco.data.heldout import split_lazily
from diloco.data.settings import DataSettings
from diloco.data.sources import read_source
from diloco.data.token_folder import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    SPLITS,
    TokenFolder,
    TokenSplit,
    file_name,
    fingerprint_of,
    map_file,
    token_folders,
)
from diloco.data.tokenizer import Tokenizer
from diloco.data.tokenizer_choice import make_tokenizer
from diloco.errors import ConfigurationError, DataError

__all__ = ["TokenWriter", "tokenize"]

_BATCH_CHARACTERS = 4 << 20  # text tokenised at a time: enough to use all threads of the tokenizers library


def tokenize(
    settings: DataSettings,
    place: Path,
    *,
    shard_tokens: int = 1 << 28,
    progress: Callable[[int, int], None] = lambda documents, size_bytes: None,
) -> TokenFolder:
    """Make a token folder of the text that ``settings`` name. `build_corpus` gives the same corpus for both.

    The tokenizers library uses all cores (``TOKENIZERS_PARALLELISM=false`` prevents it). A BPE is first trained on the
    text, which is then read twice.

    Args:
        settings: the text and tokenizer to use; settings that concern training are ignored.
        place: the folder to make; it must not exist, or be empty.
        shard_tokens: a file ends with the document that brings it to this many tokens.
        progress: called after each batch with the numbers of documents and UTF-8 bytes so far.

    Raises:
        DataError: the text cannot be read or does not suffice for both splits, or the folder can't be written. Nothing
            of it remains.
        ConfigurationError: the settings can't work or need a package that is not installed, or ``place`` is not empty.
    """
    sources = settings.parsed_sources()
    if len(sources) > 1:
        raise ConfigurationError(
            f"A folder of tokens has one source, not {', '.join(source.name for source in sources)}. Make a folder for "
            "each source, with the same tokenizer."
        )
    (source,) = sources
    if token_folders(source):
        raise ConfigurationError(f"{source.data[0]} already contains tokens. Give text instead.")

    def split() -> Iterator[tuple[str, bool]]:
        return split_lazily(read_source(source), settings.heldout_fraction, settings.max_documents)

    tokenizer = make_tokenizer(settings, (text for text, heldout in split() if not heldout))
    writer = TokenWriter(place, tokenizer, shard_tokens)
    made = {
        "data": [str(each) for each in source.data] or ["the standard library"],
        "split": source.split,
        "tokenizer": settings.tokenizer,
        "heldout_fraction": settings.heldout_fraction,
        "max_documents": settings.max_documents,
    }
    batch: list[tuple[str, bool]] = []
    size = documents = 0
    with writer.writing(made):
        for text, heldout in split():
            batch.append((text, heldout))
            size += len(text)
            documents += 1
            if size >= _BATCH_CHARACTERS:
                writer.add(batch)
                batch, size = [], 0
                progress(documents, writer.bytes)
        writer.add(batch)
    return TokenFolder(place)


def _require_free(place: Path) -> None:
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ConfigurationError(f"{place} already exists and is not an empty folder. Give another path.")


class TokenWriter:
    """Writes a token folder, a few documents at a time.

    Args:
        place: the folder to make; it must not exist, or be empty.
        shard_tokens: a file ends with the document that brings it to this many tokens.

    Raises:
        ConfigurationError: ``place`` exists and is not an empty folder.
    """

    def __init__(self, place: Path, tokenizer: Tokenizer, shard_tokens: int) -> None:
        place = Path(os.path.realpath(place))  # keeps a link, and gives "." a name
        _require_free(place)
        self.place = self.folder = place  # ``folder`` becomes the temporary folder during writing
        self.tokenizer = tokenizer
        self._dtype = tokenizer.dtype.newbyteorder("<")
        self._shard_tokens = shard_tokens
        self._splits: dict[str, _SplitWriter] = {}

    @contextmanager
    def writing(self, made: Mapping[str, Any]) -> Iterator[TokenWriter]:
        """Let `add` write documents inside the context; afterwards the folder is complete, or nothing of it remains.

        Args:
            made: how the folder was made, for the manifest; may be filled inside the context.

        Raises:
            DataError: the folder can't be written, for example because the disk is full.
            ConfigurationError: another process has made it meanwhile.
        """
        try:
            with new_folder(self.place, last=MANIFEST) as self.folder:
                self._splits = {name: _SplitWriter(self.folder, name, self._shard_tokens) for name in SPLITS}
                try:
                    yield self
                    for split in self._splits.values():
                        split.close()
                    self._finish(made)
                finally:
                    for split in self._splits.values():
                        split.drop()
        except OSError as error:
            _require_free(self.place)  # another process may have made it meanwhile
            raise DataError(
                f"{self.place} can't be written: {error}. Give a writable path with enough free space. What was "
                "written has been removed."
            ) from error

    @property
    def bytes(self) -> int:
        """The number of UTF-8 bytes of the documents so far."""
        return sum(split.bytes for split in self._splits.values())

    def add(self, documents: Sequence[tuple[str, bool]]) -> None:
        """Tokenise and write documents, each paired with whether it is held out."""
        for name, split in self._splits.items():
            texts = [text for text, heldout in documents if heldout == (name == "heldout")]
            if not texts:
                continue
            packed = self.tokenizer.encode_documents(texts)
            ends = np.flatnonzero(packed == self.tokenizer.eos_id) + 1
            split.add(packed.astype(self._dtype, copy=False), ends)
            split.bytes += self.tokenizer.num_bytes(packed)

    def _finish(self, made: Mapping[str, Any]) -> None:
        self.tokenizer.save(self.folder)
        splits = {name: split.manifest() for name, split in self._splits.items()}
        pieces = {
            name: [
                map_file(self.folder / file_name(name, number, "tokens"), self._dtype)
                for number in range(len(split.shards))
            ]
            for name, split in splits.items()
        }
        members = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "dtype": self.tokenizer.dtype.name,
            "vocab_size": self.tokenizer.vocab_size,
            "eos_id": self.tokenizer.eos_id,
            "fingerprint": fingerprint_of(self.tokenizer, pieces["train"], pieces["heldout"]),
            **{name: asdict(split) for name, split in splits.items()},
            "made": {"diloco": version("diloco"), **made},
        }
        with (self.folder / MANIFEST).open("w", encoding="utf-8") as file:
            file.write(json.dumps(members, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())


class _SplitWriter:
    """The files of one split while they are written."""

    def __init__(self, folder: Path, name: str, shard_tokens: int) -> None:
        self.folder = folder
        self._name = name
        self._shard_tokens = shard_tokens
        self._digest = xxhash.xxh3_64()
        self._shards: list[tuple[int, int]] = []
        self._files: tuple[Any, ...] = ()
        self._tokens = self._documents = 0
        self.bytes = 0

    def add(self, packed: NDArray[Any], ends: NDArray[np.int64]) -> None:
        begin = 0
        while begin < len(packed):
            room = self._shard_tokens - self._tokens
            # the document that fills the file
            last = min(int(np.searchsorted(ends, begin + room)), len(ends) - 1)
            mine = ends[np.searchsorted(ends, begin, side="right") : last + 1]
            self._write(packed[begin : mine[-1]], mine - begin + self._tokens)
            begin = int(mine[-1])
            if self._tokens >= self._shard_tokens:
                self.close()

    def _write(self, tokens: NDArray[Any], ends: NDArray[np.int64]) -> None:
        if not self._files:
            names = [file_name(self._name, len(self._shards), kind) for kind in ("tokens", "ends")]
            self._files = tuple((self.folder / name).open("wb") for name in names)
        data = np.ascontiguousarray(tokens).data
        self._digest.update(data)
        self._files[0].write(data)
        self._files[1].write(ends.astype("<u8").data)
        self._tokens += len(tokens)
        self._documents += len(ends)

    def close(self) -> None:
        """Finish the current file."""
        if not self._files:
            return
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        self._files = ()
        self._shards.append((self._tokens, self._documents))
        self._tokens = self._documents = 0

    def drop(self) -> None:
        """Close the current file without finishing it; unwritten data may be lost."""
        for file in self._files:
            with suppress(OSError):  # the disk may be full
                file.close()
        self._files = ()

    def manifest(self) -> TokenSplit:
        tokens, documents = (sum(each) for each in zip(*self._shards, strict=True)) if self._shards else (0, 0)
        return TokenSplit(tokens, documents, self.bytes, self._digest.hexdigest(), tuple(self._shards))
