"""The corpus of a run: documents as packed tokens, tokenised before training or while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Unpack

import numpy as np
import xxhash

from diloco.data.loader import Batches, Drawing, Sampler
from diloco.data.packed import Mixture, PackedTokens
from diloco.data.settings import DataSettings, SourceSettings
from diloco.data.source import Source, is_heldout
from diloco.data.stream import BLOCK, DocumentStream
from diloco.data.token_folder import SPLITS, TokenFolder, encode_splits, token_folders, training_texts
from diloco.data.tokenizer import Tokenizer, make_tokenizer
from diloco.errors import ConfigurationError, DataError
from diloco.units import format_bytes

__all__ = [
    "Corpus",
    "build_corpus",
    "corpus_vocabulary_size",
    "fingerprint_of",
    "heldout_tokens",
    "open_stream",
]

_AHEAD = 4
_BPE_DOCUMENTS = 10_000  # while streaming, a BPE is trained on the first ones
_HELDOUT_DOCUMENTS = 256  # while streaming, the first ones that the hash holds out are evaluated on


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training and held-out documents as tokens, each followed by the end-of-document token, without padding."""

    train: PackedTokens  # uint16 if every id fits, else uint32; empty if documents are read during training
    heldout: PackedTokens
    tokenizer: Tokenizer
    fingerprint: str
    """Equal for equal tokens, split and vocabulary size. It tells data sets apart and is not a cryptographic hash."""
    mapped: bool = False  # whether drawing batches reads files
    about: str = ""  # what there is to train and to evaluate on, if it is not documents of text
    stream: Callable[..., Batches] | None = None  # opens the batches of a replica that reads during training

    def batches(self, **drawing: Unpack[Drawing]) -> Batches:
        """Return the batches of one replica, prepared ahead in a thread if they are read from files."""
        drawing.setdefault("ahead", _AHEAD if self.mapped else 0)
        return self.stream(**drawing) if self.stream else Sampler(self.train, **drawing)

    def description(self) -> str:
        """Return how much there is to train and to evaluate on, and the shares of the sources."""
        train, heldout = self.train, f"{self.heldout.documents:,} documents, {format_bytes(self.heldout.num_bytes)}"
        counts = f"{train.documents:,} documents, {format_bytes(train.num_bytes)}, {len(train):,} tokens"
        shares = ", ".join(f"{name} {share:.1%}" for name, share in train.shares.items())
        files = f"{f' ({shares})' if shares else ''}{', in files' if self.mapped and not self.stream else ''}"
        return self.about or f"{'read while training' if self.stream else counts}{files}; held out: {heldout}"


def build_corpus(settings: DataSettings) -> Corpus:
    """Read, split and tokenise the text that ``settings`` name, all in memory. Folders of tokens are memory-mapped."""
    sources, fraction = settings.parsed_sources(), settings.heldout_fraction
    folders = {about.name: token_folders(about) for about in sources}
    mapped = [folder for each in folders.values() for folder in each]
    texts = [about for about in sources if not folders[about.name]]
    if mapped:
        _check_settings(settings, mapped, not texts)
        tokenizer = mapped[0].tokenizer()
    else:
        tokenizer = make_tokenizer(settings, training_texts(map(Source, texts), fraction))
    splits = {about.name: _splits(about, folders[about.name], fraction, tokenizer) for about in sources}
    parts = {name: split["train"] for name, split in splits.items()}
    train = Mixture(parts, {about.name: about.weight for about in sources}) if settings.sources else parts[""]
    heldout = PackedTokens.joined([split["heldout"] for split in splits.values()])
    return Corpus(train, heldout, tokenizer, fingerprint_of(tokenizer, train, heldout), mapped=bool(mapped))


def open_stream(settings: DataSettings) -> Corpus:
    """Open the sources that ``settings`` name, and read the held-out documents from their beginning."""
    parsed, fraction = settings.parsed_sources(), settings.heldout_fraction
    for about in parsed:
        if token_folders(about):
            raise ConfigurationError(
                f"{about.data[0]} holds tokens, which are mapped into memory and can't be streamed. Leave out "
                "data.streaming."
            )
    sources = [Source(about) for about in parsed]
    tokenizer = make_tokenizer(settings, _first(sources, settings, _BPE_DOCUMENTS, heldout=False))
    heldout, train = _first_heldout(sources, settings, tokenizer), PackedTokens([])
    if settings.sources:
        train.shares = {about.name: about.weight / sum(each.weight for each in parsed) for about in parsed}
    named = [(each.settings.name, each.settings.weight, each.settings.text_field, len(each.parts)) for each in sources]
    fingerprint = f"{named} {fraction} {BLOCK} {tokenizer.to_json()} {heldout.digest}"
    digest = xxhash.xxh3_128_hexdigest(fingerprint.encode())
    stream = partial(DocumentStream, sources, tokenizer, data=digest, heldout_fraction=fraction)
    return Corpus(train, heldout, tokenizer, digest, mapped=True, stream=stream)


