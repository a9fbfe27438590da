"""Every fault at every stage of a round, between real processes: which replicas continue, and with which state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from diloco.algorithm import Contribution, Mean, RoundId, weighted_mean
from diloco.errors import RoundVoidError
from diloco.membership import View
from diloco.protocol import Average
from diloco.transport import Pending, SnapshotSource, Transport
from tests.processes import Processes
from tests.transport.fault_replicas import digests, make_replica, replica
from tests.transport.fault_scenarios import (
    CASES,
    LAST,
    LIMIT_S,
    NEVER_S,
    PAUSE,
    SCHEDULE,
    TARGET,
    Outcome,
    Scenario,
    name,
)
from tests.transport.wires import rendezvous


@pytest.mark.parametrize("scenario", CASES, ids=name)
def test_a_round_is_applied_by_all_who_are_left_or_by_none(scenario: Scenario) -> None:
    """Invariants 1 and 2 hold, and each process ends as configured and in time."""
    outcomes = play(scenario)
    for number in scenario.goes_on:
        went_on(scenario, outcomes[number])
    for number in outcomes.keys() - set(scenario.goes_on):
        stopped(scenario, number, outcomes[number])
    together = [outcomes[number] for number in scenario.goes_on or scenario.others]
    for outcome in together:
        assert outcome.digests == together[0].digests
        assert outcome.last == together[0].last
        assert outcome.steps == together[0].steps
        assert outcome.committed == together[0].committed
        assert outcome.void.keys() == together[0].void.keys()
    assert (TARGET in together[0].committed) == target_commits(scenario)
    assert replayed(scenario, together[0]) == (together[0].digests, together[0].last)
    for outcome in outcomes.values():  # up to the fault all were identical
        for step in range(1, SCHEDULE.inner_steps * 2 + 1):
            assert outcome.digests[step] == together[0].digests[step]


def play(scenario: Scenario) -> dict[int, Outcome]:
    """Inject the fault, and return the outcomes of all live processes."""
    outcomes: dict[int, Outcome] = {}
    with rendezvous(scenario.num_replicas) as address, Processes() as processes:
        processes.start(scenario.num_replicas, replica, scenario, address)
        strike(processes, scenario)

        def draw_conclusions(*numbers: int) -> None:
            silent = scenario.others if scenario.victim in numbers else (scenario.victim,)
            if scenario.fault in ("freeze", "cut") and scenario.silence_s == NEVER_S:
                for number in numbers:
                    processes.send(number, ("silent", *silent))
            hear(*numbers)

        def hear(*numbers: int) -> None:
            for number in numbers:
                word = processes.next_report(number, LIMIT_S)
                if number in scenario.goes_on:
                    assert word == "continued", word
                else:
                    outcomes[number] = word

        if scenario.heals == "early":
            draw_conclusions(scenario.victim)
            processes.send(scenario.victim, ("heal",))
            hear(*scenario.others)
        else:
            draw_conclusions(*scenario.others)
            if scenario.fault == "freeze":
                processes.thaw(scenario.victim)
                hear(scenario.victim)
            elif scenario.heals:
                processes.send(scenario.victim, ("heal",))
                hear(scenario.victim)
            elif scenario.fault != "kill":
                draw_conclusions(scenario.victim)
        for number in scenario.goes_on:
            processes.send(number, ("continue",))
        for number in scenario.goes_on:
            outcomes[number] = processes.next_report(number, LIMIT_S)
        end(processes, outcomes)
    return outcomes


def strike(processes: Processes, scenario: Scenario) -> None:
    """Wait until the victim reaches the stage of the fault, and inject it."""
    victim = scenario.victim
    if scenario.stage == "vote":
        assert processes.next_report(victim, LIMIT_S) == "summed"
        for number in scenario.others:
            assert processes.next_report(number, LIMIT_S) == "voted"
        processes.send(victim, ("vote",))
    assert processes.next_report(victim, LIMIT_S) == "held"
    if scenario.fault == "kill":
        processes.kill(victim)
    elif scenario.fault == "freeze":
        processes.freeze(victim)
        processes.send(victim, ("continue",))  # received when it is thawed
    else:
        processes.send(victim, (scenario.fault,))


def end(processes: Processes, ranks: Any) -> None:
    """Every process closes its transport and ends; none hangs."""
    for rank in ranks:
        processes.send(rank, ("end",))
    processes.results(LIMIT_S, ranks)


def went_on(scenario: Scenario, outcome: Outcome) -> None:
    assert outcome.error is None
    assert outcome.steps == LAST
    assert outcome.members == scenario.goes_on
    assert not outcome.void
    newest = sorted(outcome.committed)[-1].outer_step
    for fragment in range(SCHEDULE.num_fragments):
        assert outcome.committed[RoundId(fragment, newest)] == scenario.goes_on
        assert outcome.committed[RoundId(fragment, newest - 1)] == scenario.goes_on


def stopped(scenario: Scenario, number: int, outcome: Outcome) -> None:
    assert outcome.error is not None
    kind, words = outcome.error
    assert kind == ("ReplicaLostError" if scenario.raises else "failure")
    assert outcome.steps < PAUSE
    if number != scenario.victim:
        assert outcome.lost == (scenario.victim,)
        assert f"replica {scenario.victim} " in words
        return
    left_out = outcome.lost == (number,) and f"without replica {number}" in words
    smaller = outcome.lost == scenario.others and "can't be reached" in words
    too_few = f"of at least {scenario.min_replicas} replicas are left" in words  # it resumed before the others answered
    assert left_out or smaller or too_few or scenario.num_replicas == 2


def target_commits(scenario: Scenario) -> bool:
    """Return whether the target is committed. If no replica continues, a survivor must have received all votes."""
    if scenario.goes_on:
        return True
    reached = {"before send": False, "in flight": False, "commit": True, "merge": True}
    if scenario.stage != "vote":
        return reached[scenario.stage]
    return scenario.num_replicas > 2


class Replay(Transport):
    """Replicas in one thread whose rounds have the outcomes of another run."""

    def __init__(self, replica: int, ended: Outcome, given: dict[RoundId, dict[int, Contribution]]) -> None:
        self.replica = replica
        self._ended = ended
        self._given = given

    def average(self, contribution: Contribution) -> Pending:
        self._given.setdefault(contribution.round, {})[self.replica] = contribution
        return _Replayed(contribution.round, self._ended, self._given)

    def publish(self, source: SnapshotSource, version: Callable[[int], object] | None = None) -> None: ...

    def fetch(self, fragment: int, donors: Sequence[int], expected_bytes: int | None = None) -> dict[str, Any]:
        raise AssertionError("nobody has anything to take over here")


@dataclasses.dataclass(frozen=True)
class _Replayed:
    round: RoundId
    ended: Outcome
    given: dict[RoundId, dict[int, Contribution]]

    def wait(self, timeout_s: float | None = None) -> Average:
        contributors = self.ended.committed.get(self.round)
        if contributors is None:
            raise RoundVoidError(self.ended.void.get(self.round, "never decided"))
        mean: Mean = weighted_mean([self.given[self.round][replica] for replica in contributors])
        return Average(
            round=self.round,
            values=mean.values,
            view=View(0, contributors),
            contributors=contributors,
            weight=mean.weight,
            sent_bytes=0,
            received_bytes=0,
            wait_s=0.0,
        )


def replayed(scenario: Scenario, ended: Outcome) -> tuple[dict[int, tuple[str, ...]], tuple[str, ...]]:
    """Return the digests after each step and at the end of a run in one thread that commits the same rounds.

    The work of a void round is part of the next one there, by the definition of the pseudo-gradient.
    """
    given: dict[RoundId, dict[int, Contribution]] = {}
    replicas = [
        make_replica(Replay(number, ended, given), scenario.codec, lambda event: None)
        for number in range(scenario.num_replicas)
    ]
    witness = replicas[(scenario.goes_on or scenario.others)[0]][0]
    history = {}
    for step in range(1, ended.steps + 1):
        for diloco, train in replicas:
            train()
            diloco.begin()
        for diloco, _ in replicas:
            diloco.finish()
        if step in ended.digests:
            history[step] = digests(witness)
    return history, digests(witness)
