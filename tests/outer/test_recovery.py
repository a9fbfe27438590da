"""State recovery during training: whenever the state arrives, the result is the donor's state, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from diloco.algorithm import Nesterov, RoundId, SyncSchedule
from diloco.errors import TransportError
from diloco.membership import View
from diloco.outer import DiLoCo, Fragment, StateRecovery
from diloco.protocol import Average
from diloco.waiting import at_once

FRAGMENTS = 2
VIEW = View(1, (0, 1, 2))


def make_fragments(seed: int) -> tuple[Fragment, ...]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    inner, schedule = torch.optim.SGD(model.parameters()), SyncSchedule(inner_steps=2, num_fragments=FRAGMENTS)
    return DiLoCo(model, inner, schedule=schedule, outer_optimizer=Nesterov(learning_rate=0.5)).fragments


def lie(fragment: int, finished_rounds: int) -> dict[str, Any]:
    """Return another state that claims to contain these rounds."""
    return make_fragments(7)[fragment].state.snapshot() | {"finished_rounds": finished_rounds}


class Slow(Future[Mapping[str, Any]]):
    """A fetch that ends when the test ends it."""

    def __init__(self, fragment: int, donors: Sequence[int], after: int) -> None:
        super().__init__()
        self.fragment, self.donors, self.after = fragment, tuple(donors), after

    def end(self, outcome: Mapping[str, Any] | TransportError) -> None:
        if isinstance(outcome, TransportError):
            self.set_exception(outcome)
        else:
            self.set_result(outcome)


class Donors:
    """What recovery sees of the transport of replica 2."""

    replica, view, fetched_bytes = 2, VIEW, 0

    def __init__(self, pair: Pair) -> None:
        self.pair, self.at_once = pair, False
        self.fetches: list[Slow] = []

    def fetch(self, fragment: int, donors: Sequence[int], expected_bytes: int | None = None) -> Any:
        if self.at_once:
            return at_once(self.pair.donor[fragment].state.snapshot)
        self.fetches.append(Slow(fragment, donors, self.pair.rounds[fragment]))
        return self.fetches[-1]


@dataclass
class Flight:
    """A round in flight."""

    average: Average
    matched: bool  # whether the joiner held the donor's state when the round began
    void: bool = False
    applied: bool = False  # whether the donor has finished the round


class Pair:
    """A donor, and a joiner that lacks the donor's first round of each fragment."""

    def __init__(self) -> None:
        self.donor, self.joiner = make_fragments(0), make_fragments(1)
        self.rounds = [0] * FRAGMENTS
        self.transport: Any = Donors(self)
        self.recovery = StateRecovery(self.joiner, self.transport)
        self.flights: dict[int, Flight] = {}
        self.behind: dict[int, list[Flight]] = {fragment: [] for fragment in range(FRAGMENTS)}

    def send(self, fragment: int) -> None:
        """Begin a round on both sides, with the joiner's state as in its header of the round."""
        self.catch_up(fragment)
        self.recovery.round_begins(self.joiner[fragment])
        matched = fragment not in self.differing()
        self.flights[fragment] = Flight(self.average(fragment, None if matched else 0), matched)

    def merge(self, fragment: int, *, donor_lags: bool = False) -> str:
        """End the round; with ``donor_lags`` the donor ends it when it catches up."""
        flight = self.flights.pop(fragment)
        self.rounds[fragment] += 1
        self.behind[fragment].append(flight)
        if not donor_lags:
            self.catch_up(fragment)
        if flight.void:
            if not self.recovery.is_behind(self.joiner[fragment]):
                self.joiner[fragment].state.count_void(flight.average.round.outer_step)
        elif flight.matched:
            self.joiner[fragment].state.take_step(flight.average)
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
            self.donor[index].state.take_step(flight.average)
        flight.applied = True
        self.donor[index].state.count_void(outer_step)

    def rejoin(self) -> None:
        """Let the joiner rejoin: it fetches all fragments again, and the rounds in flight end without it."""
        self.transport = Donors(self)
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
        values, held = torch.randn(self.donor[fragment].numel), self.donor[fragment].state.digest()
        traffic: dict[str, Any] = {"weight": 2.0, "sent_bytes": 0, "received_bytes": 0}
        return Average(round=round_id, values=values, view=VIEW, contributors=(0, 1), donor=donor, held=held, **traffic)

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
                if not fetch.done():
                    fetch.end(self.answer(fetch.fragment))
            self.recovery.poll()

    def miss(self, rounds: int = 1) -> None:
        """Let rounds of fragment 0 pass without the joiner."""
        for _ in range(rounds):
            self.send(0)
            assert "fetches in the background" in self.merge(0)

    def arrive(self, outcome: Mapping[str, Any] | TransportError | None = None) -> tuple[str, ...]:
        """End the last fetch with ``outcome`` or the donor's state, and return what `poll` says."""
        self.transport.fetches[-1].end(self.answer(0) if outcome is None else outcome)
        return self.recovery.poll()


