"""Sources that fail in the middle, and are there again afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from diloco.data.batches import Batch, Batches
from diloco.data.block_reader import BlockReader
from diloco.data.prefetch import Prefetcher
from diloco.data.stream import DocumentStream
from diloco.data.tokenizer import ByteTokenizer
from diloco.errors import DataError
from tests.data.streams import LENGTH, SIZE, lists, numbered

DOCUMENTS = numbered(40)


class Failing:
    """Fails once, at record ``at``."""

    size: int | None = None

    def __init__(self, at: int | None) -> None:
        self._at = at

    def records(self, start: int = 0) -> Iterator[str]:
        for number, document in enumerate(DOCUMENTS[start:], start):
            if number == self._at:
                self._at = None
                raise DataError("the connection is lost")
            yield document


def stream(at: int | None, replica: int = 0, replicas: int = 1) -> DocumentStream:
    reader = BlockReader(Failing(at), name="it", size=4, tokenizer=ByteTokenizer(), heldout_fraction=0.2, seed=0)
    return DocumentStream(
        [reader], [1.0], data="test", eos_id=256, sequence_length=LENGTH, batch_size=SIZE, replica=replica,
        num_replicas=replicas,
    )  # fmt: skip


def drawn(batches: Batches, count: int, *, once_more: Callable[[], None] = lambda: None) -> list[object]:
    """So many batches, and the number of failures at the end."""
    found: list[object] = []
    failures = 0
    while len(found) < count:
        try:
            batch: Batch = batches.next_batch()
        except DataError:
            failures += 1
            once_more()
            continue
        found.append(lists(batch))
    return [*found, failures]


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("at", [0, 1, 7, 22, 39])
def test_a_source_that_is_there_again_goes_on_where_it_was(at: int, replicas: int) -> None:
    """Where it failed is not where it ends."""
    count = 150 // replicas
    assert (
        drawn(stream(at, replicas - 1, replicas), count)[:-1] == drawn(stream(None, replicas - 1, replicas), count)[:-1]
    )


@pytest.mark.parametrize("at", [0, 22])
def test_also_where_it_was_read_ahead(at: int) -> None:
    ahead = Prefetcher(stream(at), 3)
    try:
        found = drawn(ahead, 100, once_more=lambda: ahead.load_state_dict(ahead.state_dict()))
    finally:
        ahead.close()
    assert found == [*drawn(stream(None), 100)[:-1], 1]
