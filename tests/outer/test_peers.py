"""The package against implementations that its authors did not write, and against the paper's listing in plain NumPy.

``peers.json`` has the numbers of the others, with repository, commit, file and licence of each. It is written by
``python -m benchmarks.real.peers``. No value here depends on a product of matrices.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from diloco.algorithm import AlphaMerge, MergeRule, Nesterov, RebaseMerge, Sgd, SyncSchedule
from tests.replicas import Swarm, apart

PEERS: dict[str, Any] = json.loads(Path(__file__).with_name("peers.json").read_text())
Array = NDArray[np.float32]


class Parts(nn.Module):
    """A model with a vector of each size."""

    def __init__(self, *parts: torch.Tensor) -> None:
        super().__init__()
        self.parts = nn.ParameterList(part.clone() for part in parts)


# torchft: two layers of one value, both replicas with the gradient 2 and a rate of 1


@pytest.mark.parametrize("number", range(6))
def test_torchfts_recorded_runs_are_reproduced_exactly(number: int) -> None:
    recorded, run = PEERS["torchft"], PEERS["torchft"]["runs"][number]
    delay, every = run["fragment_sync_delay"], recorded["sync_every"]
    swarm = Swarm(
        2,
        SyncSchedule(inner_steps=every, num_fragments=2, overlap_steps=delay),
        make_model=lambda: Parts(torch.ones(1), torch.ones(1)),
        make_inner=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        outer=Sgd(learning_rate=2.0),
        merge=AlphaMerge(run["fragment_update_alpha"]),
        fragments=apart(Parts(torch.ones(1), torch.ones(1))),
    )
    # torchft sends the first fragment after every / 2 - delay steps, the package after every
    for _ in range(every // 2 + delay):
        for diloco in swarm.replicas:
            diloco.begin(0.0)
        for diloco in swarm.replicas:
            diloco.finish()

    def gradient(replica: int, step: int, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 2.0)

    for step in range(16):
        for replica in range(2):
            assert swarm.local(replica).tolist() == run["local"][str(step)], f"local values after step {step}"
            if str(step) in run["global"]:
                assert swarm.global_params(replica).tolist() == run["global"][str(step)], f"global, step {step}"
        swarm.run(1, gradient)


# EXO gym: AdamW inside, and rounds after steps H + 1, 2 H + 1, ...


def test_exo_gyms_trajectory_is_reproduced() -> None:
    recorded = PEERS["exogym"]
    start, targets = torch.tensor(recorded["start"]), torch.tensor(recorded["targets"])
    swarm = Swarm(
        2,
        SyncSchedule(inner_steps=recorded["sync_every"], offsets=(1,)),
        make_model=lambda: Parts(start),
        make_inner=lambda model: torch.optim.AdamW(model.parameters(), **recorded["adamw"]),
        outer=Nesterov(**recorded["outer"]),
    )

    def gradient(replica: int, step: int, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.detach() - targets[replica, step]

    for step, both in enumerate(zip(*recorded["local"], strict=True)):
        swarm.run(1, gradient)
        for replica, values in enumerate(both):
            np.testing.assert_allclose(swarm.local(replica), values, rtol=1e-5, atol=1e-6, err_msg=f"step {step}")
    assert swarm.replicas[0].rounds_committed == 3
    assert (swarm.local(0) - start).abs().max() > 0.3, "the run must have moved"


# Algorithm 2 of Streaming DiLoCo, line by line, in float32


REBASE = RebaseMerge()


@dataclass(frozen=True)
class Case:
    """The settings of a run. Fragments are larger than a block of fp4, or smaller."""

    num_replicas: int = 2
    sizes: tuple[int, ...] = (4, 300, 5)
    inner_steps: int = 10
    overlap_steps: int = 2
    merge: MergeRule = REBASE
    codec: str = "fp4"
    adamw: bool = False


OUTER_LR, MU, STEPS = 0.4, 0.9, 65
INNER_LR = 0.125  # a power of two, so that it does not matter if the inner step rounds its product
BETAS, EPSILON, DECAY = (0.9, 0.99), 1e-8, 0.1


def fp4(values: Array) -> Array:
    """Round to the nearest of seven powers of two, the largest of a block of 256 and those below it, or to 0."""
    result = np.zeros_like(values)
    for first in range(0, len(values), 256):
        block = values[first : first + 256]
        powers = 2.0 ** np.arange(127, -127, -1)  # the first, larger one of two that are equally near
        nearest = powers[np.abs(np.abs(block)[:, None] - powers).argmin(axis=1)]
        nearest[block == 0] = 0
        nearest[nearest < nearest.max() / 64] = 0
        result[first : first + 256] = np.copysign(nearest, block)
    return result


def listing(case: Case, start: Array, targets: Array) -> tuple[list[Array], Array]:
    """Run lines 1-12. theta[m] is theta_m^(t), synced[p] is theta_p^(t-H). ``targets`` has axes (replica, step, value).

    Return the local parameters of each replica, and the global ones.
    """
    M, P, H, tau = case.num_replicas, len(case.sizes), case.inner_steps, case.overlap_steps
    bounds = np.cumsum((0, *case.sizes))
    parts = [slice(bounds[p], bounds[p + 1]) for p in range(P)]
    theta = [start.copy() for _ in range(M)]
    first, second = np.zeros((M, start.size)), np.zeros((M, start.size))
    synced, velocity = start.copy(), np.zeros_like(start)
    travelling: dict[int, tuple[Array, list[Array]]] = {}
    encoded: Callable[[Array], Array] = fp4 if case.codec == "fp4" else np.copy

    def merge(p: int) -> None:  # lines 10 to 12
        part, (delta, sent) = parts[p], travelling.pop(p)
        velocity[part] = np.float32(MU) * velocity[part] + delta
        synced[part] -= np.float32(OUTER_LR) * (np.float32(MU) * velocity[part] + delta)
        for m in range(M):
            if isinstance(case.merge, AlphaMerge):
                alpha = np.float32(case.merge.alpha)
                theta[m][part] = alpha * theta[m][part] + (np.float32(1) - alpha) * synced[part]
            else:
                theta[m][part] = (theta[m][part] - sent[m]) + synced[part]

    for t in range(1, STEPS + 1):
        for m in range(M):
            gradient = theta[m] - targets[m, t - 1]
            if case.adamw:
                first[m] = BETAS[0] * first[m] + (1 - BETAS[0]) * gradient
                second[m] = BETAS[1] * second[m] + (1 - BETAS[1]) * gradient**2
                step = first[m] / (1 - BETAS[0] ** t) / (np.sqrt(second[m] / (1 - BETAS[1] ** t)) + EPSILON)
                theta[m] = (theta[m] * (1 - INNER_LR * DECAY) - INNER_LR * step).astype(np.float32)
            else:
                theta[m] = theta[m] - np.float32(INNER_LR) * gradient
        for p, part in enumerate(parts):
            since = t - p * H // P  # t - t_p
            due = since - tau >= H and (since - tau) % H == 0  # line 9
            if due and tau == H:  # a round is merged just before the next one of the fragment is sent
                merge(p)
            if since >= H and since % H == 0:  # line 6, from H + t_p on, as in the paper's example
                sent = [theta[m][part].copy() for m in range(M)]
                total = np.zeros(case.sizes[p], np.float32)
                for m in range(M):
                    total += encoded(synced[part] - sent[m])  # line 7
                travelling[p] = total / np.float32(M), sent  # line 8
            if due and tau < H:
                merge(p)
    return theta, synced


CASES = {
    "defaults": Case(),
    "float32": Case(codec="float32"),
    "three replicas, alpha": Case(num_replicas=3, merge=AlphaMerge(0.25)),
    "no overlap": Case(overlap_steps=0, merge=AlphaMerge(0.0), codec="float32"),
    "a whole round late": Case(overlap_steps=10),
    "a whole round late, fragments that do not divide H": Case(overlap_steps=9, inner_steps=9, sizes=(3, 4)),
    "one fragment of several blocks": Case(sizes=(700,), overlap_steps=3, num_replicas=4),
    "AdamW, alpha": Case(adamw=True, codec="float32", num_replicas=3, merge=AlphaMerge(0.5)),
    "AdamW": Case(adamw=True, codec="float32"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_algorithm_2_in_plain_numpy_gives_the_same_values(case: Case) -> None:
    rng = np.random.default_rng(0)
    start = rng.normal(size=sum(case.sizes)).astype(np.float32)
    targets = rng.integers(-8, 9, (case.num_replicas, STEPS, start.size)).astype(np.float32) / 4
    pieces = [torch.from_numpy(piece) for piece in np.split(start, np.cumsum(case.sizes)[:-1])]

    def gradient(replica: int, step: int, model: nn.Module) -> None:
        goals = torch.from_numpy(targets[replica, step]).split(case.sizes)
        for parameter, goal in zip(model.parameters(), goals, strict=True):
            parameter.grad = parameter.detach() - goal

    def inner(model: nn.Module) -> torch.optim.Optimizer:
        if case.adamw:
            return torch.optim.AdamW(model.parameters(), INNER_LR, betas=BETAS, eps=EPSILON, weight_decay=DECAY)
        return torch.optim.SGD(model.parameters(), INNER_LR)

    swarm = Swarm(
        case.num_replicas,
        SyncSchedule(inner_steps=case.inner_steps, num_fragments=len(case.sizes), overlap_steps=case.overlap_steps),
        make_model=lambda: Parts(*pieces),
        make_inner=inner,
        outer=Nesterov(learning_rate=OUTER_LR, momentum=MU),
        merge=case.merge,
        codec=case.codec,
        fragments=apart(Parts(*pieces)),
    )
    swarm.run(STEPS, gradient)
    local, synced = listing(case, start, targets)
    assert np.abs(synced - start).max() > 0.5, "the run must have moved"
    tolerance = 2e-4 if case.adamw else 0.0
    for m in range(case.num_replicas):
        np.testing.assert_allclose(swarm.local(m), local[m], rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(swarm.global_params(m), synced, rtol=tolerance, atol=tolerance)
