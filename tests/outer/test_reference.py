"""The package against Streaming DiLoCo's Algorithm 2 in plain NumPy, from the paper's listing, and sums by hand."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from diloco.algorithm import AlphaMerge, Nesterov, SyncSchedule
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
