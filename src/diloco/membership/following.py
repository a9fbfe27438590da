"""What follows from the reports of a view that ends: who stays, and what they adopt. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from diloco.membership.hearing import largest_set, within_reach
from diloco.membership.quorum import Policy, decide, more_than_could_lie
from diloco.membership.reports import NextView, Report
from diloco.membership.view import View

__all__ = ["next_view", "who_stays"]


def who_stays(view: View, mine: Report, me: int, policy: Policy) -> tuple[int, ...]:
    """Members of ``view`` that are to be members of the next one, ascending; maybe not ``me``.

    A largest set of those who hear each other, without those who are behind if the others are enough to go on.

    Args:
        view: the one that ends.
        mine: all that is known.
        me: the replica that asks.
        policy: who may go on.
    """
    there = frozenset(view.members) - mine.gone
    if policy.split == "go-on" and me in there:
        there = within_reach(me, there, mine.unheard)
    order = [each for each in view.order if each in there]
    said = Counter(late for _, late in mine.behind)
    late = {each for each, times in said.items() if times >= more_than_could_lie(len(view.members))} & there
    if late:
        in_time = largest_set([each for each in order if each not in late], mine.unheard)
        lost = frozenset(view.members) - frozenset(in_time)
        if decide(view, lost=lost, gone=mine.gone, joining=(), policy=policy).members is not None:
            return in_time
    return largest_set(order, mine.unheard)


def next_view(view: View, told: Sequence[Report], staying: Sequence[int], policy: Policy) -> NextView:
    """What follows ``view``.

    Args:
        view: the one that ends.
        told: the reports of all who stay; what every rank must know alike they say alike.
        staying: as `who_stays` says.
        policy: who may go on.
    """
    known, lost = told[0], frozenset(view.members).difference(staying)
    left_commits = {(fragment, outer_step): digest for fragment, outer_step, digest in sorted(known.left_commits)}
    commits = {key: each for key, each in left_commits.items() if all(key in report.held for report in told)}
    for report in told:
        commits.update(report.claims)
    wishing = known.joining - known.gone - {other for one, other in known.unheard if one in staying}
    joining = frozenset({min(wishing)}) if wishing else frozenset()  # two may not have a way to each other yet
    left = {replica: step for replica, step in sorted(known.left)}  # two ranks of it may have named two steps
    decision = decide(view, lost=lost, gone=known.gone, joining=joining, policy=policy, left=left)
    agreed = [report.agreed for report in told if report.agreed is not None]
    needed = more_than_could_lie(len(told))
    supported = [each for each in agreed if sum(each.following == other.following for other in agreed) >= needed]
    if supported and decision.members is not None:  # else others may have agreed on something else since
        return max(supported, key=lambda each: each.known).following
    members, joined = decision.members, tuple(sorted(joining - frozenset(view.members)))
    return NextView(
        view=None if members is None else view.followed_by(view.id + 1, members, joined),
        previous=view,
        from_step=max(report.step for report in told) + 1,
        commits=commits,
        reason=decision.reason,
        joined=joined,
        void=frozenset().union(*(report.void for report in told)) - commits.keys(),
        left=tuple(left.items()),
    )
