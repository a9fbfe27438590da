"""Who stays in a view when some of its members can't hear each other. Pure: every survivor computes the same set."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

__all__ = ["largest_set", "within_reach"]


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


def within_reach(member: int, members: Collection[int], unheard: Iterable[tuple[int, int]]) -> frozenset[int]:
    """Those of ``members`` that ``member`` reaches over any number of others, itself included.

    >>> sorted(within_reach(0, range(4), [(0, 2), (0, 3), (1, 2), (1, 3)]))
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
