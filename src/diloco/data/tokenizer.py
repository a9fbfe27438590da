"""Tokenizers of the ``tokenizers`` library in which every token stands for a string of bytes.

A loss per token converts to bits per byte by a table of the bytes of each token. A tokenizer that folds case, merges
spaces or has no token for some characters would model a different text than the one whose bytes are counted, so it is
refused. A ``tokenizer_config.json`` next to the ``tokenizer.json`` names the end-of-document token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diloco.data.settings import HUB_PREFIX, DataSettings
from diloco.data.source import FROM_HUB, as_data_error
from diloco.errors import ConfigurationError, DataError, from_extra, nearest
from diloco.private_files import read_regular
from diloco.waiting import fetching

if TYPE_CHECKING:
    import tokenizers

EOS = "<|endoftext|>"
"""The end-of-document token of the vocabularies made here. In a text, these characters are plain text."""

_PROBE = "The quick  brown fox,\n\n\tit's 12,345 µm Grüße – 東京 🙂 ﬁ e\u0301 \u00a0x_\r\n"
"""A text that a tokenizer must spell exactly: white space, other scripts, characters that normalisers change."""


class Tokenizer:
    """A tokenizer of a ``tokenizer.json``: a byte-level BPE such as GPT-2's, or another that spells texts exactly.

    Special tokens that are written out in a text are encoded as plain characters, so no document can end itself.

    Args:
        content: the text of the file.
        eos: the token that ends a document.
        source: the name of the tokenizer in error messages.

    Raises:
        DataError: the file cannot be read, does not spell texts exactly, or has no such token. The encoding methods
            raise it for a text that encodes to the end-of-document token.
    """

    def __init__(self, content: str, *, eos: str, source: str = "the tokenizer") -> None:
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library raises nothing more specific
            raise DataError(f"{source} is not a valid tokenizer.json: {error}.") from error
        eos_id = self._tokenizer.token_to_id(eos)
        if eos_id is None:
            raise DataError(
                f"{source} has no token {eos!r} to end a document with. Name another as eos_token in a "
                "tokenizer_config.json next to it."
            )
        self._tokenizer.add_special_tokens([eos])  # some files list it without marking it as special
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._eos, self._source = eos, source
        self._token_bytes = _token_bytes(self._tokenizer, source)
        self.vocab_size = len(self._token_bytes)  # number of ids, the end-of-document token included
        self.dtype = smallest_dtype(self.vocab_size)
        self.eos_id = eos_id  # the token that ends every document
        self._num_bytes = np.array([len(token) for token in self._token_bytes], dtype=np.int64)
        spelled, probe = self.as_bytes(self._encoded([_PROBE])[0].ids), _PROBE.encode()
        if spelled not in (probe, b" " + probe):
            raise DataError(
                f"{source} does not spell every text exactly: {_PROBE!r} became {spelled.decode(errors='replace')!r}, "
                "so bits per byte would refer to a different text. Use a byte-level BPE, such as GPT-2's or Llama 3's, "
                "or one with byte fallback and no normaliser, such as Llama 2's."
            )
        self._num_bytes[eos_id] = len(probe) - len(spelled)  # less a space that is added before every document

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``, without an end-of-document token."""
        return list(self.encode_documents([text])[:-1].tolist())

    def encode_documents(self, documents: Sequence[str]) -> NDArray[Any]:
        """Return the ids of all documents, each followed by `eos_id`, packed end to end: ``(n,)`` of type `dtype`."""
        pieces = [np.zeros(0, dtype=self.dtype)]
        for begin in range(0, len(documents), 1024):  # limits how many of the library's bulky results exist at once
            texts = documents[begin : begin + 1024]
            for text, encoding in zip(texts, self._encoded(texts), strict=True):
                if self.eos_id in encoding.ids:  # it may be a piece of a Unigram model
                    raise DataError(
                        f"{self._source} encodes part of a text as the end-of-document token {self._eos!r}. The text "
                        f"begins with {text[:40]!r}. Remove these characters from it, or choose another "
                        "end-of-document token (eos_token in tokenizer_config.json)."
                    )
                pieces.append(np.array([*encoding.ids, self.eos_id], dtype=self.dtype))
        return np.concatenate(pieces)

    def _encoded(self, texts: Sequence[str]) -> list[tokenizers.Encoding]:
        try:
            return self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises nothing more specific
            raise DataError(f"{self._source} can't encode every text: {error}. Use a byte-level BPE.") from error

    def decode(self, ids: ArrayLike) -> str:
        """Return the text of ``ids``, an array of any shape.

        The end-of-document token is dropped. Bytes that are not valid UTF-8, and ids outside the vocabulary (a model's
        vocabulary may be larger), become U+FFFD.
        """
        return self.as_bytes(ids).decode("utf-8", errors="replace")

    def as_bytes(self, ids: ArrayLike) -> bytes:
        """Return the bytes that `decode` decodes. An id outside the vocabulary is ``ff``."""
        size = self.vocab_size
        return b"".join(self._token_bytes[i] if 0 <= i < size else b"\xff" for i in np.asarray(ids).ravel().tolist())

    def num_bytes(self, ids: ArrayLike) -> int:
        """Return the number of UTF-8 bytes that ``ids`` stand for; the end-of-document token stands for none."""
        return int(self._num_bytes[np.asarray(ids, dtype=np.int64)].sum())

    @property
    def added_tokens(self) -> dict[int, str]:
        """The tokens that are not made of pieces of text, such as those that end documents or answers."""
        return {index: token.content for index, token in self._tokenizer.get_added_tokens_decoder().items()}

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``; `load_tokenizer` reads them back."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self.to_json() + "\n", "utf-8")
        config = {"eos_token": self._eos, "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")

    def to_json(self) -> str:
        """Return the text of the ``tokenizer.json``."""
        return self._tokenizer.to_str(pretty=True)


