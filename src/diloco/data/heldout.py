"""Split documents into training and held-out documents, as a function of their text."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import xxhash

from diloco.data.packed import PackedTokens
from diloco.data.settings import DataSettings
from diloco.data.sources import DocumentSource, open_source, read_source
from diloco.data.token_folder import token_folders
from diloco.data.tokenizer import Tokenizer
from diloco.errors import DataError

__all__ = ["documents_of", "first_heldout", "heldout_tokens", "is_heldout", "split_documents", "split_lazily"]


def split_documents(
    texts: Iterable[str], heldout_fraction: float, max_documents: int | None = None
) -> tuple[list[str], list[str]]:
    """Return the training and the held-out documents, each in the order given.

    The split of a document depends only on its text and the fraction: adding documents moves no other document, and
    copies of a document stay together. ``max_documents`` keeps the documents whose texts hash lowest, so a small sample
    is spread over all of them.

    Raises:
        DataError: one of the splits would be empty; the message says which fractions would work.

    >>> split_documents(["one", "four", "five", "eight"], heldout_fraction=0.3)
    (['four', 'five', 'eight'], ['one'])
    """
    train: list[str] = []
    heldout: list[str] = []
    for text, held_out in split_lazily(texts, heldout_fraction, max_documents):
        (heldout if held_out else train).append(text)
    return train, heldout


def split_lazily(
    texts: Iterable[str], heldout_fraction: float, max_documents: int | None = None
) -> Iterator[tuple[str, bool]]:
    """Yield what `split_documents` returns, document by document, each with whether it is held out.

    At most ``max_documents`` documents are held in memory, or one if there is no such limit.

    Raises:
        DataError: as `split_documents`, after the last document.
    """
    hashed: Iterable[tuple[int, str, float, int]]
    hashed = ((place, text, *_keys(text)) for place, text in enumerate(texts))
    if max_documents is not None:
        kept = heapq.nsmallest(max_documents, hashed, key=lambda each: (each[3], each[0]))
        hashed = sorted(kept)
    train, heldout = 0, 0
    lowest, highest = 1.0, 0.0
    for _, text, key, _ in hashed:
        held_out = key < heldout_fraction
        heldout += held_out
        train += not held_out
        lowest, highest = min(lowest, key), max(highest, key)
        yield text, held_out
    if train and heldout:
        return
    if lowest >= highest:
        raise DataError(
            f"{train + heldout} documents were read, no two of them different, but at least one to train on and one to "
            "hold out are needed. Give more files, a .jsonl with one document per line, or a document_separator in "
            "data.sources to split long files into documents."
        )
    raise DataError(
        f"data.heldout_fraction={heldout_fraction:g} holds out {heldout} of {train + heldout} documents and leaves "
        f"{train} to train on; at least one of each is needed. Use a fraction between {lowest:.6g} and {highest:.6g}, "
        "or more documents."
    )


def is_heldout(text: str, heldout_fraction: float) -> bool:
    """Return whether `split_documents` holds a document out."""
    return _keys(text)[0] < heldout_fraction


def heldout_tokens(settings: DataSettings, tokenizer: Tokenizer) -> PackedTokens:
    """Return the held-out tokens of the corpus of ``settings``, encoded by the tokenizer that a run saved.

    Raises:
        DataError, ConfigurationError: as `build_corpus` and `open_stream`.
    """
    sources = settings.parsed_sources()
    if settings.streaming:
        texts = first_heldout([open_source(source) for source in sources], settings)
        return PackedTokens([tokenizer.encode_documents(texts)])
    pieces = []
    for source in sources:
        if folders := token_folders(source):
            pieces += [piece for folder in folders for piece in folder.tokens("heldout").pieces]
        else:
            _, heldout = split_documents(read_source(source), settings.heldout_fraction, settings.max_documents)
            pieces.append(tokenizer.encode_documents(heldout))
    return PackedTokens(pieces, vocab_size=tokenizer.vocab_size)


def first_heldout(sources: Sequence[DocumentSource], settings: DataSettings) -> list[str]:
    """Return the first held-out documents, up to the same number from each source.

    Raises:
        DataError: no document is held out.
    """
    share = -(-settings.streaming_heldout // len(sources))
    heldout = [text for source in sources for text in islice(documents_of(source, settings, heldout=True), share)]
    if not heldout:
        raise DataError(
            f"data.heldout_fraction={settings.heldout_fraction:g} holds out none of the documents. Use a larger "
            "fraction, or more documents."
        )
    return heldout


def documents_of(source: DocumentSource, settings: DataSettings, *, heldout: bool) -> Iterator[str]:
    """Yield the documents of one split in the order of their source."""
    for text in source.records():
        if text and is_heldout(text, settings.heldout_fraction) is heldout:
            yield text


def _keys(text: str) -> tuple[float, int]:
    """Return two independent halves of a hash: a number in [0, 1) for the split, and an integer for the sample.

    Because they are independent, a sample is as likely to be held out as the rest.
    """
    number = xxhash.xxh3_128_intdigest(text.encode("utf-8"))
    # A float holds 53 bits exactly.
    return (number >> 75) / (1 << 53), number & ((1 << 64) - 1)
