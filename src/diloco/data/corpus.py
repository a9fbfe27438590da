"""Documents into packed tokens: those to train on and those to hold out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from diloco.data.mixture import Mixture, Part, shares_of
from diloco.data.packed import PackedTokens, Tokens
from diloco.data.settings import DataSettings
from diloco.data.source_settings import SourceSettings
from diloco.data.sources import open_source
from diloco.data.split import split_documents
from diloco.data.token_folder import TokenFolder, fingerprint_of, is_token_folder
from diloco.data.tokenizer import Tokenizer
from diloco.data.tokens import given_tokenizer, make_tokenizer, vocabulary_size
from diloco.errors import ConfigurationError

__all__ = ["Corpus", "build_corpus", "corpus_vocabulary_size", "read_source", "split_documents", "token_folders"]


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


def read_source(source: SourceSettings) -> Iterable[str]:
    """Its documents."""
    return (record for record in open_source(source).records() if record)


def token_folders(source: SourceSettings) -> list[TokenFolder]:
    """The folders of tokens that a source consists of, opened; none where it is text.

    Raises:
        ConfigurationError: for some of both.
    """
    ready = [place for place in source.data if is_token_folder(Path(place))]
    if ready and len(ready) < len(source.data):
        other = next(place for place in source.data if place not in ready)
        raise ConfigurationError(
            f"{ready[0]} holds tokens and {other} does not; in one source all of it must. `diloco tokenize` of the "
            "other, or a table of its own in data.sources, would work. The corpus was not built."
        )
    return [TokenFolder(Path(place)) for place in ready]


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
