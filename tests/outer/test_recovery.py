"""State recovery during training: whenever the state arrives, the result is the donor's state, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from diloco.algorithm import Contribution, Nesterov, RoundId, SyncSchedule
from diloco.errors import TransportError
from diloco.events import Event, Note
from diloco.membership import View
from diloco.outer import DiLoCo, Fragment, StateRecovery
from diloco.protocol import Average
from diloco.transport import Fetching, Pending, Transport

FRAGMENTS = 2
VIEW = View(1, (0, 1, 2))


def make_fragments(seed: int) -> tuple[Fragment, ...]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    inner, schedule = torch.optim.SGD(model.parameters()), SyncSchedule(inner_steps=2, num_fragments=FRAGMENTS)
    return DiLoCo(model, inner, schedule=schedule, outer_optimizer=Nesterov(learning_rate=0.5)).fragments


def snapshot(seed: int, index: int) -> dict[str, Any]:
    return make_fragments(seed)[index].state.snapshot()


@dataclass
class Slow:
    """A fetch that ends when the test sets its outcome."""

    fragment: int
    donors: tuple[int, ...]
    after: int
    outcome: Mapping[str, Any] | TransportError | None = None

    def done(self) -> bool:
        return self.outcome is not None

    def result(self, timeout: float | None = None) -> Mapping[str, Any]:
        if self.outcome is None:
            raise TimeoutError
        if isinstance(self.outcome, TransportError):
            raise self.outcome
        return self.outcome


@dataclass
class FakeTransport(Transport):
    """The transport of replica 2."""

    pair: Pair
    replica: int = 2
    view: View = VIEW
    fetches: list[Slow] = field(default_factory=list)
    at_once: bool = False

    def average(self, contribution: Contribution) -> Pending:
        raise NotImplementedError

    def publish(self, source: Any, version: Any = None) -> None:
        raise NotImplementedError

    def fetch(self, fragment: int, donors: Sequence[int], expected_bytes: int | None = None) -> Mapping[str, Any]:
        return self.pair.donor[fragment].state.snapshot()

    def fetch_in_background(self, fragment: int, donors: Sequence[int], expected_bytes: int | None = None) -> Fetching:
        if self.at_once:
            return super().fetch_in_background(fragment, donors, expected_bytes)
        self.fetches.append(Slow(fragment, tuple(donors), self.pair.rounds[fragment]))
        return self.fetches[-1]


@dataclass
class Flight:
    """A round in flight.

    Attributes:
        average: The result, unless the round is void.
        matched: Whether the joiner held the donor's state when the round began.
        applied: Whether the donor has finished the round.
    """

    average: Average
    matched: bool
    void: bool = False
    applied: bool = False


class Pair:
    """A donor, and a joiner that lacks the donor's first round of each fragment."""

    def __init__(self) -> None:
        self.donor, self.joiner = make_fragments(0), make_fragments(1)
        self.rounds = [0] * FRAGMENTS
        self.transport = FakeTransport(self)
        self.recovery = StateRecovery(self.joiner, self.transport)
        self.flights: dict[int, Flight] = {}
        self.behind: dict[int, list[Flight]] = {fragment: [] for fragment in range(FRAGMENTS)}

    def send(self, fragment: int) -> None:
        """Begin a round on both sides, with the joiner's state as in its header of the round."""
        self.catch_up(fragment)
        self.joiner[fragment].adopted = -1  # as `Fragment.send` does
        digests = [side[fragment].state.digest() for side in (self.donor, self.joiner)]
        matched = digests[0] == digests[1]
        self.flights[fragment] = Flight(self.average(fragment, None if matched else 0), matched)

    def merge(self, fragment: int, *, donor_lags: bool = False) -> str:
        """End the round; with ``donor_lags`` the donor ends it when it catches up."""
        flight = self.flights.pop(fragment)
        self.rounds[fragment] += 1
        self.behind[fragment].append(flight)
        if not donor_lags:
            self.catch_up(fragment)
        if flight.void:
            if self.joiner[fragment].donor is None:
                self.joiner[fragment].state.count_void(flight.average.round.outer_step)
        elif flight.matched:
            self.apply(self.joiner, flight.average)
        else:
            return self.recovery.round_missed(flight.average, 0)
        return ""

    def catch_up(self, fragment: int) -> None:
        """End the rounds at the donor that the joiner has ended."""
        for flight in self.behind[fragment]:
            self.end_at_donor(flight)
        self.behind[fragment].clear()

    def end_at_donor(self, flight: Flight) -> None:
        """End a round at the donor; repeated calls have no effect."""
        index, outer_step = flight.average.round.fragment, flight.average.round.outer_step
        if not flight.applied and not flight.void:
            self.apply(self.donor, flight.average)
        flight.applied = True
        self.donor[index].state.count_void(outer_step)

    def rejoin(self) -> None:
        """Let the joiner rejoin: it fetches all fragments again, and the rounds in flight end without it."""
        self.transport = FakeTransport(self)
        self.recovery.change_transport(self.transport)
        self.transport.at_once = True
        list(self.recovery.fetch_all((0,), keep_work=True, step=0))
        self.transport.at_once = False
        for fragment in list(self.flights):
            self.behind[fragment].append(self.flights.pop(fragment))
            self.rounds[fragment] += 1

    def average(self, fragment: int, donor: int | None) -> Average:
        round_id = RoundId(fragment, self.rounds[fragment])
        torch.manual_seed(100 * fragment + round_id.outer_step)
        values: Tensor = torch.randn(self.donor[fragment].numel)
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
            held=self.donor[fragment].state.digest(),
        )

    @staticmethod
    def apply(side: Sequence[Fragment], average: Average) -> None:
        side[average.round.fragment].state.take_step(average, telemetry=False, keep=False)

    def answer(self, fragment: int) -> dict[str, Any]:
        self.catch_up(fragment)
        return self.donor[fragment].state.snapshot()

    def differing(self) -> list[int]:
        for fragment in range(FRAGMENTS):
            self.catch_up(fragment)
        return [f for f in range(FRAGMENTS) if self.donor[f].state.digest() != self.joiner[f].state.digest()]

    def settle(self) -> None:
        """Answer every fetch and continue the rounds."""
        for _ in range(2 * FRAGMENTS + 2):
            for fragment in range(FRAGMENTS):
                if fragment not in self.flights:
                    self.send(fragment)
            for fragment in range(FRAGMENTS):
                self.merge(fragment)
            for fetch in self.transport.fetches:
                if fetch.outcome is None:
                    fetch.outcome = self.answer(fetch.fragment)
            self.recovery.poll()


