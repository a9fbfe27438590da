"""Taking over state beside the training, whenever it comes: the end is the donor's state, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from diloco.algorithm.averaging import Contribution, RoundId
from diloco.algorithm.fragments import partition
from diloco.algorithm.outer_loop import OuterLoop
from diloco.algorithm.outer_optimizer import Nesterov
from diloco.errors import TransportError
from diloco.membership.view import View
from diloco.train.shared_state import SharedState
from diloco.train.taking_over import TakingOver
from diloco.transport.base import Average, Pending, Transport

FRAGMENTS = 2
VIEW = View(1, (0, 1, 2))


def outer_loop(seed: int) -> OuterLoop:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    return OuterLoop(model, partition(model, num_fragments=FRAGMENTS), Nesterov(learning_rate=0.5))


@dataclass
class Slow:
    """A fetch that ends when a test says so."""

    fragment: int
    donors: tuple[int, ...]
    outcome: Mapping[str, Any] | TransportError | None = None

    def done(self) -> bool:
        return self.outcome is not None

    def result(self) -> Mapping[str, Any]:
        assert self.outcome is not None
        if isinstance(self.outcome, TransportError):
            raise self.outcome
        return self.outcome


@dataclass
class FakeTransport(Transport):
    """Of replica 2."""

    replica: int = 2
    view: View = VIEW
    fetches: list[Slow] = field(default_factory=list)

    def average(self, contribution: Contribution) -> Pending:
        raise NotImplementedError

    def publish(self, source: Any, version: Any = None) -> None:
        raise NotImplementedError

    def fetch(self, fragment: int, donors: Sequence[int], expected_bytes: int | None = None) -> Mapping[str, Any]:
        raise NotImplementedError

    def fetch_beside(self, fragment: int, donors: Sequence[int], expected_bytes: int | None = None) -> Slow:
        self.fetches.append(Slow(fragment, tuple(donors)))
        return self.fetches[-1]


class Pair:
    """A donor, and a joiner that lacks the donor's first round of each fragment."""

    def __init__(self) -> None:
        self.donor, self.joiner = SharedState(outer_loop(0)), SharedState(outer_loop(1))
        self.transport = FakeTransport()
        self.taking_over = TakingOver(self.joiner, self.transport)
        self.rounds = [0] * FRAGMENTS
        self.sent_in_step: dict[int, bool] = {}

    def send(self, fragment: int) -> None:
        """The joiner's state as it is in a round's header."""
        digests = [shared.outer_loop.digest(fragment) for shared in (self.donor, self.joiner)]
        self.sent_in_step[fragment] = digests[0] == digests[1]

    def merge(self, fragment: int) -> str:
        average = self.average(fragment, None if self.sent_in_step.pop(fragment) else 0)
        self.apply(self.donor, average)
        self.rounds[fragment] += 1
        if average.donor is not None:
            return self.taking_over.missed(average, average.donor)
        self.apply(self.joiner, average)
        return ""

    def average(self, fragment: int, donor: int | None) -> Average:
        round_id = RoundId(fragment, self.rounds[fragment])
        torch.manual_seed(100 * fragment + round_id.outer_step)
        values: Tensor = torch.randn(self.donor.outer_loop.fragments[fragment].numel)
        return Average(
            round=round_id,
            values=values,
            view=VIEW,
            contributors=(0, 1),
            weight=2.0,
            sent_bytes=0,
            received_bytes=0,
            wait_s=0.0,
            donor=donor,
        )

    @staticmethod
    def apply(shared: SharedState, average: Average) -> None:
        fragment = average.round.fragment
        with shared.changing(fragment):
            shared.outer_loop.outer_step(fragment, average.values)
            shared.finished_rounds[fragment] = average.round.outer_step + 1

    def answer(self, fragment: int) -> dict[str, Any]:
        return self.donor.snapshot(fragment)

    def differing(self) -> list[int]:
        loops = self.donor.outer_loop, self.joiner.outer_loop
        return [f for f in range(FRAGMENTS) if loops[0].digest(f) != loops[1].digest(f)]

    def settle(self) -> None:
        """Answer everything that is asked, and let the rounds go on."""
        for _ in range(2 * FRAGMENTS + 2):
            for fragment in range(FRAGMENTS):
                if fragment not in self.sent_in_step:
                    self.send(fragment)
            for fragment in range(FRAGMENTS):
                self.merge(fragment)
            for fetch in self.transport.fetches:
                if fetch.outcome is None:
                    fetch.outcome = self.answer(fetch.fragment)
            self.taking_over.poll()


