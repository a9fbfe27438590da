"""The corpus of a run: documents as packed tokens, tokenised before training or while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Unpack

import numpy as np
import xxhash

from diloco.data.block_reader import BlockReader
from diloco.data.heldout import documents_of, first_heldout, split_documents
from diloco.data.loader import Batches, Drawing, Sampler
from diloco.data.packed import Mixture, PackedTokens, shares_of
from diloco.data.settings import DataSettings, SourceSettings
from diloco.data.sources import DocumentSource, open_source, read_source
from diloco.data.stream import DocumentStream
from diloco.data.token_folder import SPLITS, TokenFolder, fingerprint_of, token_folders
from diloco.data.tokenizer import Tokenizer
from diloco.data.tokenizer_choice import given_tokenizer, make_tokenizer
from diloco.errors import ConfigurationError
from diloco.units import format_bytes

__all__ = ["Corpus", "StreamedCorpus", "build_corpus", "corpus_vocabulary_size", "open_stream"]

_BPE_DOCUMENTS = 10_000  # while streaming, a BPE is trained on the first ones

_COUNTS = ("train_documents", "train_bytes", "heldout_documents", "heldout_bytes")


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training and held-out documents as tokens, each followed by the end-of-document token, without padding."""

    train: PackedTokens  # uint16 if every id fits, else uint32
    heldout: PackedTokens
    tokenizer: Tokenizer
    train_documents: int
    heldout_documents: int
    train_bytes: int  # UTF-8 bytes of the training documents; the end-of-document tokens stand for none
    heldout_bytes: int
    fingerprint: str
    """Equal for equal tokens, split and vocabulary size. It tells data sets apart and is not a cryptographic hash."""
    mapped: bool = False  # whether drawing batches reads files

    def batches(self, **drawing: Unpack[Drawing]) -> Batches:
        """Return the batches of one replica."""
        return Sampler(self.train, **drawing)

    def description(self) -> str:
        """Return how much there is to train and to evaluate on, and the shares of the sources."""
        train = f"{self.train_documents:,} documents, {format_bytes(self.train_bytes)}, {len(self.train):,} tokens"
        return f"{train}{_shares(self.train.shares)}{', in files' if self.mapped else ''}; {self._heldout_facts()}"

    def _heldout_facts(self) -> str:
        return f"held out: {self.heldout_documents:,} documents, {format_bytes(self.heldout_bytes)}"


@dataclass(frozen=True, eq=False)
class StreamedCorpus(Corpus):
    """Sources that are read during training, and the documents held out of them. ``train`` and its counts are empty."""

    settings: DataSettings = field(default_factory=DataSettings)
    sources: tuple[tuple[SourceSettings, DocumentSource], ...] = ()

    def batches(self, **drawing: Unpack[Drawing]) -> Batches:
        """Return the batches of one replica out of a fixed number; see `DocumentStream`."""
        num_replicas, seed = drawing["num_replicas"], drawing["seed"]
        assert num_replicas is not None, "checked with the settings"
        assert drawing.get("sharding", "shuffled") == "shuffled", "checked with the settings"
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
            sequence_length=drawing["sequence_length"],
            batch_size=drawing["batch_size"],
            replica=drawing["replica"],
            num_replicas=num_replicas,
        )

    def description(self) -> str:
        total = sum(about.weight for about, _ in self.sources)
        shares = {about.name: about.weight / total for about, _ in self.sources if about.name}
        return f"read while training{_shares(shares)}; {self._heldout_facts()}"


def build_corpus(settings: DataSettings) -> Corpus:
    """Read, split and tokenise the text that ``settings`` name, all in memory. Folders of tokens are memory-mapped.

    Raises:
        DataError: the text cannot be read, or does not suffice for both splits.
        ConfigurationError: the settings contradict each other or a token folder, or a package they need is not
            installed.
    """
    sources = settings.parsed_sources()
    folders = {source.name: token_folders(source) for source in sources}
    ready = [folder for found in folders.values() for folder in found]
    if ready and settings.max_documents is not None:
        raise ConfigurationError(
            f"max_documents={settings.max_documents} has no effect on {ready[0].path}, which holds tokens. Use it when "
            "the text is tokenised."
        )
    if all(folders.values()):
        _check_heldout_fraction(settings, ready)
    texts = {
        source.name: split_documents(read_source(source), settings.heldout_fraction, settings.max_documents)
        for source in sources
        if not folders[source.name]
    }
    train = (document for train, _ in texts.values() for document in train)
    tokenizer = _tokenizer_of(settings, ready) if ready else make_tokenizer(settings, train)
    corpora = [
        _mapped(found, tokenizer) if found else _tokenised(*texts.pop(name), tokenizer)
        for name, found in folders.items()
    ]
    return _mixed(sources, corpora) if settings.sources else corpora[0]


