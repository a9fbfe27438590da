"""Tests of the contracts of outer optimizers, average rules, merge rules and inner optimizers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from diloco.algorithm import AverageRule, MergeRule, OuterOptimizer, OuterState
from diloco.testing.codecs import contract, expect

__all__ = ["check_average_rule", "check_inner_optimizer", "check_merge_rule", "check_outer_optimizer"]

_SIZE = 1001


def check_outer_optimizer(outer: OuterOptimizer) -> None:
    """Raise unless ``outer`` keeps the contract of `OuterOptimizer`.

    Its state must consist of a step and float32 vectors as long as the parameters, so that it can be copied, sent and
    loaded. ``update`` must change only that state and the parameters, in place, and depend on nothing else.

    Raises:
        ContractError: if the contract is broken. The message says how.
    """
    with contract("outer optimizer", outer):
        for method in ("init", "update"):
            expect(callable(getattr(outer, method, None)), f"it has no method {method}")
        start, means = _draw(0), [_draw(seed) * 0.1 for seed in range(1, 5)]
        values = start.clone()
        state = outer.init(values)
        expect(isinstance(state, OuterState), f"init returned a {type(state).__name__}, not a diloco.OuterState")
        expect(torch.equal(values, start), "init changed the parameters")
        expect(state.step == 0, f"init returned a state at step {state.step}, not 0")
        names = _slots(state)
        for count, mean in enumerate(means, 1):
            before = mean.clone()
            outer.update(mean, state, values)
            expect(torch.equal(mean, before), "update changed the mean")
            expect(state.step == count, f"the state is at step {state.step} after {count} updates")
            expect(_slots(state) == names, "update added or removed slots of the state")
            expect(bool(values.isfinite().all()), f"the parameters are not finite after {count} updates")
            if count == 2:  # as a joiner or a checkpoint copies it
                resumed = OuterState(state.step, {slot: held.clone() for slot, held in state.slots.items()})
                other = values.clone()
        expect(not torch.equal(values, start), f"the parameters have not moved in {len(means)} updates")
        for mean in means[2:]:
            outer.update(mean, resumed, other)
        alike = torch.equal(other, values) and all(
            torch.equal(resumed.slots[slot], state.slots[slot]) for slot in names
        )
        expect(alike, "it continues differently from a copy of its state, so part of its state is elsewhere")


def check_average_rule(rule: AverageRule | None) -> None:
    """Raise unless ``rule`` keeps the contract of `AverageRule`.

    It must return equal bits each time, for any number and weights of contributions, of which each overwrites the one
    before.

    Raises:
        ContractError: if the contract is broken. The message says how.
    """
    sizes = [_SIZE - 7, 0, 7]

    def average(count: int, scale: float = 1.0) -> Tensor:
        buffer = torch.empty_like(_draw(0))
        given = ((1.0 + 0.5 * number, buffer.copy_(_draw(number)).mul_(scale)) for number in range(count))
        return rule.combine(given, sizes)  # type: ignore[union-attr]  # None is caught below

    with contract("average", rule):
        expect(callable(getattr(rule, "combine", None)), "it has no method combine")
        elementwise = getattr(rule, "elementwise", None)
        expect(isinstance(elementwise, bool), f"elementwise is {elementwise!r}; it must be True or False")
        for count, scale in ((1, 1.0), (4, 1.0), (4, 0.0), (4, 1e-12)):
            found = average(count, scale)
            shape = (tuple(found.shape), found.dtype) if isinstance(found, Tensor) else type(found).__name__
            expect(
                shape == ((_SIZE,), torch.float32),
                f"combine returned {shape}, not a float32 vector as long as the values",
            )
            expect(bool(found.isfinite().all()), f"the average of {count} contributions is not finite")
            expect(torch.equal(found, average(count, scale)), "equal contributions give different averages")


def check_merge_rule(rule: MergeRule) -> None:
    """Raise unless ``rule`` keeps the contract of `MergeRule`.

    It must change only the local parameters, and nothing if the local, global and sent parameters are equal.

    Raises:
        ContractError: if the contract is broken. The message says how.
    """
    with contract("merge rule", rule):
        expect(callable(getattr(rule, "merge", None)), "it has no method merge")
        keeps = getattr(rule, "keeps_sent", None)
        expect(isinstance(keeps, bool), f"keeps_sent is {keeps!r}; it must be True or False")
        merged = []
        for _ in range(2):
            local, global_params, sent = _draw(0), _draw(1), _draw(2) if keeps else None
            rule.merge(local, global_params, sent)
            expect(torch.equal(global_params, _draw(1)), "merge changed the global parameters")
            expect(sent is None or torch.equal(sent, _draw(2)), "merge changed the sent parameters")
            expect(bool(local.isfinite().all()), "the local parameters are not finite after a merge")
            merged.append(local)
        expect(torch.equal(*merged), "equal merges give different parameters")
        if getattr(rule, "elementwise", False):
            local, global_params, sent = _draw(0), _draw(1), _draw(2)
            for part in (slice(_SIZE // 3), slice(_SIZE // 3, _SIZE)):
                rule.merge(local[part], global_params[part], sent[part] if keeps else None)
            expect(torch.equal(local, merged[0]), "it claims to be elementwise but merges parts differently")
        local = _draw(0)
        rule.merge(local, _draw(0), _draw(0) if keeps else None)
        close = bool((local - _draw(0)).abs().max() <= 1e-6)
        expect(close, "parameters move although the local, global and sent ones are equal")


def check_inner_optimizer(make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    """Raise unless the optimizer that ``make`` returns for a model trains it and continues from a checkpoint.

    It must hold every trainable parameter exactly once, reduce the loss, and give equal bits after ``load_state_dict``
    of its ``state_dict`` as without.

    Raises:
        ContractError: if the contract is broken. The message says how.
    """
    model = _model()
    optimizer = make(model)
    with contract("inner optimizer", optimizer):
        expect(isinstance(optimizer, torch.optim.Optimizer), "it is not a torch.optim.Optimizer")
        held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        wanted = [id(parameter) for parameter in model.parameters()]
        expect(len(held) == len(set(held)), "it holds a parameter twice")
        expect(set(held) == set(wanted), f"it holds {len(set(held) & set(wanted))} of {len(wanted)} parameters")
        expect(all("lr" in group for group in optimizer.param_groups), "it has parameter groups without lr")
        first = _trained(model, optimizer, 6)
        other = copy.deepcopy(model)
        resumed = make(other)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        last = _trained(model, optimizer, 6)
        expect(last < first, f"the loss is {first:.4g} after 6 steps and {last:.4g} after 12")
        _trained(other, resumed, 6)
        alike = all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        expect(alike, "it continues differently from its state_dict, so part of its state is elsewhere")


def _slots(state: OuterState) -> set[str]:
    for slot, values in state.slots.items():
        shape = (tuple(values.shape), values.dtype) if isinstance(values, Tensor) else (type(values).__name__,)
        fits = shape == ((_SIZE,), torch.float32)
        expect(fits, f"slot {slot!r} is {shape}, not a float32 vector as long as the parameters")
    return set(state.slots)


def _draw(seed: int) -> Tensor:
    return _normal(torch.Size([_SIZE]), torch.Generator("cpu").manual_seed(seed))


def _normal(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device="cpu", generator=generator)


def _model() -> nn.Module:
    """Return a model with an embedding, hidden matrices, a norm and a head, with fixed weights."""
    with torch.device("cpu"):
        model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.LayerNorm(8))
        model.append(nn.Linear(8, 12, bias=False)).float()
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(_normal(parameter.shape, generator) * 0.5)
    return model


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Train ``steps`` full-batch steps to predict each token's successor. Return the loss before the last step."""
    tokens, last = torch.arange(12, dtype=torch.int64, device="cpu"), math.nan
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        loss.backward()  # type: ignore[no-untyped-call]  # torch
        optimizer.step()
        optimizer.zero_grad()
        last = float(loss.detach())
    return last
