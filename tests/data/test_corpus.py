"""Training and held-out text is disjoint and stable, and packed without padding."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.data import Corpus, DataSettings, build_corpus
from diloco.errors import DataError
from tests.data.streams import numbered, split


def corpus_of(folder: Path, documents: list[str], **settings: object) -> Corpus:
    folder.mkdir(exist_ok=True)
    for i, document in enumerate(documents):
        (folder / f"{i:05}.txt").write_text(document)
    return build_corpus(DataSettings(paths=(str(folder),), **settings))  # type: ignore[arg-type]  # varied by name


@settings(deadline=None)
@given(documents=st.lists(st.text(min_size=1)), more=st.lists(st.text(min_size=1)))
def test_the_split_is_disjoint_complete_and_stable_under_more_documents(documents: list[str], more: list[str]) -> None:
    documents += ["one", "five"]  # one per split, so that neither is empty
    train, heldout = split(documents, 0.5)
    assert not set(train) & set(heldout)
    assert sorted(train + heldout) == sorted(documents)
    for larger, side in zip(split([*more, *documents], 0.5), (train, heldout), strict=True):
        assert larger[len(larger) - len(side) :] == side


@pytest.mark.parametrize(("fraction", "held_out"), [(1e-9, 0), (1 - 1e-9, 3)])
def test_an_empty_side_says_which_fractions_would_work(fraction: float, held_out: int) -> None:
    with pytest.raises(DataError, match=rf"holds out {held_out} of 3 documents.*Use a fraction between") as caught:
        split(numbered(3), fraction)
    low, high = (float(word.rstrip(",")) for word in str(caught.value).split("between ")[1].split()[:3:2])
    assert all(split(numbered(3), (low + high) / 2))


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:264"])
def test_a_corpus_is_its_documents_each_followed_by_an_end(tmp_path: Path, tokenizer: str) -> None:
    documents = [*numbered(60), "é漢" * 500]
    corpus = corpus_of(tmp_path / "text", documents, tokenizer=tokenizer, heldout_fraction=0.2)
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
    settings = {"tokenizer": "bpe:264", "heldout_fraction": 0.2}
    one = corpus_of(tmp_path / "one", [*train, *heldout], **settings)
    other = corpus_of(tmp_path / "other", [*train, *unlike], **settings)
    assert np.array_equal(one.train[:], other.train[:])
    assert len(other.tokenizer.encode("zqzq")) == 4


def test_the_fingerprint_tells_corpora_apart(tmp_path: Path) -> None:
    documents = numbered(20)
    changes = ({}, {"heldout_fraction": 0.7}, {"tokenizer": "bpe:257"})
    variants = [(documents, {"heldout_fraction": 0.5, **change}) for change in changes]
    variants += [(each, {"heldout_fraction": 0.5}) for each in (documents[::-1], [*documents, "more"], documents)]
    prints = [corpus_of(tmp_path / str(n), texts, **how).fingerprint for n, (texts, how) in enumerate(variants)]
    assert prints[-1] == prints[0]
    assert len(set(prints)) == 5
