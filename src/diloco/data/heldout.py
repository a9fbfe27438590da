"""What a run evaluates on, without what it trains on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from diloco.data.corpus import read_source, token_folders
from diloco.data.packed import PackedTokens, TokenArray, Tokens
from diloco.data.settings import DataSettings
from diloco.data.source_settings import SourceSettings
from diloco.data.sources import open_source
from diloco.data.split import split_documents
from diloco.data.stream_corpus import first_heldout
from diloco.data.tokenizer import Tokenizer

__all__ = ["heldout_tokens", "read_texts"]


def heldout_tokens(settings: DataSettings, tokenizer: Tokenizer) -> Tokens:
    """The held-out tokens of the corpus of ``settings``, made by the tokenizer that a run has left.

    Raises:
        DataError, ConfigurationError: as `build_corpus` and `open_stream`.
    """
    sources = settings.parsed_sources()
    if settings.streaming:
        return tokenizer.encode_documents(first_heldout([open_source(source) for source in sources], settings))
    pieces = [piece for source in sources for piece in _of_source(source, settings, tokenizer)]
    return PackedTokens(pieces, vocab_size=tokenizer.vocab_size)


def read_texts(settings: DataSettings, paths: Sequence[Path]) -> Iterable[str]:
    """All documents of ``paths`` (files, folders and ``hf:`` names), read as ``settings`` say."""
    (source,) = dataclasses.replace(settings, paths=tuple(paths), sources={}, streaming=False).parsed_sources()
    return read_source(source)


def _of_source(source: SourceSettings, settings: DataSettings, tokenizer: Tokenizer) -> Sequence[TokenArray]:
    if folders := token_folders(source):
        return [piece for folder in folders for piece in folder.tokens("heldout").pieces]
    _, heldout = split_documents(read_source(source), settings.heldout_fraction, settings.max_documents)
    return [tokenizer.encode_documents(heldout)]
