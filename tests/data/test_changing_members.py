"""Samplers whose members change: nothing is drawn twice, and resuming equals never stopping."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from diloco.data import Assignment, Sampler, windows_at
from tests.data.numbered_windows import LENGTH, tokens_for, windows_of


def sampler(replica: int, num_replicas: int | None, windows: int = 100, **more: str) -> Sampler:
    """Return a sampler with batches of 2 sequences."""
    arguments = {"sequence_length": LENGTH, "batch_size": 2, "seed": 1, **more}
    return Sampler(tokens_for(windows), replica=replica, num_replicas=num_replicas, **arguments)  # type: ignore[arg-type]


def test_samplers_share_out_the_windows_while_members_change() -> None:
    """Replica 1 leaves at step 3, which the others apply from step 5 on; replica 7 joins at step 8."""
    first = Assignment.of(2)
    second = first.following(5, (0,), 2, first.ranges(1, range(3, 5), 2))
    third = second.following(8, (0, 7), 2)
    stayer, leaver, joiner = sampler(0, None), sampler(1, None), sampler(7, None)
    stayer.assign(first)
    leaver.assign(first)
    drawn = [window for _ in range(3) for each in (stayer, leaver) for window in windows_of(each.next_batch())]
    stayer.assign(second)
    drawn += [window for _ in range(3) for window in windows_of(stayer.next_batch())]
    stayer.assign(third)
    joiner.load_state_dict({**stayer.state_dict(), "drawn": 8})
    drawn += [window for _ in range(2) for window in windows_of(stayer.next_batch())]
    assert joiner.state_dict() == stayer.state_dict()
    drawn += [window for _ in range(3) for each in (stayer, joiner) for window in windows_of(each.next_batch())]
    # 3 + 3 batches of steps 0 to 2, replica 0's of steps 3 to 7, then 6 together: a prefix of the first epoch.
    assert sorted(drawn) == sorted(windows_at(np.arange(2 * (6 + 5 + 6)), 100, 2, seed=1).tolist())


def test_assignments_count_from_their_first_step_on_in_whatever_order_they_come() -> None:
    own, fixed = sampler(1, 2), Assignment.of(2)
    later, latest = Assignment(4, (1, 5), 50), Assignment(6, (1,), 70)
    own.assign(latest)
    own.assign(Assignment(4, (1,), 90))
    own.assign(later)  # replaces the one before
    assert own.state_dict()["assignments"] == [each.to_message() for each in (fixed, later, latest)]
    expected = [fixed.positions(1, step, 2) for step in range(4)]
    expected += [later.positions(1, step, 2) for step in (4, 5)] + [latest.positions(1, 6, 2)]
    for positions in expected:
        assert windows_of(own.next_batch()) == windows_at(positions, 100, 2, seed=1).tolist()
    assert own.state_dict()["assignments"] == [latest.to_message()]
    own.assign(Assignment(7, (0, 1), 10))
    assert windows_of(own.next_batch()) == windows_at(np.array([12, 13]), 100, 2, seed=1).tolist()


@pytest.mark.parametrize("stop", range(9))
def test_resuming_between_changes_equals_never_stopping(stop: int) -> None:
    """An epoch is 5 batches; members change at steps 3 and 6, and the cursor contains that from step 1 on."""
    first = Assignment.of(2)
    second = first.following(3, (1,), 2, first.ranges(0, range(2, 3), 2))
    runs = [sampler(1, 2, windows=11) for _ in range(2)]
    for step in range(10):
        if step == 1:
            for own in runs:
                own.assign(second)
                own.assign(second.following(6, (1, 3), 2))
        if step == stop:
            state = json.loads(json.dumps(runs[1].state_dict()))
            runs[1] = sampler(1, 2, windows=11)
            runs[1].load_state_dict(state)
            assert runs[1].state_dict() == state
        batches = [own.next_batch() for own in runs]
        assert torch.equal(batches[0][0], batches[1][0])
        assert torch.equal(batches[0][1], batches[1][1])
