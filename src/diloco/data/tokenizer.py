"""Tokenizers of the ``tokenizers`` library in which every token stands for a string of bytes.

A loss per token converts to bits per byte only if the tokens spell every text exactly. Byte-level vocabularies do so by
construction. Others, such as those made from SentencePiece, are tested on `PROBES`. A tokenizer that folds case, merges
spaces or has no token for some characters would model a different text than the one whose bytes are counted, so it is
refused.

A tokenizer is saved as a ``tokenizer.json``. The ``tokenizer_config.json`` next to it names the end-of-document token.
Other libraries read these files too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diloco.errors import DataError

if TYPE_CHECKING:
    import tokenizers

__all__ = ["EOS", "ByteTokenizer", "Tokenizer", "byte_letters", "checked_utf8"]

EOS = "<|endoftext|>"
"""The end-of-document token of the vocabularies made here. In a text, these characters are plain text."""

_WORD = "word"
PROBES = (
    "The quick  brown fox,\n\n\tit's 12,345 µm",
    "Grüße – 東京 🙂 ﬁ e\u0301 \u00a0x\r\n",
    _WORD,
    "_",
)
"""Texts that a tokenizer must spell exactly: runs of white space, other scripts, characters that normalisers change."""

_SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>\Z")


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
            raise DataError(f"{source} has no token {eos!r} to end a document with.")
        # Some files list the token without marking it as special.
        self._tokenizer.add_special_tokens([eos])
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._token_bytes, self._adds_space = _token_bytes(self._tokenizer, source)
        self.vocab_size = len(self._token_bytes)  # number of ids, the end-of-document token included
        self.eos_id = eos_id  # the token that ends every document
        self._eos = eos
        self._source = source
        self._num_bytes = np.array([len(token) for token in self._token_bytes], dtype=np.int64)
        if self._adds_space:  # subtracts the space that was added at the beginning of the document
            self._num_bytes[eos_id] = -1

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type that holds every id: uint16 for up to 65536 ids, else uint32."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``, without an end-of-document token."""
        checked_utf8(text)
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        self._check_end(text, ids)
        return ids

    def encode_documents(self, documents: Sequence[str]) -> NDArray[Any]:
        """Return the ids of all documents, each followed by `eos_id`, packed end to end: ``(n,)`` of type `dtype`."""
        pieces = [np.zeros(0, dtype=self.dtype)]
        for begin in range(0, len(documents), 1024):  # limits how many of the library's bulky results exist at once
            texts = documents[begin : begin + 1024]
            for text in texts:
                checked_utf8(text)
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            for text, encoding in zip(texts, encodings, strict=True):
                self._check_end(text, encoding.ids)
                pieces.append(np.array([*encoding.ids, self.eos_id], dtype=self.dtype))
                if self._adds_space:
                    self._check_spelling(text, pieces[-1])
        return np.concatenate(pieces)

    def decode(self, ids: ArrayLike) -> str:
        """Return the text of ``ids``, an array of any shape.

        The end-of-document token is dropped. Bytes that are not valid UTF-8, and ids outside the vocabulary (a model's
        vocabulary may be larger), become U+FFFD.
        """
        return self.as_bytes(ids).decode("utf-8", errors="replace")

    def as_bytes(self, ids: ArrayLike) -> bytes:
        """Return the bytes that `decode` decodes. The end-of-document token has none; an id outside the vocabulary is
        ``ff``.
        """
        size = self.vocab_size
        return b"".join(self._token_bytes[i] if 0 <= i < size else b"\xff" for i in np.asarray(ids).ravel().tolist())

    def num_bytes(self, ids: ArrayLike) -> int:
        """Return the number of UTF-8 bytes that ``ids`` stand for; the end-of-document token stands for none.

        Raises:
            DataError: an id is outside the vocabulary.
        """
        given = np.asarray(ids, dtype=np.int64)
        if given.size and not (given.min() >= 0 and given.max() < self.vocab_size):
            raise DataError(
                f"The ids range from {given.min()} to {given.max()}, but this vocabulary has 0 to "
                f"{self.vocab_size - 1}. Their bytes can't be counted."
            )
        return int(self._num_bytes[given].sum())

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``; `load_tokenizer` reads them back."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self.to_json() + "\n", "utf-8")
        config = {"eos_token": self._eos, "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")

    def to_json(self) -> str:
        """Return the text of the ``tokenizer.json``."""
        return self._tokenizer.to_str(pretty=True)

    def _check_end(self, text: str, ids: Sequence[int]) -> None:
        """Raise `DataError` if a text contains the end-of-document token, which may be a piece of a Unigram model."""
        if self.eos_id in ids:
            raise DataError(
                f"{self._source} encodes part of a text as the end-of-document token {self._eos!r}. The text begins "
                f"with {text[:40]!r}. Remove these characters from it, or choose another end-of-document token "
                "(eos_token in tokenizer_config.json)."
            )

    def _check_spelling(self, text: str, ids: NDArray[Any]) -> None:
        """Raise `DataError` if a document is not spelled exactly.

        The tokens of a document that begins with a space may lack one byte: no further space is added before it.
        """
        spelled, size = self.num_bytes(ids), len(text.encode())
        if spelled != size and not (text.startswith(" ") and spelled == size - 1):
            raise DataError(
                f"{self._source} encodes a document of {size} bytes as tokens that stand for {spelled}, so bits per "
                f"byte would refer to a different text. The document begins with {text[:40]!r}. Use a byte-level BPE."
            )


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


