"""Tokenizers of the ``tokenizers`` library: a byte-level BPE trained on the training documents, or a user's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.data.pieces import token_bytes
from diloco.data.tokenizer import EOS, Tokenizer, byte_letters, checked_utf8, write_tokenizer
from diloco.errors import DataError

__all__ = ["BPETokenizer", "train_bpe"]


class BPETokenizer(Tokenizer):
    """A byte-level BPE, as GPT-2's, or any other that tells texts exactly, from the text of a ``tokenizer.json``.

    Special tokens written out in a text are encoded as the characters they are, so that no document can end itself.

    Args:
        content: the text of a ``tokenizer.json``.
        eos: the token that ends a document.
        source: what to call it in messages.

    Raises:
        DataError: it cannot be read, does not tell texts exactly (see `diloco.data.pieces`), or has no such token. Also
            raised for a text with that token in it, where it can be written with ordinary characters.
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
