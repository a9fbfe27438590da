"""Which members of a view may continue, which of them stay, and what they adopt. Pure functions of known facts.

Every survivor computes the same outcome, even if some can't hear each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from diloco.membership.values import Agreed, NextView, Report, View

_MAX_NAMED = 8  # members compare reasons, which are sent as strings of bounded length
_MAX_EXACT = 16  # the most members among which `largest_set` tries all choices


@dataclass(frozen=True)
class Policy:
    """The conditions under which survivors may form a smaller view."""

    min_replicas: int = 1  # the fewest replicas that may continue after a loss; a growing view may have fewer
    # what a side of a partition does that can't reach members which may be continuing without it. ``stop``: only the
    # larger side continues, or of two halves the one with the lowest-numbered member. ``go-on``: any side continues
    # that has ``min_replicas`` of the old members. If that is more than half of all replicas, at most one side has
    # them.
    split: Literal["stop", "go-on"] = "stop"


class Decision(NamedTuple):
    """The members of the next view, or None if this side may not continue; and the reason."""

    members: tuple[int, ...] | None
    reason: str


def decide(
    view: View,
    *,
    lost: Collection[int],
    gone: Collection[int],
    joining: Collection[int],
    policy: Policy,
    left: Collection[int] = (),
) -> Decision:
    """Decide which members follow ``view``, of which some are ``lost``: they can't be reached, or have left.

    If all of these are known to have ended (``gone``), the survivors are all there are, and they continue. Under
    ``split="stop"``, a side that merely can't reach some members continues only with more than half of the view, or
    with half of it and the lowest-numbered member. So a network partition never makes two histories. Replicas that have
    ended stay in the count, as they may have continued with the silent ones before they ended. Those that ``left``
    announced it, and count as ended.

    >>> decide(View.of(3), lost={2}, gone=(), joining=(), policy=Policy())
    Decision(members=(0, 1), reason='replica 2 is lost; replicas 0, 1 continue')
    >>> decide(View.of(3), lost={0, 1}, gone=(), joining=(), policy=Policy()).members is None
    True
    >>> decide(View.of(3), lost={0, 1}, gone={0, 1}, joining=(), policy=Policy()).members
    (2,)
    >>> decide(View.of(3), lost={0, 1}, gone=(), joining=(), policy=Policy(split="go-on")).members
    (2,)
    """
    survivors = [member for member in view.members if member not in lost]
    silent = [member for member in view.members if member in lost and member not in gone and member not in left]
    members = tuple(sorted({*survivors, *joining}))
    half = len(view.members) / 2
    smaller = len(survivors) < half or (len(survivors) == half and view.members[0] in lost)
    if silent and policy.split == "stop" and smaller:
        return Decision(
            None,
            f"{names_of(silent)} can't be reached and may be continuing without {names_of(survivors)}, which "
            f"{'is' if len(survivors) == 1 else 'are'} the smaller side",
        )
    # Joiners may be on only one side of a partition, so they don't make up for lost members there.
    counted = survivors if silent and policy.split == "go-on" else members
    if lost and len(counted) < policy.min_replicas:
        return Decision(None, f"{len(counted)} of at least {policy.min_replicas} replicas are left")
    missed = [member for member in lost if member not in left]
    words = [f"{names_of(missed)} {'is' if len(missed) == 1 else 'are'} lost"] if missed else []
    words += [f"{names_of(left)} {'has' if len(left) == 1 else 'have'} left"] if left else []
    words += [f"{names_of(joining)} {'joins' if len(joining) == 1 else 'join'}"] if joining else []
    return Decision(
        members, "; ".join([*words, f"{names_of(members)} {'continues' if len(members) == 1 else 'continue'}"])
    )


def names_of(replicas: Collection[int]) -> str:
    """Name replicas for a message, at most eight of them."""
    names, more = ", ".join(map(str, sorted(replicas)[:_MAX_NAMED])), len(replicas) - _MAX_NAMED
    return f"replica{'s' if len(replicas) != 1 else ''} {names}{f' and {more} more' if more > 0 else ''}"


def byzantine_quorum(members: int) -> int:
    """Return how many of ``members`` must report the same of another one before it counts: f + 1, with n > 2 f.

    >>> [byzantine_quorum(members) for members in (1, 2, 3, 4, 5)]
    [1, 1, 2, 2, 3]
    """
    return (members - 1) // 2 + 1


def enough_without(view: View, lost: Collection[int], policy: Policy) -> bool:
    """Return whether the other members of ``view`` may continue without the ``lost`` ones, which may still be running.

    >>> enough_without(View.of(3), {2}, Policy()), enough_without(View.of(3), {1, 2}, Policy())
    (True, False)
    """
    return decide(view, lost=lost, gone=(), joining=(), policy=policy).members is not None


def staying_members(view: View, mine: Report, me: int, policy: Policy) -> tuple[int, ...]:
    """Return the members of ``view`` that stay in the next one, in ascending order; ``me`` may not be among them.

    They are a largest set of members that all hear each other, without the late ones if the others are enough to
    continue. If two members don't hear each other, the one to go is a member from which more than f members
    (`byzantine_quorum`) have recently received nothing for a while, else the one that joined later.
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
    """Return what follows ``view``; the ``reports`` of all ``staying`` ranks are equal in `Report.known`.

    A round that all of these ranks have voted for is committed if one of them has committed it. If members have left,
    these may have committed it: one digest for each position in a replica is enough then, unless anyone calls it void.
    """
    known, lost, size = reports[0], frozenset(view.members).difference(staying), len(reports) // len(staying)
    claims = frozenset().union(*(report.commits for report in reports))
    void = frozenset().union(*(report.void for report in reports))
    held = {key for key in known.held if all(key in report.held for report in reports)}
    if known.left:
        digests = {key: {(report.rank % size, report.held[key]) for report in reports} for key in held - void}
        claims |= {key for key, each in digests.items() if len(each) == size}
    commits = {key: digest for key, digest in known.held.items() if key in held & claims}
    joining = known.joining - known.gone - {other for one, other in known.unheard if one in staying}
    decision = decide(view, lost=lost, gone=known.gone, joining=joining, policy=policy, left=known.left)
    if decision.members is not None:  # else others may have agreed on a different view since
        earlier = _standing(view, reports, size, policy)
        if earlier is not None:
            return earlier
    members, joined = decision.members, tuple(sorted(joining - frozenset(view.members)))
    return NextView(
        view=None if members is None else view.followed_by(view.id + 1, members, joined),
        previous=view,
        from_step=max(report.step for report in reports) + 1,
        commits=commits,
        reason=decision.reason,
        joined=joined,
        void=void - commits.keys(),
        left=tuple(sorted(known.left)),
    )


