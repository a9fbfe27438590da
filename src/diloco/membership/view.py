"""A view: the replicas that take part in a round, agreed by all of them before payloads move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from diloco.errors import ConfigurationError

__all__ = ["View"]


@dataclass(frozen=True)
class View:
    """The members of the run during one period.

    >>> View.of(3)
    View(id=0, members=(0, 1, 2))
    """

    id: int  # increases by one with every view change
    members: tuple[int, ...]  # replica numbers in ascending order, which is also the order of every sum
    # the members in join order, and by number if they joined together; empty: ordered by number
    order: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not self.members or list(self.members) != sorted(set(self.members)):
            raise ConfigurationError(
                f"a view needs at least one replica, each once, in ascending order; got members {self.members}."
            )
        object.__setattr__(self, "order", self.order or self.members)
        if sorted(self.order) != list(self.members):
            raise ConfigurationError(
                f"the join order of a view must name each member once; got order {self.order} for members "
                f"{self.members}."
            )

    @classmethod
    def of(cls, num_replicas: int) -> View:
        """The first view of ``num_replicas`` replicas, numbered from 0."""
        return cls(0, tuple(range(num_replicas)))

    def followed_by(self, identity: int, members: Sequence[int], joined: Sequence[int]) -> View:
        """Return view ``identity`` with ``members``, of which ``joined`` are not in this one.

        >>> View.of(3).followed_by(1, (1, 2), ()).followed_by(2, (0, 1, 2), (0,)).order
        (1, 2, 0)
        """
        return View(identity, tuple(members), (*(each for each in self.order if each in members), *sorted(joined)))
