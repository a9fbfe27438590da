"""Bytes and BPE: nothing is lost, byte counts are right, and saving and loading round-trips."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from diloco.data import ByteTokenizer, DataSettings, Tokenizer, load_tokenizer, make_tokenizer, train_bpe
from diloco.errors import DataError

EOS = "<|endoftext|>"
DOCUMENTS = [f"def function_{i}(argument):\n    return argument + {i}  # déjà vu 漢字\n" for i in range(50)]
TOKENIZERS: dict[str, Tokenizer] = {"bytes": ByteTokenizer(), "bpe": train_bpe(DOCUMENTS, 300)}

each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
# st.text leaves surrogates out; the literal end-of-document token must be plain characters
texts = st.lists(st.one_of(st.text(), st.just(EOS), st.sampled_from(DOCUMENTS)), max_size=5).map("".join)


@each_tokenizer
@settings(max_examples=30)
@given(text=texts)
def test_encode_then_decode_loses_nothing_and_counts_every_byte(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.num_bytes(ids) == len(text.encode())
    assert tokenizer.eos_id not in ids
    assert all(0 <= index < tokenizer.vocab_size for index in ids)


@each_tokenizer
@settings(max_examples=30)
@given(documents=st.lists(texts, max_size=6))
def test_documents_are_packed_each_followed_by_its_end(tokenizer: Tokenizer, documents: list[str]) -> None:
    packed = tokenizer.encode_documents(documents)
    assert packed.tolist() == [i for text in documents for i in [*tokenizer.encode(text), tokenizer.eos_id]]
    assert packed.dtype == np.uint16
    assert tokenizer.num_bytes(packed) == sum(len(text.encode()) for text in documents)
    assert tokenizer.decode(packed) == "".join(documents)


@each_tokenizer
def test_saved_and_loaded_it_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "one")
    packed = tokenizer.encode_documents([*DOCUMENTS, f"a{EOS}b"])
    for path in (tmp_path / "one", tmp_path / "one" / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert type(loaded) is type(tokenizer)
        assert (loaded.vocab_size, loaded.eos_id) == (tokenizer.vocab_size, tokenizer.eos_id)
        assert np.array_equal(loaded.encode_documents([*DOCUMENTS, f"a{EOS}b"]), packed)
        loaded.save(tmp_path / "two")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def test_saved_bytes_mean_the_same_to_the_tokenizers_library(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.save(tmp_path)
    library = LibraryTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "  né\n\t漢\x00\U0001f600"
    assert library.encode(text).ids == tokenizer.encode(text)
    assert library.decode(tokenizer.encode(text)) == text
    assert library.token_to_id(EOS) == tokenizer.eos_id


def test_a_trained_bpe_has_the_size_asked_for_and_is_deterministic() -> None:
    first, second = train_bpe(DOCUMENTS, 300), train_bpe(DOCUMENTS, 300)
    assert (first.vocab_size, first.to_json()) == (300, second.to_json())
    assert len(first.encode(DOCUMENTS[0])) < len(DOCUMENTS[0].encode()) / 2


def test_too_little_text_for_a_vocabulary_says_what_it_gives() -> None:
    with pytest.raises(DataError, match=r"too few for a BPE .*: they give (\d+)") as caught:
        train_bpe(["abab abab"], 4096)
    largest = int(str(caught.value).split("bpe:")[1].split()[0])
    assert train_bpe(["abab abab"], largest).vocab_size == largest


def library_tokenizer(*eos: str, special: bool = True, letters: int = 256) -> LibraryTokenizer:
    """A byte-level tokenizer such as a user may provide."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:letters]
    tokenizer = LibraryTokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in eos])
    return tokenizer


@pytest.mark.parametrize("special", [True, False])
def test_a_users_tokenizer_with_one_usual_end_token(tmp_path: Path, special: bool) -> None:
    library = library_tokenizer("<|im_start|>", "</s>", special=special)
    library.enable_truncation(4)
    library.enable_padding(length=100)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = make_tokenizer(DataSettings(tokenizer=str(tmp_path / "tokenizer.json")), [])
    text = "no document can </s> end itself"
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (257, 258)
    assert tokenizer.eos_id not in tokenizer.encode(text)
    assert tokenizer.decode([*tokenizer.encode(text), 257]) == text
    assert tokenizer.num_bytes(tokenizer.encode(text)) == len(text)


def test_a_tokenizer_whose_bytes_cannot_be_counted_is_refused() -> None:
    with pytest.raises(DataError, match=r"lacks 1 of the 256 bytes"):
        Tokenizer(library_tokenizer("</s>", letters=255).to_str(), eos="</s>")
    words = LibraryTokenizer(models.WordLevel({"a": 0, "</s>": 1, "?": 2}, unk_token="?"))
    with pytest.raises(DataError, match=r"does not spell every text exactly"):
        Tokenizer(words.to_str(), eos="</s>")
    words = LibraryTokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="?"))
    with pytest.raises(DataError, match=r"can't encode every text: .*Missing"):
        Tokenizer(words.to_str(), eos="</s>")


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


def test_a_text_that_would_end_itself_is_refused() -> None:
    tokenizer = unigram()
    for attempt in (tokenizer.encode, lambda text: tokenizer.encode_documents(["a", text])):
        with pytest.raises(DataError, match=r"as the end-of-document token .* begins with 'ab</s>cd'"):
            attempt("ab</s>cd")
    assert tokenizer.encode_documents(["a", "a"]).tolist().count(tokenizer.eos_id) == 2
