"""Which members of a view may continue, which of them stay, and what they adopt. Pure functions of known facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from diloco.algorithm import RoundId, check_choice
from diloco.membership.values import NextView, Report, View, names_of

_MAX_EXACT = 16  # the most members among which `largest_set` tries all choices


@dataclass(frozen=True)
class Policy:
    """The conditions under which survivors may form a smaller view."""

    # the fewest replicas that may continue after a loss; a growing view may have fewer
    min_replicas: Annotated[int, Meta(ge=1)] = 1
    # what a side of a partition does that can't reach members which may be continuing without it. ``stop``: only the
    # larger side continues, or of two halves the one with the lowest-numbered member. ``go-on``: any side continues
    # that has ``min_replicas`` of the old members. If that is more than half of all replicas, at most one side has
    # them.
    split: Literal["stop", "go-on"] = "stop"

    def __post_init__(self) -> None:
        check_choice("split", self.split, ("stop", "go-on"))


def refusal(
    view: View, lost: Collection[int], policy: Policy, *, gone: Collection[int] = (), joining: Collection[int] = ()
) -> str:
    """Return why the members of ``view`` that are not ``lost`` may not continue, or "" if they may.

    If all of the lost ones are known to have ended (``gone``), the survivors are all there are, and they continue.
    Under ``split="stop"``, a side that merely can't reach some members continues only with more than half of the view,
    or with half of it and the lowest-numbered member. So a network partition never makes two histories. Replicas that
    have ended stay in the count, as they may have continued with the silent ones before they ended.

    >>> refusal(View.of(3), {2}, Policy())
    ''
    >>> refusal(View.of(3), {0, 1}, Policy())
    "replicas 0, 1 can't be reached and may be continuing without replica 2, which is the smaller side"
    >>> refusal(View.of(3), {0, 1}, Policy(), gone={0, 1}), refusal(View.of(3), {0, 1}, Policy(split="go-on"))
    ('', '')
    """
    survivors = [member for member in view.members if member not in lost]
    silent = [member for member in view.members if member in lost and member not in gone]
    half = len(view.members) / 2
    smaller = len(survivors) < half or (len(survivors) == half and view.members[0] in lost)
    if silent and policy.split == "stop" and smaller:
        return (
            f"{names_of(silent)} can't be reached and may be continuing without {names_of(survivors)}, which "
            f"{'is' if len(survivors) == 1 else 'are'} the smaller side"
        )
    # Joiners may be on only one side of a partition, so they don't make up for lost members there.
    counted = survivors if silent and policy.split == "go-on" else {*survivors, *joining}
    if lost and len(counted) < policy.min_replicas:
        return f"{len(counted)} of at least {policy.min_replicas} replicas are left"
    return ""


def yields(mine: Collection[int], theirs: Collection[int]) -> bool:
    """Return whether, of two sides that have both gone on, that of the members ``mine`` yields to the other one.

    It is the one with fewer members, or of equal ones that whose lowest number is higher.

    >>> yields({1}, {0}), yields({0}, {1}), yields({0}, {1, 2}), yields({1, 2}, {0, 3})
    (True, False, True, True)
    """
    return (len(mine), -min(mine)) < (len(theirs), -min(theirs))


def staying_members(
    view: View, reports: Collection[Report], candidates: Collection[int], size: int, policy: Policy
) -> tuple[int, ...]:
    """Return the members of ``view`` that a proposer lets stay, in ascending order.

    They are a largest set of members that all hear each other, without the late ones if the others are enough to
    continue. If two members don't hear each other, the one to go is a member that half of the view find unsteady, else
    the one that joined later. But the lowest-numbered member stays if that makes no set smaller and only half of the
    view stays: see `refusal`.

    Args:
        candidates: the members that may stay.
        size: the number of ranks per replica.
    """
    broken = {(report.rank // size, other) for report in reports for other in report.lost}
    unsteady = _accused(view, size, {report.rank: report.unsteady for report in reports})
    order = sorted((member for member in view.order if member in candidates), key=lambda member: member in unsteady)
    late = _accused(view, size, {report.rank: report.late for report in reports})

    def largest(members: Sequence[int]) -> tuple[int, ...]:
        staying = largest_set(members, broken)
        if 2 * len(staying) > len(view.members):
            return staying
        return largest_set(sorted(members, key=lambda member: member != view.members[0]), broken)

    if late.intersection(candidates):
        in_time = largest([member for member in order if member not in late])
        gone = frozenset().union(*(report.gone for report in reports))
        if not refusal(view, {*view.members}.difference(in_time), policy, gone=gone):
            return in_time
    return largest(order)


def next_view(
    view: View, reports: Sequence[Report], staying: Collection[int], policy: Policy, alive: Collection[int] = ()
) -> NextView | None:
    """Return what follows ``view`` if ``staying`` stay, or None if they may not: a pure function of their reports.

    They all hear each other, and one of them has lost whoever does not stay, or half of the view find it late. A round
    is committed if all of their ranks have voted for it, with one digest at each position in a replica, and none calls
    it void or one has committed it.

    Args:
        reports: of all ranks of these members, in ascending order of ranks.
        alive: replicas that the caller hears, so that they have not ended, whatever a report says.
    """
    size, lost = len(reports) // len(staying), frozenset(view.members).difference(staying)

    def union(name: str) -> frozenset[Any]:
        return frozenset().union(*(getattr(report, name) for report in reports))

    apart, gone, left = union("apart"), union("gone") | union("left"), union("left") & lost
    late = _accused(view, size, {report.rank: report.late for report in reports})
    if not lost <= apart | gone | late or not (apart | gone).isdisjoint(staying):
        return None
    asking = frozenset.intersection(*(report.joining for report in reports)) - apart - gone.difference(view.members)
    joining, restarted = asking.difference(view.members), asking & lost
    if refusal(view, lost, policy, gone=gone.difference(alive), joining=asking):
        return None
    members = sorted({*staying, *joining})
    votes, commits, void = [report.votes for report in reports], union("commits"), union("void")

    def is_committed(round_id: RoundId, digests: Sequence[str]) -> bool:
        have_voted = all(mine.get(round_id) == digests[index % size] for index, mine in enumerate(votes))
        return have_voted and (round_id not in void or round_id in commits)

    digests_of = {round_id: tuple(mine.get(round_id, "") for mine in votes[:size]) for round_id in votes[0]}
    agreed = {round_id: digests for round_id, digests in digests_of.items() if is_committed(round_id, digests)}
    return NextView(
        view=view.followed_by(members),
        previous=view,
        from_step=max(report.step for report in reports) + 1,
        commits=agreed,
        void=void.difference(agreed),
        left=tuple(sorted(left)),
        apart=tuple(sorted(lost - gone)),
        restarted=tuple(sorted(restarted)),
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
    bit_of = {member: size - 1 - index for index, member in enumerate(members)}
    apart = [0] * size  # by bit: the members with which one makes a bad pair
    for first, second in unheard:
        if first in bit_of and second in bit_of and first != second:
            apart[bit_of[first]] |= 1 << bit_of[second]
            apart[bit_of[second]] |= 1 << bit_of[first]

    def largest(group: int) -> int:
        pairs = {bit: (apart[bit] & group).bit_count() for bit in range(size) if group >> bit & 1}
        while any(pairs.values()):
            worst = max(pairs, key=lambda bit: (pairs[bit], -bit))
            without = group & ~(1 << worst)
            if size <= _MAX_EXACT:
                both = largest(without), largest(without & ~apart[worst]) | 1 << worst
                return max(both, key=lambda subset: (subset.bit_count(), subset))
            group = without
            del pairs[worst]
            for bit in pairs:
                pairs[bit] -= apart[worst] >> bit & 1
        return group

    chosen = largest((1 << size) - 1)
    for bit in range(size - 1, -1, -1):  # a greedy search may leave out a member that hears all the others
        if not apart[bit] & chosen:
            chosen |= 1 << bit
    return tuple(sorted(member for member in members if chosen >> bit_of[member] & 1))


def _accused(view: View, size: int, accusations: Mapping[int, Collection[int]]) -> set[int]:
    """Return the replicas that at least half of ``view`` accuse; ``accusations`` are by rank.

    One accusation is not enough: a fast member may find one late that keeps up with all the others.
    """
    pairs = {(rank // size, accused) for rank, replicas in accusations.items() for accused in replicas}
    counts = Counter(accused for _, accused in pairs)
    return {accused for accused, count in counts.items() if 2 * count >= len(view.members)}