class ByteTokenizer(Tokenizer):
    """A tokenizer whose ids are the 256 bytes of UTF-8, and 256 for the end of a document.

    Its ``tokenizer.json`` is a BPE without merges in which every byte is a token. Encoding copies bytes instead.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("né"), tokenizer.vocab_size
    ([110, 195, 169], 257)
    >>> tokenizer.decode([110, 195, 169, 256])
    'né'
    >>> tokenizer.encode_documents(["a", "b"])
    array([ 97, 256,  98, 256], dtype=uint16)
    """

    def __init__(self) -> None:
        super().__init__(_byte_vocabulary(), eos=EOS)

    def encode_documents(self, documents: Sequence[str]) -> NDArray[Any]:
        encoded = [document.encode() for document in documents]
        ends = np.cumsum([len(document) + 1 for document in encoded], dtype=np.int64)
        tokens = np.full(ends[-1] if encoded else 0, self.eos_id, dtype=self.dtype)
        is_byte = np.ones(len(tokens), dtype=np.bool_)
        is_byte[ends - 1] = False
        tokens[is_byte] = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        return tokens


def smallest_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest type that holds every id: uint16 for up to 65536 ids, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


@cache
def _byte_vocabulary() -> str:
    from tokenizers import models

    vocabulary = {letter: number for number, letter in enumerate([*byte_letters(), EOS])}
    return str(_byte_level(models.BPE(vocab=vocabulary, merges=[]), words=False).to_str())


