"""The corpus of a run: documents as packed tokens or conversations in rows, made before training or while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar, Unpack

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from diloco.data.batches import Batch, Batches, Cursor, Drawing, Sampler, as_message, deal, read_message
from diloco.data.chat import ChatTokenizer, PackedRows, chat_rows, heldout_rows
from diloco.data.settings import DataSettings
from diloco.data.source import DataIdentity, Source, warn_once
from diloco.data.split import MANY, Survey, survey
from diloco.data.tokenizer import Tokenizer, make_tokenizer
from diloco.data.tokens import SPLITS, PackedTokens, TokenFolder, encode, encode_splits, pack, token_folders
from diloco.errors import CheckpointError, ConfigurationError, DataError, DiLoCoError
from diloco.units import format_bytes

T = TypeVar("T", str, range)

_EVEN = 1.1  # between the largest and the smallest share of a stream
_MAX_FILES = 1000  # with more, a checkpoint says only whether one of them has changed
_BPE_DOCUMENTS = 10_000  # while streaming, a BPE is trained on the first ones


@dataclass(frozen=True, eq=False)
class Corpus:
    """What to train and to evaluate on, as tokens."""

    train: PackedTokens | PackedRows  # empty if documents are read during training
    heldout: PackedTokens | PackedRows
    tokenizer: Tokenizer
    fingerprint: str
    """Equal for equal tokens, split and vocabulary size. It tells data sets apart and is not a cryptographic hash."""
    facts: Mapping[str, str]  # what there is to train and to evaluate on, in words
    files: str = ""  # the files and data sets, each with a digest of its content, separated by "; "
    stream: Callable[..., Batches] | None = None  # opens the batches of a replica that reads during training

    @property
    def evaluates(self) -> bool:
        """Whether enough is held out to predict a token."""
        return len(self.heldout) > 1

    def batches(self, **drawing: Unpack[Drawing]) -> Batches:
        """Return the batches of one replica."""
        return self.stream(**drawing) if self.stream else Sampler(self.train, **drawing)


def build_corpus(settings: DataSettings, sequence_length: int = 1024, tokenizer: Tokenizer | None = None) -> Corpus:
    """Read, split and tokenise what ``settings`` name, all in memory; with ``tokenizer`` instead of training a BPE.

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
        return _streamed_corpus(settings, tokenizer)
    if folders:
        tokenizer = folders[0].tokenizer()
        _check_settings(settings, folders, tokenizer)
        train, heldout = _of_folders(folders, tokenizer)
        identity = [DataIdentity(folder.path.name, f"{folder.splits['train'].digest}") for folder in folders]
    else:
        source = Source(settings)
        split = survey(source.documents(), settings.heldout_fraction).split
        tokenizer = tokenizer or make_tokenizer(settings, split.training(source.documents()))
        parts = zip(*encode_splits(source, split, tokenizer), strict=True)
        train, heldout = (PackedTokens.joined(part) for part in parts)
        identity = source.identity()
    facts = {"data": f"{_size(train)}{', in files' if folders else ''}", "held out": _size(heldout)}
    return Corpus(train, heldout, tokenizer, _fingerprint(tokenizer, train, heldout), facts, _in_words(identity))


def _chat_corpus(settings: DataSettings, length: int) -> Corpus:
    if settings.tokenizer == "bytes" or settings.bpe_vocab_size is not None:
        raise ConfigurationError(
            f"data.format={settings.format!r} needs the tokenizer of a model, not {settings.tokenizer!r}. Give a model "
            "folder as --model or data.tokenizer."
        )
    tokenizer = ChatTokenizer(settings.tokenizer, settings.format)
    train, heldout, notes = chat_rows(settings, tokenizer, length)
    size = (
        f"{_count(train.documents, 'conversation')} in {_count(train.num_windows(length), 'row')} of {length} tokens, "
        f"{train.num_tokens / len(train):.0%} full; {train.counted_tokens:,} tokens count"
    )
    facts = {"data": "; ".join([size, *notes]), "held out": _conversations(heldout)}
    files = _in_words(Source(settings).identity())
    return Corpus(train, heldout, tokenizer, _fingerprint(tokenizer, train, heldout), facts, files)


def _conversations(rows: PackedRows) -> str:
    if not rows.documents:
        return NOTHING
    return f"{_count(rows.documents, 'conversation')}, {_count(rows.counted_tokens, 'token')} that count"


