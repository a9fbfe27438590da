"""What a member believes of another one's report about the end of a view. Pure.

Everybody speaks for itself: whom it can't hear, for whose contribution it waits, that it leaves. What a report says of
others counts only where this rank's own observation does not speak against it: of a replica that it hears, it waits for
that replica's own words, or for the end of its connection. So a liar can say whom it does not hear itself, and no more;
one that accuses two is the one to go (`diloco.membership.following`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from diloco.membership.reports import NextView, Report
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
    """What is believed of a report.

    Args:
        report: as it came.
        mine: what this rank knows already.
        sender: the replica whose rank sent it.
        me: this replica.
        hears: whether the ranks of a replica are all connected, and not given up.

    >>> lie = Report(2, 0, unheard=frozenset({(0, 1), (2, 1)}), gone=frozenset({0, 1}))
    >>> what = believed(lie, Report(0, 0), sender=2, me=0, hears={1, 2}.__contains__)
    >>> sorted(what.unheard), sorted(what.gone)
    ([(2, 1)], [])
    """

    agreed = report.agreed
    if agreed is not None and (agreed.known > sum(map(len, report.known)) or not could_follow(agreed.following, mine)):
        agreed = None
    if mine.covers(report):  # nothing in it is news
        return report if agreed is report.agreed else replace(report, agreed=agreed)

    def speaks_of(replica: int) -> bool:
        return replica == sender or (replica != me and not hears(replica))

    unheard = frozenset(
        pair
        for pair in report.unheard  # of two that want to join anybody can say so: at worst they come one by one
        if pair in mine.unheard or speaks_of(pair[0]) or mine.joining.issuperset(pair)
    )
    fits = len(mine.left_commits | report.left_commits) <= MOST_ROUNDS  # all of it is told to all once more
    left = frozenset(each for each in report.left if each in mine.left or speaks_of(each[0]))
    whole = fits and left and left == report.left
    ended = mine.gone | {replica for replica, _ in left}
    return replace(
        report,
        unheard=unheard,
        behind=frozenset(pair for pair in report.behind if pair in mine.behind or speaks_of(pair[0])),
        unsteady=frozenset(pair for pair in report.unsteady if pair in mine.unsteady or speaks_of(pair[0])),
        gone=frozenset(each for each in report.gone if each in ended or (each != me and not hears(each))),
        left=left,
        left_commits=report.left_commits if whole else report.left_commits & mine.left_commits,
        agreed=agreed,
    )


def could_follow(following: NextView, mine: Report) -> bool:
    """Whether a view could follow, as far as this rank knows: nobody is missing from it whom nobody accuses.

    Args:
        following: what another one says was agreed or adopted.
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
    """Who keeps a change of views from its end: of those who stay, who has not reported or isn't ready for the same.

    Where one of them knows something else than this rank, it is whoever that is about, or from: it told them different
    things.

    Args:
        mine: what this rank knows.
        reports: replica and its rank's report, None where none has come that is wholly believed, of all who stay.
        unproven: who says that it has committed what others have not voted for.
        me: this replica.
    """
    blamed = set(unproven)
    for replica, report in reports:
        if replica == me or (report is not None and report.known == mine.known):
            continue
        between: set[int] = set()
        if report is not None:
            said = (mine.unheard ^ report.unheard) | (mine.behind ^ report.behind) | (mine.unsteady ^ report.unsteady)
            between |= {speaker for speaker, _ in said}
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
        blamed = {one for one, told in reports if told is None or told.agreed is None or told.agreed.following != same}
    return frozenset(blamed - {me})