def test_rounds_that_go_by_while_the_state_travels_are_made_up_for() -> None:
    pair = Pair()
    pair.send(0)
    assert "fetches in the background" in pair.merge(0)
    assert pair.joiner[0].donor is not None
    answer = pair.answer(0)
    for _ in range(3):
        pair.send(0)
        pair.merge(0)
    assert [fetch.donors for fetch in pair.transport.fetches] == [(0, 1)]
    pair.transport.fetches[0].outcome = answer
    assert pair.recovery.poll() == ()
    assert pair.joiner[0].donor is None
    assert pair.joiner[0].state.digest() == pair.donor[0].state.digest()
    assert pair.joiner[0].state.finished_rounds == pair.donor[0].state.finished_rounds == 4


def test_state_that_comes_between_sending_and_merging_takes_up_the_round() -> None:
    pair = Pair()
    pair.send(0)
    pair.merge(0)
    pair.send(0)
    pair.transport.fetches[0].outcome = pair.answer(0)
    pair.recovery.poll()
    assert "this round is now applied to it" in pair.merge(0)
    assert pair.joiner[0].state.digest() == pair.donor[0].state.digest()
    assert len(pair.transport.fetches) == 1


def test_state_with_the_round_in_flight_in_it_takes_it_up_once() -> None:
    pair = Pair()
    pair.send(0)
    pair.merge(0)
    pair.send(0)
    average = pair.average(0, donor=0)
    pair.apply(pair.donor, average)  # the donor merges before the joiner
    pair.transport.fetches[0].outcome = pair.answer(0)
    pair.recovery.poll()
    assert "already contains this round" in pair.recovery.round_missed(average, 0)
    assert pair.joiner[0].state.digest() == pair.donor[0].state.digest()


def test_what_was_trained_stays_to_be_shared() -> None:
    pair = Pair()
    fragment = pair.joiner[0]
    with torch.no_grad():
        fragment.parameters[0].add_(0.25)
    before, _, _ = fragment.pseudo_gradient()
    pair.send(0)
    pair.merge(0)
    pair.transport.fetches[0].outcome = pair.answer(0)
    pair.recovery.poll()
    after, _, _ = fragment.pseudo_gradient()
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)


def test_a_donor_that_does_not_answer_is_told_of_and_the_next_round_asks_again() -> None:
    pair = Pair()
    pair.send(0)
    pair.merge(0)
    pair.transport.fetches[0].outcome = TransportError("gone.")
    assert pair.recovery.poll() == ("Adopting the state of replica 0 failed: gone.",)
    assert pair.joiner[0].donor is None
    pair.send(0)
    pair.merge(0)
    assert len(pair.transport.fetches) == 2


def test_a_state_that_turns_out_to_be_another_one_is_fetched_again() -> None:
    """A diverged or malicious donor claims that its state contains all rounds. Donors are then asked one at a time."""
    pair = Pair()
    pair.send(0)
    pair.merge(0)
    pair.transport.fetches[0].outcome = snapshot(7, 0) | {"finished_rounds": 1}
    pair.recovery.poll()
    pair.send(0)
    assert "fetches in the background" in pair.merge(0)
    pair.send(0)
    pair.transport.fetches[1].outcome = snapshot(7, 0) | {"finished_rounds": 2}
    pair.recovery.poll()
    assert "fetches in the background" in pair.merge(0), "it arrived after the round began"
    pair.transport.fetches[2].outcome = pair.answer(0)
    pair.recovery.poll()
    assert pair.joiner[0].state.digest() == pair.donor[0].state.digest()
    assert [fetch.donors for fetch in pair.transport.fetches] == [(0, 1), (0,), (1,)]


