"""Whoever comes and goes: no position of the stream is drawn twice, and none is lost by a clean leave."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diloco.data.assignment import Assignment, Range, windows_at
from diloco.data.permutation import permute
from diloco.data.sampler import Sampler
from diloco.errors import CheckpointError, ConfigurationError

LENGTH = 3


@dataclass
class Stream:
    """The stream as a plain list that is handed out from the front."""

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
    """After some steps replicas leave, each having stopped some steps and maybe a sequence earlier, and others come."""

    steps: int
    unused_steps: dict[int, int]
    joining: frozenset[int]
    within_batch: bool = False


NUMBERS = st.integers(0, 4)
LEAVING = st.dictionaries(NUMBERS, st.integers(0, 4), max_size=4)
CHANGES = st.lists(st.builds(Change, st.integers(0, 4), LEAVING, st.frozensets(NUMBERS), st.booleans()), max_size=6)


def listed(ranges: tuple[Range, ...]) -> list[int]:
    return [position for begin, end in ranges for position in range(begin, end)]


@settings(deadline=None)
@given(num_replicas=st.integers(1, 4), batch_size=st.integers(1, 3), changes=CHANGES)
@example(num_replicas=1, batch_size=1, changes=[Change(0, {}, frozenset({3})), Change(3, {0: 3}, frozenset())])
@example(num_replicas=2, batch_size=2, changes=[Change(4, {1: 4}, frozenset()), Change(1, {}, frozenset({5}))])
def test_nothing_is_drawn_twice_or_lost_whoever_comes_and_goes(
    num_replicas: int, batch_size: int, changes: list[Change]
) -> None:
    """Against a list handed out step by step. The last change is followed by steps that use up what was returned."""
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
        returned: list[Range] = []
        for member in sorted(leaving if stays else ()):
            unused = min(change.unused_steps[member], change.steps)
            ranges = assignment.ranges(member, steps[change.steps - unused :], batch_size)
            given_back = [position for batch in drawn[member][change.steps - unused :] for position in batch]
            assert listed(ranges) == given_back
            # As few as can be.
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


@given(num_replicas=st.integers(1, 5), batch_size=st.integers(1, 5), step=st.integers(0, 2**40))
def test_a_fixed_run_has_one_batch_after_the_other(num_replicas: int, batch_size: int, step: int) -> None:
    fixed = Assignment.of(num_replicas)
    for member in range(num_replicas):
        begin = (step * num_replicas + member) * batch_size
        assert fixed.positions(member, step, batch_size).tolist() == list(range(begin, begin + batch_size))


def test_returned_ranges_come_first_wherever_they_begin_and_end() -> None:
    """Ranges of 1, 2 and 4 positions in batches of 3: a batch may hold several, or the end of one and fresh ones."""
    assignment = Assignment(10, (2, 5), start=40, returned=((1, 2), (7, 9), (30, 34)))
    drawn = [assignment.positions(member, step, 3).tolist() for step in (10, 11) for member in (2, 5)]
    assert drawn == [[1, 7, 8], [30, 31, 32], [33, 40, 41], [42, 43, 44]]
    assert assignment.ranges(5, range(10, 12), 3) == ((30, 33), (42, 45))
    assert assignment.ranges(5, range(10, 10), 3) == ()
    assert assignment.following(10, (5,), 3) == Assignment(10, (5,), 40, assignment.returned)
    assert assignment.following(11, (5,), 3) == Assignment(11, (5,), 40, ((33, 34),))
    assert assignment.following(12, (5,), 3) == Assignment(12, (5,), 45)


def test_what_is_returned_may_come_in_any_order_and_of_several_assignments() -> None:
    """Replica 1 stopped at step 3; the others went on with it, and with replica 4, until step 6."""
    first = Assignment.of(2)
    second = first.following(5, (0, 1, 4), 2)
    unused = [*first.ranges(1, range(3, 5), 2), *second.ranges(1, range(5, 6), 2)]
    assert unused == [(14, 16), (18, 20), (22, 24)]
    third = second.following(6, (0, 4), 2, unused)
    assert third == Assignment(6, (0, 4), 26, ((14, 16), (18, 20), (22, 24)))
    assert third == second.following(6, (0, 4), 2, [list(each) for each in reversed(unused)])
    # Neighbours become one range, also where one ends and the fresh ones begin.
    assert second.ranges(1, range(5, 6), 2) + second.ranges(4, range(5, 6), 2) == ((22, 24), (24, 26))
    assert Assignment.of(1).ranges(0, range(2, 5), 4) == ((8, 20),)
    assert second.following(7, (0,), 2, [(22, 24), (20, 22)]) == Assignment(7, (0,), 32, ((20, 24),))
    assert second.following(6, (0, 1), 2, second.ranges(4, range(5, 6), 2)) == Assignment(6, (0, 1), 24)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"from_step": -1}, r"from_step=-1 was given; a whole number from 0"),
        ({"from_step": True}, r"from_step=True"),
        ({"start": 1.5}, r"start=1\.5"),
        ({"start": 2**62}, r"below 2\*\*62"),
        ({"members": []}, r"the members \[\] was given; a tuple of 1 to 65536"),
        ({"members": ()}, r"each once, in ascending order"),
        ({"members": (1, 0)}, r"the members \(1, 0\)"),
        ({"members": (1, 1)}, r"the members \(1, 1\)"),
        ({"members": (-1, 1)}, r"the members \(-1, 1\)"),
        ({"members": tuple(range(2**16 + 1))}, r"the members \(0, 1, 2, 3, 4, 5, \.\.\.\)"),
        ({"returned": ((2, 2),)}, r"begin < end <= start would work"),
        ({"returned": ((3, 2),)}, r"returned ranges \(\(3, 2\),\)"),
        ({"returned": ((-1, 2),)}, r"\(-1, 2\)"),
        ({"returned": ((0, 2), (1, 3))}, r"without overlap"),
        ({"returned": ((4, 5), (0, 2))}, r"in ascending order"),
        ({"returned": ((8, 11),)}, r"start=10 was given; .* nobody can return it"),
        ({"returned": ((0, 1, 2),)}, r"pairs"),
        ({"returned": (5,)}, r"pairs"),
        ({"returned": "ab"}, r"returned ranges 'ab'"),
        ({"returned": tuple((i, i + 1) for i in range(2**16 + 1)), "start": 2**17}, r"at most 65536 pairs"),
    ],
)
def test_malformed_assignments_are_refused_also_as_messages(change: dict[str, object], message: str) -> None:
    arguments = {"from_step": 0, "members": (0, 1), "start": 10, "returned": (), **change}
    with pytest.raises(ConfigurationError, match=message):
        Assignment(**arguments)  # type: ignore[arg-type]  # arguments are varied by name
    with pytest.raises(ConfigurationError, match=r"Nothing was assigned\."):
        Assignment.from_message(json.loads(json.dumps(list(arguments.values()))))


@pytest.mark.parametrize("message", [None, {}, "text", [], [0, [0], 0], [0, 0, 0, []], [0, [0], 0, [1]], [0] * 5])
def test_messages_of_another_form_are_refused(message: object) -> None:
    with pytest.raises(ConfigurationError, match=r"would work\. Nothing was assigned\."):
        Assignment.from_message(message)


def test_questions_without_an_answer_are_refused() -> None:
    assignment = Assignment(5, (0, 2), 40, ((8, 12),))
    with pytest.raises(ConfigurationError, match=r"replica 1 draws at step 5 .* members \(0, 2\) would work"):
        assignment.positions(1, 5, 2)
    with pytest.raises(ConfigurationError, match=r"step=4 was given to an assignment for the steps from 5 on"):
        assignment.ranges(0, range(4, 6), 2)
    with pytest.raises(ConfigurationError, match=r"range\(5, 9, 2\) were asked for; steps in a row"):
        assignment.ranges(0, range(5, 9, 2), 2)
    with pytest.raises(ConfigurationError, match=r"batch_size=0 was given"):
        assignment.positions(0, 5, 0)
    with pytest.raises(ConfigurationError, match=r"only positions below 2\*\*62 can be counted"):
        assignment.positions(0, 2**60, 4)
    with pytest.raises(ConfigurationError, match=r"step=4 was given"):
        assignment.following(4, (0,), 2)
    for returned in ([(9, 10)], [(1, 3), (2, 4)], [(50, 52)]):  # not yet drawn again, given back twice, never assigned
        with pytest.raises(ConfigurationError, match=r"without overlap"):
            assignment.following(5, (0,), 2, returned)
    with pytest.raises(ConfigurationError, match=r"The ranges \('ab',\) were returned; pairs"):
        assignment.following(5, (0,), 2, ["ab"])  # type: ignore[list-item]  # the point
    for num_replicas in (0, 2**16 + 1):
        with pytest.raises(ConfigurationError, match=rf"of {num_replicas} replicas was asked for; 1 to 65536"):
            Assignment.of(num_replicas)


def test_a_batch_of_two_epochs_has_its_windows_of_both() -> None:
    """7 windows in batches of 2 make epochs of 6 positions; the positions here are of a returned range."""
    shuffles = [permute(np.arange(7), 7, f"seed 3, epoch {epoch}").tolist() for epoch in range(3)]
    windows = windows_at(np.array([5, 12, 6]), num_windows=7, batch_size=2, seed=3)
    assert windows.tolist() == [shuffles[0][5], shuffles[2][0], shuffles[1][0]]


def sampler(replica: int, num_replicas: int | None, windows: int = 100, **more: str) -> Sampler:
    """Batches of 2 sequences, whose tokens tell their own place."""
    tokens = np.arange(windows * LENGTH + 1)
    arguments = {"sequence_length": LENGTH, "batch_size": 2, "seed": 1, **more}
    return Sampler(tokens, replica=replica, num_replicas=num_replicas, **arguments)  # type: ignore[arg-type]


def windows_of(own: Sampler) -> list[int]:
    inputs, _ = own.next_batch()
    return (inputs[:, 0] // LENGTH).tolist()


def test_samplers_share_out_the_windows_while_members_change() -> None:
    """Replica 1 knows at step 3 that it leaves, the others from step 5 on; replica 7 comes at step 8."""
    first = Assignment.of(2)
    second = first.following(5, (0,), 2, first.ranges(1, range(3, 5), 2))
    third = second.following(8, (0, 7), 2)
    stayer, leaver, joiner = sampler(0, None), sampler(1, None), sampler(7, None)
    stayer.assign(first)
    leaver.assign(first)
    drawn = [window for _ in range(3) for each in (stayer, leaver) for window in windows_of(each)]
    stayer.assign(second)
    drawn += [window for _ in range(3) for window in windows_of(stayer)]
    stayer.assign(third)
    joiner.load_state_dict({**stayer.state_dict(), "drawn": 8})
    drawn += [window for _ in range(2) for window in windows_of(stayer)]
    assert joiner.state_dict() == stayer.state_dict()
    drawn += [window for _ in range(3) for each in (stayer, joiner) for window in windows_of(each)]
    # 3 + 3 batches of steps 0 to 2, replica 0's of steps 3 to 7, then 6 together: a prefix of the first epoch.
    assert sorted(drawn) == sorted(windows_at(np.arange(2 * (6 + 5 + 6)), 100, 2, seed=1).tolist())


def test_assignments_count_from_their_first_step_on_in_whatever_order_they_come() -> None:
    own, fixed = sampler(1, 2), Assignment.of(2)
    later, latest = Assignment(4, (1, 5), 50), Assignment(6, (1,), 70)
    own.assign(latest)
    own.assign(Assignment(4, (1,), 90))
    own.assign(later)  # takes the place of the one before
    assert own.state_dict()["assignments"] == [each.to_message() for each in (fixed, later, latest)]
    expected = [fixed.positions(1, step, 2) for step in range(4)]
    expected += [later.positions(1, step, 2) for step in (4, 5)] + [latest.positions(1, 6, 2)]
    for positions in expected:
        assert windows_of(own) == windows_at(positions, 100, 2, seed=1).tolist()
    assert own.state_dict()["assignments"] == [latest.to_message()]
    own.assign(Assignment(7, (0, 1), 10))
    assert own.epoch == 0
    assert windows_of(own) == windows_at(np.array([12, 13]), 100, 2, seed=1).tolist()


@pytest.mark.parametrize("stop", range(9))
def test_resuming_between_changes_equals_never_stopping(stop: int) -> None:
    """An epoch is 5 batches; members change at the steps 3 and 6, and the cursor knows it from step 1 on."""
    first = Assignment.of(2)
    second = first.following(3, (1,), 2, first.ranges(0, range(2, 3), 2))
    runs = [sampler(1, 2, windows=11) for _ in range(2)]
    for step in range(10):
        if step == 1:
            for own in runs:
                own.assign(second)
                own.assign(second.following(6, (1, 3), 2))
        if step == stop:
            state = json.loads(json.dumps(runs[1].state_dict()))
            runs[1] = sampler(1, 2, windows=11)
            runs[1].load_state_dict(state)
            assert runs[1].state_dict() == state
        batches = [own.next_batch() for own in runs]
        assert torch.equal(batches[0][0], batches[1][0])
        assert torch.equal(batches[0][1], batches[1][1])


def test_assignments_that_cannot_be_are_refused() -> None:
    own, contiguous, new = sampler(1, 2), sampler(1, 2, sharding="contiguous"), sampler(7, None)
    own.next_batch()
    own.next_batch()
    before = own.state_dict()
    with pytest.raises(ConfigurationError, match=r"from step 1 on was given after 2 batches .* step 2 or later"):
        own.assign(Assignment(1, (0, 1), 50))
    with pytest.raises(ConfigurationError, match=r"to the members \(0, 2\) was given to replica 1"):
        own.assign(Assignment(2, (0, 2), 50))
    with pytest.raises(ConfigurationError, match=r"members can change with sharding='shuffled'"):
        contiguous.assign(Assignment.of(2))
    assert own.state_dict() == before
    with pytest.raises(ConfigurationError, match=r"Replica 7 was to draw at step 0 and has assignments .* \[\]"):
        new.next_batch()
    new.assign(Assignment(4, (0, 7), 50))
    with pytest.raises(ConfigurationError, match=r"from the steps \[4\] on"):
        new.next_batch()
    new.load_state_dict({**new.state_dict(), "drawn": 4})
    assert windows_of(new) == windows_at(np.array([52, 53]), 100, 2, seed=1).tolist()
    # It may take over a cursor of others that it is not among, but not draw by it.
    new.load_state_dict({**new.state_dict(), "assignments": [[0, [0, 1], 0, []]]})
    with pytest.raises(ConfigurationError, match=r"replica 7 draws at step 5 was asked for"):
        new.next_batch()
    assert new.state_dict()["drawn"] == 5


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        ([], r"at least one is needed"),
        (None, r"the assignments None, which cannot be read"),
        ([[0, [1, 0], 0, []]], r"cannot be read: An assignment to the members \(1, 0\)"),
        ([[3, [0, 1], 0, []]], r"assignments from the steps \[3\] on after 1 batches"),
        ([[0, [0, 1], 0, []], [0, [0], 0, []]], r"each from a later step than the one before"),
    ],
)
def test_a_cursor_with_other_assignments_than_can_be_is_refused(assignments: object, message: str) -> None:
    own, contiguous = sampler(0, 2), sampler(0, 2, sharding="contiguous")
    own.next_batch()
    before = own.state_dict()
    with pytest.raises(CheckpointError, match=message):
        own.load_state_dict({**before, "assignments": assignments})
    assert own.state_dict() == before
    with pytest.raises(CheckpointError, match=r"'contiguous' has none\. The cursor was not loaded"):
        contiguous.load_state_dict({**contiguous.state_dict(), "assignments": [[0, [0, 1], 0, []]]})