def test_a_joiner_makes_up_for_rounds_missed_during_the_transfer_and_keeps_its_work() -> None:
    pair = Pair()
    pair.miss()
    assert pair.joiner[0].state_dict()["finished_rounds"] == 0, "the published state lacks the round"
    answer = pair.answer(0)
    pair.miss(3)
    assert [fetch.donors for fetch in pair.transport.fetches] == [(0, 1)]
    with torch.no_grad():
        pair.joiner[0].parameters[0].add_(0.25)
    before, _, _ = pair.joiner[0].pseudo_gradient()
    assert pair.arrive(answer) == ()
    after, _, _ = pair.joiner[0].pseudo_gradient()
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
    assert not pair.recovery.is_behind(pair.joiner[0])
    assert 0 not in pair.differing()
    assert pair.joiner[0].state.finished_rounds == pair.donor[0].state.finished_rounds == 4


@pytest.mark.parametrize("donor_first", [False, True])
def test_a_state_that_comes_between_sending_and_merging_takes_the_round_up_once(donor_first: bool) -> None:
    pair = Pair()
    pair.miss()
    pair.send(0)
    average = pair.average(0, donor=0)
    if donor_first:
        pair.donor[0].state.take_step(average)
    pair.arrive()
    said = pair.recovery.round_missed(average, 0) if donor_first else pair.merge(0)
    assert ("already contains this round" if donor_first else "this round is now applied to it") in said
    assert 0 not in pair.differing()
    assert len(pair.transport.fetches) == 1


@pytest.mark.parametrize(
    ("outcome", "missed", "words"),
    [
        (TransportError("gone."), 1, "gone."),
        (lie(0, 1), 2, "the received state differs from the one that the other replicas hold."),
        ({"slots": {}}, 1, "the received data is not a valid state of fragment 0: "),
        ({"finished_rounds": None}, 1, "the received data is not a valid state of fragment 0: finished_rounds is"),
        ({"outer_step": "many"}, 1, "the received data is not a valid state of fragment 0: "),
    ],
)
def test_what_can_not_be_adopted_is_told_changes_nothing_and_is_asked_for_again(
    outcome: Any, missed: int, words: str
) -> None:
    pair = Pair()
    before = pair.joiner[0].state.digest()
    pair.miss(missed)
    odd = isinstance(outcome, dict) and len(outcome) == 1
    (failure,) = pair.arrive(pair.answer(0) | outcome if odd else outcome)
    assert failure.startswith(f"Adopting the state of replica 0 failed: {words}")
    assert pair.joiner[0].state.digest() == before
    assert not pair.recovery.is_behind(pair.joiner[0])
    pair.miss()
    assert pair.transport.fetches[1].donors == ((0,) if missed == 2 else (0, 1)), "who lied is asked alone"


def test_a_state_that_turns_out_to_be_another_one_is_fetched_again() -> None:
    """A diverged or malicious donor claims that its state contains all rounds. Donors are then asked one at a time."""
    pair = Pair()
    pair.miss()
    pair.arrive(lie(0, 1))
    pair.miss()
    pair.send(0)
    pair.arrive(lie(0, 2))
    assert "fetches in the background" in pair.merge(0), "it arrived after the round began"
    pair.arrive()
    assert 0 not in pair.differing()
    assert [fetch.donors for fetch in pair.transport.fetches] == [(0, 1), (0,), (1,)]


fragments = st.integers(0, FRAGMENTS - 1)
happenings = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["send", "void", "donor", "merge", "read", "arrive", "fail", "lie"]), fragments),
        st.tuples(st.sampled_from(["poll", "poll", "come back"]), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=60)
@given(happenings)
def test_in_whatever_order_things_happen_the_end_is_the_donors_state(happenings: list[tuple[str, int]]) -> None:
    """Rounds are void; donors leave, lag, run ahead, or send a wrong state."""
    pair = Pair()
    read: dict[int, dict[str, Any]] = {}  # a donor reads its state some time after the request; it arrives even later
    for what, fragment in happenings:
        flight = pair.flights.get(fragment)
        open_fetch = next((f for f in pair.transport.fetches if not f.done() and f.fragment == fragment), None)
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
            if pair.donor[fragment].state.finished_rounds >= open_fetch.after:  # else it would ask to try again later
                read[id(open_fetch)] = pair.donor[fragment].state.snapshot()
        elif what == "arrive" and open_fetch is not None:
            open_fetch.end(read.get(id(open_fetch)) or pair.answer(fragment))
        elif what == "fail" and open_fetch is not None:
            open_fetch.end(TransportError("gone."))
        elif what == "lie" and open_fetch is not None:
            open_fetch.end(lie(fragment, open_fetch.after + 1))
        elif what == "poll":
            pair.recovery.poll()
        elif what == "come back":
            pair.rejoin()
    pair.settle()
    assert pair.differing() == []
    finished = [[fragment.state.finished_rounds for fragment in side] for side in (pair.joiner, pair.donor)]
    assert finished[0] == finished[1]
