"""The corpus of a run: documents as packed tokens or conversations in rows, made before training or while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Unpack

import numpy as np
import xxhash

from diloco.data.chat import PackedRows, all_rows, chat_rows
from diloco.data.chat_tokenizer import ChatTokenizer
from diloco.data.loader import Batches, DocumentStream, Drawing, Sampler
from diloco.data.settings import DataSettings
from diloco.data.source import Source, is_heldout
from diloco.data.tokenizer import Tokenizer, make_tokenizer
from diloco.data.tokens import (
    SPLITS,
    PackedTokens,
    TokenFolder,
    encode_splits,
    pack,
    token_folders,
    training_texts,
)
from diloco.errors import ConfigurationError, DataError
from diloco.units import format_bytes

__all__ = ["Corpus", "build_corpus", "corpus_vocabulary_size", "heldout_data"]

_AHEAD = 4
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
    ahead: int = 0  # batches that a thread prepares, because drawing them reads files
    stream: Callable[..., Batches] | None = None  # opens the batches of a replica that reads during training

    def batches(self, **drawing: Unpack[Drawing]) -> Batches:
        """Return the batches of one replica."""
        drawing.setdefault("ahead", self.ahead)
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
        _check_settings(settings, folders)
        tokenizer = folders[0].tokenizer()
    else:
        tokenizer = make_tokenizer(settings, training_texts(Source(settings)))
    train, heldout = _splits(settings, folders, tokenizer)
    about = f"{_size(train)}, {len(train):,} tokens{', in files' if folders else ''}; held out: {_size(heldout)}"
    digest = _fingerprint(tokenizer, train, heldout)
    return Corpus(train, heldout, tokenizer, digest, about, ahead=_AHEAD if folders else 0)


def _chat_corpus(settings: DataSettings, length: int) -> Corpus:
    if settings.tokenizer == "bytes" or settings.bpe_vocab_size is not None:
        raise ConfigurationError(
            f"data.format='chat' needs the tokenizer of a model, not {settings.tokenizer!r}. Give a model folder as "
            "--model or data.tokenizer."
        )
    tokenizer = ChatTokenizer(settings.tokenizer, settings.chat_template)
    train, heldout, notes = chat_rows(settings, tokenizer, length)
    size = (
        f"{train.documents:,} conversations in {train.num_windows(length):,} rows of {length} tokens, "
        f"{train.efficiency:.0%} full; {train.counted_tokens:,} tokens count"
    )
    about = "; ".join([size, *notes, f"held out: {heldout.documents:,} conversations"])
    return Corpus(train, heldout, tokenizer, _fingerprint(tokenizer, train, heldout), about)


def _streamed_corpus(settings: DataSettings) -> Corpus:
    source, fraction = Source(settings), settings.heldout_fraction
    tokenizer = make_tokenizer(settings, islice(_documents(source, heldout=False), _BPE_DOCUMENTS))
    heldout, field = _first_heldout(source, tokenizer), settings.text_field
    origin = f"{field} {len(source.parts)} {fraction} {tokenizer.to_json()} {heldout.digest}"
    digest = xxhash.xxh3_128_hexdigest(origin.encode())
    stream = partial(DocumentStream, source, tokenizer, data=digest, heldout_fraction=fraction)
    about = f"read while training; held out: {_size(heldout)}"
    return Corpus(PackedTokens([]), heldout, tokenizer, digest, about, ahead=_AHEAD, stream=stream)


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
    if isinstance(tokenizer, ChatTokenizer):
        if paths:
            return all_rows(replace(settings, paths=tuple(paths)), tokenizer, sequence_length)
        return chat_rows(settings, tokenizer, sequence_length)[1]
    if paths:
        source = Source(replace(settings, paths=tuple(paths), streaming=False))
        return pack(list(source.documents()), tokenizer)
    if settings.streaming:
        return _first_heldout(Source(settings), tokenizer)
    return _splits(settings, token_folders(settings), tokenizer)[1]


def _fingerprint(tokenizer: Tokenizer, train: PackedTokens | PackedRows, heldout: PackedTokens | PackedRows) -> str:
    return xxhash.xxh3_128_hexdigest(f"{tokenizer.vocab_size} {train.digest} {heldout.digest}".encode())


def _size(tokens: PackedTokens) -> str:
    return f"{tokens.documents:,} documents, {format_bytes(tokens.num_bytes)}"


def _splits(settings: DataSettings, folders: Sequence[TokenFolder], tokenizer: Tokenizer) -> list[PackedTokens]:
    """Return the tokens to train on and the held-out ones: of folders, or of the text if there are none."""
    if folders:
        return [PackedTokens.joined([folder.splits[name] for folder in folders]) for name in SPLITS]
    return [
        PackedTokens(
            [np.concatenate([part[:] for part in parts])],
            vocab_size=tokenizer.vocab_size,
            documents=sum(part.documents for part in parts),
            num_bytes=sum(part.num_bytes for part in parts),
        )
        for parts in zip(*encode_splits(Source(settings), tokenizer), strict=True)
    ]


def _documents(source: Source, *, heldout: bool) -> Iterator[str]:
    fraction = source.settings.heldout_fraction
    return (text for text in source.documents() if is_heldout(text, fraction) is heldout)


def _first_heldout(source: Source, tokenizer: Tokenizer) -> PackedTokens:
    if not (texts := list(islice(_documents(source, heldout=True), _HELDOUT_DOCUMENTS))):
        raise DataError(
            f"data.heldout_fraction={source.settings.heldout_fraction:g} holds out none of the documents. Use a larger "
            "fraction, or more documents."
        )
    return pack(texts, tokenizer)


def _check_settings(settings: DataSettings, folders: Sequence[TokenFolder]) -> None:
    """Raise `ConfigurationError` if token folders differ in their tokenizer, or the settings ask for another one."""
    first, tokenizer, asked = folders[0], folders[0].tokenizer().to_json(), settings.heldout_fraction
    for folder in folders:
        if folder.tokenizer().to_json() != tokenizer:
            raise ConfigurationError(
                f"{first.path} and {folder.path} were made with different tokenizers. Make them with the same one, "
                f"such as --tokenizer {first.path}."
            )
        fraction = folder.made.get("heldout_fraction", asked)
        if asked not in (fraction, DataSettings.heldout_fraction):
            raise ConfigurationError(
                f"{folder.path} was made with a heldout_fraction of {fraction:g}, so data.heldout_fraction={asked:g} "
                "has no effect. Pass it to `diloco tokenize`, or leave it out."
            )
    trained = settings.bpe_vocab_size is not None
    if trained or (settings.tokenizer != "bytes" and make_tokenizer(settings).to_json() != tokenizer):
        raise ConfigurationError(
            f"data.tokenizer={settings.tokenizer!r} has no effect: {first.path} was made with another one."
        )
