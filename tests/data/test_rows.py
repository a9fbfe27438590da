"""Whole examples in rows, and which of their tokens count."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.data import Example, PackedRows, Sampler, heldout_batches, pack_rows
from diloco.model import ENDS, document_numbers

LENGTH = 12
sizes = st.lists(st.integers(2, LENGTH), min_size=1, max_size=30)


def examples_of(sizes: list[int]) -> list[Example]:
    """Return examples whose tokens all differ; the first half of each is a prompt."""
    ends = np.cumsum([0, *sizes])
    made = []
    for begin, size in zip(ends[:-1].tolist(), sizes, strict=True):
        made.append(Example(np.arange(begin, begin + size) + 1, np.arange(size) >= max(1, size // 2)))
    return made


@settings(max_examples=30)
@given(sizes)
def test_rows_hold_everything_once_and_none_is_overfull(sizes: list[int]) -> None:
    rows = pack_rows(sizes, LENGTH)
    assert sorted(number for row in rows for number in row) == list(range(len(sizes)))
    assert all(sum(sizes[number] for number in row) <= LENGTH for row in rows)
    # best fit: no two rows would fit into one
    assert sum(sum(sizes[n] for n in row) <= LENGTH // 2 for row in rows) <= 1


@settings(max_examples=30)
@given(sizes, st.booleans())
def test_each_token_that_counts_is_a_target_once_behind_its_own_example(sizes: list[int], together: bool) -> None:
    examples = examples_of(sizes)
    rows = PackedRows(examples, LENGTH, padding=0, together=together)
    seen: list[int] = []
    for inputs, targets in heldout_batches(rows, LENGTH, 4, 0):
        seen += targets[targets >= 0].tolist()
        # a target follows the token before it in its own example
        assert bool((inputs[targets >= 0] + 1 == targets[targets >= 0]).all())
    assert sorted(seen) == sorted(t for e in examples for t in e.tokens[e.counted].tolist())
    assert rows.counted_tokens == len(seen)


@settings(max_examples=30)
@given(sizes)
def test_the_marks_tell_the_examples_of_a_row_apart(sizes: list[int]) -> None:
    rows = PackedRows(examples_of(sizes), LENGTH, padding=0)
    number_of = {int(token): n for n, each in enumerate(examples_of(sizes)) for token in each.tokens}
    for inputs, targets in heldout_batches(rows, LENGTH, 1, 0):
        documents = document_numbers(targets, ENDS)[0].tolist()
        belongs = [number_of.get(token, -1) for token in inputs[0].tolist()]
        pairs = set(zip(documents, belongs, strict=True))
        assert len(pairs) == len({d for d, _ in pairs}) == len({b for _, b in pairs})


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(2, LENGTH), min_size=24, max_size=40), resumed_at=st.integers(0, 3))
def test_replicas_share_the_rows_out_and_a_cursor_goes_on_where_it_was(sizes: list[int], resumed_at: int) -> None:
    rows = PackedRows(examples_of(sizes), LENGTH, padding=0, together=False)

    def sampler(replica: int) -> Sampler:
        return Sampler(rows, sequence_length=LENGTH, batch_size=2, replica=replica, num_replicas=2, seed=3)

    drawn: list[int] = []
    for replica in (0, 1):
        draws, other = sampler(replica), sampler(replica)
        for step in range(len(sizes) // 4):
            if step == resumed_at:
                other.load_state_dict(draws.state_dict())
                draws = other
            drawn += draws.next_batch()[0][:, 0].tolist()
    assert len(drawn) == len(set(drawn)) == len(sizes) // 4 * 4


def test_what_counts_and_the_length_are_part_of_the_digest() -> None:
    one, other = examples_of([4, 6]), examples_of([4, 6])
    other[0].counted[:] = [False, True, True, True]
    digests = [PackedRows(each, LENGTH, padding=0).digest for each in (one, other)]
    digests += [PackedRows(one, LENGTH, padding=0, together=False).digest, PackedRows(one, 10, padding=0).digest]
    assert len(set(digests)) == 4
    assert PackedRows(examples_of([4, 6]), LENGTH, padding=0).digest == digests[0]
