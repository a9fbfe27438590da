"""Bytes and BPE: nothing is lost, byte counts are right, and saving and loading round-trips."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from diloco.data import EOS, ByteTokenizer, DataSettings, Tokenizer, load_tokenizer, make_tokenizer, train_bpe
from diloco.errors import ConfigurationError, DataError

DOCUMENTS = [f"def function_{i}(argument):\n    return argument + {i}  # déjà vu 漢字\n" for i in range(50)]
TOKENIZERS: dict[str, Tokenizer] = {"bytes": ByteTokenizer(), "bpe": train_bpe(DOCUMENTS, 300)}

each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
# st.text leaves surrogates out; the literal end-of-document token must be plain characters
texts = st.lists(st.one_of(st.text(), st.just(EOS), st.sampled_from(DOCUMENTS)), max_size=5).map("".join)


@each_tokenizer
@settings(deadline=None)
@given(text=texts)
def test_encode_then_decode_loses_nothing_and_counts_every_byte(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.num_bytes(ids) == len(text.encode())
    assert tokenizer.eos_id not in ids
    assert all(0 <= index < tokenizer.vocab_size for index in ids)


@each_tokenizer
@settings(deadline=None)
@given(documents=st.lists(texts, max_size=6))
def test_documents_are_packed_each_followed_by_its_end(tokenizer: Tokenizer, documents: list[str]) -> None:
    packed = tokenizer.encode_documents(documents)
    assert packed.tolist() == [i for text in documents for i in [*tokenizer.encode(text), tokenizer.eos_id]]
    assert packed.dtype == np.uint16
    assert tokenizer.num_bytes(packed) == sum(len(text.encode()) for text in documents)
    assert tokenizer.decode(packed) == "".join(documents)


@each_tokenizer
def test_more_documents_than_are_encoded_at_a_time(tokenizer: Tokenizer) -> None:
    documents = [f"{i}" for i in range(1025)]
    assert tokenizer.decode(tokenizer.encode_documents(documents)) == "".join(documents)


@each_tokenizer
def test_arrays_and_tensors_of_any_shape_are_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abcdef")
    assert tokenizer.num_bytes(torch.tensor([ids, ids])) == 12
    assert tokenizer.decode(np.array(ids, dtype=np.uint16)) == "abcdef"
    assert tokenizer.num_bytes([]) == 0


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert ByteTokenizer().decode([0x61, 0xC3, 256, 0x62]) == "a\ufffdb"


@each_tokenizer
def test_ids_outside_the_vocabulary(tokenizer: Tokenizer) -> None:
    size = tokenizer.vocab_size
    assert tokenizer.decode([size, -1]) == "\ufffd\ufffd"
    for ids in ([size], [-1]):
        with pytest.raises(DataError, match=f"this vocabulary has 0 to {size - 1}"):
            tokenizer.num_bytes(ids)


@each_tokenizer
def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    for attempt in (tokenizer.encode, lambda text: tokenizer.encode_documents([text])):
        with pytest.raises(DataError, match=r"U\+DC80, half of a surrogate pair, at character 2"):
            attempt("ab\udc80")


@each_tokenizer
def test_saved_and_loaded_it_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "new" / "folder")
    for path in (tmp_path / "new" / "folder", tmp_path / "new" / "folder" / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert type(loaded) is type(tokenizer)
        assert (loaded.vocab_size, loaded.eos_id) == (tokenizer.vocab_size, tokenizer.eos_id)
        packed = tokenizer.encode_documents([*DOCUMENTS, f"a{EOS}b"])
        assert np.array_equal(loaded.encode_documents([*DOCUMENTS, f"a{EOS}b"]), packed)
        assert loaded.decode(packed) == tokenizer.decode(packed)
        loaded.save(tmp_path / "again")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "new" / "folder" / name).read_bytes()


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
    assert first.vocab_size == 300
    assert first.to_json() == second.to_json()
    assert len(first.encode(DOCUMENTS[0])) < len(DOCUMENTS[0].encode()) / 2


def test_too_little_text_for_a_vocabulary_says_what_it_gives() -> None:
    with pytest.raises(DataError, match=r"^1 training documents are too few for a BPE .*: they give (\d+)") as caught:
        train_bpe(["abab abab"], 4096)
    largest = int(str(caught.value).split("data.bpe_vocab_size=")[1].split()[0])
    assert train_bpe(["abab abab"], largest).vocab_size == largest


def test_a_vocabulary_above_16_bits_needs_32() -> None:
    tokenizer = LibraryTokenizer.from_str(train_bpe(DOCUMENTS, 257).to_json())
    tokenizer.add_tokens([f"x{i:05}x" for i in range((1 << 16) - 257)])
    assert Tokenizer(tokenizer.to_str(), eos=EOS).dtype == np.uint16
    tokenizer.add_tokens(["one more"])
    wide = Tokenizer(tokenizer.to_str(), eos=EOS)
    assert wide.encode_documents(["one more"]).tolist() == [65536, wide.eos_id]
    assert wide.dtype == np.uint32
    assert wide.num_bytes([65536]) == len("one more")


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


@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "<|im_end|>", "special": True}])
def test_the_file_beside_it_says_which_token_ends_a_document(tmp_path: Path, eos: object) -> None:
    library_tokenizer("</s>", "<|im_end|>").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert load_tokenizer(tmp_path).eos_id == 257


def test_an_end_token_that_cannot_be_told_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    library_tokenizer().save(str(file))
    with pytest.raises(DataError, match=r"none of its tokens has a usual name.*tokenizer_config\.json next to it"):
        load_tokenizer(file)
    library_tokenizer("</s>", "<eos>").save(str(file))
    with pytest.raises(DataError, match=r"each of </s>, <eos> could"):
        load_tokenizer(file)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(DataError, match=r"has no token '<end>'"):
        load_tokenizer(file)


def test_a_tokenizer_whose_bytes_cannot_be_counted_is_refused() -> None:
    with pytest.raises(DataError, match=r"lacks 1 of the 256 bytes"):
        Tokenizer(library_tokenizer("</s>", letters=255).to_str(), eos="</s>")
    words = LibraryTokenizer(models.WordLevel({"a": 0, "</s>": 1, "?": 2}, unk_token="?"))
    with pytest.raises(DataError, match=r"does not spell every text exactly"):
        Tokenizer(words.to_str(), eos="</s>")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "does not contain a JSON object"),
        ('{"added_tokens": 3}', "does not say which token"),
    ],
)
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path)


def test_json_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"content": "</s>"}]}')
    with pytest.raises(DataError, match=r"tokenizer\.json is not a valid tokenizer\.json: "):
        load_tokenizer(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"tokenizer\.json does not exist"):
        load_tokenizer(tmp_path / "empty")


def test_the_settings_choose() -> None:
    assert isinstance(make_tokenizer(DataSettings(), DOCUMENTS), ByteTokenizer)
    assert make_tokenizer(DataSettings(tokenizer="bpe", bpe_vocab_size=280), DOCUMENTS).vocab_size == 280
    with pytest.raises(ConfigurationError, match=r"data\.tokenizer='byte' .*did you mean 'bytes'\?"):
        make_tokenizer(DataSettings(tokenizer="byte"), DOCUMENTS)
