"""What members agree on: views, votes, and the reports with which they agree. Pure values, sent as they are.

The bounds of a field are part of its type: `msgspec` checks them when a value is received.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from msgspec import Meta

from diloco.algorithm import RoundId
from diloco.errors import ConfigurationError

GREATEST = 1 << 53
"""The upper bound of every step, size and count."""

MOST_RANK = (1 << 31) - 1
"""The greatest number of a rank or a replica."""

_MAX_ROUNDS = 4096  # that one member can have committed recently: two of each fragment
MAX_MEMBERS = 1 << 12
_MAX_NAMED = 8  # of several replicas

Count = Annotated[int, Meta(ge=0, le=GREATEST)]
Rank = Annotated[int, Meta(ge=0, le=MOST_RANK)]
Ranks = Annotated[tuple[Rank, ...], Meta(max_length=MAX_MEMBERS)]
RoundIds = Annotated[frozenset[RoundId], Meta(max_length=_MAX_ROUNDS)]
Digest = Annotated[str, Meta(max_length=64)]  # with the bounds above, a report fits into a message of 1 MiB
Words = Annotated[str, Meta(max_length=1 << 16)]
"""A text for users, which is made printable and cut as soon as it is part of a value."""
Cause = Literal[
    "silent", "ended", "unreachable", "late", "fault", "ejected", "left", "restarted", "joins", "interrupted", "other"
]
"""Why a view ends: what has become of a member, or "other": a round is disputed, or it is unknown."""
Votes = Annotated[Mapping[RoundId, Digest], Meta(max_length=_MAX_ROUNDS)]
"""Rounds with the digest of the average that one rank holds."""
Commits = Annotated[
    Mapping[RoundId, Annotated[tuple[Digest, ...], Meta(min_length=1, max_length=MAX_MEMBERS)]],
    Meta(max_length=_MAX_ROUNDS),
]
"""Rounds with the digests of their averages, one for each position in a replica."""
Replicas = Annotated[frozenset[Rank], Meta(max_length=MAX_MEMBERS)]


@dataclass(frozen=True)
class View:
    """The replicas that take part in a round, agreed by all of them before payloads move.

    >>> View.of(3)
    View(id=0, members=(0, 1, 2))
    """

    id: Annotated[int, Meta(ge=-1, le=GREATEST)]  # increases by one with every view change
    members: Ranks  # replica numbers in ascending order, which is also the order of every sum
    # the members in join order, and by number if they joined together; empty: ordered by number
    order: Ranks = field(default=(), repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", self.order or self.members)
        if not self.members or not list(self.members) == sorted(set(self.members)) == sorted(self.order):
            rule = "a view needs at least one replica, each once, in ascending order and in join order"
            raise ConfigurationError(f"{rule}; got {self.members} and {self.order}.")

    @classmethod
    def of(cls, num_replicas: int) -> View:
        """The first view of ``num_replicas`` replicas, numbered from 0."""
        return cls(0, tuple(range(num_replicas)))

    def followed_by(self, members: Sequence[int]) -> View:
        """Return the next view with ``members``, in ascending order.

        >>> View.of(3).followed_by((1, 2)).followed_by((0, 1, 2)).order
        (1, 2, 0)
        """
        kept = [member for member in self.order if member in members]
        joined = [member for member in members if member not in kept]
        return View(self.id + 1, tuple(members), (*kept, *joined))


def names_of(replicas: Collection[int]) -> str:
    """Name replicas for a message, at most eight of them."""
    names, more = ", ".join(map(str, sorted(replicas)[:_MAX_NAMED])), len(replicas) - _MAX_NAMED
    return f"replica{'s' if len(replicas) != 1 else ''} {names}{f' and {more} more' if more > 0 else ''}"


@dataclass(frozen=True)
class NextView:
    """What all staying members adopt."""

    view: View
    previous: View  # the view that ended
    # one more than the last inner step that any survivor has begun to synchronise. If replicas joined, rounds sent at
    # this inner step or later belong to the next view, and earlier undecided rounds are void.
    from_step: Count
    commits: Commits  # the committed rounds that a survivor may not have committed itself
    void: RoundIds = frozenset()  # rounds that are void; see `carries_over` for the undecided ones
    left: Ranks = ()  # members of the old view that left voluntarily; ascending
    apart: Ranks = ()  # members that were left out, and that may still be running; ascending
    restarted: Ranks = ()  # members that have ended, and whose new processes are about to join; ascending

    def __post_init__(self) -> None:
        if self.view.id != self.previous.id + 1:
            raise ConfigurationError(f"view {self.previous.id} can't be followed by view {self.view.id}.")

    @property
    def staying(self) -> tuple[int, ...]:
        """The members of the old view that stay."""
        return tuple(each for each in self.view.members if each in self.previous.members)

    @property
    def joined(self) -> tuple[int, ...]:
        """The replicas that were not members before."""
        return tuple(each for each in self.view.members if each not in self.previous.members)

    @property
    def coming(self) -> tuple[int, ...]:
        """The replicas that join, with this view or right after it."""
        return (*self.joined, *self.restarted)

    @property
    def reason(self) -> str:
        """What has become of the members, for users."""
        lost = {*self.previous.members}.difference(self.view.members, self.left)
        parts = (
            (lost, "is lost", "are lost"),
            (self.left, "has left", "have left"),
            (self.joined, "joins", "join"),
            (self.view.members, "continues", "continue"),
        )
        return "; ".join(
            f"{names_of(replicas)} {singular if len(replicas) == 1 else plural}"
            for replicas, singular, plural in parts
            if replicas
        )

    @property
    def carries_over(self) -> bool:
        """Whether rounds that are neither committed nor void continue in the next view; else they are void, too."""
        return not self.joined


@dataclass(frozen=True)
class Accepted:
    """The last proposal that a rank has accepted in a view change."""

    ballot: Count
    following: NextView
    again: bool  # whether a proposer had taken it over from an earlier ballot


@dataclass(frozen=True)
class Report:
    """One rank's report on the end of a view, all first-hand, and its promise to accept nothing below ``ballot``.

    What can be wrong with a replica has these names everywhere: it is ``apart``, ``gone`` or has ``left``, and so is
    lost; or it is heard, and ``late`` or ``unsteady``. It is in doubt while only the end of its connection is known.
    """

    rank: Rank
    view_id: Count
    apart: Replicas = frozenset()  # replicas that the rank can't hear, or that can't hear it; they may be running
    gone: Replicas = frozenset()  # replicas whose process is known to have ended
    left: Replicas = frozenset()  # replicas that have announced their leaving; they are in ``gone`` as well
    # replicas that the rank hears, and for whose contribution it has waited too long, or that spoil rounds
    late: Replicas = frozenset()
    unsteady: Replicas = frozenset()  # replicas that the rank hears, but that are quiet, or were recently
    # replicas that have asked the rank to be members of the next view; a member among them was started again, and joins
    # right after that view
    joining: Replicas = frozenset()
    step: Count = 0  # the number of inner steps that the rank has begun to synchronise
    commits: Votes = field(default_factory=dict)  # the rounds that it has committed recently
    void: RoundIds = frozenset()  # the rounds that the rank has decided void recently
    # rounds that the rank has voted for and not committed; disputed ones are in ``void`` as well
    voted: Votes = field(default_factory=dict)
    ballot: Count = 0
    number: Count = 0  # of this report among the rank's
    accepted: Accepted | None = None

    def extended(
        self,
        others: Collection[int],
        *,
        apart: Collection[int] = (),
        gone: Collection[int] = (),
        left: Collection[int] = (),
        late: Collection[int] = (),
        restarted: Collection[int] = (),
    ) -> Report:
        """Return the report with what is observed of ``others``.

        A replica that is apart stays apart if it ends afterwards; it is gone once its new process asks to join.
        """
        known = frozenset(others)
        returning = known.intersection(restarted)
        ended = self.gone.union(known.intersection({*gone, *left}) - self.apart, returning)
        return replace(
            self,
            apart=self.apart.union(known.intersection(apart)) - ended,
            gone=ended,
            left=self.left.union(ended.intersection(left)),
            late=self.late.union(known.intersection(late)),
            joining=self.joining.union(returning),
        )

    def without(self, replica: int) -> Report:
        """Return the report as if nothing had been observed of the end, or the silence, of a replica."""
        forgotten = frozenset({replica})
        return replace(
            self,
            apart=self.apart - forgotten,
            gone=self.gone - forgotten,
            left=self.left - forgotten,
            joining=self.joining - forgotten,
        )

    @property
    def votes(self) -> Mapping[RoundId, Digest]:
        """The rounds that the rank has voted for, committed or not."""
        return {**self.voted, **self.commits}

    @property
    def lost(self) -> frozenset[int]:
        """The replicas that the rank can't hear, for whatever reason."""
        return self.apart | self.gone
