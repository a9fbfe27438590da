"""What a tokenizer is, and the simplest one: bytes.

Every token stands for a fixed string of bytes, so that a loss per token can be told as bits per byte. A tokenizer is
saved as a ``tokenizer.json`` of the ``tokenizers`` library, with the end-of-document token named in a
``tokenizer_config.json`` beside it, which is what other libraries read too.


Tokenizers of the ``tokenizers`` library: a byte-level BPE trained on the training documents, or a user's own.

What the tokens of a ``tokenizer.json`` stand for in bytes, whether it is byte-level or made from SentencePiece.

A loss per token becomes bits per byte only if every text is told exactly by its tokens. Byte-level vocabularies do
that by construction. Others are tried on `PROBES`: one that folds case, unites spaces or has no token for some
characters models another text than the one that is counted, and is refused.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diloco.errors import DataError

if TYPE_CHECKING:
    import tokenizers

__all__ = ["EOS", "BPETokenizer", "ByteTokenizer", "Tokenizer", "byte_letters", "checked_utf8", "train_bpe"]

EOS = "<|endoftext|>"
"""How the end-of-document token is written in the vocabularies made here. In a text these characters are only text."""


class Tokenizer(ABC):
    """A vocabulary whose tokens each stand for a string of bytes.

    Attributes:
        vocab_size: number of ids, the end-of-document token included.
        eos_id: the token that ends every document.
    """

    def __init__(self, token_bytes: Sequence[bytes], eos_id: int) -> None:
        self.vocab_size = len(token_bytes)
        self.eos_id = eos_id
        self._token_bytes = tuple(token_bytes)
        self._num_bytes = np.array([len(token) for token in token_bytes], dtype=np.int64)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type that holds every id: uint16 up to 65536 of them, else uint32."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, without an end-of-document token."""

    @abstractmethod
    def encode_documents(self, documents: Sequence[str]) -> NDArray[Any]:
        """(n,) `dtype`: the ids of all documents, each followed by `eos_id`, packed end to end."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``, from which `load_tokenizer` reads."""

    @abstractmethod
    def to_json(self) -> str:
        """The text of its ``tokenizer.json``."""

    def decode(self, ids: ArrayLike) -> str:
        """The text that ``ids`` stand for, whatever their shape.

        The end-of-document token is dropped; bytes that are no UTF-8, and ids outside the vocabulary (a model's may be
        larger), become U+FFFD.
        """
        return self.as_bytes(ids).decode("utf-8", errors="replace")

    def as_bytes(self, ids: ArrayLike) -> bytes:
        """What `decode` makes text of: the end-of-document token is dropped, an id outside the vocabulary is ``ff``."""
        size = self.vocab_size
        return b"".join(self._token_bytes[i] if 0 <= i < size else b"\xff" for i in np.asarray(ids).ravel().tolist())

    def num_bytes(self, ids: ArrayLike) -> int:
        """How many bytes of UTF-8 ``ids`` stand for; the end-of-document token stands for none.

        Raises:
            DataError: an id outside the vocabulary.
        """
        given = np.asarray(ids, dtype=np.int64)
        if given.size and not (given.min() >= 0 and given.max() < self.vocab_size):
            raise DataError(
                f"Ids from {given.min()} to {given.max()} were given; this vocabulary has 0 to {self.vocab_size - 1}. "
                "Their bytes were not counted."
            )
        return int(self._num_bytes[given].sum())


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8 are their own ids, and 256 ends a document.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("né"), tokenizer.vocab_size
    ([110, 195, 169], 257)
    >>> tokenizer.decode([110, 195, 169, 256])
    'né'
    >>> tokenizer.encode_documents(["a", "b"])
    array([ 97, 256,  98, 256], dtype=uint16)
    """

    def __init__(self) -> None:
        super().__init__([*(bytes([byte]) for byte in range(256)), b""], eos_id=256)

    def encode(self, text: str) -> list[int]:
        return list(checked_utf8(text))

    def encode_documents(self, documents: Sequence[str]) -> NDArray[Any]:
        encoded = [checked_utf8(document) for document in documents]
        ends = np.cumsum([len(document) + 1 for document in encoded], dtype=np.int64)
        tokens = np.full(ends[-1] if encoded else 0, self.eos_id, dtype=self.dtype)
        is_byte = np.ones(len(tokens), dtype=np.bool_)
        is_byte[ends - 1] = False
        tokens[is_byte] = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        return tokens

    def save(self, folder: Path) -> None:
        write_tokenizer(folder, self.to_json(), EOS)

    def to_json(self) -> str:
        """The text of an equivalent ``tokenizer.json``: a BPE without merges, in which every byte is a token."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        vocabulary = {letter: byte for byte, letter in enumerate(byte_letters())}
        tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, EOS: self.eos_id}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([EOS])
        return tokenizer.to_str(pretty=True)


