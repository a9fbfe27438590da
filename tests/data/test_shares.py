"""Sequences of an elastic run: none is drawn twice, and a clean leave loses none."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.data import Assignment, Shares

B = 3
MARGIN = 4


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

    def change(self, *, join: int | None = None, leave: int | None = None, crash: int | None = None) -> None:
        """At the freeze, members report their steps; they may have continued since."""
        from_step = max(self.steps.values()) + 1
        left = {} if leave is None else {leave: self.steps[leave]}
        members = tuple(sorted((set(self.steps) | ({join} if join is not None else set())) - {leave, crash}))
        joined = () if join is None else (join,)
        for gone in (leave, crash):
            if gone is not None:
                del self.steps[gone]
        for replica in self.steps:  # they continue between the freeze and the next view
            self.since_change[replica] = 0
            self.advance(replica)
        self.shares = self.shares.following(
            from_step, members, joined=joined, left=left, margin=MARGIN + 1, batch_size=B
        )
        if join is not None:
            self.steps[join] = from_step
            self.own[join] = []
            self.since_change[join] = 0
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
def test_nothing_is_drawn_twice_and_a_clean_leave_loses_nothing(changes: list[tuple[str, int]]) -> None:
    run, following = Run(), 1
    for kind, number in changes:
        members = sorted(run.steps)
        chosen = members[number % len(members)]
        if kind == "join":
            run.change(join=following)
            following += 1
        elif kind == "leave" and len(members) > 1:
            run.change(leave=chosen)
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
    still = {position for begin, end in last.returned for position in range(begin, end)}
    drawn = set(run.used)
    behind = last.positions(last.members[-1], max(run.steps.values()) - 1, B).max()
    assert set(range(int(behind) + 1)) - drawn <= still, "a sequence was lost"


def test_a_crash_loses_no_more_than_what_was_begun() -> None:
    run = Run()
    run.change(join=1)
    run.settle()
    before = run.steps[1]
    run.change(crash=1)
    run.settle()
    missing = set(range(max(run.used) + 1)) - set(run.used)
    assert len(missing) <= B * (run.shares.chain[-1].from_step - before)
    assert len(run.used) == len(set(run.used))
