"""The part of another member's report on the end of a view that a rank believes. Pure.

Every member speaks for itself: which members it can't hear, whose contribution it awaits, that it leaves. What a report
says of other replicas counts only if this rank's own observation does not contradict it. While this rank hears such a
replica, it waits for that replica's own report, or for the end of its connection. A Byzantine member can thus only
claim not to hear others; if it accuses two, it is the one to go (`diloco.membership.next_view`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from diloco.membership import NextView, Report
from diloco.protocol.fields import MOST_ROUNDS

__all__ = ["believed", "blamed_replicas", "could_follow"]


def believed(
    report: Report,
    mine: Report,
    *,
    sender: int,
    me: int,
    hears: Callable[[int], bool],
) -> Report:
    """Return the part of a report that this rank believes.

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
    fits = len(mine.left_commits | report.left_commits) <= MOST_ROUNDS  # all of it is forwarded to all members
    left = frozenset(each for each in report.left if each in mine.left or may_report_on(each[0]))
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


def blamed_replicas(
    mine: Report, reports: Collection[tuple[int, Report | None]], unproven: Collection[int], *, me: int
) -> frozenset[int]:
    """Return the replicas that keep a view change from ending: staying ones that have not reported, or aren't ready.

    If a staying replica knows something else than this rank, the replica that the difference is about, or comes from,
    is to blame: it sent different reports to the two.

    Args:
        mine: what this rank knows.
        reports: the replica and the report of every staying rank; None if no report is believed as a whole.
        unproven: replicas that claim a commit for which others have not voted.
        me: this replica.
    """
    blamed = set(unproven)
    for replica, report in reports:
        if replica == me or (report is not None and report.known == mine.known):
            continue
        between: set[int] = set()
        if report is not None:
            differing = (
                (mine.unheard ^ report.unheard) | (mine.behind ^ report.behind) | (mine.unsteady ^ report.unsteady)
            )
            between |= {speaker for speaker, _ in differing}
            between |= (mine.gone ^ report.gone) | (mine.joining ^ report.joining)
            between |= {each for each, _ in mine.left ^ report.left}
            if mine.left_commits != report.left_commits:
                between |= {each for each, _ in mine.left | report.left}
        blamed |= between - {me} - (mine.gone & report.gone if report is not None else set()) or {replica}
    own_digest = {report.rank: (replica, report.own_digest) for replica, report in reports if report is not None}
    for replica, report in reports:
        for rank, digest in report.heard.items() if report is not None else ():
            if rank in own_digest and own_digest[rank][1] != digest:
                about = own_digest[rank][0]
                blamed.add(replica if about == me else about)
    if not blamed:
        same = mine.agreed.following if mine.agreed is not None else None
        blamed = {
            one for one, report in reports if report is None or report.agreed is None or report.agreed.following != same
        }
    return frozenset(blamed - {me})