def _streamed_corpus(settings: DataSettings, tokenizer: Tokenizer | None) -> Corpus:
    source, fraction = Source(settings), settings.heldout_fraction
    look = survey(source.documents(), fraction)
    tokenizer = tokenizer or make_tokenizer(settings, islice(look.split.training(source.documents()), _BPE_DOCUMENTS))
    heldout = _first_heldout(source, look, tokenizer)
    identity = source.identity()
    contents = [part.content for part in identity]
    origin = f"{settings.text_field} {contents} {fraction} {tokenizer.to_json()} {heldout.digest}"
    digest = xxhash.xxh3_128_hexdigest(origin.encode())
    stream = partial(DocumentStream, source, look, tokenizer, data=digest)
    facts = {"data": "read while training", "held out": _size(heldout)}
    return Corpus(PackedTokens([]), heldout, tokenizer, digest, facts, _in_words(identity), stream)


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
        return heldout_rows(settings, tokenizer, sequence_length, everything=bool(paths))
    if not paths and (folders := token_folders(settings)):
        return _of_folders(folders, tokenizer)[1]
    source = Source(settings)
    if paths:
        return encode(source.documents(), tokenizer)
    look = survey(source.documents(), settings.heldout_fraction)
    if settings.streaming:
        return _first_heldout(source, look, tokenizer)
    return encode(look.split.heldout(source.documents()), tokenizer)


def _fingerprint(tokenizer: Tokenizer, train: PackedTokens | PackedRows, heldout: PackedTokens | PackedRows) -> str:
    return xxhash.xxh3_128_hexdigest(f"{tokenizer.vocab_size} {train.digest} {heldout.digest}".encode())


def _in_words(identity: Sequence[DataIdentity]) -> str:
    if len(identity) > _MAX_FILES:
        digest = xxhash.xxh3_64_hexdigest(" ".join(part.content for part in identity).encode())
        return f"{len(identity):,} files ({digest})"
    return "; ".join(f"{part.name.replace(';', ',')} ({part.content})" for part in identity)


NOTHING = "nothing, because there is too little; the loss is not evaluated"


def _size(tokens: PackedTokens) -> str:
    if not len(tokens):
        return NOTHING
    return f"{_count(tokens.documents, 'document')}, {format_bytes(tokens.num_bytes)}, {_count(len(tokens), 'token')}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _of_folders(folders: Sequence[TokenFolder], tokenizer: Tokenizer) -> list[PackedTokens]:
    """Return the tokens to train on and the held-out ones of token folders."""
    for folder in folders:
        if not folder.tokenizer().encodes_like(tokenizer):
            raise ConfigurationError(
                f"{folder.path} was made with another tokenizer than that of the run, or of the first of its folders. "
                "Make it again with that one (--tokenizer FOLDER)."
            )
    return [PackedTokens.joined([folder.splits[name] for folder in folders]) for name in SPLITS]


def _first_heldout(source: Source, look: Survey, tokenizer: Tokenizer) -> PackedTokens:
    texts = look.heldout
    if texts is None:
        texts = list(islice(look.split.heldout(source.documents()), MANY))
    return pack(texts, tokenizer, counted=True)


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
    if trained or (settings.tokenizer != "bytes" and not make_tokenizer(settings).encodes_like(tokenizer)):
        raise ConfigurationError(
            f"data.tokenizer={settings.tokenizer!r} has no effect: {folders[0].path} was made with another one. Make "
            "it again with that one (diloco tokenize --tokenizer)."
        )


_BLOCK = 64  # documents of a replica that are tokenised at a time
PIECE_CHARACTERS = 65_536
"""While streaming, a longer document is dealt to the replicas in pieces of this length, each a document."""


class _Position(msgspec.Struct, kw_only=True):
    """Where a replica is in the documents; part of its cursor."""

    rows: Any = None  # the state of the data set before the block of documents to draw from; None: at the beginning
    dealt: int = 0  # the documents to train on before that block
    offset: int = 0  # the tokens of the block that have been drawn
    last: int  # the token before the next one to draw
    epoch: int = 0


