"""The outcome of the reports on the end of a view: which members stay, and what they adopt. Pure.

Every survivor computes the same outcome, even if some can't hear each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from diloco.membership.quorum import Policy, byzantine_quorum, decide
from diloco.membership.reports import Agreed, NextView, Report
from diloco.membership.view import View

__all__ = ["largest_set", "next_view", "reachable_from", "staying_members"]


def staying_members(view: View, mine: Report, me: int, policy: Policy) -> tuple[int, ...]:
    """Return the members of ``view`` that stay in the next one, in ascending order; ``me`` may not be among them.

    They are a largest set of members that all hear each other, without the late ones if the others are enough to
    continue. If two members don't hear each other, the one to go is a member from which more than f members
    (`byzantine_quorum`) have recently received nothing for a while, else the one that joined later.

    Args:
        view: the view that ends.
        mine: all that this rank knows.
        me: this rank's replica.
        policy: decides which survivors may continue.
    """
    there = frozenset(view.members) - mine.gone
    if policy.split == "go-on" and me in there:
        there = reachable_from(me, there, mine.unheard)
    needed = byzantine_quorum(len(view.members))
    unsteady = _accused(mine.unsteady, needed)
    order = sorted((each for each in view.order if each in there), key=lambda each: each in unsteady)
    late = _accused(mine.behind, needed) & there
    if late:
        in_time = largest_set([each for each in order if each not in late], mine.unheard)
        lost = frozenset(view.members) - frozenset(in_time)
        if decide(view, lost=lost, gone=mine.gone, joining=(), policy=policy).members is not None:
            return in_time
    return largest_set(order, mine.unheard)


def next_view(view: View, reports: Sequence[Report], staying: Sequence[int], policy: Policy) -> NextView:
    """Return what follows ``view``.

    Args:
        view: the view that ends.
        reports: the reports of all staying ranks; they are equal in `Report.known`.
        staying: the result of `staying_members`.
        policy: decides which survivors may continue.
    """
    known, lost = reports[0], frozenset(view.members).difference(staying)
    left_commits = {(fragment, outer_step): digest for fragment, outer_step, digest in sorted(known.left_commits)}
    commits = {key: each for key, each in left_commits.items() if all(key in report.held for report in reports)}
    for report in reports:
        commits.update(report.claims)
    wishing = known.joining - known.gone - {other for one, other in known.unheard if one in staying}
    joining: set[int] = set()
    for each in sorted(wishing):  # two joiners may not be connected to each other yet
        if joining.isdisjoint({one for pair in known.unheard if each in pair for one in pair}):
            joining.add(each)
    left = {replica: step for replica, step in sorted(known.left)}  # two of its ranks may have named different steps
    decision = decide(view, lost=lost, gone=known.gone, joining=joining, policy=policy, left=left)
    agreed = [report.agreed for report in reports if report.agreed is not None]
    supported = _supported(agreed, byzantine_quorum(len(reports)))
    if supported and decision.members is not None:  # else others may have agreed on a different view since
        return max(supported, key=lambda each: each.known).following
    members, joined = decision.members, tuple(sorted(joining - frozenset(view.members)))
    return NextView(
        view=None if members is None else view.followed_by(view.id + 1, members, joined),
        previous=view,
        from_step=max(report.step for report in reports) + 1,
        commits=commits,
        reason=decision.reason,
        joined=joined,
        void=frozenset().union(*(report.void for report in reports)) - commits.keys(),
        left=tuple(left.items()),
    )


def largest_set(members: Sequence[int], unheard: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Return a largest set of ``members`` that all hear each other.

    Of several largest sets, it is the one that holds the earliest members. So a single broken pair costs one member,
    and a member that can't hear two others is the one to go. If the members are in join order, a replica whose link
    flaps counts as a late one.

    Args:
        members: the candidates in order of preference, each once.
        unheard: pairs of which one can't hear the other, in either order. Pairs with non-members are ignored.

    Returns:
        The set, in ascending order.

    >>> largest_set(range(4), [(3, 0), (3, 1)])
    (0, 1, 2)
    >>> largest_set(range(4), [(0, 3), (0, 1)])
    (1, 2, 3)
    >>> largest_set((0, 1, 2), [(0, 2)]), largest_set((1, 2, 0), [(0, 2)])
    ((0, 1), (1, 2))
    """
    apart: dict[int, set[int]] = {member: set() for member in members}
    for one, other in unheard:
        if one in apart and other in apart and one != other:
            apart[one].add(other)
            apart[other].add(one)
    # weights whose sums order sets by size, then by the earliest members; no two sets weigh the same
    size = len(members)
    weight = {member: (1 << size) + (1 << (size - 1 - index)) for index, member in enumerate(members)}
    return tuple(sorted(_heaviest(frozenset(members), apart, weight, {})))


def reachable_from(member: int, members: Collection[int], unheard: Iterable[tuple[int, int]]) -> frozenset[int]:
    """Return the ``members`` that ``member`` reaches directly or through others, itself included.

    >>> sorted(reachable_from(0, range(4), [(0, 2), (0, 3), (1, 2), (1, 3)]))
    [0, 1]
    """
    apart = {frozenset(pair) for pair in unheard}
    reached, waiting = {member}, [member]
    while waiting:
        one = waiting.pop()
        more = {other for other in members if other not in reached and frozenset((one, other)) not in apart}
        reached |= more
        waiting += more
    return frozenset(reached)


def _supported(agreed: Iterable[Agreed], needed: int) -> list[Agreed]:
    """Return the agreements on a view that at least ``needed`` of them name; most of them name the same."""
    alike: list[list[Agreed]] = []
    for each in agreed:
        same = next((others for others in alike if others[0].following == each.following), None)
        if same is None:
            alike.append([each])
        else:
            same.append(each)
    return [each for others in alike if len(others) >= needed for each in others]


def _accused(pairs: Iterable[tuple[int, int]], needed: int) -> set[int]:
    """Return the second elements that are paired with at least ``needed`` different first ones."""
    return {each for each, times in Counter(other for _, other in pairs).items() if times >= needed}


def _heaviest(
    members: frozenset[int],
    apart: Mapping[int, set[int]],
    weight: Mapping[int, int],
    known: dict[frozenset[int], frozenset[int]],
) -> frozenset[int]:
    """Return the heaviest subset of ``members`` of which no two are ``apart``; ``known`` caches results by group."""
    chosen: frozenset[int] = frozenset()
    for group in _groups(members, apart):
        if len(group) > 1 and group not in known:
            pivot = max(group, key=lambda each: (len(apart[each] & group), -each))
            without = _heaviest(group - {pivot}, apart, weight, known)
            with_it = _heaviest(group - {pivot} - apart[pivot], apart, weight, known) | {pivot}
            known[group] = max(without, with_it, key=lambda each: sum(weight[member] for member in each))
        chosen |= known.get(group, group)
    return chosen


def _groups(members: frozenset[int], apart: Mapping[int, set[int]]) -> list[frozenset[int]]:
    """Partition ``members`` into the connected components of the graph ``apart``."""
    left, groups = set(members), []
    while left:
        group, waiting = set(), [left.pop()]
        while waiting:
            one = waiting.pop()
            group.add(one)
            more = apart[one] & left
            left -= more
            waiting += more
        groups.append(frozenset(group))
    return groups