def corpus_vocabulary_size(settings: DataSettings) -> int:
    """Return the vocabulary size of the tokenizer that ``settings`` name, without reading any text."""
    folders = [folder for source in settings.parsed_sources() for folder in token_folders(source)]
    if folders:
        return folders[0].vocab_size
    return settings.bpe_vocab_size or make_tokenizer(settings).vocab_size


def heldout_tokens(settings: DataSettings, tokenizer: Tokenizer) -> PackedTokens:
    """Return the held-out tokens of the corpus of ``settings``, encoded by the tokenizer that a run saved."""
    parsed = settings.parsed_sources()
    if settings.streaming:
        return _first_heldout([Source(about) for about in parsed], settings, tokenizer)
    fraction = settings.heldout_fraction
    return PackedTokens.joined([_splits(each, token_folders(each), fraction, tokenizer)["heldout"] for each in parsed])


def fingerprint_of(tokenizer: Tokenizer, train: PackedTokens, heldout: PackedTokens) -> str:
    """Return the fingerprint of a corpus: equal for equal tokens, split and vocabulary size."""
    return xxhash.xxh3_128_hexdigest(f"{tokenizer.vocab_size} {train.digest} {heldout.digest}".encode())


def _splits(
    about: SourceSettings, folders: Sequence[TokenFolder], heldout_fraction: float, tokenizer: Tokenizer
) -> dict[str, PackedTokens]:
    """Return the tokens of both splits of a source: of its folders, or of its text if it has none."""
    if folders:
        return {name: PackedTokens.joined([folder.splits[name] for folder in folders]) for name in SPLITS}
    sides = zip(*encode_splits(Source(about), heldout_fraction, tokenizer), strict=True)
    return {
        name: PackedTokens(
            [np.concatenate([part[:] for part in parts])],
            vocab_size=tokenizer.vocab_size,
            documents=sum(part.documents for part in parts),
            num_bytes=sum(part.num_bytes for part in parts),
        )
        for name, parts in zip(SPLITS, sides, strict=True)
    }


def _first(sources: Sequence[Source], settings: DataSettings, count: int, *, heldout: bool) -> Iterator[str]:
    """Yield the first documents that are held out or not, as many from each source."""
    for source in sources:
        texts = (text for text in source.documents() if is_heldout(text, settings.heldout_fraction) is heldout)
        yield from islice(texts, -(-count // len(sources)))


def _first_heldout(sources: Sequence[Source], settings: DataSettings, tokenizer: Tokenizer) -> PackedTokens:
    """Return the first held-out documents as tokens; raise `DataError` if there are none."""
    texts = list(_first(sources, settings, _HELDOUT_DOCUMENTS, heldout=True))
    if not texts:
        raise DataError(
            f"data.heldout_fraction={settings.heldout_fraction:g} holds out none of the documents. Use a larger "
            "fraction, or more documents."
        )
    return tokenizer.pack(texts)


def _check_settings(settings: DataSettings, folders: Sequence[TokenFolder], all_mapped: bool) -> None:
    """Raise `ConfigurationError` if token folders differ in their tokenizer, or the settings ask for another one."""
    first, tokenizer, asked = folders[0], folders[0].tokenizer().to_json(), settings.heldout_fraction
    for folder in folders:
        if folder.tokenizer().to_json() != tokenizer:
            raise ConfigurationError(
                f"{first.path} and {folder.path} were made with different tokenizers. Make them with the same one, "
                f"such as --tokenizer {first.path}."
            )
        fraction = folder.made.get("heldout_fraction", asked)
        if all_mapped and asked not in (fraction, DataSettings().heldout_fraction):
            raise ConfigurationError(
                f"{folder.path} was made with a heldout_fraction of {fraction:g}, so data.heldout_fraction={asked:g} "
                "has no effect. Pass it to `diloco tokenize`, or leave it out."
            )
    trained = settings.bpe_vocab_size is not None
    if trained or (settings.tokenizer != "bytes" and make_tokenizer(settings).to_json() != tokenizer):
        raise ConfigurationError(
            f"data.tokenizer={settings.tokenizer!r} has no effect: {first.path} was made with another one."
        )
