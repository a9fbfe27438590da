"""Which sequences each member draws as views change: a pure function of what all members agree on.

A view changes while its members are at different steps, and none of them stops for it. So they keep using their
assignment for ``margin`` further steps, within which every one of them has to wait for a round of the next view. The
next assignment begins there. Until then, a joining replica draws from positions that are reserved for it alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco.data.assignment import Assignment, Range
from diloco.errors import ConfigurationError

__all__ = ["Shares"]


@dataclass(frozen=True)
class Shares:
    """The assignments of a run that have not ended yet.

    >>> alone = Shares.of((0,))
    >>> both = alone.following(10, (0, 1), joined=(1,), left={}, margin=5, batch_size=4)
    >>> [each.from_step for each in both.of_member(0)]
    [0, 15]
    >>> both.of_member(1)[0]  # for steps 10 to 14, after what replica 0 draws until then
    Assignment(from_step=10, members=(1,), start=60, returned=())
    >>> both.chain[-1].start
    80
    """

    chain: tuple[Assignment, ...]  # in the order in which they begin; each is in force until the next one begins
    # one assignment for each replica that joined, with the step from which the chain includes it
    aside: tuple[tuple[Assignment, int], ...] = ()

    @classmethod
    def of(cls, members: Sequence[int], from_step: int = 0) -> Shares:
        """Return the shares of a run that begins with ``members``."""
        return cls((Assignment(from_step, tuple(members), 0),))

    def following(
        self,
        from_step: int,
        members: Sequence[int],
        *,
        joined: Collection[int],
        left: Mapping[int, int],
        margin: int,
        batch_size: int,
    ) -> Shares:
        """Return the shares after a change of the view.

        Args:
            from_step: a step of the next view that no member has begun when the change is agreed on; not before that of
                any earlier change.
            members: the members of the next view, in ascending order.
            joined: the members that were not in the view before.
            left: replica that left cleanly -> the inner steps that it has done.
            margin: steps within which every member waits for a round.
            batch_size: sequences per batch of a replica (B).
        """
        begins = max(from_step + margin, self.chain[-1].from_step)
        returned: list[Range] = []
        for replica in set(self.chain[-1].members) - set(members):
            returned += self._unused(replica, left.get(replica, from_step), begins, batch_size)
        base = self.chain[-1].following(begins, tuple(members), batch_size, returned)
        oldest = from_step - margin  # no member is further behind
        aside, start = [each for each in self.aside if each[1] > oldest], base.start
        for replica in sorted(joined):
            aside.append((Assignment(from_step, (replica,), start), begins))
            start += (begins - from_step) * batch_size
        following = Assignment(begins, base.members, start, base.returned)
        alive = [each for each, after in zip(self.chain, self.chain[1:], strict=False) if after.from_step > oldest]
        last = [self.chain[-1]] if self.chain[-1].from_step < begins else []
        return Shares((*alive, *last, following), tuple(aside))

    def of_member(self, member: int) -> tuple[Assignment, ...]:
        """Return the assignments that a member's sampler needs, in the order in which they begin."""
        return tuple(assignment for assignment, _ in self._spans(member, self.chain[-1].from_step))

    def to_message(self) -> dict[str, Any]:
        """Return the shares as JSON."""
        return {
            "chain": [each.to_message() for each in self.chain],
            "aside": [[each.to_message(), until] for each, until in self.aside],
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Shares:
        """Return the shares from which `to_message` made the message; raise `ConfigurationError` for anything else."""
        match message:
            case {"chain": [*chain], "aside": [*aside]} if chain and all(_is_aside(each) for each in aside):
                begun = tuple(Assignment.from_message(each) for each in chain)
                return cls(begun, tuple((Assignment.from_message(each), until) for each, until in aside))
        raise ConfigurationError(
            "The message of shares must have a chain of assignments and a list of assignments aside."
        )

    def _unused(self, replica: int, done: int, until: int, batch_size: int) -> list[Range]:
        """Return what a replica that has done this many steps is assigned before step ``until`` and will not use."""
        ranges: list[Range] = []
        for assignment, end in self._spans(replica, until):
            first = max(assignment.from_step, done)
            if first < end:
                ranges += assignment.ranges(replica, range(first, end), batch_size)
        return ranges

    def _spans(self, replica: int, until: int) -> list[tuple[Assignment, int]]:
        """Return a member's assignments, each with the step at which it ends; after a rejoin, only the new ones."""
        aside = [each for each in self.aside if each[0].members == (replica,)][-1:]
        begins = aside[0][1] if aside else 0
        ends = [each.from_step for each in self.chain[1:]] + [until]
        spans = zip(self.chain, ends, strict=True)
        return [*aside, *((a, end) for a, end in spans if replica in a.members and a.from_step >= begins)]


def _is_aside(each: object) -> bool:
    """Return whether it may be a pair of an assignment and the step until which it is in force."""
    return isinstance(each, list | tuple) and len(each) == 2 and type(each[1]) is int
