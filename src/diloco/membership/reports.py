"""What members report to each other when a view ends, and what they adopt. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TypedDict

from diloco.membership.proofs import Commits, SignedVote
from diloco.membership.view import View

__all__ = ["Agreed", "News", "NextView", "Report", "Rounds"]

Rounds = frozenset[tuple[int, int]]
"""Rounds as (fragment, outer step)."""


@dataclass(frozen=True)
class NextView:
    """What all staying members adopt."""

    view: View | None  # None if these survivors may not continue
    previous: View  # the view that ended
    # one more than the last inner step that any survivor has begun to synchronise. If replicas joined, rounds sent at
    # this inner step or later belong to the next view, and earlier undecided rounds are void.
    from_step: int
    commits: Commits
    reason: str
    joined: tuple[int, ...] = ()  # replicas that were not members before
    void: Rounds = frozenset()  # rounds that are void; `carries_over` decides about undecided ones
    # members of the old view that left voluntarily, and the inner step after which each left; ascending
    left: tuple[tuple[int, int], ...] = ()

    @property
    def carries_over(self) -> bool:
        """Whether rounds that are neither committed nor void continue in the next view; else they are void, too."""
        return self.view is not None and not self.joined


@dataclass(frozen=True)
class Agreed:
    """What a member has declared itself ready for. Others may have adopted it since."""

    known: int  # how much the member knew then; of two agreements, the one with the greater number was made later
    following: NextView
    # the sets of members that were to be ready for it when the member was: if any member has adopted it, all of one set
    # were
    quorums: frozenset[tuple[int, ...]]


@dataclass(frozen=True)
class Report:
    """One rank's report on the end of a view."""

    rank: int
    view_id: int
    # pairs of replicas of which the first can't hear the second; for two joining replicas, as others report
    unheard: frozenset[tuple[int, int]] = frozenset()
    # pairs of replicas of which the first hears the second, and has waited too long for its contribution or has proof
    # that it is faulty
    behind: frozenset[tuple[int, int]] = frozenset()
    # pairs of replicas of which the first hears the second, but recently received nothing from it for several beats
    unsteady: frozenset[tuple[int, int]] = frozenset()
    gone: frozenset[int] = frozenset()  # replicas whose process is known to have ended
    joining: frozenset[int] = frozenset()  # replicas that want to be members of the next view
    step: int = 0  # the number of inner steps that the rank has begun to synchronise
    commits: Commits = field(default_factory=dict)  # the rounds that the rank has committed recently
    void: Rounds = frozenset()  # the rounds that the rank has decided void recently
    # rounds that the rank has voted for and not committed; disputed ones are in ``void`` as well
    voted: Commits = field(default_factory=dict)
    # replicas that have announced their leaving, and the inner step after which they leave; they are in ``gone`` as
    # well
    left: frozenset[tuple[int, int]] = frozenset()
    # the rounds that the leaving replicas have committed recently, as (fragment, outer step, digest)
    left_commits: frozenset[tuple[int, int, str]] = frozenset()
    ready: bool = False  # whether the rank holds the same report from all that are to stay
    agreed: Agreed | None = None  # what the rank is ready for, or was before it knew more; None: nothing yet
    # rank -> `own_digest` of that rank's report, as received here
    heard: Mapping[int, str] = field(default_factory=dict)
    # signed votes that made a round void or disputed, or that prove what the voter does not report; ranks that know the
    # keys verify them
    shown: frozenset[SignedVote] = frozenset()

    @property
    def own_digest(self) -> str:
        """A digest of what the rank reports of its own steps and rounds, which never changes during a view change."""
        text = repr((self.rank, self.step, sorted(self.commits.items()), sorted(self.void), sorted(self.voted.items())))
        return blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def known(self) -> tuple[frozenset[object], ...]:
        """The part of the report in which all ranks must agree."""
        return self.unheard, self.behind, self.unsteady, self.gone, self.joining, self.left, self.left_commits

    @property
    def held(self) -> Commits:
        """The rounds that the rank has voted for, committed or not."""
        return {**self.voted, **self.commits}

    @property
    def claims(self) -> Commits:
        """The last round of each fragment that the rank has committed; all members have decided the earlier ones."""
        last = {fragment: (fragment, outer_step) for fragment, outer_step in sorted(self.commits)}
        return {key: self.commits[key] for key in last.values()}

    def covers(self, other: Report) -> bool:
        """Return whether this report contains everything of ``other`` in which all ranks must agree."""
        return all(more >= less for more, less in zip(self.known, other.known, strict=True))


class News(TypedDict, total=False):
    """What happened to a view.

    ``unheard`` are replicas that this one can't hear, ``behind`` are replicas that it hears and whose contribution it
    has awaited for too long, and ``apart`` are pairs of joining replicas without a connection to each other. The other
    keys are those of a `Report`.
    """

    unheard: frozenset[int]
    behind: frozenset[int]
    apart: frozenset[tuple[int, int]]
    gone: frozenset[int]
    joining: frozenset[int]
    left: frozenset[tuple[int, int]]
    left_commits: frozenset[tuple[int, int, str]]
