"""The corpus of a run: documents as packed tokens or conversations in rows, made before training or while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Unpack

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from diloco.data.batches import Batch, Batches, Cursor, Drawing, Sampler, as_message, read_message
from diloco.data.chat import ChatTokenizer, PackedRows, chat_rows
from diloco.data.settings import DataSettings
from diloco.data.source import Source, is_heldout
from diloco.data.tokenizer import Tokenizer, make_tokenizer
from diloco.data.tokens import SPLITS, PackedTokens, TokenFolder, encode_splits, pack, token_folders
from diloco.errors import ConfigurationError, DataError
from diloco.units import format_bytes

_BPE_DOCUMENTS = 10_000  # while streaming, a BPE is trained on the first ones
_HELDOUT_DOCUMENTS = 256  # while streaming, the first ones that the hash holds out are evaluated on


@dataclass(frozen=True, eq=False)
class Corpus:
    """What to train and to evaluate on, as tokens."""

    train: PackedTokens | PackedRows  # empty if documents are read during training
    heldout: PackedTokens | PackedRows
    tokenizer: Tokenizer
    fingerprint: str
    """Equal for equal tokens, split and vocabulary size. It tells data sets apart and is not a cryptographic hash."""
    about: str  # what there is to train and to evaluate on
    stream: Callable[..., Batches] | None = None  # opens the batches of a replica that reads during training

    def batches(self, **drawing: Unpack[Drawing]) -> Batches:
        """Return the batches of one replica."""
        return self.stream(**drawing) if self.stream else Sampler(self.train, **drawing)


def build_corpus(settings: DataSettings, sequence_length: int = 1024) -> Corpus:
    """Read, split and tokenise what ``settings`` name, all in memory.

    Folders of tokens are memory-mapped. With ``data.streaming``, only the held-out documents are read here.
    Conversations become rows of ``sequence_length`` tokens.
    """
    if settings.chat:
        return _chat_corpus(settings, sequence_length)
    folders = token_folders(settings)
    if settings.streaming:
        if folders:
            raise ConfigurationError(
                f"{folders[0].path} holds tokens, which are mapped into memory and can't be streamed. Leave out "
                "data.streaming."
            )
        return _streamed_corpus(settings)
    if folders:
        tokenizer = folders[0].tokenizer()
        _check_settings(settings, folders, tokenizer)
    else:
        tokenizer = make_tokenizer(settings, Source(settings).documents(heldout=False))
    train, heldout = _splits(settings, folders, tokenizer)
    about = f"{_size(train)}, {len(train):,} tokens{', in files' if folders else ''}; held out: {_size(heldout)}"
    return Corpus(train, heldout, tokenizer, _fingerprint(tokenizer, train, heldout), about)


def _chat_corpus(settings: DataSettings, length: int) -> Corpus:
    if settings.tokenizer == "bytes" or settings.bpe_vocab_size is not None:
        raise ConfigurationError(
            f"data.format={settings.format!r} needs the tokenizer of a model, not {settings.tokenizer!r}. Give a model "
            "folder as --model or data.tokenizer."
        )
    tokenizer = ChatTokenizer(settings.tokenizer, settings.format)
    train, heldout, notes = chat_rows(settings, tokenizer, length)
    size = (
        f"{train.documents:,} conversations in {train.num_windows(length):,} rows of {length} tokens, "
        f"{train.num_tokens / len(train):.0%} full; {train.counted_tokens:,} tokens count"
    )
    about = "; ".join([size, *notes, f"held out: {heldout.documents:,} conversations"])
    return Corpus(train, heldout, tokenizer, _fingerprint(tokenizer, train, heldout), about)


def _streamed_corpus(settings: DataSettings) -> Corpus:
    source, fraction = Source(settings), settings.heldout_fraction
    tokenizer = make_tokenizer(settings, islice(source.documents(heldout=False), _BPE_DOCUMENTS))
    heldout = _first_heldout(source, tokenizer)
    origin = f"{settings.text_field} {len(source.parts)} {fraction} {tokenizer.to_json()} {heldout.digest}"
    digest = xxhash.xxh3_128_hexdigest(origin.encode())
    stream = partial(DocumentStream, source, tokenizer, data=digest)
    about = f"read while training; held out: {_size(heldout)}"
    return Corpus(PackedTokens([]), heldout, tokenizer, digest, about, stream)


def corpus_vocabulary_size(settings: DataSettings) -> int:
    """Return the vocabulary size of the tokenizer that ``settings`` name, without reading any text."""
    if folders := token_folders(settings):
        return folders[0].vocab_size
    return settings.bpe_vocab_size or make_tokenizer(settings).vocab_size


def heldout_data(
    settings: DataSettings, tokenizer: Tokenizer, sequence_length: int, paths: Sequence[str] = ()
) -> PackedTokens | PackedRows:
    """Return what the corpus of ``settings`` holds out, or all that is at other ``paths``.

    ``tokenizer`` is the one that a run saved; a `ChatTokenizer` for conversations.
    """
    if paths:
        settings = replace(settings, paths=tuple(paths), streaming=False)
    if isinstance(tokenizer, ChatTokenizer):
        return chat_rows(settings, tokenizer, sequence_length, split=not paths)[1]
    if paths:
        return pack(list(Source(settings).documents()), tokenizer)
    if settings.streaming:
        return _first_heldout(Source(settings), tokenizer)
    return _splits(settings, token_folders(settings), tokenizer)[1]


def _fingerprint(tokenizer: Tokenizer, train: PackedTokens | PackedRows, heldout: PackedTokens | PackedRows) -> str:
    return xxhash.xxh3_128_hexdigest(f"{tokenizer.vocab_size} {train.digest} {heldout.digest}".encode())


def _size(tokens: PackedTokens) -> str:
    return f"{tokens.documents:,} documents, {format_bytes(tokens.num_bytes)}"


def _splits(settings: DataSettings, folders: Sequence[TokenFolder], tokenizer: Tokenizer) -> list[PackedTokens]:
    """Return the tokens to train on and the held-out ones: of folders, or of the text if there are none."""
    for folder in folders:
        if folder.tokenizer().to_json() != tokenizer.to_json():
            raise ConfigurationError(
                f"{folder.path} was made with another tokenizer than that of the run, or of the first of its folders. "
                "Make it again with that one (--tokenizer FOLDER)."
            )
    if folders:
        return [PackedTokens.joined([folder.splits[name] for folder in folders]) for name in SPLITS]
    return [PackedTokens.joined(parts) for parts in zip(*encode_splits(Source(settings), tokenizer), strict=True)]


def _first_heldout(source: Source, tokenizer: Tokenizer) -> PackedTokens:
    if not (texts := list(islice(source.documents(heldout=True), _HELDOUT_DOCUMENTS))):
        raise DataError(
            f"data.heldout_fraction={source.settings.heldout_fraction:g} holds out none of the documents. Use a larger "
            "fraction, or more documents."
        )
    return pack(texts, tokenizer)


def _check_settings(settings: DataSettings, folders: Sequence[TokenFolder], tokenizer: Tokenizer) -> None:
    """Raise `ConfigurationError` if the settings ask for another tokenizer or split than that of token folders."""
    asked = settings.heldout_fraction
    for folder in folders:
        fraction = folder.made.get("heldout_fraction", asked)
        if asked not in (fraction, DataSettings.heldout_fraction):
            raise ConfigurationError(
                f"{folder.path} was made with a heldout_fraction of {fraction:g}, so data.heldout_fraction={asked:g} "
                "has no effect. Pass it to `diloco tokenize`, or leave it out."
            )
    trained = settings.bpe_vocab_size is not None
    if trained or (settings.tokenizer != "bytes" and make_tokenizer(settings).to_json() != tokenizer.to_json()):
        raise ConfigurationError(
            f"data.tokenizer={settings.tokenizer!r} has no effect: {folders[0].path} was made with another one."
        )


_BLOCK = 64  # documents that are tokenised at a time


class _Place(msgspec.Struct, kw_only=True):
    """Where a replica is in its documents; part of its cursor."""

    rows: Any = None  # the state of the data set before the block of documents to draw from; None: at the beginning
    offset: int = 0  # the tokens of the block that have been drawn
    last: int  # the token before the next one to draw
    epoch: int = 0


class DocumentStream(Batches):
    """The `Batches` of one replica that reads, tokenises and packs its documents meanwhile, in the order of the source.

    ``datasets.distributed.split_dataset_by_node`` divides them among the replicas, whose number can't change. Documents
    are packed end to end, each followed by the end-of-document token, so every token is a target once.
    """

    def __init__(self, source: Source, tokenizer: Tokenizer, *, data: str, **drawing: Unpack[Drawing]) -> None:
        super().__init__({"stream": data}, drawing)
        self._source, self._tokenizer, self._stream = source, tokenizer, source.stream()
        self._thread = ThreadPoolExecutor(1, f"batches of replica {self._replica}")  # it starts with the first batch
        self._next: Future[tuple[Batch, Cursor]] | None = None
        self._restore({**self._origin, "drawn": 0, "place": as_message(_Place(last=tokenizer.eos_id))})

    @property
    def epochs(self) -> float:
        return float(self._cursor["place"]["epoch"])

    def next_batch(self) -> Batch:
        self._next = self._next or self._thread.submit(self._draw)
        try:
            batch, self._cursor = self._next.result()
        except BaseException:
            self._restore(self._cursor)
            raise
        self._next = self._thread.submit(self._draw)
        return batch

    def state_dict(self) -> dict[str, Any]:
        return dict(self._cursor)

    def close(self) -> None:
        self._thread.shutdown()
        del self._blocks  # iterators of `datasets` that end with the interpreter print errors

    def _restore(self, state: Cursor) -> None:
        wait([self._next] if self._next else [])
        self._next, self._cursor, self._place = None, state, read_message(state["place"], _Place)
        self._blocks = self._read(self._place.rows, self._place.epoch)
        self._tokens: NDArray[Any] = np.zeros(0, np.int64)  # of the block of documents; the next batch reads them

    def _draw(self) -> tuple[Batch, Cursor]:
        """Make the batch after the last one that was returned."""
        if self._place.offset > len(self._tokens):
            self._tokens = next(self._blocks)[2]
        rows = torch.tensor([self._row() for _ in range(self._batch_size)], dtype=torch.int64, device="cpu")
        cursor = {**self._origin, "drawn": self._cursor["drawn"] + 1, "place": as_message(self._place)}
        return (rows[:, :-1].contiguous(), rows[:, 1:].contiguous()), cursor

    def _row(self) -> list[int]:
        """Return the token before the next ones to draw, and those."""
        place, row = self._place, [self._place.last]
        while len(row) <= self._length:
            if place.offset >= len(self._tokens):
                (place.rows, place.epoch, self._tokens), place.offset = next(self._blocks), 0
            tokens = self._tokens[place.offset :][: self._length + 1 - len(row)].tolist()
            row += tokens
            place.offset += len(tokens)
        place.last = row[-1]
        return row

    def _read(self, rows: Any, epoch: int) -> Iterator[tuple[Any, int, NDArray[Any]]]:
        """Yield the tokens of one block of documents after the other, each with the state of the data set before it."""
        from datasets.distributed import split_dataset_by_node

        source = self._source
        while True:
            documents = split_dataset_by_node(self._stream, rank=self._replica, world_size=self._num_replicas or 1)
            if rows is not None:
                documents.load_state_dict(rows)
            is_empty, texts = rows is None, (source.text("a record of the stream", row) for row in documents)
            while block := list(islice(texts, _BLOCK)):
                train = [text for text in block if text and not is_heldout(text, source.settings.heldout_fraction)]
                is_empty = is_empty and not train
                yield rows, epoch, self._tokenizer.encode_documents(train)
                rows = documents.state_dict()
            if is_empty:
                raise DataError(
                    "There are no documents to train on: all are empty, held out, or those of other replicas. Give "
                    "more text or a smaller data.heldout_fraction."
                )
            rows, epoch = None, epoch + 1
