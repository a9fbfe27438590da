"""Outer optimizers, which update the flat global parameters of a fragment, and rules that merge them into local ones.

An outer optimizer has two methods, ``init`` and ``update``, like the transformations of optax, and keeps its state per
fragment in an `OuterState`. All arithmetic is float32, elementwise and in pieces, and every product is rounded before
it is added (no fused multiply-add). So the result has the same bits on every machine and needs no tensor-sized
temporary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from diloco.algorithm.checks import check_choice, check_number, check_whole
from diloco.algorithm.codec.base import in_pieces
from diloco.algorithm.schedule import ValueSchedule

ScalarSchedule = float | Callable[[int], float]  # a number, or a pure function of the outer step (counted from 0)


@dataclass
class OuterState:
    """The state of the outer optimizer for one fragment."""

    step: int = 0  # the number of outer steps taken
    slots: dict[str, Tensor] = field(default_factory=dict)  # name -> ``(numel,)`` float32


@runtime_checkable
class OuterOptimizer(Protocol):
    """An outer optimizer: an immutable value, shared by all fragments."""

    def init(self, values: Tensor) -> OuterState:
        """Return the initial state for ``values``, ``(numel,)`` float32, on the same device."""

    def update(self, mean: Tensor, state: OuterState, values: Tensor) -> None:
        """Take one outer step, updating ``state`` and ``values`` in place. ``mean`` must not be changed.

        Args:
            mean: ``(numel,)`` float32, the mean pseudo-gradient (Delta).
            state: The state of this fragment.
            values: ``(numel,)`` float32, the global parameters (theta).
        """


def at(schedule: ScalarSchedule, step: int) -> float:
    """Return the value of ``schedule`` at ``step``."""
    return schedule(step) if callable(schedule) else schedule


def _check(name: str, value: ScalarSchedule, high: float | None = None) -> None:
    if not callable(value):
        check_number(f"outer {name}", value, ge=0, le=high)


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """``theta <- theta - lr * Delta`` (FedAvg with lr = 1; Algorithm 1 with plain SGD)."""

    learning_rate: ScalarSchedule = 1.0

    def __post_init__(self) -> None:
        _check("learning_rate", self.learning_rate)

    @property
    def lasting_gain(self) -> float:
        """What each of many equal means moves values by, as a multiple of it, at the highest learning rate."""
        return _peak(self.learning_rate)

    def init(self, values: Tensor) -> OuterState:
        return OuterState()

    def update(self, mean: Tensor, state: OuterState, values: Tensor) -> None:
        learning_rate = at(self.learning_rate, state.step)
        for delta, theta in in_pieces(mean, values):
            theta.sub_(delta * learning_rate)
        state.step += 1


@dataclass(frozen=True, kw_only=True)
class Nesterov:
    """``v <- mu * v + Delta; theta <- theta - lr * (Delta + mu * v)``, as ``torch.optim.SGD(nesterov=True)``.

    The papers' outer optimizer, with mu = 0.9 and lr = 0.7 (DiLoCo) or 0.4 (Streaming DiLoCo). Adds 4 bytes per value.
    Each of many equal means moves values by the gain, ``lr / (1 - mu)``, times it; the first by only ``lr (1 + mu)``.

    >>> theta = torch.tensor([1.0])
    >>> outer = Nesterov(learning_rate=0.5, momentum=0.5)
    >>> state = outer.init(theta)
    >>> outer.update(torch.tensor([1.0]), state, theta)     # v = 1, theta = 1 - 0.5 * (1 + 0.5 * 1)
    >>> theta.item(), state.slots["momentum"].item()
    (0.25, 1.0)
    """

    learning_rate: ScalarSchedule = 0.7
    momentum: ScalarSchedule = 0.9

    def __post_init__(self) -> None:
        _check("learning_rate", self.learning_rate)
        _check("momentum", self.momentum, 1)

    @property
    def lasting_gain(self) -> float:
        """As that of `Sgd`."""
        return round(_peak(self.learning_rate) / (1 - _peak(self.momentum)), 12)

    def init(self, values: Tensor) -> OuterState:
        return OuterState(slots={"momentum": torch.zeros_like(values)})

    def update(self, mean: Tensor, state: OuterState, values: Tensor) -> None:
        learning_rate, momentum = at(self.learning_rate, state.step), at(self.momentum, state.step)
        for delta, velocity, theta in in_pieces(mean, state.slots["momentum"], values):
            velocity.mul_(momentum).add_(delta)
            theta.sub_(velocity.mul(momentum).add_(delta).mul_(learning_rate))
        state.step += 1


def nesterov(
    learning_rate: float = 0.7,
    momentum: float = 0.9,
    outer_steps: int = 1,
    schedule: Any = "constant",
    final_ratio: float = 0.0,
    momentum_warmup: int = 0,
) -> Nesterov:
    """Return `Nesterov` as settings describe it; its schedules span ``outer_steps``."""
    warmup = check_whole("sync.arguments.outer.momentum_warmup", momentum_warmup, 0)
    rising = ValueSchedule(peak=momentum, warmup_steps=warmup) if warmup else momentum
    return Nesterov(learning_rate=_scheduled(learning_rate, outer_steps, schedule, final_ratio), momentum=rising)


def sgd(learning_rate: float = 1.0, outer_steps: int = 1, schedule: Any = "constant", final_ratio: float = 0.0) -> Sgd:
    """Return `Sgd` as settings describe it; its schedule spans ``outer_steps``."""
    return Sgd(learning_rate=_scheduled(learning_rate, outer_steps, schedule, final_ratio))


def _peak(value: ScalarSchedule) -> float:
    return value.peak if isinstance(value, ValueSchedule) else at(value, 0)


def _scheduled(rate: float, outer_steps: int, kind: Any, final_ratio: float) -> ScalarSchedule:
    check_choice("sync.arguments.outer.schedule", kind, ("constant", "linear", "cosine"))
    check_number("sync.arguments.outer.final_ratio", final_ratio, ge=0, le=1)
    if kind == "constant":
        return rate
    return ValueSchedule(peak=rate, kind=kind, total_steps=outer_steps, final_ratio=final_ratio)


@runtime_checkable
class MergeRule(Protocol):
    """A rule that merges new global parameters into the local ones, each value by the same value of the others."""

    @property
    def keeps_sent(self) -> bool:
        """Whether the rule needs the local parameters when sent, which cost 4 bytes per value while in flight."""

    def merge(self, local: Tensor, global_params: Tensor, sent: Tensor | None) -> None:
        """Update ``local`` in place, given the global parameters after the outer step; all ``(n,)`` float32.

        ``sent`` are the local parameters when sent if ``keeps_sent``, else None. A call gets a part of a fragment.
        """


@dataclass(frozen=True)
class AlphaMerge:
    """``local <- alpha * local + (1 - alpha) * global`` (Streaming DiLoCo, Algorithm 2, line 12).

    alpha = 0 drops the work of the overlapped steps; alpha = 1 ignores the other replicas.

    >>> import torch
    >>> local = torch.tensor([1.0, 2.0])
    >>> AlphaMerge(0.25).merge(local, torch.tensor([5.0, 6.0]), None)
    >>> local.tolist()
    [4.0, 5.0]
    """

    alpha: float = 0.0
    keeps_sent = False

    def __post_init__(self) -> None:
        check_number("merge alpha", self.alpha, ge=0, le=1)

    def merge(self, local: Tensor, global_params: Tensor, sent: Tensor | None) -> None:
        local.mul_(self.alpha).add_(global_params * (1 - self.alpha))


@dataclass(frozen=True)
class RebaseMerge:
    """``local <- global + (local - local when sent)``, which keeps all work of the overlapped steps
    (as LOSCAR-SGD).

    >>> import torch
    >>> local, sent = torch.tensor([1.5]), torch.tensor([1.0])
    >>> RebaseMerge().merge(local, torch.tensor([3.0]), sent)
    >>> local.tolist()
    [3.5]
    """

    keeps_sent = True

    def merge(self, local: Tensor, global_params: Tensor, sent: Tensor | None) -> None:
        assert sent is not None, "RebaseMerge needs the local parameters when sent"
        local.sub_(sent).add_(global_params)
