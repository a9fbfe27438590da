"""What members report to each other when a view ends, and what they adopt. Pure values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypedDict

from diloco.membership.view import View

__all__ = ["MOST_ROUNDS", "Agreed", "Commits", "News", "NextView", "Report", "Rounds", "believed", "could_follow"]

Commits = Mapping[tuple[int, int], str]
"""(fragment, outer step) -> digest of an average."""

Rounds = frozenset[tuple[int, int]]
"""Rounds as (fragment, outer step)."""

MOST_ROUNDS = 4096
"""The most rounds that one member can have committed recently: two of each fragment."""


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
    # pairs of replicas of which the first hears the second, and has waited too long for its contribution, or found
    # it to spoil rounds
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


def believed(report: Report, mine: Report, *, sender: int, me: int, hears: Callable[[int], bool]) -> Report:
    """Return the part of a report that this rank believes.

    Every member speaks for itself: which members it can't hear, whose contribution it awaits, that it leaves. What a
    report says of other replicas counts only if this rank does not hear them; else it waits for their own reports, or
    for the end of their connections. So a member that lies can only claim not to hear others; if it accuses two, it is
    the one to go.

    Args:
        report: the report as received.
        mine: what this rank knows already.
        sender: the replica of the report's rank.
        me: this replica.
        hears: whether all ranks of a replica are connected and not declared lost.

    >>> lie = Report(2, 0, unheard=frozenset({(0, 1), (2, 1)}), gone=frozenset({0, 1}))
    >>> what = believed(lie, Report(0, 0), sender=2, me=0, hears={1, 2}.__contains__)
    >>> sorted(what.unheard), sorted(what.gone)
    ([(2, 1)], [])
    """

    agreed = report.agreed
    if agreed is not None and (agreed.known > sum(map(len, report.known)) or not could_follow(agreed.following, mine)):
        agreed = None
    if mine.covers(report):  # the report holds nothing new
        return report if agreed is report.agreed else replace(report, agreed=agreed)

    def may_report_on(replica: int) -> bool:
        return replica == sender or (replica != me and not hears(replica))

    unheard = frozenset(
        pair
        # any member may report that two joiners don't hear each other: at worst they join one after the other
        for pair in report.unheard
        if pair in mine.unheard or may_report_on(pair[0]) or mine.joining.issuperset(pair)
    )
    left = frozenset(each for each in report.left if each in mine.left or may_report_on(each[0]))
    fits = len(mine.left_commits | report.left_commits) <= MOST_ROUNDS  # all of it is forwarded to all members
    whole = fits and left and left == report.left
    ended = mine.gone | {replica for replica, _ in left}
    return replace(
        report,
        unheard=unheard,
        behind=frozenset(pair for pair in report.behind if pair in mine.behind or may_report_on(pair[0])),
        unsteady=frozenset(pair for pair in report.unsteady if pair in mine.unsteady or may_report_on(pair[0])),
        gone=frozenset(each for each in report.gone if each in ended or (each != me and not hears(each))),
        left=left,
        left_commits=report.left_commits if whole else report.left_commits & mine.left_commits,
        agreed=agreed,
    )


def could_follow(following: NextView, mine: Report) -> bool:
    """Return whether a view could follow, as far as this rank knows: it lacks no member that is not accused.

    Args:
        following: what another member reports as agreed or adopted.
        mine: what this rank knows.
    """
    if following.view is None:
        return False
    accused = {each for pair in mine.unheard | mine.behind for each in pair} | mine.gone
    before, after = {*following.previous.members}, {*following.view.members}
    return before - after <= accused and after <= before | mine.joining
