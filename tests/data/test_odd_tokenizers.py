"""Tokenizers of others that would count wrong: a text with the end of a document in it, a space that nobody wrote."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from diloco.data.tokenizer import EOS, BPETokenizer, train_bpe
from diloco.errors import DataError


def unigram() -> BPETokenizer:
    """Its model knows the end of a document as a piece like any other, as SentencePiece's do."""
    letters = [(letter, -5.0) for letter in "▁abcdefghs<>/"]
    fallback = [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *fallback, *letters]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return BPETokenizer(tokenizer.to_str(), eos="</s>", source="the unigram")


def letter() -> BPETokenizer:
    """Whose owner says that a letter ends documents."""
    return BPETokenizer(train_bpe(["some text"] * 2, 257).to_json(), eos="s", source="the letters")


@pytest.mark.parametrize(("make", "text"), [(unigram, "ab</s>cd"), (letter, "tests")])
def test_a_text_that_would_end_itself_is_refused(make, text: str) -> None:  # type: ignore[no-untyped-def]
    tokenizer = make()
    for attempt in (tokenizer.encode, lambda text: tokenizer.encode_documents(["a", text])):
        with pytest.raises(DataError, match=f"into the token that ends a document, .* begins with '{text}'"):
            attempt(text)
    assert tokenizer.encode_documents(["a", "a"]).tolist().count(tokenizer.eos_id) == 2


def test_a_space_that_a_byte_level_tokenizer_puts_before_a_document_is_no_byte_of_it() -> None:
    library = Tokenizer.from_str(train_bpe(["hello there"] * 4, 262).to_json())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer = BPETokenizer(library.to_str(), eos=EOS)
    documents = ["hello", "\nthere ü", "x"]
    packed = tokenizer.encode_documents(documents)
    assert tokenizer.decode(packed) == "".join(f" {document}" for document in documents)
    assert tokenizer.num_bytes(packed) == sum(len(document.encode()) for document in documents)
