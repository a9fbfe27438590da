"""A process that is killed or stands still in a round: which replicas continue, with which state, and who comes back.

Cut and damaged connections: `test_wire_damage`. Every order of events: the simulated networks of ``tests/protocol``.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

from diloco.algorithm import Contribution, Merge, RoundId, Verdict, make_codec
from diloco.transport import InProcessTransport
from tests.processes import Processes
from tests.transport.fault_replicas import (
    LAST,
    LIMIT_S,
    PAUSE,
    SCHEDULE,
    SENT_AT,
    TARGET,
    Outcome,
    Scenario,
    digests,
    make_replica,
    replica,
)
from tests.transport.wires import rendezvous

CASES = [
    Scenario(fault="kill", stage="before send"),
    Scenario(fault="kill", stage="before send", on_failure="stop"),
    Scenario(fault="kill", stage="in flight"),
    Scenario(fault="kill", stage="in flight", victim=2, on_failure="stop"),
    Scenario(fault="kill", stage="in flight", codec="float32"),
    Scenario(fault="kill", stage="in flight", victim=0, num_replicas=2),
    Scenario(fault="kill", stage="in flight", on_failure="stop", raises=False),
    Scenario(fault="kill", stage="merge"),
    Scenario(fault="kill", stage="merge", min_replicas=3),
    Scenario(fault="freeze", stage="before send", raises=False),
    Scenario(fault="freeze", stage="in flight", victim=0),
    Scenario(fault="freeze", stage="in flight", codec="float32", on_failure="stop"),
    Scenario(fault="freeze", stage="merge", victim=0, num_replicas=2),
]


def name(scenario: Scenario) -> str:
    """Return the fields of a scenario that differ from the defaults."""
    values = {each: getattr(scenario, each.name) for each in dataclasses.fields(Scenario)}
    return ", ".join(f"{each.name}={value}" for each, value in values.items() if value != each.default)


@contextmanager
def struck(scenario: Scenario) -> Iterator[tuple[Processes, Callable[[], int]]]:
    """The processes of a scenario in which the fault has just happened, and what starts a replacement of the victim."""
    with rendezvous(scenario.num_replicas) as address, Processes() as processes:
        processes.start(scenario.num_replicas, replica, scenario, address)
        addresses, victim = [processes.next_report(m, LIMIT_S) for m in range(scenario.num_replicas)], scenario.victim
        assert processes.next_report(victim, LIMIT_S) == "held"
        if scenario.fault == "kill":
            processes.kill(victim)
        else:
            processes.freeze(victim)
            processes.send(victim, "go on")  # received when it wakes up
        yield processes, lambda: processes.start(1, replica, scenario, addresses[scenario.others[0]])[0]


def go_on(processes: Processes, ranks: Iterable[int]) -> None:
    """Wait until these replicas have committed rounds without the victim, and let them train on."""
    for rank in ranks:
        assert processes.next_report(rank, LIMIT_S) == "continued"
    for rank in ranks:
        processes.send(rank, "go on")


def outcomes_of(processes: Processes, ranks: Iterable[int]) -> dict[int, Outcome]:
    """Return the outcomes of processes, which have closed their connections and ended by then."""
    found = {rank: processes.next_report(rank, LIMIT_S) for rank in ranks}
    for rank in ranks:
        processes.send(rank, "end")
    processes.results(LIMIT_S, ranks)
    return found


def stopped_together(processes: Processes, ranks: Sequence[int]) -> list[Outcome]:
    """Signal all processes when the last one, which has joined, is settled; return their outcomes."""
    assert processes.next_report(ranks[-1], LIMIT_S) == "settled"
    for rank in ranks:
        os.kill(processes.pid(rank), signal.SIGTERM)
    return [*outcomes_of(processes, ranks).values()]


@pytest.mark.parametrize("scenario", CASES, ids=name)
def test_a_round_is_applied_by_all_who_are_left_or_by_none(scenario: Scenario) -> None:
    """Invariants 1 and 2 hold, and each process ends as configured and in time."""
    with struck(scenario) as (processes, _):
        go_on(processes, [number for number in scenario.goes_on if number != scenario.victim])
        outcomes = outcomes_of(processes, scenario.others)
        if scenario.fault == "freeze":  # it wakes up when the others have ended: their ports refuse connections
            processes.thaw(scenario.victim)
            go_on(processes, {scenario.victim}.intersection(scenario.goes_on))
            outcomes |= outcomes_of(processes, [scenario.victim])
    for number, outcome in outcomes.items():
        if number in scenario.goes_on:
            went_on(scenario, outcome)
        else:
            stopped(scenario, number, outcome)
    together = [outcomes[number] for number in scenario.goes_on or scenario.others]
    for outcome in together:
        assert outcome.digests == together[0].digests
        assert outcome.last == together[0].last
        assert outcome.committed == together[0].committed
        assert outcome.void.keys() == together[0].void.keys()
    if scenario.goes_on or scenario.stage != "in flight":  # else it is committed if all the others have voted for it
        assert (TARGET in together[0].committed) == (bool(scenario.goes_on) or scenario.stage == "merge")
    assert replayed(scenario, together[0]) == (together[0].digests, together[0].last)
    for outcome in outcomes.values():  # up to the fault all were identical
        for step in range(1, SENT_AT):
            assert outcome.digests[step] == together[0].digests[step]


def went_on(scenario: Scenario, outcome: Outcome) -> None:
    assert outcome.error is None
    assert outcome.steps == LAST
    assert outcome.members == scenario.goes_on
    assert not outcome.void
    newest = sorted(outcome.committed)[-1].outer_step
    for fragment in range(SCHEDULE.num_fragments):
        assert outcome.committed[RoundId(fragment, newest)] == scenario.goes_on


def stopped(scenario: Scenario, number: int, outcome: Outcome) -> None:
    assert outcome.error is not None
    kind, words = outcome.error
    assert kind == ("ReplicaLostError" if scenario.raises else "failure")
    assert outcome.steps < PAUSE
    if number != scenario.victim:
        assert outcome.lost == (scenario.victim,)
        assert f"replica {scenario.victim} " in words
    else:
        assert outcome.lost in ((number,), scenario.others)


class Replay(InProcessTransport):
    """Replicas in one thread whose rounds have the outcomes of another run."""

    def __init__(self, num_replicas: int, ended: Outcome) -> None:
        super().__init__(num_replicas)
        self._ended = ended

    def judge(self, contributions: Mapping[int, Contribution]) -> Verdict:
        (round_id,) = {each.round for each in contributions.values()}
        return Verdict(self._ended.committed.get(round_id, ()), self._ended.void.get(round_id, "never decided"))


def replayed(scenario: Scenario, ended: Outcome) -> tuple[dict[int, tuple[str, ...]], tuple[str, ...]]:
    """Return the digests after each step and at the end of a run in one thread that commits the same rounds.

    The work of a void round is part of the next one there, by the definition of the pseudo-gradient.
    """
    hub, codec = Replay(scenario.num_replicas, ended), make_codec(scenario.codec)
    replicas = [make_replica(hub.endpoint(m), codec, lambda event: None) for m in hub.view.members]
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


# Replicas that come back.

RETURNS = [
    Scenario(fault="kill", stage="before send", rejoins=True),
    Scenario(fault="kill", stage="in flight", victim=0, codec="float32", rejoins=True),
    Scenario(fault="kill", stage="merge", victim=1, num_replicas=2, rejoins=True),
    Scenario(fault="freeze", stage="in flight", rejoins=True),
]


@pytest.mark.parametrize("scenario", RETURNS, ids=name)
def test_a_new_process_takes_the_place_of_one_that_was_killed_or_stands_still(scenario: Scenario) -> None:
    """Invariants 7 and 8. The others train on; the new one adopts their state meanwhile, and has it from then on.

    No replica has to notice the silence of one that stands still: the new process shows that it has ended.
    """
    with struck(scenario) as (processes, another):
        if scenario.fault == "kill":
            go_on(processes, scenario.others)
        new = another()
        assert processes.next_report(new, LIMIT_S) == "joined"
        if scenario.fault == "freeze":
            go_on(processes, scenario.others)
        are_one(scenario, stopped_together(processes, (*scenario.others, new)), joins=1)
        if scenario.fault == "freeze":
            processes.thaw(scenario.victim)
            left = outcomes_of(processes, [scenario.victim])[scenario.victim]
            assert left.error is not None
            assert left.error[0] in ("ReplicaLostError", "failure"), "the second if it stops before its next round"


def test_who_comes_back_may_be_lost_and_come_back_again() -> None:
    scenario = Scenario(fault="kill", stage="in flight", rejoins=True)
    with struck(scenario) as (processes, another):
        go_on(processes, scenario.others)
        second = another()
        assert processes.next_report(second, LIMIT_S) == "joined"
        processes.kill(second)  # perhaps before its first contribution, perhaps after many
        third = another()
        assert processes.next_report(third, LIMIT_S) == "joined"
        are_one(scenario, stopped_together(processes, (*scenario.others, third)), joins=2)


def test_the_last_of_three_goes_on_alone() -> None:
    """The second one dies while the others handle the loss of the first, or afterwards."""
    with struck(Scenario(fault="kill", stage="in flight")) as (processes, _):
        processes.kill(2)
        go_on(processes, [0])
        outcome = outcomes_of(processes, [0])[0]
    assert outcome.error is None
    assert outcome.members == (0,)
    assert not outcome.void
    assert outcome.committed[max(outcome.committed)] == (0,)


def are_one(scenario: Scenario, found: list[Outcome], *, joins: int) -> None:
    """Check that the last joiner has the others' state, and that no replica had more void rounds than joins explain."""
    *others, joiner = found
    for outcome in found:
        assert outcome.error is None
        assert outcome.members == tuple(range(scenario.num_replicas))
        assert outcome.steps == joiner.steps
        assert outcome.last == joiner.last
    for outcome in others:
        assert outcome.digests == others[0].digests
        assert outcome.committed == others[0].committed
        assert len(outcome.void) <= joins * (SCHEDULE.overlap_steps + 1)
    for fragment in range(SCHEDULE.num_fragments):
        mine = min(each.outer_step for each in joiner.committed if each.fragment == fragment)
        missed = [each.outer_step for each in joiner.void if each.fragment == fragment]
        assert all(outer_step < mine for outer_step in missed)
        together = [step for step in joiner.digests if step >= merged_at(fragment, mine)]
        assert together
        for step in together:
            assert joiner.digests[step][fragment] == others[0].digests[step][fragment]
    for round_id, contributors in joiner.committed.items():
        assert others[0].committed[round_id] == contributors


def merged_at(fragment: int, outer_step: int) -> int:
    """Return the step after which a round is merged."""
    return next(step for step in itertools.count(1) if Merge(fragment, outer_step) in SCHEDULE.actions(step))