def test_rounds_that_go_by_while_the_state_travels_are_made_up_for() -> None:
    pair = Pair()
    pair.send(0)
    assert "fetches beside the training" in pair.merge(0)
    assert pair.taking_over.lacks(0)
    answer = pair.answer(0)
    for _ in range(3):
        pair.send(0)
        pair.merge(0)
    assert [fetch.donors for fetch in pair.transport.fetches] == [(0, 1)]
    pair.transport.fetches[0].outcome = answer
    assert pair.taking_over.poll() == ()
    assert not pair.taking_over.lacks(0)
    assert pair.joiner.outer_loop.digest(0) == pair.donor.outer_loop.digest(0)
    assert pair.joiner.finished_rounds[0] == pair.donor.finished_rounds[0] == 4


def test_state_that_comes_between_sending_and_merging_takes_up_the_round() -> None:
    pair = Pair()
    pair.send(0)
    pair.merge(0)
    pair.send(0)
    pair.transport.fetches[0].outcome = pair.answer(0)
    pair.taking_over.poll()
    assert "has it now" in pair.merge(0)
    assert pair.joiner.outer_loop.digest(0) == pair.donor.outer_loop.digest(0)
    assert len(pair.transport.fetches) == 1


def test_state_with_the_round_in_flight_in_it_takes_it_up_once() -> None:
    pair = Pair()
    pair.send(0)
    pair.merge(0)
    pair.send(0)
    average = pair.average(0, donor=0)
    pair.apply(pair.donor, average)  # the donor merges before the joiner does
    pair.transport.fetches[0].outcome = pair.answer(0)
    pair.taking_over.poll()
    assert "that of this round included" in pair.taking_over.missed(average, 0)
    assert pair.joiner.outer_loop.digest(0) == pair.donor.outer_loop.digest(0)


def test_what_was_trained_stays_to_be_shared() -> None:
    pair = Pair()
    loop = pair.joiner.outer_loop
    with torch.no_grad():
        loop.parameters[0][0].add_(0.25)
    before, _, _ = loop.pseudo_gradient(0, keep_local=False)
    pair.send(0)
    pair.merge(0)
    pair.transport.fetches[0].outcome = pair.answer(0)
    pair.taking_over.poll()
    after, _, _ = loop.pseudo_gradient(0, keep_local=False)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)


def test_one_fragment_is_fetched_at_a_time_in_the_order_found() -> None:
    pair = Pair()
    for fragment in (1, 0):
        pair.send(fragment)
        pair.merge(fragment)
    assert [fetch.fragment for fetch in pair.transport.fetches] == [1]
    pair.transport.fetches[0].outcome = pair.answer(1)
    pair.taking_over.poll()
    assert [fetch.fragment for fetch in pair.transport.fetches] == [1, 0]
    assert pair.taking_over.lacks(0)


def test_a_donor_that_does_not_answer_is_told_of_and_the_next_round_asks_again() -> None:
    pair = Pair()
    pair.send(0)
    pair.merge(0)
    pair.transport.fetches[0].outcome = TransportError("gone.")
    assert pair.taking_over.poll() == ("Taking over the state of replica 0 failed: gone.",)
    assert not pair.taking_over.lacks(0)
    pair.send(0)
    pair.merge(0)
    assert len(pair.transport.fetches) == 2


def test_over_another_transport_nothing_of_the_old_one_is_taken() -> None:
    pair = Pair()
    pair.send(0)
    pair.merge(0)
    old, before = pair.transport.fetches[0], pair.joiner.outer_loop.digest(0)
    pair.taking_over.change_transport(FakeTransport())
    old.outcome = pair.answer(0)
    pair.taking_over.poll(wait=True)
    assert pair.joiner.outer_loop.digest(0) == before


fragments = st.integers(0, FRAGMENTS - 1)
happenings = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["send", "merge", "read", "arrive", "fail"]), fragments),
        st.tuples(st.just("poll"), st.just(0)),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(happenings)
def test_in_whatever_order_things_happen_the_end_is_the_donors_state(happenings: list[tuple[str, int]]) -> None:
    pair = Pair()
    read: dict[int, dict[str, Any]] = {}  # a donor reads its state when it is asked or later, and it arrives later yet
    for what, fragment in happenings:
        open_fetches = [f for f in pair.transport.fetches if f.outcome is None and f.fragment == fragment]
        if what == "send" and fragment not in pair.sent_in_step:
            pair.send(fragment)
        elif what == "merge" and fragment in pair.sent_in_step:
            pair.merge(fragment)
        elif what == "read" and open_fetches:
            read[id(open_fetches[0])] = pair.answer(fragment)
        elif what == "arrive" and open_fetches:
            fetch = open_fetches[0]
            fetch.outcome = read.get(id(fetch), pair.answer(fragment))
        elif what == "fail" and open_fetches:
            open_fetches[0].outcome = TransportError("gone.")
        elif what == "poll":
            pair.taking_over.poll()
    pair.settle()
    assert pair.differing() == []
    assert pair.joiner.finished_rounds == pair.donor.finished_rounds
