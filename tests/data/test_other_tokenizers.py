"""Third-party tokenizers: bits per byte stay correct, or the tokenizer or text is refused with the reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from diloco.data import (
    Tokenizer,
)
from diloco.errors import DataError


def llama(*, prepend: bool = True, fallback: bool = True) -> LibraryTokenizer:
    """A tokenizer like Llama 2's: converted from SentencePiece, with byte fallback."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁t", "he", "▁the", "ü"]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    model = models.BPE(
        vocab={word: n for n, word in enumerate(words)},
        merges=merges,
        unk_token="<unk>",
        byte_fallback=fallback,
        fuse_unk=True,
    )
    tokenizer = LibraryTokenizer(model)
    steps = [normalizers.Prepend("▁")] if prepend else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def made(tokenizer: LibraryTokenizer) -> Tokenizer:
    return Tokenizer(tokenizer.to_str(), eos="</s>")


LLAMA, PLAIN = made(llama()), made(llama(prepend=False))


@given(st.lists(st.text(min_size=1), min_size=1, max_size=4))
def test_the_bytes_of_documents_are_counted_exactly(documents: list[str]) -> None:
    for tokenizer in (LLAMA, PLAIN):
        ids = tokenizer.encode_documents(documents)
        assert tokenizer.num_bytes(ids) == sum(len(document.encode()) for document in documents)
        before = " " if tokenizer is LLAMA else ""
        assert tokenizer.decode(ids) == "".join(before + document for document in documents)


def unigram() -> Tokenizer:
    """A Unigram model in which the end-of-document token is an ordinary piece, as in SentencePiece."""
    letters = [(letter, -5.0) for letter in "▁abcdefghs<>/"]
    fallback = [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *fallback, *letters]
    tokenizer = LibraryTokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return Tokenizer(tokenizer.to_str(), eos="</s>", source="the unigram")


@pytest.mark.parametrize(("make", "text"), [(unigram, "ab</s>cd")])
def test_a_text_that_would_end_itself_is_refused(make, text: str) -> None:  # type: ignore[no-untyped-def]
    tokenizer = make()
    for attempt in (tokenizer.encode, lambda text: tokenizer.encode_documents(["a", text])):
        with pytest.raises(DataError, match=f"as the end-of-document token .* begins with '{text}'"):
            attempt(text)
    assert tokenizer.encode_documents(["a", "a"]).tolist().count(tokenizer.eos_id) == 2
