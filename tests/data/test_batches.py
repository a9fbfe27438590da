"""The contract of every kind of batches: order, cursor, another number of replicas; and prefetching."""

import json
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from diloco.data import Assignment, Batches, Sampler
from diloco.errors import CheckpointError, ConfigurationError, DataError
from tests.data.streams import KINDS, LENGTH, SIZE, lists


@pytest.fixture
def make() -> Iterator[Callable[[str, int], list[Batches]]]:
    """Return a function that makes the batches of every replica."""
    opened: list[Batches] = []

    def make(kind: str, replicas: int) -> list[Batches]:
        opened.extend(KINDS[kind](replica, replicas) for replica in range(replicas))
        return opened[-replicas:]

    yield make
    for batches in opened:
        batches.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_cursor_goes_on_anywhere_and_targets_are_the_next_tokens(kind: str, make: Any) -> None:
    """Across epochs and through JSON; what was made ahead does not count, and is the same as what was not."""
    (_, whole), (_, again), (_, plain) = make(kind, 2), make(kind, 2), make(kind.split(",")[0], 2)
    rng = random.Random(kind)
    for step in range(60):
        if rng.random() < 0.2:
            cursor = json.loads(json.dumps(again.state_dict()))
            again = make(kind, 2)[1]
            again.load_state_dict(cursor)
            assert again.state_dict() == cursor
        for batches in (whole, again, plain) if step % 7 == 3 else ():
            batches.skip_batch()
        inputs, targets = batch = whole.next_batch()
        assert inputs.shape == targets.shape == (SIZE, LENGTH)
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.is_contiguous() and targets.is_contiguous()  # noqa: PT018  # one fact of both
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert lists(batch) == lists(again.next_batch()) == lists(plain.next_batch())
        assert whole.state_dict() == again.state_dict() == plain.state_dict()
        assert whole.epochs == again.epochs == plain.epochs


@pytest.mark.parametrize("kind", KINDS)
def test_a_cursor_of_other_data_or_none_at_all_is_refused(kind: str, make: Any) -> None:
    (batches,) = make(kind, 1)
    good = batches.state_dict()
    (another,) = make("stream of files" if kind.startswith(("stream,", "array", "pieces")) else "array", 1)
    wrong = [{}, another.state_dict(), {**good, "sequence_length": 99}]
    for cursor in wrong:
        with pytest.raises(CheckpointError, match="not loaded"):
            batches.load_state_dict(cursor)
    assert batches.state_dict() == good


class Counted(Sampler):
    """Batches that record the thread that made each, and fail where they are told to."""

    def __init__(self, ahead: int, fails_at: int = -1) -> None:
        super().__init__(
            np.arange(4001), sequence_length=4, batch_size=2, replica=0, num_replicas=1, seed=0, ahead=ahead
        )
        self.fails_at, self.threads, self.made = fails_at, set[str](), threading.Condition()

    def _draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._drawn == self.fails_at:
            raise DataError("no more")
        with self.made:
            self.threads.add(threading.current_thread().name)
            self.made.notify_all()
            return super()._draw()


def test_so_many_are_made_ahead_and_no_more() -> None:
    batches = Counted(3)
    assert not batches.threads, "no batch may be made before the first request"
    batches.next_batch()
    with batches.made:
        assert batches.made.wait_for(lambda: batches._drawn == 4, timeout=10)
        assert not batches.made.wait_for(lambda: batches._drawn > 4, timeout=0.05)
    assert batches.threads == {"batches of replica 0_0"}
    assert batches.state_dict()["drawn"] == 1
    batches.close()
    assert "batches of replica 0_0" not in [thread.name for thread in threading.enumerate()]


def test_an_error_comes_where_its_batch_would_and_again() -> None:
    batches, plain = Counted(4, fails_at=2), Counted(0)
    assert [lists(batches.next_batch()) for _ in range(2)] == [lists(plain.next_batch()) for _ in range(2)]
    for _ in range(2):
        with pytest.raises(DataError, match="no more"):
            batches.next_batch()
    assert batches.state_dict() == plain.state_dict()
    batches.load_state_dict(Counted(0).state_dict())
    batches.fails_at = -1
    assert lists(batches.next_batch()) == lists(Counted(0).next_batch())
    batches.close()


def test_assignments_hold_from_their_step_on_though_batches_were_made_ahead() -> None:
    plain, ahead = (
        Sampler(np.arange(4001), sequence_length=4, batch_size=2, replica=0, num_replicas=None, seed=0, ahead=number)
        for number in (0, 5)
    )
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
        assert (plain.state_dict(), plain.order, plain.epochs) == (ahead.state_dict(), ahead.order, ahead.epochs)
    ahead.close()
