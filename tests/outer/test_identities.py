"""Invariant 12: degenerate cases are parameter values, not branches, so each algorithm reduces to the others."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from diloco.algorithm import AlphaMerge, MergeRule, Nesterov, RebaseMerge, Sgd, SyncSchedule
from tests.replicas import BALANCED, Gradient, Swarm, Vectors, quadratic


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def plain_training(steps: int, replica: int = 0) -> torch.Tensor:
    """Train one model without DiLoCo."""
    model = Vectors()
    optimizer, gradient = adamw(model), quadratic()
    for step in range(steps):
        gradient(replica, step, model)
        optimizer.step()
    return model.vector().detach()


def trained(num_replicas: int, steps: int, schedule: SyncSchedule, *, shared: bool = False, **more: Any) -> Swarm:
    """Return replicas that have trained by AdamW, with a fragment for the whole model or three of equal sizes."""
    fragments = BALANCED if schedule.num_fragments == 3 else {}
    swarm = Swarm(num_replicas, schedule, **{"make_inner": adamw, **fragments, **more})
    swarm.run(steps, quadratic(shared=shared))
    return swarm


@pytest.mark.parametrize("merge", [AlphaMerge(0.0), RebaseMerge()])
def test_one_replica_with_outer_sgd_of_lr_1_is_plain_training(merge: MergeRule) -> None:
    """global - (global - local) is local up to the rounding of one subtraction, at each of 20 rounds."""
    swarm = trained(1, 60, SyncSchedule(inner_steps=3), outer=Sgd(), merge=merge)
    torch.testing.assert_close(swarm.local(0), plain_training(60), rtol=1e-5, atol=1e-6)


def test_a_whole_round_late_one_replica_is_plain_training_too() -> None:
    """With tau = H and rebase the global parameters lag one round, and the local ones continue as if alone."""
    schedule = SyncSchedule(inner_steps=4, num_fragments=3, overlap_steps=4)
    swarm = trained(1, 42, schedule, outer=Sgd(), merge=RebaseMerge())
    torch.testing.assert_close(swarm.local(0), plain_training(42), rtol=1e-5, atol=1e-6)


def step_on_the_mean(optimizer: torch.optim.Optimizer, model: nn.Module, gradient: Gradient, step: int) -> None:
    """Take a data-parallel step of four replicas."""
    of_each: list[list[Any]] = []
    for replica in range(4):
        gradient(replica, step, model)
        of_each.append([parameter.grad for parameter in model.parameters()])
    for parameter, *gradients in zip(model.parameters(), *of_each, strict=True):
        parameter.grad = torch.stack(gradients).mean(0)
    optimizer.step()


def test_h_1_with_sgd_inside_and_outside_is_data_parallel_sgd() -> None:
    swarm, together, gradient = Swarm(4, SyncSchedule(inner_steps=1), outer=Sgd()), Vectors(), quadratic()
    swarm.run(50, gradient)
    optimizer = torch.optim.SGD(together.parameters(), lr=0.1)
    for step in range(50):
        step_on_the_mean(optimizer, together, gradient, step)
    torch.testing.assert_close(swarm.local(2), together.vector().detach(), rtol=1e-5, atol=1e-6)


def test_one_fragment_without_overlap_is_algorithm_1() -> None:
    """Algorithm 1 of the Streaming paper, implemented with a whole model, a deep copy and torch's own Nesterov."""
    swarm = trained(3, 40, SyncSchedule(inner_steps=5), outer=Nesterov(learning_rate=0.7, momentum=0.9))
    anchor = Vectors()
    outer = torch.optim.SGD(anchor.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    workers = [copy.deepcopy(anchor) for _ in range(3)]
    inner, gradient = [adamw(worker) for worker in workers], quadratic()
    for step in range(40):
        for m, worker in enumerate(workers):
            gradient(m, step, worker)
            inner[m].step()
        if (step + 1) % 5 == 0:
            for name, parameter in anchor.named_parameters():
                deltas = [parameter.detach() - worker.get_parameter(name).detach() for worker in workers]
                parameter.grad = torch.stack(deltas).mean(0)
            outer.step()
            for worker in workers:
                worker.load_state_dict(anchor.state_dict())
    torch.testing.assert_close(swarm.local(1), anchor.vector().detach(), rtol=1e-4, atol=1e-5)


def test_alpha_1_is_independent_replicas() -> None:
    schedule = SyncSchedule(inner_steps=4, num_fragments=3, overlap_steps=2)
    swarm = trained(2, 30, schedule, merge=AlphaMerge(1.0))
    for replica in range(2):
        assert torch.equal(swarm.local(replica), plain_training(30, replica))


@pytest.mark.parametrize(("num_replicas", "exact"), [(2, True), (4, True), (3, False)])
def test_replicas_on_the_same_data_are_one_replica(num_replicas: int, exact: bool) -> None:
    """The results are equal bit for bit if dividing by M is exact, else within rounding."""
    schedule = SyncSchedule(inner_steps=4, num_fragments=3, overlap_steps=1)
    many, one = (
        trained(count, 40, schedule, shared=True, outer=Nesterov(learning_rate=0.4), merge=RebaseMerge())
        for count in (num_replicas, 1)
    )
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(many.local(num_replicas - 1), one.local(0), **tolerance)
    torch.testing.assert_close(many.global_params(0), one.global_params(0), **tolerance)


def test_without_overlap_neither_the_merge_rule_nor_the_partition_of_equal_offsets_matters() -> None:
    whole, apart = SyncSchedule(inner_steps=4), SyncSchedule(inner_steps=4, num_fragments=3, offsets=(0, 0, 0))
    one, *others = (
        trained(2, 24, schedule, outer=Nesterov(learning_rate=0.4), merge=merge).local(0)
        for schedule, merge in ((whole, AlphaMerge(0.0)), (whole, RebaseMerge()), (apart, AlphaMerge(0.0)))
    )
    assert all(torch.equal(other, one) for other in others)


def test_snoo_without_momentum_is_lookahead() -> None:
    """One replica (SNOO) with mu = 0: every H steps ``slow <- slow + lr (fast - slow)``, then ``fast <- slow``."""
    swarm = trained(1, 40, SyncSchedule(inner_steps=5), outer=Nesterov(learning_rate=0.5, momentum=0.0))
    fast, gradient = Vectors(), quadratic()
    inner, slow = adamw(fast), [parameter.detach().clone() for parameter in fast.parameters()]
    for step in range(40):
        gradient(0, step, fast)
        inner.step()
        if (step + 1) % 5 == 0:
            with torch.no_grad():
                for anchor, parameter in zip(slow, fast.parameters(), strict=True):
                    anchor += 0.5 * (parameter - anchor)
                    parameter.copy_(anchor)
    torch.testing.assert_close(swarm.local(0), fast.vector().detach(), rtol=1e-6, atol=1e-7)


class Sparse(nn.Module):
    """One tile of `topk2`."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(4096))


def few_of_two_sizes(replica: int, step: int, model: nn.Module) -> None:
    """Set 64 nonzero gradients of 1/2 or 1: as many as `topk2` keeps, and two levels represent them exactly."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    gradient = torch.zeros(4096)
    chosen = torch.randperm(4096, generator=generator)[:64]
    signs = torch.randint(0, 2, (64,), generator=generator) * 2.0 - 1
    gradient[chosen] = signs * torch.tensor([0.5, 1.0]).repeat(32)
    for parameter in model.parameters():
        parameter.grad = gradient


@pytest.mark.parametrize("decay", [1.0, 0.95])
def test_topk2_that_keeps_all_and_rounds_nothing_is_sgd_on_the_mean(decay: float) -> None:
    """SparseLoCo with k = all, no quantiser and H = 1. All sums are of powers of two, so the bits are equal."""
    swarm = Swarm(
        4,
        SyncSchedule(inner_steps=1),
        make_model=Sparse,
        make_inner=lambda model: torch.optim.SGD(model.parameters(), lr=0.125),
        codec="topk2",
        error_feedback=decay,
    )
    swarm.run(6, few_of_two_sizes)
    plain = Sparse()
    inner = torch.optim.SGD(plain.parameters(), lr=0.125)
    for step in range(6):
        step_on_the_mean(inner, plain, few_of_two_sizes, step)
    assert torch.equal(swarm.local(0), plain.values.detach())
