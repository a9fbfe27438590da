"""Odd modules, and pairs of replicas of them, for tests of what is averaged and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from diloco.algorithm import SyncSchedule
from diloco.events import RoundCommitted
from diloco.transport import InProcessTransport
from tests.replicas import Swarm

H = 2


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def with_buffer(buffer: Tensor, name: str = "buffer", **kind: bool) -> nn.Module:
    model = linear()
    model.register_buffer(name, buffer, **kind)
    return model


def with_parameter(parameter: Any, name: str = "odd") -> nn.Module:
    model = linear()
    model.register_parameter(name, parameter if isinstance(parameter, nn.Parameter) else nn.Parameter(parameter))
    return model


class Wrapping(torch.Tensor):
    """A tensor whose values are in another one, as those of quantised weights are."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapping:
        made: Wrapping = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*(each.inner if isinstance(each, Wrapping) else each for each in args), **(kwargs or {}))
        return Wrapping(out) if func is torch.ops.aten.detach.default else out

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None


def pair(make: Callable[[], nn.Module], other: Callable[[], nn.Module] | None = None, *, least: int = 2) -> Swarm:
    """Return two replicas, of ``make()`` and of ``other()`` or else ``make()``."""
    return Swarm(
        2,
        SyncSchedule(inner_steps=H),
        make_model=iter([make(), (other or make)()]).__next__,
        make_inner=lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5),
        transport=InProcessTransport(2, min_contributors=least),
    )


def rounds(swarm: Swarm, count: int = 1) -> None:
    """Move the trainable parameters of replica m by m, and merge, ``count`` times."""

    def gradient(replica: int, step: int, model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, -float(replica))

    swarm.run(count * H, gradient)


def committed(swarm: Swarm) -> bool:
    """Return whether every round has been committed, and there was one."""
    void = [diloco.rounds_void for diloco in swarm.replicas]
    return void == [0, 0] and any(isinstance(event, RoundCommitted) for event in swarm.events)
