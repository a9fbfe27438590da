"""View changes: replicas that rejoin after a fault, are replaced, or lose contact with each other."""

from __future__ import annotations

import itertools
import threading

import pytest

from diloco.algorithm import Merge
from tests.processes import Processes
from tests.transport.fault_replicas import replica
from tests.transport.fault_scenarios import LIMIT_S, PAUSE, SCHEDULE, VOID_PER_JOIN, Outcome, Scenario, name
from tests.transport.test_torch_faults import end, strike
from tests.transport.wires import Wires, rendezvous

RETURNS = [
    Scenario(fault="kill", stage="before send", rejoins=True),
    Scenario(fault="kill", stage="in flight", victim=0, rejoins=True),
    Scenario(fault="kill", stage="vote", victim=2, codec="float32", rejoins=True),
    Scenario(fault="kill", stage="vote", victim=0, num_replicas=2, rejoins=True),
    Scenario(fault="kill", stage="merge", victim=1, num_replicas=2, rejoins=True),
]


@pytest.mark.parametrize("scenario", RETURNS, ids=name)
def test_a_new_process_takes_the_place_of_one_that_was_killed(scenario: Scenario) -> None:
    """Invariants 7 and 8. The others continue to train, with no void round when the first process is lost and at most
    `VOID_PER_JOIN` when the second one joins. The second adopts each fragment's state while they train, and has the
    same state as they do from then on."""
    with rendezvous(scenario.num_replicas) as address, Processes() as processes:
        processes.start(scenario.num_replicas, replica, scenario, address)
        strike(processes, scenario)
        continue_training(processes, scenario)
        (new,) = processes.start(1, replica, scenario, address)
        assert processes.next_report(new, LIMIT_S) == "joined"
        are_one(scenario, outcomes(processes, (*scenario.others, new)), joins=1)


def test_who_comes_back_may_be_lost_and_come_back_again() -> None:
    scenario = Scenario(fault="kill", stage="commit", rejoins=True)
    with rendezvous(scenario.num_replicas) as address, Processes() as processes:
        processes.start(scenario.num_replicas, replica, scenario, address)
        strike(processes, scenario)
        continue_training(processes, scenario)
        (second,) = processes.start(1, replica, scenario, address)
        assert processes.next_report(second, LIMIT_S) == "joined"
        processes.kill(second)  # perhaps before its first contribution, perhaps after many
        (third,) = processes.start(1, replica, scenario, address)
        assert processes.next_report(third, LIMIT_S) == "joined"
        are_one(scenario, outcomes(processes, (*scenario.others, third)), joins=2)


@pytest.mark.parametrize("stage", ["before send", "vote"])
def test_a_new_process_replaces_one_that_stands_still(stage: str) -> None:
    """No replica has to notice the silence, as the restarted process shows that the first one has ended."""
    scenario = Scenario(fault="freeze", stage=stage, rejoins=True)  # type: ignore[arg-type]
    with rendezvous(scenario.num_replicas) as address, Processes() as processes:
        processes.start(scenario.num_replicas, replica, scenario, address)
        strike(processes, scenario)
        (new,) = processes.start(1, replica, scenario, address)
        assert processes.next_report(new, LIMIT_S) == "joined"
        continue_training(processes, scenario)
        found = [processes.next_report(rank, LIMIT_S) for rank in (*scenario.others, new)]
        are_one(scenario, found, joins=1)
        processes.thaw(scenario.victim)
        left: Outcome = processes.next_report(scenario.victim, LIMIT_S)
        end(processes, (*scenario.others, new, scenario.victim))
        assert left.error is not None
        assert left.error[0] == "ReplicaLostError"
        assert scenario.victim in left.lost or left.lost == scenario.others


def test_who_wakes_up_when_the_others_have_finished_does_not_go_on_alone() -> None:
    """Their ports refuse connections by then, which only a replica that was not frozen may take as their end."""
    scenario = Scenario(fault="freeze", stage="in flight")
    with rendezvous(scenario.num_replicas) as address, Processes() as processes:
        processes.start(scenario.num_replicas, replica, scenario, address)
        strike(processes, scenario)
        for number in scenario.others:
            processes.send(number, ("silent", scenario.victim))
        continue_training(processes, scenario)
        finished = outcomes(processes, scenario.others)
        assert all(outcome.error is None for outcome in finished)
        assert [processes.exit_code(number, LIMIT_S) for number in scenario.others] == [0, 0]
        processes.thaw(scenario.victim)
        left: Outcome = processes.next_report(scenario.victim, LIMIT_S)
        assert left.error is not None
        assert left.steps < PAUSE
        end(processes, [scenario.victim])


def test_the_last_of_three_goes_on_alone() -> None:
    """The second one dies while the others handle the loss of the first, or afterwards."""
    scenario = Scenario(fault="kill", stage="in flight")
    with rendezvous(3) as address, Processes() as processes:
        processes.start(3, replica, scenario, address)
        strike(processes, scenario)
        processes.kill(2)
        assert processes.next_report(0, LIMIT_S) == "continued"
        processes.send(0, ("continue",))
        outcome: Outcome = processes.next_report(0, LIMIT_S)
        end(processes, [0])
    assert outcome.error is None
    assert outcome.members == (0,)
    assert not outcome.void
    assert outcome.committed[max(outcome.committed)] == (0,)


def continue_training(processes: Processes, scenario: Scenario) -> None:
    for number in scenario.others:
        assert processes.next_report(number, LIMIT_S) == "continued"
    for number in scenario.others:
        processes.send(number, ("continue",))


def outcomes(processes: Processes, ranks: tuple[int, ...]) -> list[Outcome]:
    """Return the outcomes of all processes, which have closed their connections by then."""
    found = [processes.next_report(rank, LIMIT_S) for rank in ranks]
    end(processes, ranks)
    return found


def are_one(scenario: Scenario, found: list[Outcome], *, joins: int) -> None:
    """Check that the last joiner has the others' state, and that no replica had more void rounds than joins explain."""
    *others, joiner = found
    everybody = tuple(range(scenario.num_replicas))
    for outcome in found:
        assert outcome.error is None
        assert outcome.members == everybody
        assert outcome.steps == joiner.steps
        assert outcome.last == joiner.last
    for outcome in others:
        assert outcome.digests == others[0].digests
        assert outcome.committed == others[0].committed
        assert len(outcome.void) <= joins * VOID_PER_JOIN
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


def test_of_two_that_do_not_see_each_other_the_third_keeps_one(wires: Wires) -> None:
    """A replica that the third has lost can't accuse another one: two of three continue, whichever they are."""
    transports = wires.meet(3, continue_without_lost=True)
    told = [threading.Event() for _ in transports]
    for transport, event in zip(transports, told, strict=True):
        transport.on_change = lambda following, event=event: event.set()  # type: ignore[misc]

    for mine, other in ((transports[0], 1), (transports[1], 0)):
        mine.connections.post(mine.connections.drop_silent, [other])
    assert told[2].wait(LIMIT_S)
    going = transports[2].view.members
    assert going in ((0, 2), (1, 2))
    assert all(told[number].wait(LIMIT_S) for number in going)
    assert transports[going[0]].view == transports[2].view
    assert transports[2].failure is None
