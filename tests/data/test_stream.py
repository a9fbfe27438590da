"""Streams compared with plain Python: no document is read twice or left out, for any number of replicas."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.data import DocumentStream, permute
from diloco.errors import DataError
from tests.data.streams import lists, numbered, packed, stream, trained


def drawn(reader: DocumentStream, batches: int) -> list[int]:
    """Return the tokens that were targets."""
    return [token for _ in range(batches) for row in reader.next_batch()[1].tolist() for token in row]


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


def test_the_order_is_the_seeds() -> None:
    records = numbered(40)
    ways = [drawn(stream([records], 0, 1, seed=seed), 8) for seed in (0, 0, 1)]
    assert ways[0] == ways[1] != ways[2]
