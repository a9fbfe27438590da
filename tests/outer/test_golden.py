"""Histories that can be checked by hand: weights of ones, a constant gradient of 1, inner SGD with lr = 1.

Every inner step subtracts 1; every other change in a history comes from the outer loop.
"""

import pytest
import torch
from torch import nn

from diloco.algorithm import AlphaMerge, MergeRule, Nesterov, OuterOptimizer, RebaseMerge, Sgd, SyncSchedule
from tests.replicas import Swarm, apart


class TwoOnes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(1))
        self.b = nn.Parameter(torch.ones(1))


def ones(replica: int, step: int, model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def history(
    schedule: SyncSchedule, steps: int, outer: OuterOptimizer, merge: MergeRule, num_replicas: int = 2
) -> tuple[list[float], list[float]]:
    """Return the local values of a and b after every step, on which all replicas must agree."""
    swarm = Swarm(
        num_replicas,
        schedule,
        make_model=TwoOnes,
        make_inner=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        outer=outer,
        merge=merge,
        fragments=apart(TwoOnes()) if schedule.num_fragments == 2 else None,
    )
    values: list[tuple[float, float]] = []
    for _ in range(steps):
        swarm.run(1, ones)
        values.append((swarm.local(0)[0].item(), swarm.local(0)[1].item()))
        assert torch.equal(swarm.local(0), swarm.local(num_replicas - 1))
    return [a for a, _ in values], [b for _, b in values]


def test_diloco_with_nesterov() -> None:
    """H = 2, lr = 0.5, mu = 0.5.

    step 2: local -1, Delta = 1 - (-1) = 2, v = 2, theta = 1 - 0.5 * (2 + 0.5 * 2) = -0.5
    step 4: local -2.5, Delta = 2, v = 0.5 * 2 + 2 = 3, theta = -0.5 - 0.5 * (2 + 0.5 * 3) = -2.25
    step 6: local -4.25, Delta = 2, v = 3.5, theta = -2.25 - 0.5 * (2 + 1.75) = -4.125
    """
    a, b = history(SyncSchedule(inner_steps=2), 6, Nesterov(learning_rate=0.5, momentum=0.5), AlphaMerge(0.0))
    assert a == b == [0.0, -0.5, -1.5, -2.25, -3.25, -4.125]


def test_streaming_with_overlap_and_alpha() -> None:
    """H = 4, P = 2 (offsets 0 and 2), tau = 1, alpha = 0.5, outer SGD with lr = 1: global becomes what was sent.

    a: sent at 4 (local -3); step 5: local -4, merged 0.5 * -4 + 0.5 * -3 = -3.5; sent at 8 (-6.5); step 9: -7.5 -> -7
    b: sent at 6 (local -5); step 7: local -6, merged -5.5
    """
    schedule = SyncSchedule(inner_steps=4, num_fragments=2, overlap_steps=1)
    a, b = history(schedule, 9, Sgd(learning_rate=1.0), AlphaMerge(0.5))
    assert a == [0.0, -1.0, -2.0, -3.0, -3.5, -4.5, -5.5, -6.5, -7.0]
    assert b == [0.0, -1.0, -2.0, -3.0, -4.0, -5.0, -5.5, -6.5, -7.5]


def test_streaming_with_rebase_and_half_the_outer_step() -> None:
    """H = 2, P = 1, tau = 1, lr = 0.5: the work of the overlapped step, -1, is kept.

    sent at 2 (local -1, Delta 2); step 3: theta = 1 - 1 = 0, local = 0 + (-2 - -1) = -1
    sent at 4 (local -2, Delta 0 - -2 = 2); step 5: theta = 0 - 1 = -1, local = -1 + (-3 - -2) = -2
    """
    schedule = SyncSchedule(inner_steps=2, overlap_steps=1)
    a, _ = history(schedule, 5, Sgd(learning_rate=0.5), RebaseMerge())
    assert a == [0.0, -1.0, -1.0, -2.0, -2.0]


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_with_the_same_gradients_the_number_of_replicas_does_not_matter(num_replicas: int) -> None:
    schedule = SyncSchedule(inner_steps=3, num_fragments=2, overlap_steps=2)
    outer = Nesterov(learning_rate=0.5, momentum=0.5)
    one = history(schedule, 12, outer, AlphaMerge(0.25), num_replicas=1)
    assert history(schedule, 12, outer, AlphaMerge(0.25), num_replicas=num_replicas) == one
