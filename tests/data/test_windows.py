"""Windows: a permutation that reaches each of them once, and the held-out ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.data import heldout_batches, permute
from diloco.errors import ConfigurationError, DataError
from tests.data.numbered_windows import LENGTH, tokens_for, windows_of


@settings(deadline=None)
@given(size=st.integers(1, 2000), key=st.text(max_size=5))
def test_the_permutation_reaches_everything_once(size: int, key: str) -> None:
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


def test_the_permutation_tells_nothing_of_one_position_by_another() -> None:
    """Each pair goes to every other pair equally often; a few rounds suffice for single positions but not for pairs."""
    size, expected = 9, 20
    images = [permute(np.arange(size), size, str(key)) for key in range(expected * size * (size - 1))]
    freedom = size * (size - 1) - 1
    for one, other in ((0, 1), (0, 3), (4, 8)):  # in a square of 3 by 3: in one row, in one column, and in neither
        counts = np.zeros((size, size))
        for image in images:
            counts[image[one], image[other]] += 1
        chi_square = ((counts - expected) ** 2 / expected)[~np.eye(size, dtype=bool)].sum()
        assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5


@settings(deadline=None)
@given(windows=st.integers(1, 40), batch_size=st.integers(1, 7), most=st.integers(0, 50))
def test_heldout_windows_are_distinct_spread_and_always_the_same(windows: int, batch_size: int, most: int) -> None:
    tokens = tokens_for(windows, rest=1)
    batches = [windows_of(batch) for batch in heldout_batches(tokens, LENGTH, batch_size, most)]
    assert batches == [windows_of(batch) for batch in heldout_batches(tokens, LENGTH, batch_size, most)]
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert 1 <= len(batches[-1]) <= batch_size
    chosen = [window for batch in batches for window in batch]
    count = min(most, windows) if most else windows
    assert len(chosen) == count
    gaps = np.diff([*chosen, windows])
    assert gaps.min() >= 1
    assert gaps.max() - gaps.min() <= 1


def test_all_heldout_windows_make_every_token_a_target_once() -> None:
    tokens = tokens_for(10)
    targets = [t for _, batch in heldout_batches(tokens, LENGTH, 4, 0) for t in batch.flatten().tolist()]
    assert targets == tokens[1:].tolist()


def test_too_few_heldout_tokens_are_refused_at_once() -> None:
    with pytest.raises(DataError, match=r"only 3 held-out tokens, but one sequence of 3 needs 4"):
        heldout_batches(tokens_for(1)[:-1], LENGTH, 1, 0)
    with pytest.raises(ConfigurationError, match="An evaluation needs batch_size >= 1"):
        heldout_batches(tokens_for(1), LENGTH, 0, 0)
