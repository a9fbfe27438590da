"""Tokenizers: nothing is lost, byte counts are right, and saving and loading round-trips."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from diloco.data import ByteTokenizer, DataSettings, Tokenizer, load_tokenizer, make_tokenizer
from diloco.errors import DataError

EOS = "<|endoftext|>"
DOCUMENTS = [f"def function_{i}(argument):\n    return argument + {i}  # déjà vu 漢字\n" for i in range(50)]


def bpe(documents: list[str], size: int) -> Tokenizer:
    return make_tokenizer(DataSettings(tokenizer=f"bpe:{size}"), documents)


def library(model: Any, *added: AddedToken, **parts: Any) -> LibraryTokenizer:
    """Return a tokenizer such as a user may provide."""
    tokenizer = LibraryTokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.add_tokens(list(added))
    return tokenizer


def byte_level(*added: AddedToken, letters: int = 256) -> LibraryTokenizer:
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())[:letters])}
    parts = {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False)}
    parts |= {"decoder": decoders.Sequence([decoders.ByteLevel()])}
    return library(models.BPE(vocab=vocabulary, merges=[]), *added, **parts)


END = AddedToken("</s>", special=True, normalized=False)
FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]
UNSPELL = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def llama(*, prepend: bool) -> Tokenizer:
    """A tokenizer like Llama 2's: converted from SentencePiece, with byte fallback."""
    words = ["<unk>", "<s>", "</s>", *FALLBACK, "▁", *"abcdefghijklmnopqrstuvwxyz", "▁t", "he", "▁the", "ü"]
    model = models.BPE(
        vocab={word: n for n, word in enumerate(words)},
        merges=[("▁", "t"), ("h", "e"), ("▁t", "he")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    steps = [normalizers.Prepend("▁")] if prepend else []
    normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    decoder = decoders.Sequence([*UNSPELL, decoders.Strip(" ", 1, 0)])
    special = [AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")]
    return Tokenizer(library(model, *special, normalizer=normalizer, decoder=decoder).to_str(), eos="</s>")


TOKENIZERS = {
    "bytes": ByteTokenizer(),
    "bpe": bpe(DOCUMENTS, 300),
    "llama": llama(prepend=False),
    "llama that adds a space": llama(prepend=True),
}
each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
# st.text leaves surrogates out; the literal end-of-document token must be plain characters
texts = st.lists(st.one_of(st.text(), st.just(EOS), st.sampled_from(DOCUMENTS)), max_size=5).map("".join).filter(len)


@each_tokenizer
@settings(max_examples=30)
@given(documents=st.lists(texts, max_size=6))
def test_documents_are_packed_each_followed_by_its_end_and_every_byte_counts(
    tokenizer: Tokenizer, documents: list[str]
) -> None:
    packed = tokenizer.encode_documents(documents)
    assert packed.tolist() == [i for text in documents for i in [*tokenizer.encode(text), tokenizer.eos_id]]
    assert packed.tolist().count(tokenizer.eos_id) == len(documents)
    assert packed.dtype == np.uint16
    assert all(0 <= index < tokenizer.vocab_size for index in packed)
    assert tokenizer.num_bytes(packed) == sum(len(text.encode()) for text in documents)
    before = " " if tokenizer is TOKENIZERS["llama that adds a space"] else ""
    assert tokenizer.decode(packed) == "".join(before + text for text in documents)


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


def test_a_trained_bpe_has_the_size_asked_for_or_says_what_the_text_gives() -> None:
    first, second = bpe(DOCUMENTS, 300), bpe(DOCUMENTS, 300)
    assert (first.vocab_size, first.to_json()) == (300, second.to_json())
    assert len(first.encode(DOCUMENTS[0])) < len(DOCUMENTS[0].encode()) / 2
    with pytest.raises(DataError, match=r"too few for a BPE .*: they give (\d+)") as caught:
        bpe(["abab abab"], 4096)
    largest = int(str(caught.value).split("bpe:")[1].split()[0])
    assert bpe(["abab abab"], largest).vocab_size == largest


@pytest.mark.parametrize("special", [True, False])
def test_a_users_tokenizer_with_an_end_token_of_its_own(tmp_path: Path, special: bool) -> None:
    file = tmp_path / "tokenizer.json"
    added = [AddedToken(token, special=special, normalized=False) for token in ("<|im_start|>", "</s>")]
    theirs = byte_level(*added)
    theirs.enable_truncation(4)
    theirs.enable_padding(length=100)
    theirs.save(str(file))
    with pytest.raises(DataError, match=r"has no token '<\|endoftext\|>' .* Name another as eos_token"):
        load_tokenizer(file)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    tokenizer = make_tokenizer(DataSettings(tokenizer=str(file)))
    text = "no document can </s> end itself"
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (257, 258)
    assert tokenizer.decode([*tokenizer.encode(text), 257]) == text
    assert tokenizer.num_bytes(tokenizer.encode(text)) == len(text)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (byte_level(END, letters=255), "lacks 1 of the 256 bytes"),
        (library(models.WordLevel({"a": 0, "</s>": 1, "?": 2}, unk_token="?")), "does not spell every text exactly"),
        (library(models.WordLevel({"a": 0, "</s>": 1}, unk_token="?")), "can't encode every text: .*Missing"),
    ],
)
def test_a_tokenizer_whose_bytes_cannot_be_counted_is_refused(theirs: LibraryTokenizer, words: str) -> None:
    with pytest.raises(DataError, match=words):
        Tokenizer(theirs.to_str(), eos="</s>")


def test_a_text_that_would_end_itself_is_refused() -> None:
    """In a Unigram model the end-of-document token may be an ordinary piece, as in SentencePiece."""
    letters = [(letter, -5.0) for letter in "▁abcdefghs<>/"]
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((piece, -20.0) for piece in FALLBACK), *letters]
    split = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    model = models.Unigram(pieces, unk_id=0, byte_fallback=True)
    theirs = library(model, END, pre_tokenizer=split, decoder=decoders.Sequence(UNSPELL))
    tokenizer = Tokenizer(theirs.to_str(), eos="</s>")
    with pytest.raises(DataError, match=r"as the end-of-document token .* begins with 'ab</s>cd'"):
        tokenizer.encode_documents(["a", "ab</s>cd"])
    assert tokenizer.encode_documents(["a", "a"]).tolist().count(tokenizer.eos_id) == 2
