"""What of a folder of tokens is damaged behind right sizes is found where it is used."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from diloco.data.corpus import build_corpus
from diloco.data.heldout import heldout_tokens
from diloco.data.sampler import Sampler
from diloco.data.settings import DataSettings
from diloco.data.token_writer import tokenize
from diloco.data.tokenizer import ByteTokenizer
from diloco.errors import ConfigurationError, DataError
from tests.data.streams import numbered


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    for number, document in enumerate(numbered(40, longest=200)):
        (tmp_path / "text" / f"{number:02}.txt").write_text(document)
    return tokenize(DataSettings(paths=(tmp_path / "text",), heldout_fraction=0.3), tmp_path / "tokens").path


def write_over(file: Path, place: int, token: int) -> None:
    tokens = np.fromfile(file, dtype="<u2")
    tokens[place] = token
    tokens.tofile(file)


def settings_of(folder: Path, tmp_path: Path, kind: str) -> DataSettings:
    if kind == "one":
        return DataSettings(paths=(folder,))
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    if kind == "two":
        return DataSettings(paths=(other, folder))
    return DataSettings(sources={"a": {"data": str(other)}, "b": {"data": str(folder)}})


@pytest.mark.parametrize("kind", ["one", "two", "mixture"])
def test_an_id_beyond_the_vocabulary_never_reaches_a_model(folder: Path, tmp_path: Path, kind: str) -> None:
    settings = settings_of(folder, tmp_path, kind)
    whole = build_corpus(settings)
    assert int(whole.train[:].max()) == 256, "the last id is one"
    write_over(folder / "train-00000.tokens", 77, 257)
    write_over(folder / "heldout-00000.tokens", -1, 65535)
    corpus = build_corpus(settings)
    sampler = Sampler(corpus.train, sequence_length=16, batch_size=4, replica=0, num_replicas=1, seed=0)
    drawn = (max(int(each.max()) for each in sampler.next_batch()) for _ in range(200))
    with pytest.raises(DataError, match="hold the id 257, and their vocabulary ends at 256: a file"):
        assert all(highest < 257 for highest in drawn)
    for heldout in (corpus.heldout, heldout_tokens(settings, ByteTokenizer())):
        with pytest.raises(DataError, match="hold the id 65535"):
            heldout[:]


def test_another_tokenizer_beside_the_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    bpe = DataSettings(paths=(tmp_path / "text",), heldout_fraction=0.3, tokenizer="bpe", bpe_vocab_size=270)
    other = tokenize(bpe, tmp_path / "bpe").path
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(other / name, folder / name)
    with pytest.raises(DataError, match=r"has 270 ids and ends documents with 0, but its tokens have 257"):
        build_corpus(DataSettings(paths=(folder,)))


def test_another_fraction_to_hold_out_is_not_passed_over(folder: Path, tmp_path: Path) -> None:
    """What is held out was settled when the folder was made."""
    with pytest.raises(
        ConfigurationError,
        match=r"tokens was made with a heldout_fraction of 0.3, so",
    ):
        build_corpus(DataSettings(paths=(folder,), heldout_fraction=0.5))
    whole = build_corpus(DataSettings(paths=(folder,)))
    same = build_corpus(DataSettings(paths=(folder,), heldout_fraction=0.3))
    assert same.heldout[:].tolist() == whole.heldout[:].tolist()
    sources = {"a": {"data": str(folder)}, "b": {"data": str(tmp_path / "text")}}
    assert build_corpus(DataSettings(sources=sources, heldout_fraction=0.5)).heldout_documents > whole.heldout_documents
