"""Third-party tokenizers: bits per byte stay correct, or the tokenizer or text is refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from diloco.data import (
    EOS,
    DataSettings,
    Tokenizer,
    byte_letters,
    given_tokenizer,
    load_hub_tokenizer,
    load_tokenizer,
    train_bpe,
)
from diloco.errors import ConfigurationError, DataError


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


def test_a_space_goes_before_a_document_as_the_model_knows_it() -> None:
    assert LLAMA.encode("the") == [llama().token_to_id("▁the")]
    assert LLAMA.num_bytes(LLAMA.encode("the")) == 4
    assert LLAMA.num_bytes(LLAMA.encode_documents(["the"])) == 3
    assert LLAMA.encode("</s>") != [LLAMA.eos_id], "text must not end a document"


def test_a_saved_one_comes_back(tmp_path: Path) -> None:
    LLAMA.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.to_json() == LLAMA.to_json()
    assert again.num_bytes(again.encode_documents(["the ü"])) == 6


def metaspace() -> LibraryTokenizer:
    """A tokenizer without byte fallback."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -1.0), *((letter, -2.0) for letter in "abcdefgh")]
    tokenizer = LibraryTokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def folding() -> LibraryTokenizer:
    tokenizer = llama()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), tokenizer.normalizer])
    return tokenizer


def collapsing() -> LibraryTokenizer:
    tokenizer = llama()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(tokenizers.Regex(" +"), " "), tokenizer.normalizer]
    )
    return tokenizer


@pytest.mark.parametrize("make", [metaspace, folding, collapsing, lambda: llama(fallback=False)])
def test_one_that_changes_texts_is_refused(make) -> None:  # type: ignore[no-untyped-def]
    tokenizer = make()
    tokenizer.add_special_tokens(["</s>"])
    with pytest.raises(DataError, match=r"does not spell every text exactly: .* became .*bits per byte"):
        made(tokenizer)


def test_a_document_that_is_not_told_exactly_is_refused_when_it_comes() -> None:
    tokenizer = llama()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("Q", ""), llama().normalizer])
    sly = made(tokenizer)
    with pytest.raises(DataError, match="encodes a document of 2 bytes as tokens that stand for 1"):
        sly.encode_documents(["fine", "Qa"])


def test_by_name_of_a_local_folder(tmp_path: Path) -> None:
    LLAMA.save(tmp_path / "model")
    settings = DataSettings(tokenizer=f"hf:{tmp_path / 'model'}")
    assert given_tokenizer(settings).to_json() == LLAMA.to_json()
    assert load_hub_tokenizer(f"hf:{tmp_path / 'model' / 'tokenizer.json'}").eos_id == LLAMA.eos_id


def test_one_without_a_tokenizer_json_is_converted(tmp_path: Path) -> None:
    """GPT-2's two files, from which transformers makes tokenizer.json."""
    letters = byte_letters()
    vocabulary = {letter: n for n, letter in enumerate([*letters, "th", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    tokenizer = load_hub_tokenizer(f"hf:{tmp_path}")
    assert tokenizer.eos_id == vocabulary["<|endoftext|>"]
    assert len(tokenizer.encode("then")) == 3
    assert tokenizer.num_bytes(tokenizer.encode("thü")) == 4


@pytest.mark.parametrize("name", ["hf:nobody/nothing", "hf:a b", "hf:"])
def test_one_that_is_not_there_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises((DataError, ConfigurationError), match=r"cannot be read: |is neither"):
        given_tokenizer(DataSettings(tokenizer=name))


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


def letter() -> Tokenizer:
    """A tokenizer configured to end documents with a letter."""
    return Tokenizer(train_bpe(["some text"] * 2, 257).to_json(), eos="s", source="the letters")


@pytest.mark.parametrize(("make", "text"), [(unigram, "ab</s>cd"), (letter, "tests")])
def test_a_text_that_would_end_itself_is_refused(make, text: str) -> None:  # type: ignore[no-untyped-def]
    tokenizer = make()
    for attempt in (tokenizer.encode, lambda text: tokenizer.encode_documents(["a", text])):
        with pytest.raises(DataError, match=f"as the end-of-document token .* begins with '{text}'"):
            attempt(text)
    assert tokenizer.encode_documents(["a", "a"]).tolist().count(tokenizer.eos_id) == 2


def test_a_space_that_a_byte_level_tokenizer_puts_before_a_document_is_no_byte_of_it() -> None:
    library = LibraryTokenizer.from_str(train_bpe(["hello there"] * 4, 262).to_json())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer = Tokenizer(library.to_str(), eos=EOS)
    documents = ["hello", "\nthere ü", "x"]
    packed = tokenizer.encode_documents(documents)
    assert tokenizer.decode(packed) == "".join(f" {document}" for document in documents)
    assert tokenizer.num_bytes(packed) == sum(len(document.encode()) for document in documents)
