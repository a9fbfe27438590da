"""Mixtures: exact shares of tokens, and every window once in each epoch of its source."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.data import CYCLE, Mixture, PackedTokens, Sampler, shares_of
from diloco.errors import ConfigurationError

LENGTH = 4


def mixed(**sources: tuple[int, float]) -> Mixture:
    """Return a mixture of sources; tokens encode their position, and their source by multiples of 100,000."""
    tokens = {
        name: PackedTokens([np.arange(n * 100_000, n * 100_000 + windows * LENGTH + 1, dtype=np.uint32)])
        for n, (name, (windows, _)) in enumerate(sources.items())
    }
    return Mixture(tokens, {name: weight for name, (_, weight) in sources.items()})


@settings(deadline=None)
@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_shares_add_up_and_are_as_close_as_they_can_be(weights: list[float]) -> None:
    named = {str(n): weight for n, weight in enumerate(weights)}
    try:
        shares = shares_of(named)
    except ConfigurationError:
        assert min(weights) / sum(weights) < 1 / CYCLE
        return
    assert sum(shares) == CYCLE
    for weight, share in zip(weights, shares, strict=True):
        assert abs(share - weight / sum(weights) * CYCLE) < 1


def test_every_window_is_drawn_once_in_each_epoch_of_its_source_and_shares_are_exact() -> None:
    """Two cycles, drawn by three replicas together and counted in plain Python."""
    mixture = mixed(a=(50, 3.0), b=(700, 1.0))
    replicas = [
        Sampler(mixture, sequence_length=LENGTH, batch_size=300, replica=m, num_replicas=3, seed=5) for m in range(3)
    ]
    order = [
        int(row[0]) for _ in range(2 * CYCLE // 900 + 1) for sampler in replicas for row in sampler.next_batch()[0]
    ]
    for cycle in range(2):
        some = order[cycle * CYCLE : (cycle + 1) * CYCLE]
        assert sum(begin < 100_000 for begin in some) == CYCLE * 3 // 4
    for first in (True, False):
        own = [begin for begin in order if (begin < 100_000) == first]
        size = 50 if first else 700
        epochs = [own[n : n + size] for n in range(0, len(own) - size, size)]
        assert all(len(set(epoch)) == size for epoch in epochs), "an epoch ends before the next begins"
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs), "each epoch must have another order"
    drawn = Counter(order[: 2 * CYCLE])
    a, b = ([n for begin, n in drawn.items() if (begin < 100_000) == first] for first in (True, False))
    assert (len(a), set(a)) == (50, {15_000 // 50})
    assert (len(b), set(b)) == (700, {5000 // 700, 5000 // 700 + 1})
    assert replicas[0].epochs == pytest.approx({"a": len(order) * 0.75 / 50, "b": len(order) * 0.25 / 700}, rel=1e-3)