def byte_letters() -> list[str]:
    """The printable letter by which byte-level vocabularies write each of the 256 bytes: GPT-2's table."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def checked_utf8(text: str) -> bytes:
    """``text`` as UTF-8, or a `DataError` where it holds half of a surrogate pair."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"Text with U+{ord(text[error.start]):04X}, half of a surrogate pair, was given at character "
            f"{error.start}; text that UTF-8 can encode is needed. It was not encoded."
        ) from error


def write_tokenizer(folder: Path, content: str, eos: str) -> None:
    """Write the two files into ``folder``, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(content + "\n", "utf-8")
    config = {"eos_token": eos, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


class BPETokenizer(Tokenizer):
    """A byte-level BPE, as GPT-2's, or any other that tells texts exactly, from the text of a ``tokenizer.json``.

    Special tokens written out in a text are encoded as the characters they are, so that no document can end itself.

    Args:
        content: the text of a ``tokenizer.json``.
        eos: the token that ends a document.
        source: what to call it in messages.

    Raises:
        DataError: it cannot be read, does not tell texts exactly (see `PROBES`), or has no such token. Also raised
            for a text with that token in it, where it can be written with ordinary characters.
    """

    def __init__(self, content: str, *, eos: str, source: str = "the tokenizer") -> None:
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library raises nothing more specific
            raise DataError(f"{source} is no tokenizer.json: {error}. No tokenizer was made.") from error
        eos_id = self._tokenizer.token_to_id(eos)
        if eos_id is None:
            raise DataError(f"{source} has no token {eos!r} to end a document with. No tokenizer was made.")
        self._eos = eos
        # Said once more, as files exist that list the token without marking it special.
        self._tokenizer.add_special_tokens([eos])
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._source = source
        table, self._adds_space = token_bytes(self._tokenizer, source)
        super().__init__(table, eos_id)
        if self._adds_space:  # the end of a document takes back the space that was put before it
            self._num_bytes[eos_id] = -1

    def encode(self, text: str) -> list[int]:
        checked_utf8(text)
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        self._check_end(text, ids)
        return ids

    def encode_documents(self, documents: Sequence[str]) -> NDArray[Any]:
        pieces = [np.zeros(0, dtype=self.dtype)]
        for begin in range(0, len(documents), 1024):  # so that few of the library's bulky results exist at a time
            texts = documents[begin : begin + 1024]
            for text in texts:
                checked_utf8(text)
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            for text, encoding in zip(texts, encodings, strict=True):
                self._check_end(text, encoding.ids)
                pieces.append(np.array([*encoding.ids, self.eos_id], dtype=self.dtype))
                if self._adds_space:
                    self._check(text, pieces[-1])
        return np.concatenate(pieces)

    def _check_end(self, text: str, ids: Sequence[int]) -> None:
        """Refuse a text that would end itself, as where a Unigram model has the end-of-document token as a piece."""
        if self.eos_id in ids:
            raise DataError(
                f"{self._source} turns a text into the token that ends a document, {self._eos!r}; the text begins with "
                f"{text[:40]!r}. A text without these characters, or another token for the end (eos_token in "
                "tokenizer_config.json), would work. It was not encoded."
            )

    def _check(self, text: str, ids: NDArray[Any]) -> None:
        """Refuse a document that is not told exactly; one that begins with a space may have got no other."""
        told, size = self.num_bytes(ids), len(text.encode())
        if told != size and not (text.startswith(" ") and told == size - 1):
            raise DataError(
                f"{self._source} turns a document of {size} bytes into tokens for {told}, so that a loss in bits per "
                f"byte would be of another text; it begins with {text[:40]!r}. A byte-level BPE would work. "
                "It was not encoded."
            )

    def save(self, folder: Path) -> None:
        write_tokenizer(folder, self.to_json(), self._eos)

    def to_json(self) -> str:
        """The text of its ``tokenizer.json``."""
        return self._tokenizer.to_str(pretty=True)


def train_bpe(documents: Iterable[str], vocab_size: int) -> BPETokenizer:
    """Train a byte-level BPE with ``vocab_size`` ids: the end-of-document token, 256 bytes, and merges.

    The same documents give the same tokenizer.

    Raises:
        DataError: the documents hold too few repeated pairs for that many merges.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[EOS],
        initial_alphabet=byte_letters(),
        show_progress=False,
    )
    count = 0

    def checked() -> Iterator[str]:
        nonlocal count
        for document in documents:
            checked_utf8(document)
            count += 1
            yield document

    tokenizer.train_from_iterator(checked(), trainer)
    made = tokenizer.get_vocab_size()
    if made < vocab_size:
        raise DataError(
            f"A BPE with a vocabulary of {vocab_size} was asked for; {count} training documents give {made}. "
            f"data.bpe_vocab_size={made} or less, or more text, would work. No tokenizer was made."
        )
    return BPETokenizer(tokenizer.to_str(), eos=EOS)


