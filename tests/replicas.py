"""Small models, and replicas that step in lockstep, for tests of the algorithm."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diloco.algorithm import (
    AlphaMerge,
    Codec,
    FragmentLayout,
    MergeRule,
    Nesterov,
    OuterOptimizer,
    RebaseMerge,
    Sgd,
    SyncSchedule,
    partition,
)
from diloco.events import Event
from diloco.outer import DiLoCo
from diloco.transport import InProcessTransport
from tests.faults import Fault, FaultyTransport

Gradient = Callable[[int, int, nn.Module], None]
"""A function of (replica, step from 0, model) that sets ``.grad`` of the parameters."""


class Vectors(nn.Module):
    """A model with three parameters of different sizes."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        generator = generator or torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(4, dtype=torch.float32, generator=generator))
        self.second = nn.Parameter(torch.randn(2, 3, dtype=torch.float32, generator=generator))
        self.third = nn.Parameter(torch.randn(5, dtype=torch.float32, generator=generator))

    def vector(self) -> Tensor:
        return torch.cat([self.first, self.second.flatten(), self.third])


def apart(model: nn.Module) -> tuple[FragmentLayout, ...]:
    """Return a fragment for each parameter, in the order of the model."""
    named = enumerate(model.named_parameters())
    return tuple(FragmentLayout(index, (name,), (tuple(each.shape),)) for index, (name, each) in named)


class Swarm:
    """M replicas of one model in one thread, which step in lockstep."""

    def __init__(
        self,
        num_replicas: int,
        schedule: SyncSchedule,
        *,
        make_model: Callable[[], nn.Module] = Vectors,
        make_inner: Callable[[nn.Module], torch.optim.Optimizer] = lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        outer: OuterOptimizer | None = None,
        merge: MergeRule | None = None,
        codec: Codec | str = "float32",
        transport: InProcessTransport | None = None,
        weights: Sequence[float] = (),
        **arguments: Any,
    ) -> None:
        self.transport = transport or InProcessTransport(num_replicas)
        self.events: list[Event] = []
        self.models = [make_model() for _ in range(num_replicas)]
        self.inner = [make_inner(model) for model in self.models]
        self.replicas = [
            DiLoCo(
                model,
                inner,
                transport=self.transport.endpoint(number),
                schedule=schedule,
                outer_optimizer=outer or Sgd(learning_rate=1.0),
                merge=merge or AlphaMerge(0.0),
                codec=codec,
                weight=weights[number] if weights else 1.0,
                **{"on_event": self.events.append, **arguments},
            )
            for number, (model, inner) in enumerate(zip(self.models, self.inner, strict=True))
        ]

    def run(self, steps: int, gradient: Gradient) -> None:
        for _ in range(steps):
            for number, (model, inner, diloco) in enumerate(zip(self.models, self.inner, self.replicas, strict=True)):
                gradient(number, diloco.steps, model)
                inner.step()
                inner.zero_grad()
                diloco.begin()
            for diloco in self.replicas:
                diloco.finish()

    def resume_from(self, other: Swarm) -> None:
        """Restore everything that a checkpoint of ``other`` would hold; its inner optimizer has no state."""
        self.transport.load_state_dict(other.transport.state_dict())
        for mine, theirs, diloco, saved in zip(self.models, other.models, self.replicas, other.replicas, strict=True):
            mine.load_state_dict(theirs.state_dict())
            diloco.load_state_dict(copy.deepcopy(saved.state_dict()))

    def local(self, replica: int) -> Tensor:
        """Return all local parameters of a replica as one flat vector."""
        return torch.cat([p.detach().flatten() for p in self.models[replica].parameters()])

    def global_params(self, replica: int) -> Tensor:
        """Return all global parameters that a replica holds, as one flat vector in the model's order."""
        named = self.replicas[replica].named_global_params()
        return torch.cat([named[name].flatten() for name, _ in self.models[replica].named_parameters()])


def quadratic(seed: int = 0, *, shared: bool = False) -> Gradient:
    """Return a function that sets gradients of ``|x - target|^2 / 2`` plus noise, with a target per replica or one."""

    def gradient(replica: int, step: int, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(1000 * seed + (0 if shared else replica))
        noise = torch.Generator().manual_seed(100_000 * seed + 100 * step + (0 if shared else replica + 1))
        for parameter in model.parameters():
            target = drawn(parameter.shape, generator)
            jitter = drawn(parameter.shape, noise) / 8
            parameter.grad = parameter.detach() - target + jitter

    return gradient


def drawn(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return random float32 values between -2 and 2. Each processor draws the same, which it does not with `randn`."""
    return torch.randint(-(2**21), 2**21, tuple(shape), generator=generator) / 2**20


BALANCED = {"fragments": partition(Vectors(), num_fragments=3, strategy="balanced")}
STREAMING = SyncSchedule(inner_steps=4, num_fragments=3, overlap_steps=2)


def streaming(num_replicas: int = 3, *, faults: Sequence[Fault] = (), least: int | None = None, **more: Any) -> Swarm:
    """Return replicas of Streaming DiLoCo with default settings and the schedule `STREAMING`."""
    arguments: dict[str, Any] = {
        "outer": Nesterov(learning_rate=0.4),
        "merge": RebaseMerge(),
        "codec": "fp4",
        "transport": FaultyTransport(num_replicas, faults=faults, min_contributors=least),
        **BALANCED,
        **more,
    }
    return Swarm(num_replicas, STREAMING, **arguments)


def agree(swarm: Swarm) -> bool:
    """Return whether all replicas hold the same global parameters and outer state."""
    digests = [[d.fragments[p].state.digest() for p in range(len(d.fragments))] for d in swarm.replicas]
    return all(each == digests[0] for each in digests)
