"""The order of a run: a permutation that reaches everything once, and positions that no two members draw."""

import json

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.data import Assignment, Shares, as_message, permute, read_message
from diloco.errors import ConfigurationError

B = 3
MARGIN = 4


@settings(deadline=None)
@given(size=st.integers(1, 2000), key=st.text(max_size=5))
def test_the_permutation_reaches_everything_once(size: int, key: str) -> None:
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


def test_the_permutation_tells_nothing_of_one_position_by_another() -> None:
    """Each pair goes to every other pair equally often; a few rounds suffice for single positions but not for pairs."""
    size, expected = 9, 20
    images = [permute(np.arange(size), size, str(key)) for key in range(expected * size * (size - 1))]
    freedom = size * (size - 1) - 1
    for one, other in ((0, 1), (0, 3), (4, 8)):  # in a square of 3 by 3: in one row, in one column, and in neither
        counts = np.zeros((size, size))
        for image in images:
            counts[image[one], image[other]] += 1
        chi_square = ((counts - expected) ** 2 / expected)[~np.eye(size, dtype=bool)].sum()
        assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5


class Run:
    """Replicas that draw step by step, each at its own pace, while the members change."""

    def __init__(self) -> None:
        self.shares = Shares.of((0,))
        self.steps = {0: 0}
        self.own: dict[int, list[Assignment]] = {0: list(self.shares.of_member(0))}
        self.used: list[int] = []
        self.since_change = dict.fromkeys(self.steps, 0)

    def advance(self, replica: int) -> None:
        """Take one step, unless the replica has to wait for a round of the next view."""
        if self.since_change[replica] >= MARGIN:
            return
        step = self.steps[replica]
        mine = [each for each in self.own[replica] if each.from_step <= step][-1]
        self.used += mine.positions(replica, step, B).tolist()
        self.steps[replica] += 1
        self.since_change[replica] += 1

    def change(self, *, join: int | None = None, leave: int | None = None) -> None:
        """At the freeze, members report their steps; they may have continued since."""
        from_step = max(self.steps.values()) + 1
        members = tuple(sorted((set(self.steps) | ({join} if join is not None else set())) - {leave}))
        if leave is not None:
            del self.steps[leave]
        for replica in self.steps:  # they continue between the freeze and the next view
            self.since_change[replica] = 0
            self.advance(replica)
        joined = () if join is None else (join,)
        self.shares = self.shares.following(from_step, members, joined=joined, margin=MARGIN + 1, batch_size=B)
        self.shares = read_message(json.loads(json.dumps(as_message(self.shares))), Shares)
        if join is not None:
            self.steps[join], self.own[join], self.since_change[join] = from_step, [], 0
        for replica in self.steps:
            self.own[replica] += [each for each in self.shares.of_member(replica) if each not in self.own[replica]]
            self.own[replica].sort(key=lambda each: each.from_step)

    def settle(self) -> None:
        """Continue past the step at which the last assignment is in force for all, then stop at the same step."""
        last = max(max(self.steps.values()), self.shares.chain[-1].from_step) + 2
        for replica in self.steps:
            while self.steps[replica] < last:
                self.since_change[replica] = 0
                self.advance(replica)


CHANGES = st.lists(
    st.tuples(st.sampled_from(["join", "leave", "step", "step", "step"]), st.integers(0, 9)), max_size=40
)


@settings(max_examples=100, deadline=None)
@given(CHANGES)
def test_nothing_is_drawn_twice_and_a_change_leaves_out_a_few_batches_of_the_leaver(
    changes: list[tuple[str, int]],
) -> None:
    run, following, left_out = Run(), 1, 0
    for kind, number in changes:
        members = sorted(run.steps)
        chosen = members[number % len(members)]
        if kind == "join":
            run.change(join=following)
            following += 1
        elif kind == "leave" and len(members) > 1:
            before = run.steps[chosen]
            run.change(leave=chosen)
            left_out += run.shares.chain[-1].from_step - before
        else:
            run.since_change[chosen] = 0  # a round was merged
            run.advance(chosen)
            while max(run.steps.values()) - min(run.steps.values()) > 1:  # no replica is ahead by more than a window
                slow = min(run.steps, key=run.steps.__getitem__)
                run.since_change[slow] = 0
                run.advance(slow)
    run.settle()
    assert len(run.used) == len(set(run.used)), "a sequence was drawn twice"
    last = run.shares.chain[-1]
    behind = last.positions(last.members[-1], max(run.steps.values()) - 1, B).max()
    assert len(set(range(int(behind) + 1)) - set(run.used)) <= B * left_out


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"from_step": -1}, ">= 0"),
        ({"start": 2**62}, r"`int` <= "),
        ({"start": True}, "got `bool`"),
        ({"members": ()}, "length >= 1"),
        ({"members": (1, 1)}, "not in ascending order"),
        ({"members": "01"}, "got `str`"),
    ],
)
def test_a_malformed_order_of_a_peer_is_refused(change: dict[str, object], problem: str) -> None:
    arguments = {"from_step": 0, "members": (0, 1), "start": 10}
    good, bad = ([{"chain": [list(each.values())], "aside": []}] for each in (arguments, arguments | change))
    assert msgspec.convert(good[0], Shares).chain == (Assignment(0, (0, 1), 10),)
    with pytest.raises(ConfigurationError, match=f"order can't be read: .*{problem}"):
        read_message(bad[0], Shares)