def largest_set(members: Sequence[int], unheard: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Return a largest set of ``members`` that all hear each other: exact for up to 16, else greedy.

    ``members`` are in order of preference: of several largest sets, it is the one that holds the earliest. So a single
    broken pair costs one member, and a member that can't hear two others is the one to go. A greedy search drops the
    member with the most bad pairs, of several the last one, until there is no bad pair.

    >>> largest_set(range(4), [(3, 0), (3, 1)])
    (0, 1, 2)
    >>> largest_set(range(4), [(0, 3), (0, 1)])
    (1, 2, 3)
    >>> largest_set((0, 1, 2), [(0, 2)]), largest_set((1, 2, 0), [(0, 2)])
    ((0, 1), (1, 2))
    """
    # sets as bits, the earliest member's highest: of two sets of one size, the greater number holds the earlier members
    size = len(members)
    place = {member: size - 1 - index for index, member in enumerate(members)}
    apart = [0] * size
    for one, other in unheard:
        if one in place and other in place and one != other:
            apart[place[one]] |= 1 << place[other]
            apart[place[other]] |= 1 << place[one]

    def largest(group: int) -> int:
        pairs = {each: (apart[each] & group).bit_count() for each in range(size) if group >> each & 1}
        while any(pairs.values()):
            worst = max(pairs, key=lambda each: (pairs[each], -each))
            without = group & ~(1 << worst)
            if size <= _MAX_EXACT:
                both = largest(without), largest(without & ~apart[worst]) | 1 << worst
                return max(both, key=lambda each: (each.bit_count(), each))
            group = without
            del pairs[worst]
            for each in pairs:
                pairs[each] -= apart[worst] >> each & 1
        return group

    chosen = largest((1 << size) - 1)
    for each in range(size - 1, -1, -1):  # a greedy search may leave out one that is apart from none
        if not apart[each] & chosen:
            chosen |= 1 << each
    return tuple(sorted(member for member in members if chosen >> place[member] & 1))


def reachable_from(member: int, members: Collection[int], unheard: Iterable[tuple[int, int]]) -> frozenset[int]:
    """Return the ``members`` that ``member`` reaches directly or through others, itself included.

    >>> sorted(reachable_from(0, range(4), [(0, 2), (0, 3), (1, 2), (1, 3)]))
    [0, 1]
    """
    apart: dict[int, set[int]] = {}
    for one, other in unheard:
        apart.setdefault(one, set()).add(other)
        apart.setdefault(other, set()).add(one)
    left, waiting = {*members} - {member}, [member]
    while waiting:
        reached = left - apart.get(waiting.pop(), set())
        left -= reached
        waiting += reached
    return frozenset({member, *members} - left)


def _standing(view: View, reports: Sequence[Report], ranks_per_replica: int, policy: Policy) -> NextView | None:
    """Return the newest earlier agreement that a member may have adopted, or None.

    Whoever has adopted one had seen that all members of a quorum were ready for it. Two quorums share a member, so the
    members that report now include at least one of those, and all of them name it. One that does not was never ready,
    and never will be, as it knows more by now. Liars may leave their names out, so more than f names are enough as
    well. They can also forge an agreement that no honest member denies, if they are all that the two quorums share. The
    other members are then too few to continue without the liars, which could as well have been silent.
    """
    known, needed = reports[0], byzantine_quorum(len(reports))
    # whether any two sets of members that may both continue share a member
    one_history = policy.split == "stop" or 2 * policy.min_replicas > len(view.members)
    named: list[dict[int, Agreed]] = []  # equal agreements by the rank that names them
    for report in reports:
        if (mine := report.agreed) is not None:
            alike = next((each for each in named if next(iter(each.values())).following == mine.following), None)
            if alike is None:
                named.append(alike := {})
            alike[report.rank] = mine

    def stands(names: Collection[int], joined: Collection[int], quorum: Collection[int]) -> bool:
        asked = {report.rank for report in reports if report.rank // ranks_per_replica in quorum}
        least = min(needed, len(asked)) if one_history else needed
        if len(asked.intersection(names)) < max(1, least):
            return False
        lost, left = frozenset(view.members).difference(quorum), known.left
        return decide(view, lost=lost, gone=known.gone, joining=joined, policy=policy, left=left).members is not None

    standing = [
        max(by_rank.values(), key=lambda each: each.known)
        for by_rank in named
        for quorum in frozenset().union(*(each.quorums for each in by_rank.values()))
        if stands(by_rank, next(iter(by_rank.values())).following.joined, quorum)
    ]
    return max(standing, key=lambda each: each.known).following if standing else None


def _accused(pairs: Iterable[tuple[int, int]], needed: int) -> set[int]:
    """Return the second elements that are paired with at least ``needed`` different first ones."""
    return {each for each, times in Counter(other for _, other in pairs).items() if times >= needed}
