"""Documents into packed tokens: those to train on and those to hold out; or read while training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import xxhash

from diloco.data.block_reader import BlockReader
from diloco.data.heldout import first_heldout, some_documents, split_documents
from diloco.data.packed import Mixture, PackedTokens, Part, Tokens, shares_of
from diloco.data.settings import DataSettings, SourceSettings
from diloco.data.sources import DocumentSource, open_source, read_source
from diloco.data.stream import DocumentStream
from diloco.data.token_folder import TokenFolder, fingerprint_of, token_folders
from diloco.data.tokenizer import Tokenizer
from diloco.data.tokenizer_choice import given_tokenizer, make_tokenizer, vocabulary_size
from diloco.errors import ConfigurationError

__all__ = ["Corpus", "StreamedCorpus", "build_corpus", "corpus_vocabulary_size", "open_stream"]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training and held-out documents as tokens, each followed by the end-of-document token, without padding."""

    train: Tokens | Mixture
    """(n,) uint16 where the vocabulary allows, else uint32; of a stream nothing."""
    heldout: Tokens
    """(n,) of the same type."""
    tokenizer: Tokenizer
    train_documents: int
    heldout_documents: int
    train_bytes: int
    """UTF-8 bytes of the training documents; the end-of-document tokens stand for none."""
    heldout_bytes: int
    fingerprint: str
    """Equal for equal tokens, split and vocabulary size; a hash for telling data sets apart, not for trusting them."""
    mapped: bool = False
    """Whether tokens are read from files while they are drawn."""


def build_corpus(settings: DataSettings) -> Corpus:
    """Read, split and tokenise the text that ``settings`` name, which is held in memory; map tokens that are ready.

    Raises:
        DataError: the text cannot be read, or does not suffice for both sides.
        ConfigurationError: something asked for is not installed or unknown.
    """
    sources = settings.parsed_sources()
    folders = {source.name: token_folders(source) for source in sources}
    if any(folders.values()) and settings.max_documents is not None:
        raise ConfigurationError(
            f"data.max_documents={settings.max_documents} was given with tokens that are ready; given to `diloco "
            "tokenize` it would work. The corpus was not built."
        )
    if all(folders.values()):
        _check_heldout(settings, [folder for found in folders.values() for folder in found])
    texts = {
        source.name: split_documents(read_source(source), settings.heldout_fraction, settings.max_documents)
        for source in sources
        if not folders[source.name]
    }
    tokenizer = _tokenizer(
        settings,
        [folder for found in folders.values() for folder in found],
        lambda: [document for train, _ in texts.values() for document in train],
    )
    corpora = [
        _mapped(folders[source.name], tokenizer)
        if folders[source.name]
        else _tokenised(texts.pop(source.name), tokenizer)
        for source in sources
    ]
    if not settings.sources:
        return corpora[0]
    return _mixed(sources, corpora)


def _check_heldout(settings: DataSettings, folders: Sequence[TokenFolder]) -> None:
    """Refuse a fraction to hold out that was asked for, where all documents were parted by another."""
    asked = settings.heldout_fraction
    for folder in folders:
        made = folder.made.get("heldout_fraction", asked)
        if asked not in (made, DataSettings().heldout_fraction):
            raise ConfigurationError(
                f"data.heldout_fraction={asked:g} was given, and {folder.path} was made with {made:g}, which settles "
                "what is held out of it; without, or given to `diloco tokenize`, it would work. The corpus was not "
                "built."
            )


def corpus_vocabulary_size(settings: DataSettings) -> int:
    """Ids of the tokenizer that the corpus of ``settings`` will have, before any text is read.

    Raises:
        ConfigurationError, DataError: there is no such tokenizer.
    """
    folders = [folder for source in settings.parsed_sources() for folder in token_folders(source)]
    return folders[0].vocab_size if folders else vocabulary_size(settings)


