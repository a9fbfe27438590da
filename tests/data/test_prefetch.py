"""Prefetching: bounded, with errors in the right place and a clean end. test_batches compares the batches."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from diloco.data import Assignment, Prefetcher, Sampler
from diloco.errors import ConfigurationError, DataError
from tests.data.streams import lists


class Counted:
    """Batches that are numbers, recorded with the thread that made each."""

    order = ""

    def __init__(self, fails_at: int = -1) -> None:
        self.epochs: dict[str, float] = {}
        self.number = 0
        self.fails_at = fails_at
        self.threads: list[str] = []
        self.closed = False
        self.made = threading.Condition()

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.number == self.fails_at:
            raise DataError("no more")
        with self.made:
            self.threads.append(threading.current_thread().name)
            self.number += 1
            self.made.notify_all()
        return torch.tensor([self.number]), torch.tensor([self.number])

    def skip_batch(self) -> None:
        self.number += 1

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: Any) -> None:
        self.number = state["number"]

    def close(self) -> None:
        self.closed = True


def test_so_many_are_made_ahead_and_no_more() -> None:
    inner = Counted()
    batches = Prefetcher(inner, 3, "maker")  # type: ignore[arg-type]  # all that is used
    assert inner.number == 0, "no batch may be made before the first request"
    assert int(batches.next_batch()[0]) == 1
    with inner.made:
        # one returned, three in the queue, and one held by the thread
        assert inner.made.wait_for(lambda: inner.number == 5, timeout=10)
        assert not inner.made.wait_for(lambda: inner.number > 5, timeout=0.05)
    assert set(inner.threads) == {"maker"}
    assert batches.state_dict() == {"number": 1}
    batches.close()
    assert inner.closed
    assert "maker" not in [thread.name for thread in threading.enumerate()]


def test_an_error_comes_where_its_batch_would_and_again() -> None:
    inner = Counted(fails_at=2)
    batches = Prefetcher(inner, 4)  # type: ignore[arg-type]  # all that is used
    assert [int(batches.next_batch()[0]) for _ in range(2)] == [1, 2]
    for _ in range(2):
        with pytest.raises(DataError, match="no more"):
            batches.next_batch()
    assert batches.state_dict() == {"number": 2}
    batches.load_state_dict({"number": 0})
    inner.fails_at = -1
    assert int(batches.next_batch()[0]) == 1
    batches.close()


def test_assignments_hold_from_their_step_on_though_batches_were_made_ahead() -> None:
    tokens = np.arange(4001)
    kind = {"sequence_length": 4, "batch_size": 2, "replica": 0, "num_replicas": None, "seed": 0}
    plain = Sampler(tokens, **kind)  # type: ignore[arg-type]  # varied by name
    ahead = Prefetcher(Sampler(tokens, **kind), 5)  # type: ignore[arg-type]  # varied by name
    with pytest.raises(ConfigurationError, match="no assignment for step 0"):
        ahead.next_batch()
    first = Assignment(0, (0, 1), 0)
    later = [first, first.following(3, (0,), 2), first.following(3, (0,), 2).following(9, (0, 4, 7), 2)]
    for step in range(15):
        for assignment in later:
            if assignment.from_step in (step, step + 1):
                plain.assign(assignment)
                ahead.assign(assignment)
        assert lists(plain.next_batch()) == lists(ahead.next_batch())
        assert plain.state_dict() == ahead.state_dict()
    ahead.close()
