"""Byte-level BPE, by the ``tokenizers`` library: trained on the training documents, or a user's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diloco.data.tokenizer import EOS, Tokenizer, byte_letters, checked_utf8, write_tokenizer
from diloco.errors import DataError

if TYPE_CHECKING:
    import tokenizers

__all__ = ["BPETokenizer", "train_bpe"]


class BPETokenizer(Tokenizer):
    """A byte-level BPE, as GPT-2's, from the text of a ``tokenizer.json``.

    Special tokens written out in a text are encoded as the characters they are, so that no document can end itself.

    Args:
        content: the text of a ``tokenizer.json``.
        eos: the token that ends a document.
        source: what to call it in messages.

    Raises:
        DataError: it cannot be read, is not byte-level, lacks one of the 256 bytes, or has no such token.
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
        super().__init__(_token_bytes(self._tokenizer, source), eos_id)

    def encode(self, text: str) -> list[int]:
        checked_utf8(text)
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_documents(self, documents: Sequence[str]) -> NDArray[Any]:
        pieces = [np.zeros(0, dtype=self.dtype)]
        for begin in range(0, len(documents), 1024):  # so that few of the library's bulky results exist at a time
            texts = documents[begin : begin + 1024]
            for text in texts:
                checked_utf8(text)
            for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                pieces.append(np.array([*encoding.ids, self.eos_id], dtype=self.dtype))
        return np.concatenate(pieces)

    def save(self, folder: Path) -> None:
        write_tokenizer(folder, self.to_json(), self._eos)

    def to_json(self) -> str:
        """The text of its ``tokenizer.json``."""
        return self._tokenizer.to_str(pretty=True)


def train_bpe(documents: Sequence[str], vocab_size: int) -> BPETokenizer:
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
    for document in documents:
        checked_utf8(document)
    tokenizer.train_from_iterator(documents, trainer, length=len(documents))
    made = tokenizer.get_vocab_size()
    if made < vocab_size:
        raise DataError(
            f"A BPE with a vocabulary of {vocab_size} was asked for; {len(documents)} training documents give {made}. "
            f"data.bpe_vocab_size={made} or less, or more text, would work. No tokenizer was made."
        )
    return BPETokenizer(tokenizer.to_str(), eos=EOS)


def _token_bytes(tokenizer: tokenizers.Tokenizer, source: str) -> list[bytes]:
    """The bytes that each id stands for; none for special tokens and for ids that are not in use."""
    decoder = json.loads(tokenizer.to_str())["decoder"]
    kinds = [part.get("type") for part in [decoder or {}, *(decoder or {}).get("decoders", ())]]
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    missing = sum(letter not in vocabulary for letter in byte_of)
    if "ByteLevel" not in kinds or missing:
        reason = f"lacks {missing} of the 256 bytes" if "ByteLevel" in kinds else "is not byte-level"
        raise DataError(
            f"{source} {reason}, so that what its tokens stand for cannot be counted in bytes. A byte-level BPE, as "
            "GPT-2's or Llama 3's, would work. No tokenizer was made."
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
