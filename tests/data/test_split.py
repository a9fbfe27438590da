"""What is held out: whole documents by their hash, or the end of one if these are too little; never text of the other
side, and nothing depends on the order."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.data import ByteTokenizer, DataSettings, Split, build_corpus, heldout_data, survey, tokenize
from diloco.errors import DataError
from tests.finetuning import write_records
from tests.runs import numbered

FRACTION = DataSettings.heldout_fraction


def sides(documents: list[str], fraction: float = FRACTION) -> tuple[list[str], list[str]]:
    split = survey(documents, fraction).split
    return list(split.training(documents)), list(split.heldout(documents))


def in_bytes(texts: list[str]) -> int:
    return sum(len(text.encode()) for text in texts)


@settings(deadline=None)
@given(st.lists(st.text(min_size=1), min_size=1), st.sampled_from([1e-9, 0.02, 0.5, 1 - 1e-9]), st.randoms())
def test_every_character_is_on_one_side_whatever_the_order_and_copies_are_alike(
    documents: list[str], fraction: float, random: object
) -> None:
    split = survey(documents, fraction).split
    for text in documents:
        train, heldout = split.parts(text)
        assert train + heldout == text
    assert survey(documents[::-1], fraction).split == split


def text_of(name: str, words: int) -> str:
    return " ".join(f"{name}.{word}" for word in range(words))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 20, 22, 60, 200])
@pytest.mark.parametrize("copies", [1, 3])
def test_any_number_of_documents_gives_about_the_share_that_was_asked_for(count: int, copies: int) -> None:
    for prefix in "abcdefgh":  # other hashes
        documents = [text_of(f"{prefix}{number}", 200 + 37 * number % 400) for number in range(count)] * copies
        train, heldout = sides(documents)
        assert in_bytes(train) + in_bytes(heldout) == in_bytes(documents)
        assert heldout
        assert train
        share = in_bytes(heldout) / in_bytes(documents)
        whole = {*train, *heldout} <= {*documents}
        assert whole or FRACTION * 0.9 <= share <= FRACTION * 1.1
        assert share >= FRACTION / 10
        for text in heldout:  # or the end of a document, of which every copy lacks it
            assert not any(text.split()[-1] in each.split() for each in train)


def test_the_hash_alone_decides_where_it_suffices() -> None:
    """It is that of earlier versions: a golden value."""
    documents = numbered(2000, longest=200)
    assert survey(documents, FRACTION).split == Split(FRACTION)
    train, heldout = sides(documents)
    assert (len(train), [text.partition(":")[0] for text in heldout[:6]]) == GOLDEN
    assert sides([*documents, "more"])[1] == heldout, "adding documents moves no other one"


GOLDEN = (1956, ["<85", "<100", "<182", "<277", "<293", "<303"])


def test_a_large_document_that_the_hash_holds_out_does_not_leave_crumbs_to_train_on() -> None:
    book = next(text for number in range(999) if sides([text := f"{number} " * 9000, "x" * 9000])[0] == ["x" * 9000])
    train, heldout = sides([book, "a note"])
    assert in_bytes(heldout) <= FRACTION * in_bytes([book, "a note"])
    assert "a note" in train


@pytest.mark.parametrize("streaming", [False, True])
def test_a_book_in_one_file_is_a_corpus(tmp_path: Path, streaming: bool) -> None:
    book = "".join(f"In line {number} of the book, é.\n" for number in range(3000))
    (tmp_path / "book.txt").write_text(book)
    settings = DataSettings(paths=(str(tmp_path / "book.txt"),), streaming=streaming)
    corpus = build_corpus(settings)
    assert corpus.evaluates
    heldout = corpus.tokenizer.decode(corpus.heldout[:])
    assert book.endswith(heldout)
    assert corpus.facts["held out"].startswith("1 document, 1.8 kB, 1,778 tokens")
    assert heldout_data(settings, ByteTokenizer(), 16)[:].tolist() == corpus.heldout[:].tolist()
    if not streaming:
        assert corpus.tokenizer.decode(corpus.train[:]) + heldout == book
        folder = tokenize(settings, tmp_path / "tokens").path
        assert build_corpus(DataSettings(paths=(str(folder),))).fingerprint == corpus.fingerprint


def test_a_bpe_does_not_see_the_end_that_is_held_out(tmp_path: Path) -> None:
    corpora = []
    for end in ("zq" * 400, "qz" * 400):
        (tmp_path / "book.txt").write_text("the cat sat on the mat, " * 2000 + end)
        corpora.append(build_corpus(DataSettings(paths=(str(tmp_path / "book.txt"),), tokenizer="bpe:262")))
    assert corpora[0].tokenizer.to_json() == corpora[1].tokenizer.to_json()


def test_a_few_bytes_are_trained_on_whole_and_evaluating_them_is_refused(tmp_path: Path) -> None:
    settings = DataSettings(paths=(str(write_records(tmp_path / "a.jsonl", [{"text": "tiny"}])),))
    corpus = build_corpus(settings)
    assert (len(corpus.train), len(corpus.heldout), corpus.evaluates) == (5, 0, False)
    folder = tokenize(settings, tmp_path / "tokens").path
    assert len(build_corpus(DataSettings(paths=(str(folder),))).heldout) == 0
    with pytest.raises(DataError, match="holds no text"):
        build_corpus(DataSettings(paths=(str(write_records(tmp_path / "b.jsonl", [{"text": ""}])),)))