class DocumentStream(Batches):
    """The `Batches` of one replica that reads, tokenises and packs its documents meanwhile, in the order of the source.

    Every replica reads all documents and tokenises those that are dealt to it in this epoch (`deal`). Their number
    can't change. Documents are packed end to end, each followed by the end-of-document token, so every token is a
    target once.
    """

    def __init__(
        self, source: Source, look: Survey, tokenizer: Tokenizer, *, data: str, **drawing: Unpack[Drawing]
    ) -> None:
        super().__init__({"stream": data}, drawing)
        self._source, self._split, self._tokenizer = source, look.split, tokenizer
        self._members = self._num_replicas or 1
        if look.trained is not None:
            self._warn_of_shares(look.trained)
        self._thread = ThreadPoolExecutor(1, f"batches of replica {self._replica}")  # it starts with the first batch
        self._next: Future[tuple[Batch, Cursor]] | None = None
        self._restore({**self._origin, "drawn": 0, "place": as_message(_Position(last=tokenizer.eos_id))})

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

    def _warn_of_shares(self, lengths: Sequence[int]) -> None:
        """Say so if the replicas get unequal shares of the first epoch, by the characters of all documents."""
        sizes = [len(piece) for length in lengths for piece in self._pieces(range(length))]
        owners = self._owners(0, len(sizes), epoch=0)
        shares = np.bincount(owners, weights=sizes, minlength=self._members)
        if shares.max() > _EVEN * shares.min():
            warn_once(
                f"The {_count(len(lengths), 'document')} to train on can't be divided evenly: of the first epoch, the "
                f"{self._members} replicas get {int(shares.min()):,} to {int(shares.max()):,} characters. Give more "
                "or shorter documents, or leave out data.streaming."
            )

    def _pieces(self, text: T) -> Iterator[T]:
        """Yield what is dealt of a document: itself, if it is short or there is one replica."""
        step = PIECE_CHARACTERS if self._members > 1 else max(1, len(text))
        return (text[begin : begin + step] for begin in range(0, len(text), step))

    def _owners(self, first: int, count: int, epoch: int) -> NDArray[np.int64]:
        return deal(first, count, self._members, f"seed {self._seed}, epoch {epoch}")

    def _restore(self, state: Cursor) -> None:
        wait([self._next] if self._next else [])
        self._next, self._cursor, self._position = None, state, read_message(state["place"], _Position)
        self._blocks = self._read(self._position.rows, self._position.dealt, self._position.epoch)
        self._tokens: NDArray[Any] = np.zeros(0, np.int64)  # of the block of documents; the next batch reads them

    def _draw(self) -> tuple[Batch, Cursor]:
        """Make the batch after the last one that was returned."""
        if self._position.offset > len(self._tokens):
            self._tokens = next(self._blocks).tokens
        rows = torch.tensor([self._row() for _ in range(self._batch_size)], dtype=torch.int64, device="cpu")
        cursor = {**self._origin, "drawn": self._cursor["drawn"] + 1, "place": as_message(self._position)}
        return (rows[:, :-1].contiguous(), rows[:, 1:].contiguous()), cursor

    def _row(self) -> list[int]:
        """Return the token before the next ones to draw, and those."""
        position, row = self._position, [self._position.last]
        while len(row) <= self._length:
            if position.offset >= len(self._tokens):
                block = next(self._blocks)
                position.rows, position.dealt, position.epoch, position.offset = block.rows, block.dealt, block.epoch, 0
                self._tokens = block.tokens
            tokens = self._tokens[position.offset :][: self._length + 1 - len(row)].tolist()
            row += tokens
            position.offset += len(tokens)
        position.last = row[-1]
        return row

    def _read(self, rows: Any, dealt: int, epoch: int) -> Iterator[_Block]:
        """Yield one block of documents after the other, epoch after epoch."""
        while True:
            documents = self._source.stream()
            texts = self._texts(documents, rows)
            while block := list(islice(texts, _BLOCK * self._members)):
                pieces = [piece for text in self._split.training(block) for piece in self._pieces(text)]
                owners = self._owners(dealt, len(pieces), epoch).tolist()
                mine = [piece for piece, owner in zip(pieces, owners, strict=True) if owner == self._replica]
                yield _Block(rows, dealt, epoch, self._tokenizer.encode_documents(mine))
                rows, dealt = documents.state_dict(), dealt + len(pieces)
            if not dealt:
                raise DataError(
                    "There are no documents to train on: all are empty or held out. Give more text or a smaller "
                    "data.heldout_fraction."
                )
            rows, dealt, epoch = None, 0, epoch + 1

    def _texts(self, documents: Any, rows: Any) -> Iterator[str]:
        """Yield the text of each record of a data set from a saved state on."""
        try:
            if rows is not None:
                documents.load_state_dict(rows)
            records = iter(documents)
            first = next(records, None)
        except DiLoCoError:
            raise
        except Exception as error:  # the library raises whatever the state lacks
            raise CheckpointError(
                f"The data can't be read on from where the checkpoint stopped ({type(error).__name__}: {error}), so "
                "it has changed since. Restore it, or start a new run with --init-from."
            ) from error
        for record in () if first is None else chain([first], records):
            yield self._source.text("a record of the stream", record)


@dataclass(frozen=True)
class _Block:
    """Some documents in the order of the source, of which the tokens of those are here that are dealt to a replica."""

    rows: Any  # the state of the data set before it
    dealt: int
    epoch: int
    tokens: NDArray[Any]
