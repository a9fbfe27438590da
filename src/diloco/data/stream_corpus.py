"""A corpus that is read while training: what must be known before is its tokenizer, and a few documents to hold out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import xxhash

from diloco.data.blocks import BlockReader
from diloco.data.corpus import Corpus, token_folders
from diloco.data.settings import DataSettings
from diloco.data.source_settings import SourceSettings
from diloco.data.sources import DocumentSource, open_source
from diloco.data.split import is_heldout
from diloco.data.stream import DocumentStream
from diloco.data.tokens import make_tokenizer
from diloco.errors import ConfigurationError, DataError

__all__ = ["StreamedCorpus", "first_heldout", "open_stream"]


@dataclass(frozen=True, eq=False)
class StreamedCorpus(Corpus):
    """Sources that are open, and what is held out of them; ``train`` is empty, as are its counts."""

    settings: DataSettings = field(default_factory=DataSettings)
    sources: tuple[tuple[SourceSettings, DocumentSource], ...] = ()

    def batches(
        self, *, seed: int, sequence_length: int, batch_size: int, replica: int, num_replicas: int
    ) -> DocumentStream:
        """The batches of one replica; see `DocumentStream`."""
        readers = [
            BlockReader(
                source,
                name=about.name,
                size=self.settings.streaming_block,
                tokenizer=self.tokenizer,
                heldout_fraction=self.settings.heldout_fraction,
                seed=seed,
            )
            for about, source in self.sources
        ]
        return DocumentStream(
            readers,
            [about.weight for about, _ in self.sources],
            data=xxhash.xxh3_64_hexdigest(f"{self.fingerprint} {seed}".encode()),
            eos_id=self.tokenizer.eos_id,
            sequence_length=sequence_length,
            batch_size=batch_size,
            replica=replica,
            num_replicas=num_replicas,
        )


def open_stream(settings: DataSettings) -> StreamedCorpus:
    """Open the sources that ``settings`` name, and read what is held out, from their beginning.

    Raises:
        DataError: they cannot be read, or nothing can be held out.
        ConfigurationError: something asked for is not installed or unknown, or cannot be streamed.
    """
    opened = []
    for about in settings.parsed_sources():
        if token_folders(about):
            raise ConfigurationError(
                f"{about.data[0]} holds tokens, which are mapped into memory; without data.streaming it would work. "
                "Nothing was read."
            )
        opened.append((about, open_source(about)))
    if settings.tokenizer == "bpe" and settings.bpe_documents is None:
        raise ConfigurationError(
            "data.tokenizer='bpe' was given with data.streaming, and a BPE is trained on all documents; "
            "data.bpe_documents, the number of documents to train it on, such as 10000, would work. Nothing was read."
        )
    share = -(-(settings.bpe_documents or 0) // len(opened))
    tokenizer = make_tokenizer(
        settings,
        (text for _, source in opened for text in islice(_documents(source, settings, heldout=False), share)),
    )
    heldout = first_heldout([source for _, source in opened], settings)
    tokens = tokenizer.encode_documents(heldout)
    told = [(about.name, about.weight, about.config, about.split, about.text_field) for about, _ in opened]
    fingerprint = xxhash.xxh3_128(f"{told} {settings.heldout_fraction} {settings.streaming_block}".encode())
    fingerprint.update(tokenizer.to_json().encode())
    fingerprint.update(np.ascontiguousarray(tokens).data)
    return StreamedCorpus(
        train=tokens[:0],
        heldout=tokens,
        tokenizer=tokenizer,
        train_documents=0,
        heldout_documents=len(heldout),
        train_bytes=0,
        heldout_bytes=tokenizer.num_bytes(tokens),
        fingerprint=fingerprint.hexdigest(),
        mapped=True,
        settings=settings,
        sources=tuple(opened),
    )


def first_heldout(sources: Sequence[DocumentSource], settings: DataSettings) -> list[str]:
    """The first documents that are held out, as many of each source.

    Raises:
        DataError: there are none.
    """
    share = -(-settings.streaming_heldout // len(sources))
    heldout = [text for source in sources for text in islice(_documents(source, settings, heldout=True), share)]
    if not heldout:
        raise DataError(
            f"data.heldout_fraction={settings.heldout_fraction:g} holds out none of the documents; a larger fraction, "
            "or more documents, would work. Nothing was trained."
        )
    return heldout


def _documents(source: DocumentSource, settings: DataSettings, *, heldout: bool) -> Iterator[str]:
    for text in source.records():
        if text and is_heldout(text, settings.heldout_fraction) is heldout:
            yield text
