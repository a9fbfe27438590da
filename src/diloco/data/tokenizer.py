"""What a tokenizer is, and the simplest one: bytes.

Every token stands for a fixed string of bytes, so that a loss per token can be told as bits per byte. A tokenizer is
saved as a ``tokenizer.json`` of the ``tokenizers`` library, with the end-of-document token named in a
``tokenizer_config.json`` beside it, which is what other libraries read too.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diloco.errors import DataError

__all__ = ["EOS", "ByteTokenizer", "Tokenizer", "byte_letters", "checked_utf8", "write_tokenizer"]

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
