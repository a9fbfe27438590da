"""A replica that trains: inner steps of real work on one thread, with Streaming DiLoCo."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.wan.plan import Work
from benchmarks.wan.work import InnerLoop, Layers
from diloco import DiLoCo, SyncSchedule
from diloco.events import Event
from diloco.transport import Transport

__all__ = ["INNER_STEPS", "NUM_FRAGMENTS", "Trainer", "work_of"]

INNER_STEPS = 100
NUM_FRAGMENTS = 4
OVERLAP_STEPS = 10

_PRODUCTS = 24
_WIDTH = 512
_PAUSE_S = 0.025
"""Half a step, which leaves the cores to what other machines would do: the joiner and the network."""


def work_of(values: int) -> Work:
    """Return a model with about this many parameters, in eight layers.

    >>> work_of(25_174_016).width
    512
    """
    return Work(width=round((values / 96) ** 0.5 / 64) * 64 or 64)


class Trainer:
    """One replica.

    Args:
        work: the model; see `work_of`.
        transport: the transport to the other replicas.
        computes: whether a step does matrix products before its pause, or only pauses.
        pause_s: the length of the pause.
        on_event: as for `DiLoCo`.

    Attributes:
        steps: for each inner step, its start time and the durations of its products and of its synchronisation.
    """

    def __init__(
        self,
        work: Work,
        transport: Transport,
        *,
        computes: bool,
        pause_s: float = _PAUSE_S,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.model = Layers(work)
        self.loop = InnerLoop(work, self.model, transport.replica)
        self.steps: list[tuple[float, float, float]] = []
        self._pause_s = pause_s
        self._factor = torch.randn(_WIDTH, _WIDTH) if computes else None
        self.diloco = DiLoCo(
            self.model,
            self.loop.optimizer,
            transport=transport,
            schedule=SyncSchedule(inner_steps=INNER_STEPS, num_fragments=NUM_FRAGMENTS, overlap_steps=OVERLAP_STEPS),
            codec="fp4",
            mean_codec="float32",
            on_event=on_event,
        )

    def step(self) -> None:
        """Take one inner step, and the synchronisation that is due after it."""
        began_s = time.monotonic()
        if self._factor is not None:
            for _ in range(_PRODUCTS):
                torch.mm(self._factor, self._factor)
        computed_s = time.monotonic()
        time.sleep(self._pause_s)
        self.loop.update(self.diloco.steps + 1)
        updated_s = time.monotonic()
        self.diloco.step()
        done_s = time.monotonic()
        self.steps.append((began_s, computed_s - began_s, done_s - updated_s))
