"""What the tokens of a ``tokenizer.json`` stand for in bytes, whether it is byte-level or made from SentencePiece.

A loss per token becomes bits per byte only if every text is told exactly by its tokens. Byte-level vocabularies do
that by construction. Others are tried on `PROBES`: one that folds case, unites spaces or has no token for some
characters models another text than the one that is counted, and is refused.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from diloco.data.tokenizer import byte_letters
from diloco.errors import DataError

if TYPE_CHECKING:
    import tokenizers

__all__ = ["PROBES", "is_byte_level", "token_bytes"]

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