_WORD = "word"
PROBES = (
    "The quick  brown fox,\n\n\tit's 12,345 µm",
    "Grüße – 東京 🙂 ﬁ e\u0301 \u00a0x\r\n",
    _WORD,
    "_",
)
"""Texts that a tokenizer must tell exactly: runs of white space, other scripts, characters that normalisers change."""

_SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>\Z")


def is_byte_level(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether its decoder reads GPT-2's table of bytes."""
    decoder = json.loads(tokenizer.to_str())["decoder"]
    return "ByteLevel" in [part.get("type") for part in [decoder or {}, *(decoder or {}).get("decoders", ())]]


def token_bytes(tokenizer: tokenizers.Tokenizer, source: str) -> tuple[list[bytes], bool]:
    """The bytes that each id stands for, none for special tokens and for ids that are not in use; and whether the first
    token of a document stands for a space more than there is.

    Raises:
        DataError: that cannot be told exactly; ``source`` is what it is called in the message.
    """
    if is_byte_level(tokenizer):
        table = _of_bytes(tokenizer, source)
        return table, _told(tokenizer, table, _WORD) == b" " + _WORD.encode()  # add_prefix_space
    table = _of_pieces(tokenizer)
    return table, _adds_space(tokenizer, table, source)


def _told(tokenizer: tokenizers.Tokenizer, table: list[bytes], text: str) -> bytes:
    """What a text becomes in the tokens' bytes."""
    return b"".join(table[index] for index in tokenizer.encode(text, add_special_tokens=False).ids)


def _of_bytes(tokenizer: tokenizers.Tokenizer, source: str) -> list[bytes]:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    if missing := sum(letter not in vocabulary for letter in byte_of):
        raise DataError(
            f"{source} lacks {missing} of the 256 bytes, so that what its tokens stand for cannot be counted in bytes. "
            "A byte-level BPE, as GPT-2's or Llama 3's, would work. No tokenizer was made."
        )
    table = [b""] * (max(vocabulary.values()) + 1)
    added = tokenizer.get_added_tokens_decoder()
    for token, index in vocabulary.items():
        if index in added:
            table[index] = b"" if added[index].special else token.encode()
        elif all(letter in byte_of for letter in token):
            table[index] = bytes(byte_of[letter] for letter in token)
        else:  # cannot come from any text: no byte is written with such a letter
            table[index] = b""
    return table


def _of_pieces(tokenizer: tokenizers.Tokenizer) -> list[bytes]:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    added = tokenizer.get_added_tokens_decoder()
    table = [b""] * (max(vocabulary.values()) + 1)
    for token, index in vocabulary.items():
        byte = _BYTE.match(token) if model.get("byte_fallback") else None
        if (index in added and added[index].special) or token == model.get("unk_token"):
            continue
        table[index] = bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()
    return table


def _adds_space(tokenizer: tokenizers.Tokenizer, table: list[bytes], source: str) -> bool:
    """Whether documents get a space before them; the probes must be told exactly but for that."""
    before = set()
    for probe in PROBES:
        told, text = _told(tokenizer, table, probe), probe.encode()
        if told not in (text, b" " + text):
            raise DataError(
                f"{source} does not tell every text exactly: {probe!r} became {told.decode(errors='replace')!r}, so "
                "that a loss in bits per byte would be of another text. A byte-level BPE, as GPT-2's or Llama 3's, or "
                "one with byte fallback and no normaliser, as Llama 2's, would work. No tokenizer was made."
            )
        before.add(told != text)
    if len(before) > 1:
        raise DataError(
            f"{source} puts a space before some texts and not before others, so that its tokens cannot be counted in "
            "bytes. A byte-level BPE, as GPT-2's or Llama 3's, would work. No tokenizer was made."
        )
    return before.pop()
