"""Invariant 13: degenerate cases are parameter values, not branches, so each algorithm reduces to the others."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from diloco.algorithm import AlphaMerge, Nesterov, RebaseMerge, Sgd, SyncSchedule, partition
from tests.replicas import Swarm, Vectors, quadratic


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


@pytest.mark.parametrize("merge", [AlphaMerge(0.0), RebaseMerge()])
def test_one_replica_with_outer_sgd_of_lr_1_is_plain_training(merge: AlphaMerge | RebaseMerge) -> None:
    """global - (global - local) is local up to the rounding of one subtraction, at each of 20 rounds."""
    swarm = Swarm(1, SyncSchedule(inner_steps=3, num_fragments=1), make_inner=adamw, outer=Sgd(), merge=merge)
    swarm.run(60, quadratic())
    torch.testing.assert_close(swarm.local(0), plain_training(60), rtol=1e-5, atol=1e-6)


def test_a_whole_round_late_one_replica_is_plain_training_too() -> None:
    """With tau = H and rebase the global parameters lag one round, and the local ones continue as if alone."""
    swarm = Swarm(
        1,
        SyncSchedule(inner_steps=4, num_fragments=3, overlap_steps=4),
        make_inner=adamw,
        outer=Sgd(),
        merge=RebaseMerge(),
        fragments=partition(Vectors(), num_fragments=3, strategy="balanced"),
    )
    swarm.run(42, quadratic())
    torch.testing.assert_close(swarm.local(0), plain_training(42), rtol=1e-5, atol=1e-6)


def test_h_1_with_sgd_inside_and_outside_is_data_parallel_sgd() -> None:
    swarm = Swarm(4, SyncSchedule(inner_steps=1), outer=Sgd())
    swarm.run(50, quadratic())
    together, gradient = Vectors(), quadratic()
    optimizer = torch.optim.SGD(together.parameters(), lr=0.1)
    for step in range(50):
        gradients = []
        for replica in range(4):
            gradient(replica, step, together)
            gradients.append([p.grad for p in together.parameters()])
        for parameter, *each in zip(together.parameters(), *gradients, strict=True):
            parameter.grad = torch.stack([g for g in each if g is not None]).mean(0)
        optimizer.step()
    torch.testing.assert_close(swarm.local(2), together.vector().detach(), rtol=1e-5, atol=1e-6)


def test_one_fragment_without_overlap_is_algorithm_1() -> None:
    """Algorithm 1 of the Streaming paper, implemented with a whole model, a deep copy and torch's own Nesterov."""
    swarm = Swarm(3, SyncSchedule(inner_steps=5), make_inner=adamw, outer=Nesterov(learning_rate=0.7, momentum=0.9))
    swarm.run(40, quadratic())
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
    swarm = Swarm(
        2,
        schedule,
        make_inner=adamw,
        merge=AlphaMerge(1.0),
        fragments=partition(Vectors(), num_fragments=3, strategy="balanced"),
    )
    swarm.run(30, quadratic())
    for replica in range(2):
        assert torch.equal(swarm.local(replica), plain_training(30, replica))


@pytest.mark.parametrize(("num_replicas", "exact"), [(2, True), (4, True), (3, False)])
def test_replicas_on_the_same_data_are_one_replica(num_replicas: int, exact: bool) -> None:
    """The results are equal bit for bit if dividing by M is exact, else within rounding."""
    arguments: dict[str, Any] = {
        "schedule": SyncSchedule(inner_steps=4, num_fragments=3, overlap_steps=1),
        "make_inner": adamw,
        "outer": Nesterov(learning_rate=0.4),
        "merge": RebaseMerge(),
        "fragments": partition(Vectors(), num_fragments=3, strategy="balanced"),
    }
    many, one = Swarm(num_replicas, **arguments), Swarm(1, **arguments)
    many.run(40, quadratic(shared=True))
    one.run(40, quadratic(shared=True))
    if exact:
        assert torch.equal(many.local(num_replicas - 1), one.local(0))
        assert torch.equal(many.global_params(0), one.global_params(0))
    else:
        torch.testing.assert_close(many.local(num_replicas - 1), one.local(0), rtol=1e-5, atol=1e-6)


def test_without_overlap_rebase_and_alpha_0_are_the_same_bits() -> None:
    schedule = SyncSchedule(inner_steps=4, num_fragments=3)
    swarms = [
        Swarm(
            2,
            schedule,
            make_inner=adamw,
            outer=Nesterov(learning_rate=0.4),
            merge=merge,
            fragments=partition(Vectors(), num_fragments=3, strategy="balanced"),
        )
        for merge in (AlphaMerge(0.0), RebaseMerge())
    ]
    for swarm in swarms:
        swarm.run(24, quadratic())
    assert torch.equal(swarms[0].local(0), swarms[1].local(0))


def test_the_partition_does_not_matter_when_all_fragments_share_their_steps() -> None:
    whole = Swarm(2, SyncSchedule(inner_steps=5), make_inner=adamw, outer=Nesterov(learning_rate=0.4))
    cut = Swarm(
        2,
        SyncSchedule(inner_steps=5, num_fragments=3, offsets=(0, 0, 0)),
        make_inner=adamw,
        outer=Nesterov(learning_rate=0.4),
        fragments=partition(Vectors(), num_fragments=3, strategy="balanced"),
    )
    for swarm in (whole, cut):
        swarm.run(25, quadratic())
    assert torch.equal(whole.local(0), cut.local(0))


def test_snoo_without_momentum_is_lookahead() -> None:
    """One replica (SNOO) with mu = 0: every H steps ``slow <- slow + lr (fast - slow)``, then ``fast <- slow``."""
    schedule = SyncSchedule(inner_steps=5)
    swarm = Swarm(1, schedule, make_inner=adamw, outer=Nesterov(learning_rate=0.5, momentum=0.0))
    swarm.run(40, quadratic())
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
    arguments: dict[str, Any] = {
        "make_model": Sparse,
        "make_inner": lambda model: torch.optim.SGD(model.parameters(), lr=0.125),
        "outer": Sgd(learning_rate=1.0),
    }
    swarm = Swarm(4, SyncSchedule(inner_steps=1), codec="topk2", error_feedback=decay, **arguments)
    swarm.run(6, few_of_two_sizes)
    plain = Sparse()
    inner, worker = torch.optim.SGD(plain.parameters(), lr=0.125), Sparse()
    for step in range(6):
        gradients = []
        for replica in range(4):
            few_of_two_sizes(replica, step, worker)
            assert worker.values.grad is not None
            gradients.append(worker.values.grad.clone())
        plain.values.grad = torch.stack(gradients).mean(0)
        inner.step()
    assert torch.equal(swarm.local(0), plain.values.detach())
