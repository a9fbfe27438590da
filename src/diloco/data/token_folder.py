"""Token folders, which `diloco tokenize` writes and training maps into memory.

A folder holds ``train-00000.tokens`` and ``heldout-00000.tokens``, packed little-endian uint16 or uint32, each document
followed by its end; the tokenizer; and ``manifest.json``: counts, digests, how it was made.

Documents keep the order of their source. A folder is written next to its final path and renamed when it is complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from diloco.checkpoint import new_folder
from diloco.data.packed import PackedTokens
from diloco.data.settings import DataSettings
from diloco.data.source import Source, split_documents
from diloco.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer
from diloco.errors import ConfigurationError, DataError
from diloco.private_files import read_regular

__all__ = ["SPLITS", "TokenFolder", "encode_splits", "token_folders", "tokenize", "training_texts"]

SPLITS = ("train", "heldout")

_FORMAT = "diloco tokens"
_VERSION = 2
_MANIFEST = "manifest.json"
_DTYPES = {"uint16": "<u2", "uint32": "<u4"}
_BATCH_CHARACTERS = 4 << 20  # text tokenised at a time: enough to use all threads of the tokenizers library


class TokenFolder:
    """A token folder. Opening it raises `DataError` if it is incomplete, damaged, or of another version."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            manifest = json.loads(read_regular(path / _MANIFEST))
            if (written := manifest["format_version"]) != _VERSION:
                raise ValueError(f"version {written}, but diloco {version('diloco')} reads {_VERSION}")
            self._dtype = np.dtype(_DTYPES[manifest["dtype"]])
            self.vocab_size, self._eos_id = int(manifest["vocab_size"]), int(manifest["eos_id"])
            self.made: Mapping[str, Any] = dict(manifest["made"])  # how the folder was made
            self.splits = {name: self._split(name, manifest[name]) for name in SPLITS}
        except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
            raise DataError(
                f"The token folder {path} cannot be read ({type(error).__name__}: {error}). Copy it again, or "
                "make it again with `diloco tokenize`."
            ) from error

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer with which the tokens were made; raise `DataError` if it is another one."""
        tokenizer = load_tokenizer(self.path)
        if (tokenizer.vocab_size, tokenizer.eos_id) != (self.vocab_size, self._eos_id):
            raise DataError(
                f"The tokenizer.json in {self.path} has {tokenizer.vocab_size} ids and ends documents with "
                f"{tokenizer.eos_id}, but the tokens have {self.vocab_size} ids and end documents with {self._eos_id}. "
                "Restore the tokenizer with which they were made."
            )
        return tokenizer

    def _split(self, name: str, about: Mapping[str, Any]) -> PackedTokens:
        file, size = self.path / f"{name}-00000.tokens", int(about["tokens"]) * self._dtype.itemsize
        if file.stat().st_size != size:
            raise ValueError(f"{file.name} has {file.stat().st_size:,} bytes, but should have {size:,}")
        counts = {"documents": int(about["documents"]), "num_bytes": int(about["bytes"])}
        tokens = np.memmap(file, dtype=self._dtype, mode="r")
        return PackedTokens([tokens], str(about["digest"]), vocab_size=self.vocab_size, **counts)


def token_folders(settings: DataSettings) -> list[TokenFolder]:
    """Open the token folders of ``data.paths``; return none if these are text."""
    folders = [place for place in settings.paths if _is_token_folder(Path(place))]
    if folders and len(folders) < len(settings.paths):
        other = next(place for place in settings.paths if place not in folders)
        raise ConfigurationError(
            f"{folders[0]} contains tokens and {other} contains text, which can't be mixed. Run `diloco tokenize` "
            "on the text with the same tokenizer."
        )
    return [TokenFolder(Path(place)) for place in folders]


def _is_token_folder(path: Path) -> bool:
    try:
        return f'"format": "{_FORMAT}"'.encode() in read_regular(path / _MANIFEST)[:200]
    except OSError:
        return False


def tokenize(
    settings: DataSettings,
    place: Path,
    progress: Callable[[int, int], None] = lambda documents, size_bytes: None,
) -> TokenFolder:
    """Make a token folder of the text that ``settings`` name. `build_corpus` gives the same corpus for both.

    The tokenizers library uses all cores (``TOKENIZERS_PARALLELISM=false`` prevents it). A BPE is first trained on the
    text, which is then read twice.

    Args:
        settings: the text and tokenizer to use; settings that concern training are ignored.
        place: the folder to make; it must not exist, or be empty. If an error is raised, nothing of it remains.
        progress: called after each batch with the numbers of documents and UTF-8 bytes so far.
    """
    if token_folders(settings):
        raise ConfigurationError(f"{settings.paths[0]} already contains tokens. Give text instead.")
    place = Path(os.path.realpath(place))  # keeps a link, and gives "." a name
    _require_free(place)
    source = Source(settings)
    tokenizer = make_tokenizer(settings, training_texts(source))
    made = {
        "diloco": version("diloco"),
        "data": list(settings.paths) or ["the standard library"],
        "tokenizer": settings.tokenizer,
        "heldout_fraction": settings.heldout_fraction,
    }
    try:
        with new_folder(place, last=_MANIFEST) as folder:
            with ExitStack() as files:
                paths = [folder / f"{name}-00000.tokens" for name in SPLITS]
                writers = [_SplitWriter(files.enter_context(path.open("wb"))) for path in paths]
                for parts in encode_splits(source, tokenizer):
                    for writer, part in zip(writers, parts, strict=True):
                        writer.add(part)
                    progress(sum(writer.documents for writer in writers), sum(writer.bytes for writer in writers))
                manifest = {
                    "format": _FORMAT,
                    "format_version": _VERSION,
                    "dtype": tokenizer.dtype.name,
                    "vocab_size": tokenizer.vocab_size,
                    "eos_id": tokenizer.eos_id,
                    **{name: writer.finish() for name, writer in zip(SPLITS, writers, strict=True)},
                    "made": made,
                }
            tokenizer.save(folder)
            with (folder / _MANIFEST).open("w", encoding="utf-8") as file:
                file.write(json.dumps(manifest, indent=2) + "\n")
                os.fsync(file.fileno())
    except OSError as error:
        _require_free(place)  # another process may have made it meanwhile
        raise DataError(
            f"{place} can't be written: {error}. Give a writable path with enough free space. What was written has "
            "been removed."
        ) from error
    return TokenFolder(place)


def _require_free(place: Path) -> None:
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ConfigurationError(f"{place} already exists and is not an empty folder. Give another path.")


def training_texts(source: Source) -> Iterator[str]:
    """Yield the documents that are not held out."""
    documents = split_documents(source.documents(), source.settings.heldout_fraction)
    return (text for text, heldout in documents if not heldout)


def encode_splits(source: Source, tokenizer: Tokenizer) -> Iterator[tuple[PackedTokens, PackedTokens]]:
    """Yield the tokens of the training and of the held-out documents of some text at a time."""
    sides: tuple[list[str], list[str]] = ([], [])
    size = 0
    for text, heldout in split_documents(source.documents(), source.settings.heldout_fraction):
        sides[heldout].append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield tokenizer.pack(sides[0]), tokenizer.pack(sides[1])
            sides, size = ([], []), 0
    yield tokenizer.pack(sides[0]), tokenizer.pack(sides[1])


class _SplitWriter:
    """Writes the file of one split."""

    def __init__(self, file: BinaryIO) -> None:
        self.tokens = self.documents = self.bytes = 0
        self._file, self._digest = file, xxhash.xxh3_64()

    def add(self, part: PackedTokens) -> None:
        self.tokens += len(part)
        self.documents += part.documents
        self.bytes += part.num_bytes
        tokens = part[:].astype(part.dtype.newbyteorder("<"), copy=False)
        self._digest.update(tokens.data)
        self._file.write(tokens.data)

    def finish(self) -> dict[str, Any]:
        """Return what the manifest says of the split, once all of it is on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        counts = {"tokens": self.tokens, "documents": self.documents, "bytes": self.bytes}
        return {**counts, "digest": self._digest.hexdigest()}
