"""What follows from the reports of a view that ends: who stays, also where some can't hear each other, and what they
adopt. Pure: every survivor computes the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from diloco.membership.quorum import Policy, decide, more_than_could_lie
from diloco.membership.reports import Agreed, NextView, Report
from diloco.membership.view import View

__all__ = ["largest_set", "next_view", "reachable_from", "staying_members"]


def staying_members(view: View, mine: Report, me: int, policy: Policy) -> tuple[int, ...]:
    """Members of ``view`` that are to be members of the next one, ascending; maybe not ``me``.

    A largest set of those who hear each other, without those who are behind if the others are enough to go on. Of two
    who don't hear each other the one goes of whom more than could lie have heard nothing for a while lately, else the
    one that came later.

    Args:
        view: the one that ends.
        mine: all that is known.
        me: the replica that asks.
        policy: who may go on.
    """
    there = frozenset(view.members) - mine.gone
    if policy.split == "go-on" and me in there:
        there = reachable_from(me, there, mine.unheard)
    needed = more_than_could_lie(len(view.members))
    unsteady = _accused(mine.unsteady, needed)
    order = sorted((each for each in view.order if each in there), key=lambda each: each in unsteady)
    late = _accused(mine.behind, needed) & there
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
        staying: as `staying_members` says.
        policy: who may go on.
    """
    known, lost = told[0], frozenset(view.members).difference(staying)
    left_commits = {(fragment, outer_step): digest for fragment, outer_step, digest in sorted(known.left_commits)}
    commits = {key: each for key, each in left_commits.items() if all(key in report.held for report in told)}
    for report in told:
        commits.update(report.claims)
    wishing = known.joining - known.gone - {other for one, other in known.unheard if one in staying}
    joining: set[int] = set()
    for each in sorted(wishing):  # two of them may not have a way to each other yet
        if joining.isdisjoint({one for pair in known.unheard if each in pair for one in pair}):
            joining.add(each)
    left = {replica: step for replica, step in sorted(known.left)}  # two ranks of it may have named two steps
    decision = decide(view, lost=lost, gone=known.gone, joining=joining, policy=policy, left=left)
    agreed = [report.agreed for report in told if report.agreed is not None]
    supported = _supported(agreed, more_than_could_lie(len(told)))
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


def largest_set(members: Sequence[int], unheard: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """A largest set of ``members`` who all hear each other.

    Of several largest sets it is the one that holds the first of them. So a single bad pair costs one member, and one
    that has lost sight of two goes itself; where they are in the order in which they came, one whose link comes and
    goes has come late.

    Args:
        members: to choose from, each once.
        unheard: pairs of which one can't hear the other, in either order; pairs with others than members count for
            nothing.

    Returns:
        The set, ascending.

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
    size = len(members)  # weights whose sums compare as the two rules do: no two sets weigh the same
    weight = {member: (1 << size) + (1 << (size - 1 - index)) for index, member in enumerate(members)}
    return tuple(sorted(_heaviest(frozenset(members), apart, weight, {})))


def reachable_from(member: int, members: Collection[int], unheard: Iterable[tuple[int, int]]) -> frozenset[int]:
    """Those of ``members`` that ``member`` reaches over any number of others, itself included.

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
    """Those whose view at least ``needed`` of them name; most name the same."""
    alike: list[list[Agreed]] = []
    for each in agreed:
        same = next((others for others in alike if others[0].following == each.following), None)
        if same is None:
            alike.append([each])
        else:
            same.append(each)
    return [each for others in alike if len(others) >= needed for each in others]


def _accused(pairs: Iterable[tuple[int, int]], needed: int) -> set[int]:
    """The second ones of ``pairs`` that stand behind at least ``needed`` first ones."""
    return {each for each, times in Counter(other for _, other in pairs).items() if times >= needed}


def _heaviest(
    members: frozenset[int],
    apart: Mapping[int, set[int]],
    weight: Mapping[int, int],
    known: dict[frozenset[int], frozenset[int]],
) -> frozenset[int]:
    """The heaviest subset of ``members`` of whom no two are ``apart``; ``known``: what was found so far, by group."""
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
    """``members``, with those together who are apart from one another, directly or through others."""
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
