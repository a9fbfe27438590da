"""Which of the scheduled steps a replica of a swarm trains, by its own speed and those that the others report.

It may train a share of them, evenly, for as long as it is slow (DyLU); and leave out those that would keep the others
waiting, whenever it is late (grace). A step that is left out only advances the schedule. Learning rate, rounds and data
go on as for everybody, and nobody trains the sequences of that step in this epoch.
"""

from __future__ import annotations

from diloco.algorithm.pace import StepRate, steps_to_train, trains_at
from diloco.membership.view import View
from diloco.train.fleet.peer_fleet import PeerFleet
from diloco.train.settings import RunSettings

__all__ = ["DynamicSteps", "make_pace"]


def make_pace(settings: RunSettings, replica: int, others: PeerFleet) -> DynamicSteps | None:
    """What decides which steps a replica of a run trains; None: it trains all of them."""
    swarm, schedule = settings.swarm, settings.schedule
    grace = swarm.straggler == "grace"
    if not swarm.dynamic_steps and not grace:
        return None
    return DynamicSteps(
        replica,
        schedule.inner_steps,
        others,
        shares=swarm.dynamic_steps,
        grace_steps=(schedule.overlap_steps or 0) if grace else None,
    )


class DynamicSteps:
    """The pace of one replica.

    Args:
        inner_steps: H.
        shares: whether a replica slower than the fastest trains a share of the steps.
        grace_steps: tau, where steps are left out that don't fit into the time before the others stand still
            (`diloco.membership.grace`); None: others wait for whoever is late.
    """

    def __init__(
        self,
        replica: int,
        inner_steps: int,
        others: PeerFleet,
        *,
        shares: bool = True,
        grace_steps: int | None = None,
    ) -> None:
        self._replica = replica
        self._inner_steps = inner_steps
        self._others = others
        self._shares = shares
        self._grace_steps = grace_steps
        self._rate = StepRate()
        self._told: tuple[int, View] | None = None

    def trains(self, step: int) -> bool:
        """Whether this replica trains scheduled step ``step``, from 0, which it is about to begin."""
        return self._trains(self._replica, step) and self._fits()

    def members_training(self, step: int, *, trained: bool) -> int:
        """How many members train a scheduled step, as far as this replica knows; ``trained``: whether it has done so
        itself."""
        others = (member for member in self._others.view.members if member != self._replica)
        return trained + sum(self._trains(member, step) for member in others)

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

    def _fits(self) -> bool:
        """Whether this replica is fast enough to finish a step before anybody has to wait for it."""
        speed = self._rate.steps_per_s
        if self._grace_steps is None or speed is None:
            return True
        left_s = self._others.time_left_s(self._grace_steps)
        return left_s is None or left_s * speed >= 1

    def steps_of(self, replica: int) -> int:
        """How many of H scheduled steps a member trains, as far as this replica knows."""
        if not self._shares:
            return self._inner_steps
        known = dict(self._others.speeds())
        if (mine := self._rate.steps_per_s) is not None:
            known[self._replica] = mine
        return steps_to_train(replica, known, self._inner_steps)
