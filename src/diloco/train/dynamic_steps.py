"""Which of the scheduled steps a replica of a swarm trains, by its own speed and those that the others report (DyLU).

A step that is left out only advances the schedule. Learning rate, rounds and data go on as for everybody, and nobody
trains the sequences of that step in this epoch.
"""

from __future__ import annotations

from diloco.algorithm.pace import StepRate, steps_to_train, trains_at
from diloco.membership.view import View
from diloco.train.fleet.peer_fleet import PeerFleet

__all__ = ["DynamicSteps"]


class DynamicSteps:
    """The pace of one replica.

    Args:
        replica: its number.
        inner_steps: H.
        others: its way to the others.
    """

    def __init__(self, replica: int, inner_steps: int, others: PeerFleet) -> None:
        self._replica = replica
        self._inner_steps = inner_steps
        self._others = others
        self._rate = StepRate()
        self._told: tuple[int, View] | None = None

    def trains(self, step: int) -> bool:
        """Whether this replica trains scheduled step ``step``, from 0."""
        return self._trains(self._replica, step)

    def members_training(self, step: int) -> int:
        """How many members train a scheduled step, as far as this replica knows."""
        return sum(self._trains(member, step) for member in self._others.view.members)

    @property
    def fraction(self) -> float:
        """The fraction of the scheduled steps that this replica trains now."""
        return self.steps_of(self._replica) / self._inner_steps

    def trained(self, compute_s: float) -> None:
        """A step was trained, in ``compute_s`` seconds of pure compute."""
        self._rate.add(compute_s)

    def tell(self, step: int) -> None:
        """After scheduled step ``step``: tell the others, once in H steps and whenever the members change."""
        speed, view = self._rate.steps_per_s, self._others.view
        if speed is None:
            return
        if self._told is None or self._told[1] != view or step - self._told[0] >= self._inner_steps:
            self._told = step, view
            self._others.tell_speed(speed)
            self._others.note(pace=self.fraction)

    def _trains(self, replica: int, step: int) -> bool:
        return trains_at(step, self.steps_of(replica), self._inner_steps)

    def steps_of(self, replica: int) -> int:
        """How many of H scheduled steps a member trains, as far as this replica knows."""
        known = dict(self._others.speeds())
        if (mine := self._rate.steps_per_s) is not None:
            known[self._replica] = mine
        return steps_to_train(replica, known, self._inner_steps)
