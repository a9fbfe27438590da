"""Which of the scheduled steps a replica trains: all of them, or as many as its speed allows."""

from __future__ import annotations

from collections.abc import Collection

from diloco.algorithm import StepRate, steps_to_train, trains_at
from diloco.membership import View
from diloco.train.fleet import MetFleet


class EveryStep:
    """The steps of a replica that trains all of them, as all members do."""

    skips = False  # whether a replica may train fewer

    def trains(self, step: int) -> bool:
        """Return whether this replica trains scheduled step ``step`` (counted from 0)."""
        return True

    def num_training(self, step: int, members: Collection[int], *, trained: bool) -> int:
        """Return how many members train step ``step``, as far as this replica knows; ``trained``: whether it did."""
        return len(members)

    @property
    def fraction(self) -> float:
        """The fraction of the scheduled steps that this replica trains now."""
        return 1.0

    def trained(self, compute_s: float) -> None:
        """Record a trained step that took ``compute_s`` seconds of pure compute."""

    def announce(self, step: int) -> None:
        """Tell the others this replica's speed after scheduled step ``step``, if they have to know it."""


class DynamicSteps(EveryStep):
    """Those that a replica of a swarm trains, from its own speed and the speeds of the others (DyLU).

    A slow replica trains an evenly spaced share of the steps. A skipped step only advances the schedule: learning rate,
    rounds and data continue as on every other replica.
    """

    skips = True

    def __init__(self, replica: int, inner_steps: int, others: MetFleet) -> None:
        self._replica = replica
        self._inner_steps = inner_steps
        self._others = others
        self._rate = StepRate()
        self._announced: tuple[int, View] | None = None  # the step and view of the last announcement

    def trains(self, step: int) -> bool:
        return self._member_trains(self._replica, step)

    def num_training(self, step: int, members: Collection[int], *, trained: bool) -> int:
        others = {*members} - {self._replica}
        return trained + sum(self._member_trains(member, step) for member in others)

    def _member_trains(self, member: int, step: int) -> bool:
        return trains_at(step, self.steps_of(member), self._inner_steps)

    @property
    def fraction(self) -> float:
        return self.steps_of(self._replica) / self._inner_steps

    def trained(self, compute_s: float) -> None:
        self._rate.add(compute_s)

    def announce(self, step: int) -> None:
        """Announce the speed once every H steps and after a view change."""
        speed, view = self._rate.steps_per_s, self._others.transport.view
        if speed is None:
            return
        if self._announced is None or self._announced[1] != view or step - self._announced[0] >= self._inner_steps:
            self._announced = step, view
            self._others.directory.transport.announce_speed(speed)
            self._others.place.note(pace=self.fraction)

    def steps_of(self, replica: int) -> int:
        """Return how many of H scheduled steps a member trains, as far as this replica knows."""
        known = dict(self._others.directory.transport.speeds())
        if (mine := self._rate.steps_per_s) is not None:
            known[self._replica] = mine
        return steps_to_train(replica, known, self._inner_steps)