def _tokenizer(settings: DataSettings, folders: Sequence[TokenFolder], train: Callable[[], Iterable[str]]) -> Tokenizer:
    """The one that all tokens are of; that of the folders where there are any."""
    if not folders:
        return make_tokenizer(settings, train())
    first = folders[0].tokenizer()
    for folder in folders[1:]:
        if folder.tokenizer().to_json() != first.to_json():
            raise ConfigurationError(
                f"{folders[0].path} and {folder.path} are of different tokenizers; `diloco tokenize` with the same "
                f"one, such as --data.tokenizer {folders[0].path}, would work. The corpus was not built."
            )
    given = settings.tokenizer
    if given == "bpe" or (given != "bytes" and given_tokenizer(settings).to_json() != first.to_json()):
        raise ConfigurationError(
            f"data.tokenizer={given!r} was given, and {folders[0].path} is of another tokenizer, which it brings with "
            "it; without data.tokenizer it would work. The corpus was not built."
        )
    return first


def _mapped(folders: Sequence[TokenFolder], tokenizer: Tokenizer) -> Corpus:
    tokens: dict[str, PackedTokens] = {}
    for name in ("train", "heldout"):
        parts = [folder.tokens(name) for folder in folders]
        digests = " ".join(part.digest for part in parts)  # those of the manifests: nothing is read for it
        pieces = [piece for part in parts for piece in part.pieces]
        digest = xxhash.xxh3_64_hexdigest(digests.encode())
        whole = PackedTokens(pieces, digest, vocab_size=tokenizer.vocab_size)
        tokens[name] = parts[0] if len(parts) == 1 else whole
    count = {
        f"{name}_{what}": sum(getattr(folder.sides[name], what) for folder in folders)
        for name in ("train", "heldout")
        for what in ("documents", "bytes")
    }
    fingerprints = [folder.fingerprint for folder in folders]
    together = xxhash.xxh3_128_hexdigest(" ".join(fingerprints).encode())
    fingerprint = fingerprints[0] if len(folders) == 1 else together
    return Corpus(
        train=tokens["train"],
        heldout=tokens["heldout"],
        tokenizer=tokenizer,
        **count,
        fingerprint=fingerprint,
        mapped=True,
    )


def _tokenised(sides: tuple[list[str], list[str]], tokenizer: Tokenizer) -> Corpus:
    train, heldout = sides
    train_tokens, heldout_tokens = tokenizer.encode_documents(train), tokenizer.encode_documents(heldout)
    return Corpus(
        train=train_tokens,
        heldout=heldout_tokens,
        tokenizer=tokenizer,
        train_documents=len(train),
        heldout_documents=len(heldout),
        train_bytes=tokenizer.num_bytes(train_tokens),
        heldout_bytes=tokenizer.num_bytes(heldout_tokens),
        fingerprint=fingerprint_of(tokenizer, [train_tokens], [heldout_tokens]),
    )


def _mixed(sources: Sequence[SourceSettings], corpora: Sequence[Corpus]) -> Corpus:
    """All sources together; what is held out of each, one after the other."""
    pairs = list(zip(sources, corpora, strict=True))
    heldout = [
        piece
        for corpus in corpora
        for piece in (corpus.heldout.pieces if isinstance(corpus.heldout, PackedTokens) else [corpus.heldout[:]])
    ]
    shares = shares_of({source.name: source.weight for source in sources})
    told = [[source.name, share, corpus.fingerprint] for (source, corpus), share in zip(pairs, shares, strict=True)]
    return Corpus(
        train=Mixture([Part(source.name, corpus.train, source.weight) for source, corpus in pairs]),
        heldout=PackedTokens(heldout, vocab_size=corpora[0].tokenizer.vocab_size),
        tokenizer=corpora[0].tokenizer,
        train_documents=sum(corpus.train_documents for corpus in corpora),
        heldout_documents=sum(corpus.heldout_documents for corpus in corpora),
        train_bytes=sum(corpus.train_bytes for corpus in corpora),
        heldout_bytes=sum(corpus.heldout_bytes for corpus in corpora),
        fingerprint=xxhash.xxh3_128_hexdigest(repr(told).encode()),
        mapped=any(corpus.mapped for corpus in corpora),
    )


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
        (text for _, source in opened for text in islice(some_documents(source, settings, heldout=False), share)),
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
