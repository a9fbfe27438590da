"""Corpora: the split is disjoint and stable, tokens are the documents, a folder of tokens is the same as its text."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco.cli import main
from diloco.data import (
    ByteTokenizer,
    DataSettings,
    Sampler,
    build_corpus,
    heldout_data,
    load_tokenizer,
    survey,
    tokenize,
)
from diloco.errors import ConfigurationError, DataError
from tests.cli.runs import full_disk
from tests.finetuning import write_records
from tests.runs import numbered


def split(documents: list[str], fraction: float) -> tuple[list[str], list[str]]:
    """Return what to train on of each document and what is held out."""
    chosen = survey(documents, fraction).split
    return list(chosen.training(documents)), list(chosen.heldout(documents))


def at(*paths: Path, **settings: Any) -> DataSettings:
    return DataSettings(paths=tuple(map(str, paths)), **settings)


def of(*paths: Path, **settings: Any) -> DataSettings:
    return at(*paths, heldout_fraction=0.2, **settings)


def write(path: Path, texts: list[str]) -> Path:
    return write_records(path, [{"text": text} for text in texts])


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:264"])
def test_a_corpus_is_its_documents_each_followed_by_an_end(tmp_path: Path, tokenizer: str) -> None:
    documents = [*numbered(60), "é漢" * 500]
    corpus = build_corpus(of(write(tmp_path / "a.jsonl", documents), tokenizer=tokenizer))
    for tokens, texts in zip((corpus.train, corpus.heldout), split(documents, 0.2), strict=True):
        assert tokens.dtype == np.uint16
        assert (tokens.documents, tokens.num_bytes) == (len(texts), sum(len(text.encode()) for text in texts))
        ends = np.flatnonzero(tokens[:] == corpus.tokenizer.eos_id)
        assert ends[-1] == len(tokens) - 1
        assert [corpus.tokenizer.decode(part) for part in np.split(tokens[:], ends + 1)[:-1]] == texts


def test_a_bpe_learns_from_training_documents_only(tmp_path: Path) -> None:
    """Held-out documents that differ from all others produce no merge."""
    train, heldout = split(numbered(100), 0.2)
    _, unlike = split(["zq" * n for n in range(100, 200)], 0.2)
    one, other = (
        build_corpus(of(write(tmp_path / f"{len(side)}.jsonl", [*train, *side]), tokenizer="bpe:264"))
        for side in (heldout, unlike)
    )
    assert np.array_equal(one.train[:], other.train[:])
    assert len(other.tokenizer.encode("zqzq")) == 4


def test_the_fingerprint_tells_corpora_apart(tmp_path: Path) -> None:
    documents, half = numbered(20), {"heldout_fraction": 0.5}
    variants = [(documents, half), (documents, {"heldout_fraction": 0.7}), (documents, half | {"tokenizer": "bpe:257"})]
    variants += [(each, half) for each in (documents[::-1], [*documents, "more"], documents)]
    files = [write(tmp_path / f"{number}.jsonl", texts) for number, (texts, _) in enumerate(variants)]
    prints = [build_corpus(at(file, **how)).fingerprint for file, (_, how) in zip(files, variants, strict=True)]
    assert prints[-1] == prints[0]
    assert len(set(prints)) == 5


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [*numbered(300, longest=200), "ünï☃", "<|endoftext|> is text"]
    return write(tmp_path_factory.mktemp("text") / "text.jsonl", texts)


@pytest.fixture(scope="module")
def folder(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenize(of(text), tmp_path_factory.mktemp("tokens") / "tokens").path


@pytest.fixture(scope="module")
def bpe(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenize(of(text, tokenizer="bpe:270"), tmp_path_factory.mktemp("bpe") / "tokens").path


@pytest.fixture
def mine(folder: Path, tmp_path: Path) -> Path:
    """A copy of the folder to damage."""
    return Path(shutil.copytree(folder, tmp_path / "mine"))


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:270"])
def test_a_folder_is_the_corpus_that_it_was_made_of(text: Path, folder: Path, bpe: Path, tokenizer: str) -> None:
    place, settings = folder if tokenizer == "bytes" else bpe, of(text, tokenizer=tokenizer)
    expected, corpus = build_corpus(settings), build_corpus(at(place))
    assert corpus.train[:].tolist() == expected.train[:].tolist()
    assert corpus.heldout[:].tolist() == expected.heldout[:].tolist()
    assert corpus.fingerprint == expected.fingerprint
    assert corpus.facts == {**expected.facts, "data": f"{expected.facts['data']}, in files"}
    assert corpus.tokenizer.to_json() == expected.tokenizer.to_json()
    for each in (settings, at(place)):
        assert heldout_data(each, expected.tokenizer, 16)[:].tolist() == expected.heldout[:].tolist()


def test_folders_one_after_the_other(folder: Path, tmp_path: Path) -> None:
    other = tokenize(of(write(tmp_path / "other.jsonl", numbered(90, prefix="o"))), tmp_path / "other").path
    one, two, both, twice = (
        build_corpus(at(*each)) for each in ((folder,), (other,), (folder, other), (folder, folder))
    )
    assert both.train[:].tolist() == [*one.train[:].tolist(), *two.train[:].tolist()]
    assert both.fingerprint not in (one.fingerprint, two.fingerprint)
    assert twice.train[:].tolist() == 2 * one.train[:].tolist()


def change(folder: Path, **members: object) -> None:
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | members))


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: tuple[tuple[Callable[[Path], object], str], ...] = (
    (lambda path: (path / "train-00000.tokens").unlink(), "No such file.*train-00000.tokens"),
    (lambda path: (path / "train-00000.tokens").write_bytes(b"x"), "train-00000.tokens has 1 bytes, but"),
    (lambda path: change(path, format_version=9), "version 9, but diloco"),
    (lambda path: change(path, train=None), "cannot be read"),
    (lambda path: change(path, vocab_size=float("inf")), "cannot be read"),
    (lambda path: change(path, made=3), "cannot be read"),
    (lambda path: make_fifo(path / "manifest.json"), "holds no files to read"),
    (lambda path: make_fifo(path / "heldout-00000.bytes"), "not a regular file"),
)


@pytest.mark.parametrize(("damage", "words"), DAMAGES, ids=[str(n) for n in range(len(DAMAGES))])
def test_what_is_not_whole_is_refused(mine: Path, damage: Callable[[Path], object], words: str) -> None:
    damage(mine)
    with pytest.raises(DataError, match=words):
        build_corpus(at(mine))


def test_settings_that_tokens_cannot_follow_are_refused(text: Path, folder: Path, bpe: Path, tmp_path: Path) -> None:
    for refused, words in (
        (at(folder, text), "which can't be mixed"),
        (at(folder, bpe), "was made with another tokenizer than"),
        (at(folder, tokenizer="bpe"), "was made with another one"),
        (at(folder, tokenizer=str(bpe)), "was made with another one"),
        (at(folder, heldout_fraction=0.3), "was made with a heldout_fraction of 0.2"),
        (at(folder, streaming=True), "can't be streamed"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            build_corpus(refused)
    assert build_corpus(at(bpe, tokenizer=str(bpe))).tokenizer.vocab_size == 270
    with pytest.raises(ConfigurationError, match="was made with another tokenizer than that of the run"):
        heldout_data(at(folder), load_tokenizer(bpe), 16)  # the folder was made anew after the run
    with pytest.raises(ConfigurationError, match="already contains tokens"):
        tokenize(at(folder), tmp_path / "again")


@pytest.mark.parametrize("kind", ["one", "two"])
def test_an_id_beyond_the_vocabulary_never_reaches_a_model(folder: Path, mine: Path, kind: str) -> None:
    settings = at(mine) if kind == "one" else at(folder, mine)
    assert int(build_corpus(settings).train[:].max()) == 256, "the last id must be valid"
    for name, place, token in (("train", 77, 257), ("heldout", -1, 65535)):
        np.memmap(mine / f"{name}-00000.tokens", dtype="<u2", mode="r+")[place] = token
    corpus = build_corpus(settings)
    sampler = Sampler(corpus.train, sequence_length=16, batch_size=16, replica=0, num_replicas=1, seed=0)
    drawn = (max(int(each.max()) for each in sampler.next_batch()) for _ in range(200))
    with pytest.raises(DataError, match="contain the id 257, but their vocabulary ends at 256: one of their files"):
        assert all(highest < 257 for highest in drawn)
    for heldout in (corpus.heldout, heldout_data(settings, ByteTokenizer(), 16)):
        with pytest.raises(DataError, match="contain the id 65535"):
            heldout[:]


def test_another_tokenizer_beside_the_tokens_is_refused(mine: Path, bpe: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bpe / name, mine / name)
    with pytest.raises(DataError, match=r"has vocab_size = 257 and the tokenizer.json in it has vocab_size = 270"):
        build_corpus(at(mine))


def test_a_full_disk_is_told_and_nothing_is_left(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"tokenize --data {text} --data.heldout-fraction 0.2 --out {tmp_path / 'new' / 'tokens'}"
    with full_disk():
        assert main(flags.split()) == 1
    assert "can't be written: [Errno 27] File too large. Give a writable path" in capsys.readouterr().err
    assert not any((tmp_path / "new").iterdir())
