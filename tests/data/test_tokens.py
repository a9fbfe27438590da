"""Tokenizers: any of the library is taken, byte counts are right, and saving and loading round-trips."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from diloco.data import ByteTokenizer, DataSettings, PackedTokens, Tokenizer, load_tokenizer, make_tokenizer, pack
from diloco.errors import DataError
from tests.vocabularies import (
    END,
    FALLBACK,
    FAMILIES,
    ODD,
    UNSPELL,
    byte_level,
    library,
    llama,
    special,
    wordpiece,
    words,
)

EOS = "<|endoftext|>"
DOCUMENTS = [f"def function_{i}(argument):\n    return argument + {i}  # déjà vu 漢字\n" for i in range(50)]


def bpe(documents: list[str], size: int) -> Tokenizer:
    return make_tokenizer(DataSettings(tokenizer=f"bpe:{size}"), documents)


TOKENIZERS: dict[str, Tokenizer] = {
    "bytes": ByteTokenizer(),
    "bpe": bpe(DOCUMENTS, 300),
    **{name: Tokenizer(made().to_str()) for name, made in FAMILIES.items()},
}
each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
# st.text leaves surrogates out; the literal end-of-document token must be plain characters
texts = st.lists(st.one_of(st.text(), st.just(EOS), st.sampled_from(DOCUMENTS)), max_size=5).map("".join).filter(len)


@each_tokenizer
@settings(max_examples=25)
@given(documents=st.lists(texts, max_size=5))
def test_documents_are_packed_with_what_begins_and_ends_them_and_every_byte_counts(
    tokenizer: Tokenizer, documents: list[str]
) -> None:
    packed, byte_counts = tokenizer.encode_counted(documents)
    around = tokenizer.begin_document, tokenizer.end_document
    expected = [i for text in documents for i in [*around[0], *tokenizer.encode(text), *around[1]]]
    assert packed.tolist() == tokenizer.encode_documents(documents).tolist() == expected
    assert packed.tolist().count(tokenizer.eos_id) == len(documents)
    assert packed.dtype == np.uint16
    assert all(0 <= index < tokenizer.vocab_size for index in packed)
    sizes = [int(counts.sum()) for counts in np.split(byte_counts, np.flatnonzero(packed == tokenizer.eos_id) + 1)]
    assert sizes == [*(len(text.encode()) for text in documents), 0]


@pytest.mark.parametrize("name", ["bytes", "bpe", "Llama 3", "Gemma", "Llama, no space"])
@given(text=texts)
def test_a_tokenizer_without_a_normaliser_gives_the_text_back(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    assert tokenizer.decode(tokenizer.encode_documents([text])) == text


@each_tokenizer
def test_saved_and_loaded_it_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "one")
    packed = tokenizer.encode_documents([*DOCUMENTS, f"a{EOS}b", ODD])
    for path in (tmp_path / "one", tmp_path / "one" / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert type(loaded) is type(tokenizer)
        for name in ("vocab_size", "eos_id", "begin_prompt", "begin_document", "end_document"):
            assert getattr(loaded, name) == getattr(tokenizer, name)
        assert np.array_equal(loaded.encode_documents([*DOCUMENTS, f"a{EOS}b", ODD]), packed)
        loaded.save(tmp_path / "two")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_document_begins_and_ends_as_the_library_adds_tokens_and_ends_once(name: str) -> None:
    library, tokenizer = FAMILIES[name](), TOKENIZERS[name]
    whole, text = library.encode("the quick").ids, library.encode("the quick", add_special_tokens=False).ids
    prompt = tokenizer.encode_prompt("the quick")
    document = tokenizer.encode_documents(["the quick"]).tolist()
    assert whole[: len(prompt)] == prompt
    assert [*document, tokenizer.eos_id].index(tokenizer.eos_id) == len(document) - 1
    if whole != text and whole[0] != tokenizer.eos_id:
        assert document[: len(whole)] == whole
    assert tokenizer.encode_prompt("") in (tokenizer.begin_prompt, [tokenizer.eos_id])


ENDS: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "named by the tokenizer": (["</s>", "<e>"], {"tokenizer_config.json": {"eos_token": "<e>"}}, "<e>"),
    "as an object": (["</s>", "<e>"], {"tokenizer_config.json": {"eos_token": {"content": "<e>"}}}, "<e>"),
    "in the map of special tokens": (["</s>", "<e>"], {"special_tokens_map.json": {"eos_token": "<e>"}}, "<e>"),
    "the model's first": (["</s>", "<e>"], {"generation_config.json": {"eos_token_id": [257, 256]}}, "<e>"),
    "of the model": (["</s>", "<e>"], {"config.json": {"eos_token_id": 257}}, "<e>"),
    "none named": (["<s>", "</s>"], {"tokenizer_config.json": {"eos_token": None}}, "</s>"),
    "an id of a larger vocabulary": (["</s>"], {"config.json": {"eos_token_id": 50256}}, "</s>"),
    "an id that is a piece of text here": (["</s>"], {"config.json": {"eos_token_id": 2}}, "</s>"),
    "an id of a bracket": (["</s>"], {"generation_config.json": {"eos_token_id": [27, 58]}}, "</s>"),
    "the file alone": (["<|im_end|>", "<|end_of_text|>"], {}, "<|end_of_text|>"),
    "DeepSeek's": (["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"], {}, "<｜end▁of▁sentence｜>"),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_token_that_ends_a_document_is_named_by_the_folder_or_called_like_one(name: str, tmp_path: Path) -> None:
    tokens, files, expected = ENDS[name]
    byte_level(*special(*tokens)).save(str(tmp_path / "tokenizer.json"))
    for file, content in files.items():
        (tmp_path / file).write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_id == 256 + tokens.index(expected)


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
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    with pytest.raises(DataError, match=r"has no token '<\|end\|>' .* Name another as eos_token"):
        load_tokenizer(file)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    tokenizer = make_tokenizer(DataSettings(tokenizer=str(file)))
    text = "no document can </s> end itself"
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (257, 258)
    assert tokenizer.decode([*tokenizer.encode(text), 257]) == text


EMPTIED = normalizers.Replace(Regex(r"[\s\S]"), "")
REFUSED = {
    "255 bytes": (lambda: byte_level(*END, letters=255), "lacks 1 of the 256 bytes"),
    "no unknown token": (lambda: words(unknown=None), "can't encode every text: .*Missing"),
    "an unknown token that is missing": (lambda: wordpiece(unknown="[unk]"), "can't encode every text: .*Missing"),
    "letters only": (lambda: library(models.BPE(vocab={"a": 0, "b": 1}, merges=[]), *END), "would drop characters"),
    "nothing left": (lambda: byte_level(*END, normalizer=EMPTIED), "to nothing"),
    "no end": (lambda: byte_level(*special("<|im_start|>", "<pad>")), "no token that ends a document: .* Name one as"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_encode_a_text_or_end_a_document_is_refused(name: str) -> None:
    made, words = REFUSED[name]
    with pytest.raises(DataError, match=words):
        Tokenizer(made().to_str())


FILES: tuple[tuple[str, bytes, str], ...] = (
    ("spm.model", b"\n\x0e\n\x05<unk>\x15\xd7", r"is not a tokenizer\.json: .*given as the folder that holds it"),
    ("x.tiktoken", b"IQ== 0\nIg== 1\n", r"is not a valid tokenizer\.json: .*given as the folder that holds it"),
    ("tokenizer_config.json", b"[]", r"tokenizer_config\.json doesn't contain a JSON object"),
)


@pytest.mark.parametrize(("name", "content", "words"), FILES)
def test_a_file_that_is_no_tokenizer_is_told_from_one_of_another_kind(
    name: str, content: bytes, words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    if name == "tokenizer_config.json":
        byte_level(*END).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=words):
        make_tokenizer(DataSettings(tokenizer=str(tmp_path if name == "tokenizer_config.json" else tmp_path / name)))


def test_a_folder_without_a_vocabulary_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no tokenizer\.json, and no other vocabulary"):
        make_tokenizer(DataSettings(tokenizer=str(tmp_path)))


def test_a_byte_level_vocabulary_with_an_unknown_token_needs_no_byte() -> None:
    tokenizer = Tokenizer(byte_level(*END, letters=100, unknown="<unk>").to_str())
    assert tokenizer.encode_counted(["né"])[1].sum() == 3


@pytest.mark.parametrize("name", ["T5", "XLM-R"])
def test_control_tokens_that_are_pieces_are_plain_characters_in_a_text(name: str) -> None:
    """In a Unigram model the end-of-document token is an ordinary piece, as in SentencePiece."""
    tokenizer = TOKENIZERS[name]
    text = "the </s>the</s></s> <pad>"
    packed, byte_counts = tokenizer.encode_counted([text, "the"])
    assert packed.tolist().count(tokenizer.eos_id) == 2
    assert int(byte_counts.sum()) == len(text) + 3
    assert tokenizer.decode(packed).replace(" ", "") == text.replace(" ", "") + "the"


BYTES = ["<unk>", "</s>", *FALLBACK]


def trained_bpe() -> Any:
    """Return a BPE whose trainer was given the bytes as special tokens, as it takes them in no other way."""
    model = models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    made = library(model, normalizer=normalizers.Replace(" ", "▁"), decoder=decoders.Sequence(UNSPELL))
    made.train_from_iterator(["the fox", "the dog"], trainers.BpeTrainer(special_tokens=BYTES, show_progress=False))
    return made


def unigram_with_bytes() -> Any:
    """Return a Unigram model with bytes that are special tokens."""
    pieces = [*((name, 0.0) for name in BYTES), *((piece, -2.0) for piece in ("▁", "the", *"<>"))]
    model = models.Unigram(pieces, unk_id=0, byte_fallback=True)
    parts = {"normalizer": normalizers.Replace(" ", "▁"), "decoder": decoders.Sequence(UNSPELL)}
    return library(model, *special(*BYTES), **parts)


@pytest.mark.parametrize("make", [trained_bpe, unigram_with_bytes])
def test_bytes_that_a_trainer_marked_as_special_are_text_like_any_other(make: Callable[[], Any]) -> None:
    tokenizer = Tokenizer(make().to_str())
    text = "the\n東京\t"
    packed, byte_counts = tokenizer.encode_counted([text])
    assert tokenizer.decode(packed) == text
    assert int(byte_counts.sum()) == len(text.encode())


def test_a_piece_that_begins_like_the_name_of_an_end_ends_no_document() -> None:
    made = library(models.WordLevel({"?": 0, "</s": 1, "[sep": 2, "</s>": 3, "[sep]": 4}, unk_token="?"))
    assert Tokenizer(made.to_str()).eos_id == 3


def test_a_text_that_would_end_itself_is_refused() -> None:
    made = library(models.WordLevel({"?": 0, "a": 1, "$": 2}, unk_token="?"), pre_tokenizer=pre_tokenizers.Whitespace())
    tokenizer = Tokenizer(made.to_str(), eos="$")
    assert tokenizer.encode_documents(["a b", "a"]).tolist() == [1, 0, 2, 1, 2]
    with pytest.raises(DataError, match=r"as the special token '\$'. The text begins with 'a \$ b'"):
        tokenizer.encode_documents(["a", "a $ b"])


def test_a_tokenizer_that_draws_its_tokens_gives_the_same_ones() -> None:
    made = llama(prepend=False)
    made.model.dropout = 0.9
    assert Tokenizer(made.to_str()).encode("the the") == Tokenizer(llama(prepend=False).to_str()).encode("the the")


@each_tokenizer
def test_the_bytes_of_windows_add_up_however_documents_are_cut(tokenizer: Tokenizer) -> None:
    documents = [ODD, *DOCUMENTS[:5], "漢字" * 20, ODD * 3]
    parts = [pack(some, tokenizer, counted=True) for some in (documents[:3], documents[3:])]
    packed = PackedTokens.joined(parts)
    assert packed.num_bytes == sum(len(text.encode()) for text in documents)
    first = int(tokenizer.encode_counted(documents[:1])[1][0])  # the first token is nobody's target
    for length in (1, 7, 64):
        windows = np.arange(packed.num_windows(length))
        rest = int(packed.byte_counts()[1 + len(windows) * length :].sum())
        each = [packed.target_bytes(windows[n : n + 1], length) for n in windows.tolist()]
        assert sum(each) == packed.target_bytes(windows, length) == packed.num_bytes - first - rest
