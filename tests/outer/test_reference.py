"""The package against Streaming DiLoCo's Algorithm 2 in plain NumPy, from the paper's listing, and sums by hand."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from diloco.algorithm import AlphaMerge, MergeRule, Nesterov, OuterOptimizer, RebaseMerge, Sgd, SyncSchedule
from tests.replicas import Swarm, Vectors, apart

M, P, H, TAU, ALPHA, STEPS = 3, 3, 10, 2, 0.5, 200
SIZES = (4, 6, 5)
INNER_LR, OUTER_LR, MU = 0.05, 0.4, 0.9
BETA1, BETA2, EPSILON, DECAY = 0.9, 0.99, 1e-8, 0.1

Array = NDArray[np.float64]


def problem(seed: int) -> tuple[list[Array], list[Array]]:
    """Return a least-squares problem for each replica: features (T, 15) and targets (T,), one row per step."""
    rng = np.random.default_rng(seed)
    features = [rng.normal(size=(STEPS, sum(SIZES))) for _ in range(M)]
    truths = [rng.normal(size=sum(SIZES)) for _ in range(M)]
    return features, [x @ w for x, w in zip(features, truths, strict=True)]


def reference(start: Array, features: list[Array], targets: list[Array]) -> tuple[list[Array], Array]:
    """Run lines 1-12 of the listing. theta[m] is theta_m^(t); synced holds theta_p^(t-H) of all fragments."""
    bounds = np.cumsum((0, *SIZES))
    parts = [slice(bounds[p], bounds[p + 1]) for p in range(P)]
    offsets = [p * H // P for p in range(P)]
    theta = [start.copy() for _ in range(M)]
    first, second = np.zeros((M, start.size)), np.zeros((M, start.size))
    synced, velocity = start.copy(), np.zeros_like(start)
    travelling: dict[int, Array] = {}
    for t in range(1, STEPS + 1):
        for m in range(M):
            x, y = features[m][t - 1], targets[m][t - 1]
            gradient = (x @ theta[m] - y) * x
            first[m] = BETA1 * first[m] + (1 - BETA1) * gradient
            second[m] = BETA2 * second[m] + (1 - BETA2) * gradient**2
            step = first[m] / (1 - BETA1**t) / (np.sqrt(second[m] / (1 - BETA2**t)) + EPSILON)
            theta[m] = theta[m] * (1 - INNER_LR * DECAY) - INNER_LR * step
        for p, part in enumerate(parts):
            if (t - offsets[p]) % H == 0 and t - offsets[p] >= H:
                travelling[p] = np.mean([synced[part] - theta[m][part] for m in range(M)], axis=0)
            if (t - offsets[p] - TAU) % H == 0 and t - offsets[p] - TAU >= H:
                delta = travelling.pop(p)
                velocity[part] = MU * velocity[part] + delta
                synced[part] = synced[part] - OUTER_LR * (delta + MU * velocity[part])
                for m in range(M):
                    theta[m][part] = ALPHA * theta[m][part] + (1 - ALPHA) * synced[part]
    return theta, synced


@pytest.mark.parametrize("seed", [0, 1])
def test_algorithm_2_agrees_with_plain_numpy(seed: int) -> None:
    features, targets = problem(seed)

    def gradient(replica: int, step: int, model: nn.Module) -> None:
        assert isinstance(model, Vectors)
        x = torch.from_numpy(features[replica][step]).float()
        y = float(targets[replica][step])
        ((x @ model.vector() - y) ** 2 / 2).backward()

    swarm = Swarm(
        M,
        SyncSchedule(inner_steps=H, num_fragments=P, overlap_steps=TAU),
        make_inner=lambda model: torch.optim.AdamW(
            model.parameters(), lr=INNER_LR, betas=(BETA1, BETA2), eps=EPSILON, weight_decay=DECAY
        ),
        outer=Nesterov(learning_rate=OUTER_LR, momentum=MU),
        merge=AlphaMerge(ALPHA),
        fragments=apart(Vectors()),
    )
    start = swarm.local(0).double().numpy()
    swarm.run(STEPS, gradient)
    local, synced = reference(start, features, targets)
    assert np.abs(synced - start).max() > 0.5, "the run must have moved"
    for m in range(M):
        np.testing.assert_allclose(swarm.local(m).numpy(), local[m], rtol=2e-4, atol=2e-4)
        np.testing.assert_allclose(swarm.global_params(m).numpy(), synced, rtol=2e-4, atol=2e-4)


class TwoOnes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))


def ones(replica: int, step: int, model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


@pytest.mark.parametrize(
    ("schedule", "outer", "merge", "values"),
    [
        # step 2: local -1, Delta = 1 - (-1) = 2, v = 2, theta = 1 - 0.5 * (2 + 0.5 * 2) = -0.5
        # step 4: local -2.5, Delta = 2, v = 0.5 * 2 + 2 = 3, theta = -0.5 - 0.5 * (2 + 0.5 * 3) = -2.25
        # step 6: local -4.25, Delta = 2, v = 3.5, theta = -2.25 - 0.5 * (2 + 1.75) = -4.125
        (
            SyncSchedule(inner_steps=2),
            Nesterov(learning_rate=0.5, momentum=0.5),
            AlphaMerge(0.0),
            [[0, -0.5, -1.5, -2.25, -3.25, -4.125]] * 2,
        ),
        # outer SGD with lr = 1: global becomes what was sent. The parameters are sent at 4 and 8, and at 6
        # step 5: local -4, merged 0.5 * -4 + 0.5 * -3 = -3.5; step 9: -7.5 -> -7; step 7: local -6, merged -5.5
        (
            SyncSchedule(inner_steps=4, num_fragments=2, overlap_steps=1),
            Sgd(learning_rate=1.0),
            AlphaMerge(0.5),
            [[0, -1, -2, -3, -3.5, -4.5, -5.5, -6.5, -7], [0, -1, -2, -3, -4, -5, -5.5, -6.5, -7.5]],
        ),
        # the work of the overlapped step, -1, is kept
        # sent at 2 (local -1, Delta 2); step 3: theta = 1 - 1 = 0, local = 0 + (-2 - -1) = -1
        # sent at 4 (local -2, Delta 0 - -2 = 2); step 5: theta = 0 - 1 = -1, local = -1 + (-3 - -2) = -2
        (
            SyncSchedule(inner_steps=2, overlap_steps=1),
            Sgd(learning_rate=0.5),
            RebaseMerge(),
            [[0, -1, -1, -2, -2]] * 2,
        ),
    ],
)
def test_local_values_after_each_step_are_those_by_hand(
    schedule: SyncSchedule, outer: OuterOptimizer, merge: MergeRule, values: list[list[float]]
) -> None:
    """Gradients are 1 and the inner learning rate 1: each step subtracts 1, and the outer loop does the rest."""
    swarm = Swarm(
        2,
        schedule,
        make_model=TwoOnes,
        make_inner=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        outer=outer,
        merge=merge,
        fragments=apart(TwoOnes()) if schedule.num_fragments == 2 else None,
    )
    for of_step in zip(*values, strict=True):
        swarm.run(1, ones)
        assert swarm.local(0).tolist() == swarm.local(1).tolist() == list(of_step)
