"""The choice of scheduled steps that a replica of a swarm trains, from its own speed and the speeds of the others.

With dynamic steps (DyLU), a slow replica trains an evenly spaced share of the steps. A skipped step only advances the
schedule: learning rate, rounds and data continue as on every other replica, and its sequences are not trained in this
epoch.
"""

from __future__ import annotations

from diloco.algorithm import StepRate, steps_to_train, trains_at
from diloco.membership import View
from diloco.train.fleet.peer_fleet import PeerFleet
from diloco.train.settings import RunSettings

__all__ = ["DynamicSteps", "make_pace"]


def make_pace(settings: RunSettings, replica: int, others: PeerFleet) -> DynamicSteps | None:
    """Return the pace of a replica, or None if it trains all steps."""
    if settings.network.straggler != "dynamic":
        return None
    return DynamicSteps(replica, settings.sync.inner_steps, others)


class DynamicSteps:
    """The pace of one replica.

    Args:
        inner_steps: H.
    """

    def __init__(self, replica: int, inner_steps: int, others: PeerFleet) -> None:
        self._replica = replica
        self._inner_steps = inner_steps
        self._others = others
        self._rate = StepRate()
        self._announced: tuple[int, View] | None = None  # the step and view of the last announcement

    def trains(self, step: int) -> bool:
        """Return whether this replica trains scheduled step ``step`` (counted from 0), the next to begin."""
        return self._trains(self._replica, step)

    def members_training(self, step: int, *, trained: bool) -> int:
        """Return how many members train scheduled step ``step``, as far as this replica knows.

        Args:
            trained: whether this replica trained it.
        """
        others = (member for member in self._others.view.members if member != self._replica)
        return trained + sum(self._trains(member, step) for member in others)

    @property
    def fraction(self) -> float:
        """The fraction of the scheduled steps that this replica trains now."""
        return self.steps_of(self._replica) / self._inner_steps

    def trained(self, compute_s: float) -> None:
        """Record a trained step that took ``compute_s`` seconds of pure compute."""
        self._rate.add(compute_s)

    def announce(self, step: int) -> None:
        """Announce this replica's speed after scheduled step ``step``: once every H steps and after a view change."""
        speed, view = self._rate.steps_per_s, self._others.view
        if speed is None:
            return
        if self._announced is None or self._announced[1] != view or step - self._announced[0] >= self._inner_steps:
            self._announced = step, view
            self._others.announce_speed(speed)
            self._others.note(pace=self.fraction)

    def _trains(self, replica: int, step: int) -> bool:
        return trains_at(step, self.steps_of(replica), self._inner_steps)

    def steps_of(self, replica: int) -> int:
        """Return how many of H scheduled steps a member trains, as far as this replica knows."""
        known = dict(self._others.speeds())
        if (mine := self._rate.steps_per_s) is not None:
            known[self._replica] = mine
        return steps_to_train(replica, known, self._inner_steps)
