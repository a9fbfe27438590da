"""What members tell each other when a view ends, and what they adopt. Pure values."""

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
    """What all who stay adopt."""

    view: View | None  # None when these survivors may not go on
    previous: View  # the one that ended
    # one more than any survivor has begun to synchronise. Where replicas joined, rounds sent at this inner step or
    # later are the next view's, and earlier ones that were not decided are void.
    from_step: int
    commits: Commits
    reason: str
    joined: tuple[int, ...] = ()  # replicas that were not members before
    void: Rounds = frozenset()  # as for the rest see `carries_over`
    # members of the old view that left of their own accord, and after which inner step; ascending
    left: tuple[tuple[int, int], ...] = ()

    @property
    def carries_over(self) -> bool:
        """Whether rounds that are neither committed nor void go on in the next view; else they are void, too."""
        return self.view is not None and not self.joined


@dataclass(frozen=True)
class Agreed:
    """What a member has said it is ready for: it may have been adopted by others since."""

    known: int  # how much was known then; of two such numbers the greater one was agreed later
    following: NextView


@dataclass(frozen=True)
class Report:
    """What one rank says when a view is to end."""

    rank: int
    view_id: int
    # pairs of replicas of which the first one can't hear the second one; of two that want to join, as others say
    unheard: frozenset[tuple[int, int]] = frozenset()
    # pairs of replicas of which the first one hears the second one, and waited for its contribution too long, or has
    # seen that it lies
    behind: frozenset[tuple[int, int]] = frozenset()
    # pairs of replicas of which the first one hears the second one, and heard nothing of it for some beats lately
    unsteady: frozenset[tuple[int, int]] = frozenset()
    gone: frozenset[int] = frozenset()  # replicas whose process is known to have ended
    joining: frozenset[int] = frozenset()  # replicas that want to be members of the next view
    step: int = 0  # inner steps it has begun to synchronise
    commits: Commits = field(default_factory=dict)  # the rounds that it has committed lately
    void: Rounds = frozenset()  # the rounds that it has decided void lately
    # rounds that it has voted for, and not committed; those that are disputed are ``void`` as well
    voted: Commits = field(default_factory=dict)
    # replicas that have said that they leave, and after which inner step; they are gone as well
    left: frozenset[tuple[int, int]] = frozenset()
    # the rounds that those have committed lately, as (fragment, outer step, digest)
    left_commits: frozenset[tuple[int, int, str]] = frozenset()
    ready: bool = False  # whether it holds the same report of all who are to stay
    agreed: Agreed | None = None  # what it is ready for, or was before it knew more; None: nothing yet
    # rank -> digest of what that rank says of its own steps and rounds, as it came here
    heard: Mapping[int, str] = field(default_factory=dict)
    # signed votes that made a round void or disputed, or that prove what the voter does not say; whoever has the keys
    # checks them
    shown: frozenset[SignedVote] = frozenset()

    @property
    def own_digest(self) -> str:
        """A digest of what it says of its own steps and rounds, which never changes while a view ends."""
        text = repr((self.rank, self.step, sorted(self.commits.items()), sorted(self.void), sorted(self.voted.items())))
        return blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def known(self) -> tuple[frozenset[object], ...]:
        """All that every rank must know alike."""
        return self.unheard, self.behind, self.unsteady, self.gone, self.joining, self.left, self.left_commits

    @property
    def held(self) -> Commits:
        """Rounds that it has voted for, committed or not."""
        return {**self.voted, **self.commits}

    @property
    def claims(self) -> Commits:
        """The last round of each fragment that it has committed: all have decided the ones before."""
        last = {fragment: (fragment, outer_step) for fragment, outer_step in sorted(self.commits)}
        return {key: self.commits[key] for key in last.values()}

    def covers(self, other: Report) -> bool:
        """Whether it says all that ``other`` says of what every rank must know alike."""
        return all(more >= less for more, less in zip(self.known, other.known, strict=True))


class News(TypedDict, total=False):
    """What happened to a view: replicas that this one can't hear (``unheard``), or hears and whose contribution it has
    waited for too long (``behind``); pairs that want to join and have no connection to each other (``apart``); the
    others are those of a `Report`."""

    unheard: frozenset[int]
    behind: frozenset[int]
    apart: frozenset[tuple[int, int]]
    gone: frozenset[int]
    joining: frozenset[int]
    left: frozenset[tuple[int, int]]
    left_commits: frozenset[tuple[int, int, str]]
