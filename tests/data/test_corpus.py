"""Training and held-out text is disjoint, stable and representative, and packed without padding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.data import Corpus, DataSettings, build_corpus, read_standard_library, split_documents
from diloco.errors import ConfigurationError, DataError


def numbered(count: int) -> list[str]:
    return [f"document {i}\n" for i in range(count)]


def corpus_of(folder: Path, documents: list[str], **settings: object) -> Corpus:
    folder.mkdir(exist_ok=True)
    for i, document in enumerate(documents):
        (folder / f"{i:05}.txt").write_text(document)
    return build_corpus(DataSettings(paths=(folder,), **settings))  # type: ignore[arg-type]  # varied by name


@settings(deadline=None)
@given(documents=st.lists(st.text(min_size=1)), more=st.lists(st.text(min_size=1)))
def test_the_split_is_disjoint_complete_and_stable_under_more_documents(documents: list[str], more: list[str]) -> None:
    documents += ["one", "five"]  # one per split, so that neither is empty
    train, heldout = split_documents(documents, 0.5)
    assert not set(train) & set(heldout)
    assert sorted(train + heldout) == sorted(documents)
    larger_train, larger_heldout = split_documents([*more, *documents], 0.5)
    assert larger_train[len(larger_train) - len(train) :] == train
    assert larger_heldout[len(larger_heldout) - len(heldout) :] == heldout


def test_copies_of_a_document_stand_on_one_side() -> None:
    documents = numbered(100) * 3
    train, heldout = split_documents(documents, 0.3)
    assert all(train.count(document) in (0, 3) for document in documents)
    assert all(heldout.count(document) in (0, 3) for document in documents)


@pytest.mark.parametrize("fraction", [0.02, 0.5, 0.9])
def test_about_the_fraction_is_held_out(fraction: float) -> None:
    documents = numbered(10_000)
    _, heldout = split_documents(documents, fraction)
    assert len(heldout) == pytest.approx(fraction * 10_000, abs=5 * (10_000 * fraction * (1 - fraction)) ** 0.5)


def test_a_larger_fraction_only_adds_to_the_heldout_documents() -> None:
    few, many = (set(split_documents(numbered(200), fraction)[1]) for fraction in (0.1, 0.2))
    assert few < many


@pytest.mark.parametrize(("fraction", "held_out"), [(1e-9, 0), (1 - 1e-9, 3)])
def test_an_empty_side_says_which_fractions_would_work(fraction: float, held_out: int) -> None:
    with pytest.raises(DataError, match=rf"holds out {held_out} of 3 documents.*Use a fraction between") as caught:
        split_documents(numbered(3), fraction)
    low, high = (float(word.rstrip(",")) for word in str(caught.value).split("between ")[1].split()[:3:2])
    train, heldout = split_documents(numbered(3), (low + high) / 2)
    assert train
    assert heldout


@pytest.mark.parametrize("documents", [[], ["one"], ["same", "same"]])
def test_fewer_than_two_different_documents_cannot_be_split(documents: list[str]) -> None:
    with pytest.raises(DataError, match=r"no two of them different.*data\.document_separator"):
        split_documents(documents, 0.5)


def test_a_sample_is_spread_over_all_documents_and_held_out_as_often() -> None:
    documents = numbered(5000)
    train, heldout = split_documents(documents, 0.2, max_documents=1000)
    everything = split_documents(documents, 0.2)
    assert len(train) + len(heldout) == 1000
    assert set(train) < set(everything[0])
    assert set(heldout) < set(everything[1])
    assert len(heldout) == pytest.approx(200, abs=5 * (1000 * 0.2 * 0.8) ** 0.5)
    places = sorted(documents.index(document) for document in train + heldout)
    assert np.mean(places) == pytest.approx(2500, abs=5 * 5000 / (12 * 1000) ** 0.5)
    order = [documents.index(document) for document in train]
    assert order == sorted(order)


def test_a_sample_takes_copies_no_further_than_asked() -> None:
    train, heldout = split_documents(["a", "b"] * 10, 0.5, max_documents=20)
    assert (len(train), len(heldout)) == (10, 10)
    train, heldout = split_documents(["a", "b"] * 10, 0.5, max_documents=11)
    assert len(train) + len(heldout) == 11


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_a_corpus_is_its_documents_each_followed_by_an_end(tmp_path: Path, tokenizer: str) -> None:
    documents = [*numbered(60), "é漢" * 500]
    corpus = corpus_of(tmp_path / "text", documents, tokenizer=tokenizer, heldout_fraction=0.2, bpe_vocab_size=264)
    train, heldout = split_documents(documents, 0.2)
    for tokens, texts in ((corpus.train, train), (corpus.heldout, heldout)):
        assert tokens.dtype == np.uint16
        ends = np.flatnonzero(tokens[:] == corpus.tokenizer.eos_id)
        assert ends[-1] == len(tokens) - 1
        assert [corpus.tokenizer.decode(part) for part in np.split(tokens[:], ends + 1)[:-1]] == texts
    assert (corpus.train_documents, corpus.heldout_documents) == (len(train), len(heldout))
    assert corpus.train_bytes == sum(len(text.encode()) for text in train)
    assert corpus.heldout_bytes == sum(len(text.encode()) for text in heldout)


def test_a_bpe_learns_from_training_documents_only(tmp_path: Path) -> None:
    """Held-out documents that differ from all others produce no merge."""
    train, heldout = split_documents(numbered(100), 0.2)
    _, unlike = split_documents(["zq" * n for n in range(100, 200)], 0.2)
    settings = {"tokenizer": "bpe", "bpe_vocab_size": 264, "heldout_fraction": 0.2}
    one = corpus_of(tmp_path / "one", [*train, *heldout], **settings)
    other = corpus_of(tmp_path / "other", [*train, *unlike], **settings)
    assert other.heldout_documents == len(unlike)
    assert np.array_equal(one.train[:], other.train[:])
    assert len(other.tokenizer.encode("zqzq")) == 4


def test_the_fingerprint_tells_corpora_apart(tmp_path: Path) -> None:
    documents = numbered(20)
    settings = {"heldout_fraction": 0.5}
    base = corpus_of(tmp_path / "base", documents, **settings)
    assert corpus_of(tmp_path / "same", documents, **settings).fingerprint == base.fingerprint
    others = {
        corpus_of(tmp_path / "order", documents[::-1], **settings).fingerprint,
        corpus_of(tmp_path / "more", [*documents, "more"], **settings).fingerprint,
        corpus_of(tmp_path / "split", documents, heldout_fraction=0.7).fingerprint,
        corpus_of(tmp_path / "bpe", documents, tokenizer="bpe", bpe_vocab_size=257, **settings).fingerprint,
    }
    assert len(others | {base.fingerprint}) == 5


def test_one_long_file_becomes_a_corpus_by_a_separator(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("\n\n".join(numbered(50)))
    with pytest.raises(DataError, match=r"data\.document_separator"):
        build_corpus(DataSettings(paths=(book,)))
    corpus = build_corpus(DataSettings(paths=(book,), document_separator="\n\n", heldout_fraction=0.2))
    assert corpus.train_documents + corpus.heldout_documents == 50


def test_the_standard_library_is_the_default_corpus() -> None:
    corpus = build_corpus(DataSettings())
    assert corpus.train_bytes + corpus.heldout_bytes == sum(len(text.encode()) for text in read_standard_library())
    assert corpus.train.dtype == np.uint16
    assert len(corpus.train) == corpus.train_bytes + corpus.train_documents
    small = build_corpus(DataSettings(max_documents=100, heldout_fraction=0.1))
    assert small.train_documents + small.heldout_documents == 100


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heldout_fraction": 0.0}, r"between 0 and 1, got 0\.0"),
        ({"heldout_fraction": 1.0}, r"between 0 and 1, got 1\.0"),
        ({"bpe_vocab_size": 256}, r"at least 257"),
        ({"max_documents": 1}, r"at least 2, got 1"),
        ({"document_separator": ""}, r"data\.document_separator"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DataSettings(**settings)  # type: ignore[arg-type]  # varied by name
