"""Streams: documents are dealt by chance in equal numbers, each to one replica in an epoch, whatever order and files
they come in."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.data import Batches, DataSettings, build_corpus, deal
from diloco.errors import DataError
from tests.lazy import Lazy

datasets = Lazy("datasets")


@given(st.integers(1, 9), st.integers(0, 50), st.integers(0, 200), st.integers(0, 200))
def test_documents_are_dealt_in_equal_numbers_from_anywhere_on(
    num_replicas: int, first: int, count: int, more: int
) -> None:
    dealt = deal(first, count + more, num_replicas, "key")
    assert dealt.tolist() == [*deal(first, count, num_replicas, "key"), *deal(first + count, more, num_replicas, "key")]
    counts = np.bincount(deal(0, count, num_replicas, "key"), minlength=num_replicas)
    assert counts.max() - counts.min() <= 1


def test_the_order_of_every_run_is_another() -> None:
    for num_replicas in (2, 3, 5, 8):
        orders = Counter(map(tuple, deal(0, 4000 * num_replicas, num_replicas, "key").reshape(-1, num_replicas)))
        first = Counter(order[0] for order in orders.elements())
        assert max(first.values()) < 1.2 * 4000 / num_replicas


def of_kinds(kinds: str, count: int) -> list[str]:
    """Return documents whose kinds repeat in this order."""
    return [f"<{kinds[number % len(kinds)]}{number:05d}{'x' * 20}>" for number in range(count)]


def write(path: Path, texts: Sequence[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def epoch_of(batches: Batches) -> list[str]:
    """Return the documents that a replica draws in its first epoch."""
    tokens: list[int] = []
    while True:
        targets = batches.next_batch()[1].flatten().tolist()
        if batches.epochs:
            break
        tokens += targets
    batches.close()
    return bytes(token if token < 256 else 10 for token in tokens).decode(errors="replace").split("\n")


def drawn(data: str, num_replicas: int) -> tuple[list[set[str]], set[str]]:
    """Return the whole documents that each replica draws in the first epoch of a stream, and those held out."""
    corpus = build_corpus(DataSettings(paths=(data,), streaming=True))
    heldout = {*corpus.tokenizer.decode(corpus.heldout[:]).replace("><", ">\n<").split("\n")}
    drawing = {"sequence_length": 16, "batch_size": 1, "num_replicas": num_replicas, "seed": 0}
    each = [epoch_of(corpus.batches(replica=replica, **drawing)) for replica in range(num_replicas)]
    return [{text for text in texts if text.endswith(">")} for texts in each], heldout


@pytest.mark.parametrize("kinds", ["AB", "AAB", "ABCD", "A" * 30 + "B" * 30])
@pytest.mark.parametrize("num_replicas", [2, 3, 4])
def test_each_replica_gets_every_kind_of_an_order_with_a_period(tmp_path: Path, kinds: str, num_replicas: int) -> None:
    texts = of_kinds(kinds, 600)
    each, heldout = drawn(str(write(tmp_path / "a.jsonl", texts)), num_replicas)
    assert sum(map(len, each)) == len(set[str]().union(*each)) >= 600 - len(heldout) - 6 * num_replicas, "each once"
    assert not heldout & set[str]().union(*each)
    for texts_of_one in each:
        for kind in set(kinds):
            share = sum(text[1] == kind for text in texts_of_one) / len(texts_of_one)
            assert share == pytest.approx(kinds.count(kind) / len(kinds), abs=0.12)


@pytest.mark.parametrize("kind", ["files", "saved", "parquet"])
def test_files_of_unequal_length_are_shared_like_one(tmp_path: Path, kind: str) -> None:
    texts = of_kinds("A", 600)
    parts = [texts[:30], texts[30:]]
    data = str(tmp_path / "data")
    if kind == "files":
        for number, part in enumerate(parts):
            write(tmp_path / "data" / f"{number}.jsonl", part)
    elif kind == "saved":
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(data, num_shards=2)
        data = f"hf:{data}"
    else:
        (tmp_path / "data").mkdir()
        for number, part in enumerate(parts):
            datasets.Dataset.from_dict({"text": part}).to_parquet(f"{data}/train-{number}.parquet")
        data = f"hf:{data}"
    each, _ = drawn(data, 2)
    assert not each[0] & each[1]
    assert abs(len(each[0]) - len(each[1])) <= 12


def test_a_book_is_dealt_in_pieces_and_a_replica_without_a_document_goes_on_to_the_next_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    book = tmp_path / "book.txt"
    book.write_text("".join(f"{number:07d}\n" for number in range(60_000)))
    corpus = build_corpus(DataSettings(paths=(str(book),), streaming=True))
    drawing = {"sequence_length": 64, "batch_size": 4, "num_replicas": 2, "seed": 0}
    each = [{*epoch_of(corpus.batches(replica=replica, **drawing))} for replica in range(2)]
    lines = [{line for line in lines if len(line) == 7} for lines in each]
    assert not lines[0] & lines[1]
    assert len(lines[0] | lines[1]) > 58_000, "all but the held-out ones and a batch"
    book.write_text("a short one, " * 200)
    corpus = build_corpus(DataSettings(paths=(str(book),), streaming=True))
    for replica in range(2):
        batches = corpus.batches(replica=replica, **drawing)
        for _ in range(20):
            batches.next_batch()
        batches.close()
    assert "The 1 document to train on can't be divided evenly: of the first epoch, the 2 replicas get 0" in caplog.text


def test_a_source_without_a_document_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no text"):
        build_corpus(DataSettings(paths=(str(write(tmp_path / "a.jsonl", ["", ""])),), streaming=True))