@cache
def _byte_vocabulary() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {letter: number for number, letter in enumerate([*byte_letters(), EOS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str()


def byte_letters() -> list[str]:
    """Return the printable letter that byte-level vocabularies use for each of the 256 bytes (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def checked_utf8(text: str) -> bytes:
    """Return ``text`` as UTF-8, or raise `DataError` if it contains half of a surrogate pair."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"The text has U+{ord(text[error.start]):04X}, half of a surrogate pair, at character {error.start}, which "
            "UTF-8 can't encode."
        ) from error


def _token_bytes(tokenizer: tokenizers.Tokenizer, source: str) -> tuple[list[bytes], bool]:
    """Return the bytes that each id stands for, and whether encoding adds a space at the beginning of a document.

    Special tokens and unused ids stand for no bytes.
    """
    described = json.loads(tokenizer.to_str())
    decoder = described["decoder"] or {}
    if "ByteLevel" in [part.get("type") for part in [decoder, *decoder.get("decoders", ())]]:
        table = _of_bytes(tokenizer, source)
        return table, _spelled(tokenizer, table, _WORD) == b" " + _WORD.encode()  # add_prefix_space
    table = _of_pieces(tokenizer, described["model"])
    return table, _adds_space(tokenizer, table, source)


def _of_bytes(tokenizer: tokenizers.Tokenizer, source: str) -> list[bytes]:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    if missing := sum(letter not in vocabulary for letter in byte_of):
        raise DataError(
            f"{source} lacks {missing} of the 256 bytes, so the bytes that its tokens stand for can't be counted. "
            "Use a byte-level BPE, such as GPT-2's or Llama 3's."
        )
    table = [b""] * (max(vocabulary.values()) + 1)
    added = tokenizer.get_added_tokens_decoder()
    for token, index in vocabulary.items():
        if index in added:
            table[index] = b"" if added[index].special else token.encode()
        elif all(letter in byte_of for letter in token):  # no text can encode to any other token
            table[index] = bytes(byte_of[letter] for letter in token)
    return table


def _of_pieces(tokenizer: tokenizers.Tokenizer, model: dict[str, Any]) -> list[bytes]:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    table = [b""] * (max(vocabulary.values()) + 1)
    for token, index in vocabulary.items():
        byte = _BYTE.match(token) if model.get("byte_fallback") else None
        if (index in added and added[index].special) or token == model.get("unk_token"):
            continue
        table[index] = bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()
    return table


def _spelled(tokenizer: tokenizers.Tokenizer, table: list[bytes], text: str) -> bytes:
    """Return the bytes of the tokens that a text encodes to."""
    return b"".join(table[index] for index in tokenizer.encode(text, add_special_tokens=False).ids)


def _adds_space(tokenizer: tokenizers.Tokenizer, table: list[bytes], source: str) -> bool:
    """Return whether encoding adds a space before a document.

    Raises:
        DataError: a probe is otherwise not spelled exactly, or the space is added only to some texts.
    """
    before = set()
    for probe in PROBES:
        spelled, text = _spelled(tokenizer, table, probe), probe.encode()
        if spelled not in (text, b" " + text):
            raise DataError(
                f"{source} does not spell every text exactly: {probe!r} became {spelled.decode(errors='replace')!r}, "
                "so bits per byte would refer to a different text. Use a byte-level BPE, such as GPT-2's or Llama 3's, "
                "or one with byte fallback and no normaliser, such as Llama 2's."
            )
        before.add(spelled != text)
    if len(before) > 1:
        raise DataError(
            f"{source} adds a space before some texts and not before others, so the bytes of its tokens can't be "
            "counted. Use a byte-level BPE, such as GPT-2's or Llama 3's."
        )
    return before.pop()