def open_stream(settings: DataSettings) -> StreamedCorpus:
    """Open the sources that ``settings`` name, and read the held-out documents from their beginning.

    Raises:
        DataError: the sources cannot be read, or no document is held out.
        ConfigurationError: a source can't be streamed, or the settings can't work or need a package that is not
            installed.
    """
    opened = []
    for about in settings.parsed_sources():
        if token_folders(about):
            raise ConfigurationError(
                f"{about.data[0]} holds tokens, which are mapped into memory and can't be streamed. Leave out "
                "data.streaming."
            )
        opened.append((about, open_source(about)))
    sources = [source for _, source in opened]
    share = -(-(settings.bpe_documents or _BPE_DOCUMENTS) // len(sources))
    texts = (text for source in sources for text in islice(documents_of(source, settings, heldout=False), share))
    tokenizer = make_tokenizer(settings, texts)
    heldout = first_heldout(sources, settings)
    tokens = tokenizer.encode_documents(heldout)
    named = [(about.name, about.weight, about.config, about.split, about.text_field) for about, _ in opened]
    fingerprint = xxhash.xxh3_128(f"{named} {settings.heldout_fraction} {settings.streaming_block}".encode())
    fingerprint.update(tokenizer.to_json().encode())
    fingerprint.update(np.ascontiguousarray(tokens).data)
    return StreamedCorpus(
        train=PackedTokens([tokens[:0]]),
        heldout=PackedTokens([tokens]),
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


def corpus_vocabulary_size(settings: DataSettings) -> int:
    """Return the vocabulary size of the tokenizer that ``settings`` name, without reading any text.

    Raises:
        ConfigurationError, DataError: there is no such tokenizer.
    """
    folders = [folder for source in settings.parsed_sources() for folder in token_folders(source)]
    if folders:
        return folders[0].vocab_size
    return settings.bpe_vocab_size or given_tokenizer(settings).vocab_size


def _check_heldout_fraction(settings: DataSettings, folders: Sequence[TokenFolder]) -> None:
    """Raise `ConfigurationError` if a fraction was asked for, but all documents were already split by another."""
    asked = settings.heldout_fraction
    for folder in folders:
        made = folder.made.get("heldout_fraction", asked)
        if asked not in (made, DataSettings().heldout_fraction):
            raise ConfigurationError(
                f"{folder.path} was made with a heldout_fraction of {made:g}, so data.heldout_fraction={asked:g} has "
                "no effect. Pass it to `diloco tokenize`, or leave it out."
            )


def _tokenizer_of(settings: DataSettings, folders: Sequence[TokenFolder]) -> Tokenizer:
    """Return the tokenizer of the folders; raise `ConfigurationError` if they differ, or another was asked for."""
    first = folders[0].tokenizer()
    for folder in folders[1:]:
        if folder.tokenizer().to_json() != first.to_json():
            raise ConfigurationError(
                f"{folders[0].path} and {folder.path} were made with different tokenizers. Make them with the same "
                f"one, such as --tokenizer {folders[0].path}."
            )
    given = settings.tokenizer
    if settings.bpe_vocab_size is not None or (
        given != "bytes" and given_tokenizer(settings).to_json() != first.to_json()
    ):
        raise ConfigurationError(
            f"data.tokenizer={given!r} was given, but {folders[0].path} was made with another tokenizer. Leave out "
            "data.tokenizer."
        )
    return first


def _mapped(folders: Sequence[TokenFolder], tokenizer: Tokenizer) -> Corpus:
    """Join folders end to end. Digest and fingerprint are computed from those in the manifests; no token is read."""
    parts = {split: [folder.tokens(split) for folder in folders] for split in SPLITS}
    counts = {
        f"{split}_{what}": sum(getattr(folder.splits[split], what) for folder in folders)
        for split in SPLITS
        for what in ("documents", "bytes")
    }
    train, heldout = (_end_to_end(parts[split]) for split in SPLITS)
    fingerprint = folders[0].fingerprint
    if len(folders) > 1:
        fingerprint = xxhash.xxh3_128_hexdigest(" ".join(folder.fingerprint for folder in folders).encode())
    return Corpus(train=train, heldout=heldout, tokenizer=tokenizer, **counts, fingerprint=fingerprint, mapped=True)


def _end_to_end(parts: Sequence[PackedTokens]) -> PackedTokens:
    if len(parts) == 1:
        return parts[0]
    digest = xxhash.xxh3_64_hexdigest(" ".join(part.digest for part in parts).encode())
    pieces = [piece for part in parts for piece in part.pieces]
    return PackedTokens(pieces, digest, vocab_size=parts[0].vocab_size)


def _tokenised(train: list[str], heldout: list[str], tokenizer: Tokenizer) -> Corpus:
    train_tokens, heldout_tokens = tokenizer.encode_documents(train), tokenizer.encode_documents(heldout)
    return Corpus(
        train=PackedTokens([train_tokens]),
        heldout=PackedTokens([heldout_tokens]),
        tokenizer=tokenizer,
        train_documents=len(train),
        heldout_documents=len(heldout),
        train_bytes=tokenizer.num_bytes(train_tokens),
        heldout_bytes=tokenizer.num_bytes(heldout_tokens),
        fingerprint=fingerprint_of(tokenizer, [train_tokens], [heldout_tokens]),
    )


def _mixed(sources: Iterable[SourceSettings], corpora: Sequence[Corpus]) -> Corpus:
    """Mix all sources by weight; their held-out documents follow one after the other."""
    weights = {source.name: source.weight for source in sources}
    train = Mixture({name: corpus.train for name, corpus in zip(weights, corpora, strict=True)}, weights)
    named = [
        [name, count, corpus.fingerprint]
        for name, count, corpus in zip(weights, shares_of(weights), corpora, strict=True)
    ]
    tokenizer = corpora[0].tokenizer
    return Corpus(
        train=train,
        heldout=PackedTokens([p for corpus in corpora for p in corpus.heldout.pieces], vocab_size=tokenizer.vocab_size),
        tokenizer=tokenizer,
        **{name: sum(getattr(corpus, name) for corpus in corpora) for name in _COUNTS},
        fingerprint=xxhash.xxh3_128_hexdigest(repr(named).encode()),
        mapped=any(corpus.mapped for corpus in corpora),
    )


def _shares(shares: Mapping[str, float]) -> str:
    return f" ({', '.join(f'{name} {share:.1%}' for name, share in shares.items())})" if shares else ""
