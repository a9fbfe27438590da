"""Streams compared with plain Python: no document is read twice or left out, for any number of replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.data import Batches, ByteTokenizer, DocumentStream, Prefetcher, permute
from diloco.errors import CheckpointError, ConfigurationError, DataError
from tests.data.streams import LENGTH, SIZE, lists, numbered, packed, stream, texts, trained

EOS = ByteTokenizer().eos_id


def drawn(reader: DocumentStream, batches: int) -> list[int]:
    """Return the tokens that were targets."""
    return [token for _ in range(batches) for row in reader.next_batch()[1].tolist() for token in row]


def in_order(records: list[str], epochs: int, *, replica: int = 0, replicas: int = 1, block: int = 3) -> list[str]:
    """Return what a replica reads by the definition in the module: its blocks, each shuffled."""
    blocks = -(-len(records) // block)
    found = []
    for number in range(replica, blocks * epochs, replicas):
        begin = number % blocks * block
        some = records[begin : begin + block]
        order = permute(np.arange(len(some)), len(some), f"seed 0, 0, block {number}")
        found += trained([some[place] for place in order])
    return found


@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_each_replica_packs_its_own_blocks_end_to_end(replicas: int, sized: bool) -> None:
    records = numbered(20)
    for replica in range(replicas):
        expected = packed(in_order(records, 6, replica=replica, replicas=replicas)).tolist()
        batches = len(expected) // (SIZE * LENGTH)
        reader = stream([records], replica, replicas, sized=sized)
        assert drawn(reader, batches) == expected[: batches * SIZE * LENGTH]


def test_rows_follow_one_another_and_begin_with_an_end() -> None:
    inputs, targets = lists(stream([numbered(20)], 0, 1).next_batch())
    assert inputs[0][0] == EOS, "the very first token must be predicted, too"
    assert inputs[1][0] == targets[0][-1]


CHANGES = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=40)
@given(
    changes=CHANGES,
    count=st.integers(9, 40),
    block=st.integers(1, 6),
    sized=st.booleans(),
    longest=st.sampled_from([2, 30, 90]),
)
def test_no_document_is_read_twice_or_left_out_whatever_replicas_come_and_go(
    changes: list[tuple[int, int]], count: int, block: int, sized: bool, longest: int
) -> None:
    """All tokens drawn by any replica and the rest make up each epoch exactly once."""
    records = [chr(33 + n) * (1 + n * 7 % longest) for n in range(count)]  # each document is one repeated letter
    once = Counter(packed(trained(records)).tolist())
    if not once:
        return
    counted: Counter[int] = Counter()
    readers: list[DocumentStream] = []
    for replicas, steps in changes:
        cursors = [reader.state_dict() for reader in readers]
        readers = [stream([records], m, replicas, sized=sized, block=block) for m in range(replicas)]
        for reader in readers:
            if cursors:
                reader.resume_from(cursors.__getitem__, len(cursors))
            try:
                counted.update(drawn(reader, steps))
            except DataError:  # a replica whose every block is held out
                return
    # One replica draws the rest of the epochs that were begun, as its cursor defines it.
    blocks = -(-count // block)
    left = left_of(readers, records, block=block, sized=sized)
    total = counted + left
    epochs = -(-max(reader.state_dict()["sources"][0]["next"] for reader in readers) // blocks)
    assert total == Counter({token: number * epochs for token, number in once.items()})


def left_of(readers: list[DocumentStream], records: list[str], *, block: int, sized: bool) -> Counter[int]:
    """Return, in plain Python, the tokens that cursors leave to draw in the epochs that were begun."""
    blocks = -(-len(records) // block)
    states = [reader.state_dict() for reader in readers]
    places = [state["sources"][0] for state in states]
    end = -(-max(place["next"] for place in places) // blocks) * blocks

    def documents(number: int) -> list[str]:
        begin = number % blocks * block
        some = records[begin : begin + block]
        order = permute(np.arange(len(some)), len(some), f"seed 0, 0, block {number}")
        return [some[place] if trained([some[place]]) else "" for place in order]

    left: Counter[int] = Counter()
    for state, place in zip(states, places, strict=True):
        for _, number, record, token in state["begun"]:
            left.update(packed([documents(number)[record]]).tolist()[token:])
        fresh = [(number, 0) for number in range(place["next"], end, place["stride"])]
        for number, first in [*map(tuple, place["returned"]), *fresh]:
            left.update(packed([text for text in documents(number)[first:] if text]).tolist())
    return left


def test_what_was_begun_goes_on_at_its_next_token() -> None:
    """Redistributing among the same number of replicas equals never stopping."""
    records = numbered(40, longest=60)
    whole, again = stream([records], 0, 1), stream([records], 0, 1)
    for _ in range(20):
        cursor = again.state_dict()
        again = stream([records], 0, 1)
        again.resume_from([cursor].__getitem__, 1)
        assert lists(whole.next_batch()) == lists(again.next_batch())


def test_weights_count_tokens_not_documents() -> None:
    """Long documents of one source and short ones of the other get equal shares, to within one document."""
    long = [f"<{n}>" + "a" * 90 for n in range(40)]
    short = [f"({n})" for n in range(200)]
    reader = stream([long, short], 0, 1, weights=[1.0, 3.0], sized=True)
    for _ in range(5):
        found = Counter("a" if "<" in text else "b" for text in texts(drawn(reader, 40)))
        places = reader.state_dict()["sources"]
        assert places[1]["tokens"] == pytest.approx(3 * places[0]["tokens"], abs=3 * 100)
        assert found["b"] > 10 * found["a"]
    assert reader.epochs["1"] > reader.epochs["0"] > 0, "each source must have its own epochs"


def test_the_order_is_the_seeds() -> None:
    records = numbered(40)
    ways = [drawn(stream([records], 0, 1, seed=seed), 8) for seed in (0, 0, 1)]
    assert ways[0] == ways[1] != ways[2]


class Failing:
    """A source that fails once, at record ``at``."""

    size: int | None = None

    def __init__(self, at: int | None) -> None:
        self._at = at

    def records(self, start: int = 0) -> Iterator[str]:
        for number, document in enumerate(numbered(40)[start:], start):
            if number == self._at:
                self._at = None
                raise DataError("the connection is lost")
            yield document


def drawn_from(batches: Batches, count: int, *, once_more: Callable[[], None] = lambda: None) -> list[object]:
    """Return the batches and the number of failures; a failure must not move the cursor."""
    found: list[object] = []
    failures = 0
    while len(found) < count:
        before = batches.state_dict()
        try:
            found.append(lists(batches.next_batch()))
        except DataError:
            failures += 1
            assert batches.state_dict() == before
            once_more()
    return [*found, failures]


def failing(at: int | None, replica: int = 0, replicas: int = 1) -> DocumentStream:
    return stream([Failing(at)], replica, replicas, block=4)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("at", [0, 1, 7, 22, 39])
def test_a_source_that_is_there_again_goes_on_where_it_was(at: int, replicas: int) -> None:
    """The point of failure must not be taken for the end."""
    broken, whole = (drawn_from(failing(each, replicas - 1, replicas), 150 // replicas)[:-1] for each in (at, None))
    assert broken == whole


@pytest.mark.parametrize("at", [0, 22])
def test_also_where_it_was_read_ahead(at: int) -> None:
    ahead = Prefetcher(failing(at), 3)
    try:
        found = drawn_from(ahead, 100, once_more=lambda: ahead.load_state_dict(ahead.state_dict()))
    finally:
        ahead.close()
    assert found == [*drawn_from(failing(None), 100)[:-1], 1]


def test_sources_without_documents_are_told() -> None:
    with pytest.raises(DataError, match="has no documents"):
        stream([[]], 0, 1).next_batch()
    with pytest.raises(DataError, match="no documents to train on"):
        stream([["", ""]], 0, 1).next_batch()


def test_nobody_joins_a_stream() -> None:
    reader = stream([numbered(9)], 0, 1)
    with pytest.raises(ConfigurationError, match="streams its data"):
        reader.join_at(4, "")


@pytest.mark.parametrize(
    "change",
    [
        {"begun": [[0, 0, 0]]},
        {"begun": [[9, 0, 0, 0]]},
        {"begun": [[0, -1, 0, 0]]},
        {"sources": []},
        {"sources": [{"next": 0, "stride": 0, "tokens": 0, "blocks": None, "returned": []}]},
        {"sources": [{"next": 0, "stride": 1, "tokens": 0, "blocks": None, "returned": [[1]]}]},
        {"drawn": True},
    ],
)
def test_a_malformed_cursor_is_refused(change: dict[str, object]) -> None:
    reader = stream([numbered(9)], 0, 1)
    with pytest.raises(CheckpointError, match="malformed"):
        reader.load_state_dict({**reader.state_dict(), **change})


def test_a_cursor_of_another_number_of_replicas_is_refused() -> None:
    with pytest.raises(CheckpointError, match="of 2 replicas, not of 1"):
        stream([numbered(9)], 0, 1).load_state_dict(stream([numbered(9)], 0, 2).state_dict())