def test_a_state_that_is_not_what_all_held_at_its_round_changes_nothing() -> None:
    pair = Pair()
    before = pair.joiner[0].state.digest()
    for _ in range(2):
        pair.send(0)
        pair.merge(0)
    pair.transport.fetches[0].outcome = snapshot(7, 0) | {"finished_rounds": 1}
    (failure,) = pair.recovery.poll()
    assert failure.endswith("failed: the received state differs from the one that the other replicas hold.")
    assert pair.joiner[0].state.digest() == before
    pair.send(0)
    pair.merge(0)
    assert pair.transport.fetches[1].donors == (0,)


@pytest.mark.parametrize("odd", [{"slots": {}}, {"finished_rounds": None}, {"outer_step": "many"}])
def test_what_is_no_state_of_the_fragment_is_told_of_and_changes_nothing(odd: dict[str, Any]) -> None:
    pair = Pair()
    pair.send(0)
    pair.merge(0)
    before = pair.joiner[0].state.digest()
    pair.transport.fetches[0].outcome = pair.answer(0) | odd
    (failure,) = pair.recovery.poll()
    reason = "the received data is not a valid state of fragment 0: "
    assert failure.startswith(f"Adopting the state of replica 0 failed: {reason}")
    assert pair.joiner[0].state.digest() == before
    assert pair.joiner[0].donor is None


class NotThere(FakeTransport):
    """Lets every round pass without this replica, which never holds the others' state."""

    def average(self, contribution: Contribution) -> Pending:
        pair, index = self.pair, contribution.round.fragment
        return Had(replace(pair.average(index, 0), round=contribution.round, values=torch.zeros(contribution.numel)))

    def publish(self, source: Any, version: Any = None) -> None:
        pass


@dataclass
class Had:
    """A finished round."""

    average: Average

    def wait(self, timeout_s: float | None = None) -> Average:
        return self.average


def test_who_goes_on_from_a_checkpoint_with_an_old_state_is_told_so() -> None:
    said: list[Event] = []

    def one() -> DiLoCo:
        model = nn.Linear(2, 1)
        inner, schedule = torch.optim.SGD(model.parameters()), SyncSchedule(inner_steps=2)
        return DiLoCo(model, inner, transport=NotThere(Pair()), schedule=schedule, on_event=said.append)

    joiner = one()
    joiner.step()
    one().load_state_dict(joiner.state_dict())
    assert not [each for each in said if isinstance(each, Note)]
    joiner.step()
    one().load_state_dict(joiner.state_dict())
    assert joiner.state_dict()["fragments"][0]["finished_rounds"] == 0, "the published state does not contain the round"
    (note,) = (each for each in said if isinstance(each, Note))
    assert note.text == "The state of fragment 0 was being fetched when this was saved. It is fetched again."


fragments = st.integers(0, FRAGMENTS - 1)
happenings = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["send", "void", "donor", "merge", "read", "arrive", "fail", "lie"]), fragments),
        st.tuples(st.sampled_from(["poll", "poll", "come back"]), st.just(0)),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=60)
@given(happenings)
def test_in_whatever_order_things_happen_the_end_is_the_donors_state(happenings: list[tuple[str, int]]) -> None:
    """Rounds are void; donors leave, lag, run ahead, or send a wrong state."""
    pair = Pair()
    read: dict[int, dict[str, Any]] = {}  # a donor reads its state some time after the request; it arrives even later
    for what, fragment in happenings:
        flight = pair.flights.get(fragment)
        open_fetch = next((f for f in pair.transport.fetches if f.outcome is None and f.fragment == fragment), None)
        if what == "send" and flight is None:
            pair.send(fragment)
        elif what == "void" and flight is not None and not flight.applied:
            flight.void = True
        elif what == "donor":
            pair.catch_up(fragment)
            if flight is not None:
                pair.end_at_donor(flight)
        elif what == "merge" and flight is not None:
            pair.merge(fragment, donor_lags=True)
        elif what == "read" and open_fetch is not None:
            if (
                pair.donor[fragment].state.finished_rounds >= open_fetch.after
            ):  # else the donor asks it to try again later
                read[id(open_fetch)] = pair.donor[fragment].state.snapshot()
        elif what == "arrive" and open_fetch is not None:
            open_fetch.outcome = read.get(id(open_fetch)) or pair.answer(fragment)
        elif what == "fail" and open_fetch is not None:
            open_fetch.outcome = TransportError("gone.")
        elif what == "lie" and open_fetch is not None:
            claimed = {"finished_rounds": open_fetch.after + 1}
            open_fetch.outcome = snapshot(7, fragment) | claimed
        elif what == "poll":
            pair.recovery.poll()
        elif what == "come back":
            pair.rejoin()
    pair.settle()
    assert pair.differing() == []
    finished = [[fragment.state.finished_rounds for fragment in side] for side in (pair.joiner, pair.donor)]
    assert finished[0] == finished[1]
