"""Streams compared with plain Python: no token is drawn twice in an epoch, and none left out while nothing changes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.data import DocumentStream
from diloco.errors import DataError
from tests.data.streams import packed, stream, trained


def drawn(reader: DocumentStream, batches: int) -> list[int]:
    """Return the tokens that were targets."""
    return [token for _ in range(batches) for row in reader.next_batch()[1].tolist() for token in row]


CHANGES = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=6)
LONGEST = st.sampled_from([2, 30, 90])


@settings(deadline=None, max_examples=40)
@given(changes=CHANGES, count=st.integers(9, 40), block=st.integers(1, 6), longest=LONGEST)
def test_no_document_is_read_twice_in_an_epoch_whatever_replicas_come_and_go(
    changes: list[tuple[int, int]], count: int, block: int, longest: int
) -> None:
    records = [chr(33 + n) * (1 + n * 7 % longest) for n in range(count)]  # each document is one repeated letter
    once = Counter(packed(trained(records)).tolist())
    if not once:
        return
    counted: Counter[int] = Counter()
    readers: list[DocumentStream] = []
    for replicas, steps in changes:
        cursors = [reader.state_dict() for reader in readers]
        readers = [stream([records], m, replicas, block=block) for m in range(replicas)]
        for reader in readers:
            if cursors:
                reader.resume_from(cursors.__getitem__, len(cursors))
            try:
                counted.update(drawn(reader, steps))
            except DataError:  # a replica whose every block is held out
                return
    blocks = -(-count // block)
    epochs = -(-max(reader.state_dict()["sources"][0]["block"] + 1 for reader in readers) // blocks)
    assert all(number <= once[token] * epochs for token, number in counted.items())


@settings(deadline=None, max_examples=40)
@given(replicas=st.integers(1, 4), count=st.integers(9, 40), block=st.integers(1, 6), longest=LONGEST)
def test_replicas_divide_all_documents_among_themselves(replicas: int, count: int, block: int, longest: int) -> None:
    records = [chr(33 + n) * (1 + n * 7 % longest) for n in range(count)]
    blocks = -(-count // block)
    counted: Counter[int] = Counter()
    for m in range(replicas):
        own = [records[n * block : (n + 1) * block] for n in range(m, blocks, replicas)]
        size = sum(len(packed(trained(each))) for each in own)
        if size:
            counted.update(drawn(stream([records], m, replicas, block=block), -(-size // 16))[:size])
    assert counted == Counter(packed(trained(records)).tolist())


def test_a_document_that_was_begun_and_is_gone_is_told() -> None:
    records = ["x" * 50] * 6 + ["y"]
    reader = stream([records], 0, 1, block=2)
    reader.next_batch()
    after = stream([["z"] * 6], 0, 1, block=2)
    after.load_state_dict(reader.state_dict())
    with pytest.raises(DataError, match="has changed: there is no document at the saved position"):
        after.next_batch()
