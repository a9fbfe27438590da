"""Assignments of stream positions: none is drawn twice or lost as replicas join and leave."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diloco.data import Assignment
from diloco.errors import ConfigurationError


@dataclass
class Stream:
    """The stream as a plain list that is consumed from the front."""

    front: list[int] = field(default_factory=list)
    fresh: int = 0

    def take(self, count: int) -> list[int]:
        missing = max(count - len(self.front), 0)
        self.front += range(self.fresh, self.fresh + missing)
        self.fresh += missing
        taken, self.front = self.front[:count], self.front[count:]
        return taken

    def give_back(self, positions: list[int]) -> None:
        self.front = sorted(self.front + positions)


@dataclass(frozen=True)
class Change:
    """After some steps, replicas leave, which stopped some steps and maybe a sequence earlier, and others join."""

    steps: int
    unused_steps: dict[int, int]
    joining: frozenset[int]
    within_batch: bool = False


NUMBERS = st.integers(0, 4)
LEAVING = st.dictionaries(NUMBERS, st.integers(0, 4), max_size=4)
CHANGES = st.lists(st.builds(Change, st.integers(0, 4), LEAVING, st.frozensets(NUMBERS), st.booleans()), max_size=6)


def listed(ranges: tuple[tuple[int, int], ...]) -> list[int]:
    return [position for begin, end in ranges for position in range(begin, end)]


@settings(deadline=None)
@given(num_replicas=st.integers(1, 4), batch_size=st.integers(1, 3), changes=CHANGES)
@example(num_replicas=1, batch_size=1, changes=[Change(0, {}, frozenset({3})), Change(3, {0: 3}, frozenset())])
@example(num_replicas=2, batch_size=2, changes=[Change(4, {1: 4}, frozenset()), Change(1, {}, frozenset({5}))])
def test_nothing_is_drawn_twice_or_lost_whoever_comes_and_goes(
    num_replicas: int, batch_size: int, changes: list[Change]
) -> None:
    """Compare with a list consumed step by step. Steps after the last change use up the returned ranges."""
    assignment, stream, used = Assignment.of(num_replicas), Stream(), list[int]()
    for change in [*changes, Change(5, {}, frozenset())]:
        steps = range(assignment.from_step, assignment.from_step + change.steps)
        drawn: dict[int, list[list[int]]] = {member: [] for member in assignment.members}
        for step in steps:
            for member in assignment.members:
                batch = assignment.positions(member, step, batch_size)
                assert batch.dtype == np.int64
                assert batch.tolist() == stream.take(batch_size)
                drawn[member].append(batch.tolist())

        leaving = {member for member in change.unused_steps if member in drawn}
        stays = (set(assignment.members) - leaving) | change.joining
        returned: list[tuple[int, int]] = []
        for member in sorted(leaving if stays else ()):
            unused = min(change.unused_steps[member], change.steps)
            ranges = assignment.ranges(member, steps[change.steps - unused :], batch_size)
            given_back = [position for batch in drawn[member][change.steps - unused :] for position in batch]
            assert listed(ranges) == given_back
            # as few ranges as possible
            assert all(end < begin for (_, end), (begin, _) in pairwise(ranges))
            del drawn[member][change.steps - unused :]
            if change.within_batch and given_back:
                drawn[member].append([given_back.pop(0)])
                (begin, end), *others = ranges
                ranges = (*([(begin + 1, end)] if begin + 1 < end else []), *others)
            stream.give_back(given_back)
            returned += ranges
        used += [position for batches in drawn.values() for batch in batches for position in batch]
        members = tuple(sorted(stays)) or assignment.members
        assignment = assignment.following(steps.stop, members, batch_size, returned)
        assert Assignment.from_message(json.loads(json.dumps(assignment.to_message()))) == assignment

    assert len(set(used)) == len(used)
    assert sorted(used + listed(assignment.returned)) == list(range(assignment.start))


def test_returned_ranges_come_first_wherever_they_begin_and_end() -> None:
    """Ranges of 1, 2 and 4 positions in batches of 3: a batch may span several, or the end of one and new positions."""
    assignment = Assignment(10, (2, 5), start=40, returned=((1, 2), (7, 9), (30, 34)))
    drawn = [assignment.positions(member, step, 3).tolist() for step in (10, 11) for member in (2, 5)]
    assert drawn == [[1, 7, 8], [30, 31, 32], [33, 40, 41], [42, 43, 44]]
    assert assignment.ranges(5, range(10, 12), 3) == ((30, 33), (42, 45))
    assert assignment.ranges(5, range(10, 10), 3) == ()
    assert assignment.following(10, (5,), 3) == Assignment(10, (5,), 40, assignment.returned)
    assert assignment.following(11, (5,), 3) == Assignment(11, (5,), 40, ((33, 34),))
    assert assignment.following(12, (5,), 3) == Assignment(12, (5,), 45)


def test_what_is_returned_may_come_in_any_order_and_of_several_assignments() -> None:
    """Replica 1 stopped at step 3; the others used the assignment with it, and with replica 4, until step 6."""
    first = Assignment.of(2)
    second = first.following(5, (0, 1, 4), 2)
    unused = [*first.ranges(1, range(3, 5), 2), *second.ranges(1, range(5, 6), 2)]
    assert unused == [(14, 16), (18, 20), (22, 24)]
    third = second.following(6, (0, 4), 2, unused)
    assert third == Assignment(6, (0, 4), 26, ((14, 16), (18, 20), (22, 24)))
    assert third == second.following(6, (0, 4), 2, [list(each) for each in reversed(unused)])
    # Adjacent ranges are merged, also with the positions from start on.
    assert second.ranges(1, range(5, 6), 2) + second.ranges(4, range(5, 6), 2) == ((22, 24), (24, 26))
    assert Assignment.of(1).ranges(0, range(2, 5), 4) == ((8, 20),)
    assert second.following(7, (0,), 2, [(22, 24), (20, 22)]) == Assignment(7, (0,), 32, ((20, 24),))
    assert second.following(6, (0, 1), 2, second.ranges(4, range(5, 6), 2)) == Assignment(6, (0, 1), 24)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"from_step": -1}, r"from_step of an assignment must be an integer .*, got -1"),
        ({"start": 2**62}, r"below 2\*\*62"),
        ({"members": ()}, r"each once, in ascending order"),
        ({"members": (1, 1)}, r"ascending order, not \(1, 1\)"),
        ({"returned": ((2, 2),)}, r"begin < end <= start"),
        ({"returned": ((0, 2), (1, 3))}, r"without overlap"),
        ({"returned": ((4, 5), (0, 2))}, r"in ascending order"),
        ({"returned": ((8, 11),)}, r"start=10.* they can't be returned"),
    ],
)
def test_malformed_assignments_are_refused_also_as_messages(change: dict[str, object], message: str) -> None:
    arguments = {"from_step": 0, "members": (0, 1), "start": 10, "returned": (), **change}
    with pytest.raises(ConfigurationError, match=message):
        Assignment(**arguments)  # type: ignore[arg-type]  # arguments are varied by name
    with pytest.raises(ConfigurationError, match="of an assignment must be"):
        Assignment.from_message(json.loads(json.dumps(list(arguments.values()))))
