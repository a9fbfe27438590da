"""Packed tokens: documents end to end, in memory or in a folder that `diloco tokenize` writes and training maps.

Window i of sequences of L tokens contains ``tokens[i * L : i * L + L + 1]``. Its inputs are all tokens but the last,
its targets all but the first. So every token is a target once, except the first one and fewer than L at the end.

A folder holds ``train-00000.tokens`` and ``heldout-00000.tokens``, little-endian uint16 or uint32, each document with
the tokens that begin and end it; ``heldout-00000.bytes``, uint32, the bytes that each held-out token stands for; the
tokenizer; and ``manifest.json``: counts, digests, how it was made. Documents keep the order of their source. A folder
is written next to its final path and renamed when it is complete.
"""

from __future__ import annotations

import json
import os
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from diloco.checkpoint import new_folder
from diloco.data.settings import DataSettings
from diloco.data.source import Source
from diloco.data.split import Split, survey
from diloco.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer, smallest_dtype
from diloco.errors import ConfigurationError, DataError
from diloco.private_files import check_regular, read_regular
from diloco.units import diff


class PackedTokens:
    """Several arrays of tokens, end to end. They are read only when slices are requested.

    Args:
        pieces: ``(n,)`` arrays of one integer type, such as memory-mapped files.
        digest: a hash of all their bytes, if it is known already.
        vocab_size: reading an id that is not below it raises `DataError`, because files may be damaged. None: any.
        documents: the number of documents, each with its end.
        num_bytes: their UTF-8 bytes.
        byte_counts: for each of the pieces, how many of these bytes each token stands for. None: not known, which is
            enough to train on.

    >>> tokens = PackedTokens([np.arange(4), np.arange(4, 6)])
    >>> len(tokens), tokens[2:5].tolist(), tokens[0:3].tolist()
    (6, [2, 3, 4], [0, 1, 2])
    """

    marks_ends = False  # the tokens themselves show where a document ends

    def __init__(
        self,
        pieces: Sequence[NDArray[Any]],
        digest: str | None = None,
        *,
        vocab_size: int | None = None,
        documents: int = 0,
        num_bytes: int = 0,
        byte_counts: Sequence[NDArray[Any]] | None = None,
    ) -> None:
        # A plain view: slices of np.memmap are np.memmap objects, which take ten times as long to create.
        self.pieces = tuple(piece.view(np.ndarray) for piece in pieces)
        self.vocab_size, self.documents, self.num_bytes = vocab_size, documents, num_bytes
        self._byte_counts = None if byte_counts is None else PackedTokens(byte_counts)
        self._ends = list(accumulate(len(piece) for piece in self.pieces))
        self._digest = digest

    @classmethod
    def joined(cls, parts: Sequence[PackedTokens]) -> PackedTokens:
        """Return the tokens of several, end to end."""
        if len(parts) == 1:
            return parts[0]
        known = [part._digest for part in parts if part._digest is not None]
        counts = [part._byte_counts for part in parts if part._byte_counts is not None]
        digest, byte_counts = None, None
        if len(known) == len(parts):
            digest = xxhash.xxh3_64_hexdigest(" ".join(known).encode())
        if len(counts) == len(parts):
            byte_counts = [piece for count in counts for piece in count.pieces]
        return cls(
            [piece for part in parts for piece in part.pieces],
            digest,
            vocab_size=parts[0].vocab_size,
            documents=sum(part.documents for part in parts),
            num_bytes=sum(part.num_bytes for part in parts),
            byte_counts=byte_counts,
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.pieces[0].dtype if self.pieces else np.dtype(np.uint16)

    @property
    def digest(self) -> str:
        """A hash of the tokens' bytes that tells data sets apart, however they are divided into arrays."""
        if self._digest is None:
            digest = xxhash.xxh3_64()
            for piece in self.pieces:
                digest.update(np.ascontiguousarray(piece).data)
            self._digest = digest.hexdigest()
        return self._digest

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, where: slice, /) -> NDArray[Any]:
        begin, end, _ = where.indices(len(self))
        number, parts = bisect_right(self._ends, begin), []
        while begin < end:
            before = self._ends[number] - len(self.pieces[number])
            parts.append(self.pieces[number][begin - before : end - before])
            begin, number = self._ends[number], number + 1
        tokens = parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, self.dtype), *parts])
        if self.vocab_size is not None and len(tokens) and (highest := int(tokens.max())) >= self.vocab_size:
            raise DataError(
                f"The tokens contain the id {highest}, but their vocabulary ends at {self.vocab_size - 1}: one of "
                "their files is damaged. Copy the folder again, or make it again with `diloco tokenize`."
            )
        return tokens

    def num_windows(self, length: int) -> int:
        """Return the number of windows of ``length + 1`` tokens at stride ``length``."""
        return max(len(self) - 1, 0) // length

    def read(self, window: int, inputs: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Fill ``inputs`` and ``targets``, each ``(length,)``, with those of a window."""
        begin, length = window * len(inputs), len(inputs)
        tokens = self[begin : begin + length + 1]
        inputs[:], targets[:] = tokens[:-1], tokens[1:]

    def byte_counts(self) -> NDArray[Any]:
        """Return how many bytes of the documents each token stands for, ``(n,)``, or none if that isn't known."""
        return np.zeros(0, dtype=np.uint32) if self._byte_counts is None else self._byte_counts[:]

    def target_bytes(self, windows: NDArray[np.int64], length: int) -> int:
        """Return how many bytes of the documents the targets of ``windows`` stand for; 0 if that isn't known."""
        if self._byte_counts is None:
            return 0
        begins = [window * length + 1 for window in windows.tolist()]
        return sum(int(self._byte_counts[begin : begin + length].sum()) for begin in begins)


def pack(documents: Sequence[str], tokenizer: Tokenizer, *, counted: bool = False) -> PackedTokens:
    """Return the tokens of documents; ``counted``: with the bytes that each stands for, which an evaluation needs."""
    encoded = tokenizer.encode_counted(documents) if counted else (tokenizer.encode_documents(documents),)
    return PackedTokens(
        encoded[:1],
        vocab_size=tokenizer.vocab_size,
        documents=len(documents),
        num_bytes=sum(len(text.encode()) for text in documents),
        byte_counts=encoded[1:] or None,
    )


SPLITS = ("train", "heldout")

_FORMAT = "diloco tokens"
_VERSION = 3  # until 2, documents began without the tokens that the tokenizer begins a text with
_MANIFEST = "manifest.json"
_BATCH_CHARACTERS = 4 << 20  # text tokenised at a time: enough to use all threads of the tokenizers library


class TokenFolder:
    """A token folder. Opening it raises `DataError` if it is incomplete, damaged, or of another version."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            manifest = json.loads(read_regular(path / _MANIFEST))
            if (written := manifest["format_version"]) != _VERSION:
                raise ValueError(f"version {written}, but diloco {version('diloco')} reads {_VERSION}")
            self.vocab_size = int(manifest["vocab_size"])
            self._around = {name: list(manifest[name]) for name in ("begin_document", "end_document")}
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
        mine = {"vocab_size": self.vocab_size, **self._around}
        other = {name: getattr(tokenizer, name) for name in mine}
        if difference := diff(mine, other, f"The token folder {self.path}", "the tokenizer.json in it", mine):
            raise DataError(f"{difference}. Restore the tokenizer with which the tokens were made.")
        return tokenizer

    def _split(self, name: str, about: Mapping[str, Any]) -> PackedTokens:
        dtype = smallest_dtype(self.vocab_size).newbyteorder("<")
        file, size = self.path / f"{name}-00000.tokens", int(about["tokens"]) * dtype.itemsize
        if file.stat().st_size != size:
            raise ValueError(f"{file.name} has {file.stat().st_size:,} bytes, but should have {size:,}")
        if not size:  # nothing can't be mapped
            return PackedTokens([np.zeros(0, dtype)], str(about["digest"]), vocab_size=self.vocab_size)
        tokens, byte_counts = np.memmap(file, dtype=dtype, mode="r"), None
        if name == "heldout":
            counts = file.with_suffix(".bytes")
            check_regular(counts, sys.maxsize)
            byte_counts = [np.memmap(counts, dtype="<u4", mode="r", shape=tokens.shape)]
        return PackedTokens(
            [tokens],
            str(about["digest"]),
            vocab_size=self.vocab_size,
            documents=int(about["documents"]),
            num_bytes=int(about["bytes"]),
            byte_counts=byte_counts,
        )


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
    path: Path,
    progress: Callable[[int, int], None] = lambda documents, size_bytes: None,
) -> TokenFolder:
    """Make a token folder of the text that ``settings`` name. `build_corpus` gives the same corpus for both.

    The tokenizers library uses all cores (``TOKENIZERS_PARALLELISM=false`` prevents it). A BPE is first trained on the
    text, which is then read twice.

    Args:
        settings: the text and tokenizer to use; settings that concern training are ignored.
        path: the folder to make; it must not exist, or be empty. If an error is raised, nothing of it remains.
        progress: called after each batch with the numbers of documents and UTF-8 bytes so far.
    """
    if token_folders(settings):
        raise ConfigurationError(f"{settings.paths[0]} already contains tokens. Give text instead.")
    path = Path(os.path.realpath(path))  # keeps a link, and gives "." a name
    _require_free(path)
    source = Source(settings)
    split = survey(source.documents(), settings.heldout_fraction).split
    tokenizer = make_tokenizer(settings, split.training(source.documents()))
    counts: dict[str, Counter[str]] = {name: Counter() for name in SPLITS}
    try:
        with new_folder(path) as folder:
            with ExitStack() as opened:
                files = [opened.enter_context((folder / f"{name}-00000.tokens").open("wb")) for name in SPLITS]
                byte_counts = opened.enter_context((folder / "heldout-00000.bytes").open("wb"))
                digests = {name: xxhash.xxh3_64() for name in SPLITS}
                for parts in encode_splits(source, split, tokenizer):
                    for name, file, part in zip(SPLITS, files, parts, strict=True):
                        counts[name].update(tokens=len(part), documents=part.documents, bytes=part.num_bytes)
                        tokens = part[:].astype(part.dtype.newbyteorder("<"), copy=False)
                        digests[name].update(tokens.data)
                        file.write(tokens.data)
                    byte_counts.write(parts[1].byte_counts().astype("<u4", copy=False).data)
                    progress(*(sum(count[unit] for count in counts.values()) for unit in ("documents", "bytes")))
            tokenizer.save(folder)
            manifest = {
                "format": _FORMAT,
                "format_version": _VERSION,
                "vocab_size": tokenizer.vocab_size,
                "begin_document": tokenizer.begin_document,
                "end_document": tokenizer.end_document,
                **{name: {**counts[name], "digest": digests[name].hexdigest()} for name in SPLITS},
                "made": {"diloco": version("diloco"), **vars(settings)},
            }
            (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
    except OSError as error:
        _require_free(path)  # another process may have made it meanwhile
        raise DataError(
            f"{path} can't be written: {error}. Give a writable path with enough free space. What was written has "
            "been removed."
        ) from error
    return TokenFolder(path)


def _require_free(path: Path) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigurationError(f"{path} already exists and is not an empty folder. Give another path.")


def encode_splits(source: Source, split: Split, tokenizer: Tokenizer) -> Iterator[tuple[PackedTokens, PackedTokens]]:
    """Yield the tokens to train on and the held-out ones of some text at a time."""
    for texts in _batches(source.documents()):
        train, heldout = split.training(texts), split.heldout(texts)
        yield pack([*train], tokenizer), pack([*heldout], tokenizer, counted=True)


def encode(texts: Iterable[str], tokenizer: Tokenizer) -> PackedTokens:
    """Return the tokens to evaluate on of any number of documents, some of which are in memory as text at a time."""
    return PackedTokens.joined([pack(batch, tokenizer, counted=True) for batch in _batches(texts)])


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield the texts in lists of about `_BATCH_CHARACTERS`; at least one list, and only the last may be empty."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    yield batch