def _byte_level(model: Any, *, words: bool = True) -> tokenizers.Tokenizer:
    """Return a tokenizer in which each byte is a letter of `byte_letters`."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_letters() -> list[str]:
    """Return the printable letter that byte-level vocabularies use for each of the 256 bytes (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _token_bytes(tokenizer: tokenizers.Tokenizer, source: str) -> list[bytes]:
    """Return the bytes that each id stands for; special tokens and unused ids stand for none."""
    described = json.loads(tokenizer.to_str())
    decoder, model = described["decoder"] or {}, described["model"]
    byte_level = "ByteLevel" in [part.get("type") for part in [decoder, *decoder.get("decoders", ())]]
    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    vocabulary, added = tokenizer.get_vocab(with_added_tokens=True), tokenizer.get_added_tokens_decoder()
    if byte_level and (missing := len(byte_of.keys() - vocabulary.keys())):
        raise DataError(
            f"{source} lacks {missing} of the 256 bytes. Use a byte-level BPE, such as GPT-2's or Llama 3's."
        )
    table = [b""] * (max(vocabulary.values()) + 1)
    for token, index in vocabulary.items():
        fallback = re.fullmatch(r"<0x([0-9A-F]{2})>", token) if model.get("byte_fallback") else None
        if index in added and (added[index].special or byte_level):
            table[index] = b"" if added[index].special else token.encode()
        elif byte_level:  # no text encodes to a token with other letters
            table[index] = bytes(byte_of[letter] for letter in token) if byte_of.keys() >= set(token) else b""
        elif fallback:
            table[index] = bytes([int(fallback[1], 16)])
        elif token != model.get("unk_token"):
            table[index] = token.replace("▁", " ").encode()
    return table


def make_tokenizer(settings: DataSettings, documents: Iterable[str] = ()) -> Tokenizer:
    """Return the tokenizer that ``settings.tokenizer`` names; train a BPE on ``documents``, the training documents.

    ``hf:NAME`` is that of a model on the hub, or of a local folder with a model or a tokenizer. If there is no
    ``tokenizer.json``, transformers converts the tokenizer.
    """
    name = settings.tokenizer
    if settings.bpe_vocab_size is not None:
        return _train_bpe(documents, settings.bpe_vocab_size)
    if name == "bytes":
        return ByteTokenizer()
    path = Path(place := name.removeprefix(HUB_PREFIX)).expanduser()
    if name.startswith(HUB_PREFIX):
        if not path.exists():
            from huggingface_hub import snapshot_download

            with as_data_error(f"The tokenizer of {name}", FROM_HUB), fetching(place):
                path = Path(snapshot_download(place, allow_patterns=["tokenizer.json", "tokenizer_config.json"]))
        if not path.is_file() and not (path / "tokenizer.json").is_file():
            library = library_tokenizer(
                name, "hf", f"data.tokenizer={name!r} has no tokenizer.json and needs transformers"
            )
            return Tokenizer(library.backend_tokenizer.to_str(), eos=str(library.eos_token), source=name)
    elif not path.exists():
        raise ConfigurationError(
            f"data.tokenizer={name!r} is neither 'bytes' nor 'bpe' nor an existing path; "
            f"{nearest(name, ['bytes', 'bpe'])} Otherwise give the path of a tokenizer.json, or hf:NAME for a "
            "tokenizer of the Hugging Face hub."
        )
    return load_tokenizer(path)


def _train_bpe(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with ``vocab_size`` ids: the end-of-document token, 256 bytes, and merges.

    The same documents give the same tokenizer. Too few repeated pairs for that many merges raise `DataError`.
    """
    from tokenizers import models, trainers

    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[EOS],
        initial_alphabet=byte_letters(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    size = tokenizer.get_vocab_size()
    if size < vocab_size:
        raise DataError(
            f"The training documents are too few for a BPE with a vocabulary of {vocab_size}: they give {size} ids. "
            f"Use --tokenizer bpe:{size} or less, or give more text."
        )
    return Tokenizer(tokenizer.to_str(), eos=EOS)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer at ``path``: a ``tokenizer.json``, or a folder with one, as `Tokenizer.save` writes.

    The end-of-document token is the ``eos_token`` of the ``tokenizer_config.json`` next to it, else GPT-2's.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    config = file.with_name("tokenizer_config.json")
    try:
        content = read_regular(file).decode("utf-8-sig")
        eos = json.loads(read_regular(config)).get("eos_token") if config.exists() else None
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise DataError(f"{file} and the {config.name} next to it can't be read: {error}.") from error
    eos = eos.get("content") if isinstance(eos, dict) else eos  # a token is written there in one of two forms
    tokenizer = Tokenizer(content, eos=eos if isinstance(eos, str) else EOS, source=str(file))
    plain = ByteTokenizer()
    return plain if tokenizer.to_json() == plain.to_json() else tokenizer


def library_tokenizer(name: str, extra: str, needs: str) -> Any:
    """Load the tokenizer of ``hf:NAME`` or of a folder as an object of transformers, which ``extra`` installs."""
    with from_extra(extra, needs):
        from transformers import AutoTokenizer
    local = Path(place := name.removeprefix(HUB_PREFIX)).expanduser()
    with as_data_error(f"The tokenizer of {name}", FROM_HUB), fetching(place):
        library: Any = AutoTokenizer.from_pretrained(str(local) if local.exists() else place, trust_remote_code=False)
        library.backend_tokenizer.to_str()
    if library.eos_token is None:
        raise DataError(f"{name} has no token to end a document with.")
    return library
