"""A view: the replicas that take part in a round, agreed by all of them before payloads move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from diloco.errors import ConfigurationError

__all__ = ["View"]


@dataclass(frozen=True)
class View:
    """Who takes part.

    Attributes:
        id: grows by one whenever the members change.
        members: replica numbers in ascending order, which is also the order of every sum.
        latest: those of them who came last, ascending; none where all came at once.

    >>> View.of(3)
    View(id=0, members=(0, 1, 2))
    """

    id: int
    members: tuple[int, ...]
    latest: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not self.members or list(self.members) != sorted(set(self.members)):
            raise ConfigurationError(
                f"a view of members {self.members} was given; it needs at least one replica, each once, in ascending "
                "order. Nothing was started."
            )

    @classmethod
    def of(cls, num_replicas: int) -> View:
        """The first view of ``num_replicas`` replicas, numbered from 0."""
        return cls(0, tuple(range(num_replicas)))

    def followed_by(self, identity: int, members: Sequence[int], joined: Sequence[int]) -> View:
        """The view ``identity`` of ``members``, of whom ``joined`` were not in this one.

        >>> View.of(2).followed_by(1, (0, 1, 2), (2,)).followed_by(2, (0, 2), ()).latest
        (2,)
        """
        return View(identity, tuple(members), tuple(joined) or tuple(each for each in self.latest if each in members))
