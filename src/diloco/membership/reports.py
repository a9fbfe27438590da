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
    """What all who stay adopt.

    Attributes:
        view: the next view; None when these survivors may not go on.
        previous: the one that ended.
        from_step: one more than any survivor has begun to synchronise. Where replicas joined, rounds sent at this inner
            step or later are the next view's, and earlier ones that were not decided are void.
        commits: rounds of the old view that are committed.
        void: rounds of the old view that are void; as for the rest see `carries_over`.
        reason: in words.
        joined: replicas that were not members before.
        left: members of the old view that left of their own accord, and after which inner step; ascending.
    """

    view: View | None
    previous: View
    from_step: int
    commits: Commits
    reason: str
    joined: tuple[int, ...] = ()
    void: Rounds = frozenset()
    left: tuple[tuple[int, int], ...] = ()

    @property
    def carries_over(self) -> bool:
        """Whether rounds that are neither committed nor void go on in the next view; else they are void, too."""
        return self.view is not None and not self.joined


@dataclass(frozen=True)
class Agreed:
    """What a member has said it is ready for: it may have been adopted by others since.

    Attributes:
        known: how much was known then; of two such numbers the greater one was agreed later.
        following: what is to be adopted.
    """

    known: int
    following: NextView


@dataclass(frozen=True)
class Report:
    """What one rank says when a view is to end.

    Attributes:
        rank: who says it.
        view_id: of the view that ends.
        unheard: pairs of replicas of which the first one can't hear the second one.
        behind: pairs of replicas of which the first one hears the second one, and waited for its contribution too long,
            or has seen that it lies.
        gone: replicas whose process is known to have ended.
        joining: replicas that want to be members of the next view.
        step: inner steps it has begun to synchronise.
        commits: the rounds that it has committed lately.
        void: the rounds that it has decided void lately.
        voted: rounds that it has voted for, and not committed; those that are disputed are ``void`` as well.
        left: replicas that have said that they leave, and after which inner step; they are gone as well.
        left_commits: the rounds that those have committed lately, as (fragment, outer step, digest).
        ready: whether it holds the same report of all who are to stay.
        agreed: what it is ready for, or was before it knew more; None: nothing yet.
        heard: rank -> digest of what that rank says of its own steps and rounds, as it came here.
        shown: signed votes that made a round void or disputed, or that prove what the voter does not say; whoever has
            the keys checks them.
    """

    rank: int
    view_id: int
    unheard: frozenset[tuple[int, int]] = frozenset()
    behind: frozenset[tuple[int, int]] = frozenset()
    gone: frozenset[int] = frozenset()
    joining: frozenset[int] = frozenset()
    step: int = 0
    commits: Commits = field(default_factory=dict)
    void: Rounds = frozenset()
    voted: Commits = field(default_factory=dict)
    left: frozenset[tuple[int, int]] = frozenset()
    left_commits: frozenset[tuple[int, int, str]] = frozenset()
    ready: bool = False
    agreed: Agreed | None = None
    heard: Mapping[int, str] = field(default_factory=dict)
    shown: frozenset[SignedVote] = frozenset()

    @property
    def of_itself(self) -> str:
        """A digest of what it says of its own steps and rounds, which never changes while a view ends."""
        text = repr((self.rank, self.step, sorted(self.commits.items()), sorted(self.void), sorted(self.voted.items())))
        return blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def known(self) -> tuple[frozenset[object], ...]:
        """All that every rank must know alike."""
        return self.unheard, self.behind, self.gone, self.joining, self.left, self.left_commits

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
    waited for too long (``behind``); the others are those of a `Report`."""

    unheard: frozenset[int]
    behind: frozenset[int]
    gone: frozenset[int]
    joining: frozenset[int]
    left: frozenset[tuple[int, int]]
    left_commits: frozenset[tuple[int, int, str]]
