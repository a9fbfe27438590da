"""A process that is killed in a round: which replicas continue, with which state, and who comes back.

All replicas train in the same way. The victim stops at a point of one round, and is killed there. Silence, cut and
damaged connections: `test_wire_damage`. Every order of events: the simulations of ``tests/protocol``.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from torch import Tensor

from diloco.algorithm import Codec, Contribution, Merge, RoundId, SyncSchedule, Verdict, make_codec
from diloco.events import Event, RoundCommitted, RoundVoid
from diloco.outer import DiLoCo
from diloco.protocol import Rules
from diloco.transport import Address, InProcessTransport, Place, Transport, connect, join
from tests.outer.test_golden_digests import Case, Replica
from tests.processes import Processes, receive, report
from tests.transport.wires import rendezvous

SCHEDULE = SyncSchedule(inner_steps=4, num_fragments=2, overlap_steps=1)
TARGET = RoundId(1, 1)
SENT_AT, MERGED_AT = 10, 11  # the target, the only round in flight then
PAUSE = 16  # the step by which the survivors have committed rounds without the victim
LAST = 22
LIMIT_S = 60.0  # many times as long as anything that is waited for
RULES = Rules(
    heartbeat_s=0.2,
    silence_s=LIMIT_S,
    round_timeout_s=LIMIT_S,
    rendezvous_timeout_s=LIMIT_S,
    piece_bytes=130,  # one fp4 block
    continue_without_lost=True,
)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    # the victim has not contributed to the target; it sums the payloads, and has not voted; it has merged the average
    stage: Literal["before send", "in flight", "merge"]
    num_replicas: int = 3
    victim: int = 1
    codec: str = "fp4"  # fp4 uses an all-gather; float32 with three replicas uses a reduce-scatter
    returns: int = 0  # processes that take the victim's place, one after the other, while the others train on

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(m for m in range(self.num_replicas) if m != self.victim)


@dataclass
class Outcome:
    """The report of a replica at its end."""

    # step -> digests of global parameters and outer state after it, by fragment
    digests: dict[int, tuple[str, ...]] = field(default_factory=dict)
    last: tuple[str, ...] = ()  # the same at the end
    committed: dict[RoundId, tuple[int, ...]] = field(default_factory=dict)  # round -> contributors
    void: dict[RoundId, str] = field(default_factory=dict)  # round -> reason
    steps: int = 0  # inner steps done
    members: tuple[int, ...] = ()  # of the view at the end

    def note(self, event: Event) -> None:
        if isinstance(event, RoundCommitted):
            self.committed[RoundId(event.fragment, event.outer_step)] = event.contributors
        elif isinstance(event, RoundVoid):
            self.void[RoundId(event.fragment, event.outer_step)] = event.reason

    def has_work_of(self, number: int) -> bool:
        """Return whether two averages of each fragment contain this replica's work."""
        theirs = [round_id.fragment for round_id, contributors in self.committed.items() if number in contributors]
        return all(theirs.count(fragment) >= 2 for fragment in range(SCHEDULE.num_fragments))


def make_replica(transport: Transport, codec: Codec, note: Callable[[Event], None]) -> Replica:
    return Replica(
        transport.replica, transport, Case("", schedule=SCHEDULE, arguments={"codec": codec, "on_event": note})
    )


def digests(diloco: DiLoCo) -> tuple[str, ...]:
    return tuple(diloco.fragments[fragment.index].state.digest() for fragment in diloco.fragments)


def hold() -> None:
    """Report that the stage is reached, and wait for the fault."""
    report("held")
    receive(LIMIT_S)


def replica(index: int, scenario: Scenario, address: Address) -> None:
    """Train, report ``continued`` and wait at `PAUSE`, report the `Outcome`, and wait to end.

    Processes beyond the first M replace the victim.
    """
    joins = index >= scenario.num_replicas
    number = scenario.victim if joins else index
    stage, codec, outcome = scenario.stage if index == scenario.victim else "", make_codec(scenario.codec), Outcome()
    accumulate, held, settled = codec.accumulate, False, False

    def stops(payload: Tensor, out: Tensor, weight: float = 1.0) -> None:
        """Stop before the first addend of the target."""
        nonlocal held
        if stage == "in flight" and diloco.steps >= SENT_AT - 1 and not held:
            held = True
            hold()
        accumulate(payload, out, weight)

    codec.accumulate = stops  # type: ignore[method-assign]  # a fault
    connected = connect(Place(replica=number, num_replicas=scenario.num_replicas, rendezvous=address), RULES)
    transport = connected.transport
    assert connected.joining == joins
    if scenario.returns:
        signal.signal(signal.SIGTERM, lambda *_: transport.ask_to_stop())
    if not joins:
        report(transport.address)
    trained = make_replica(transport, codec, outcome.note)
    diloco = trained.diloco
    if joins:
        diloco.take_over(transport.view.members)
        diloco.steps = join(connected, LIMIT_S)
        report("joined")
    while scenario.returns or diloco.steps < LAST:
        if joins and not settled and outcome.has_work_of(number):
            settled = True
            report("settled")
        stop = transport.stop_step(diloco.steps, wanted=False)
        if stop is not None and diloco.steps >= stop:
            break
        trained.train()
        if scenario.returns:
            time.sleep(0.005)  # the others train for as long as a process takes to come
        if diloco.steps == SENT_AT - 1 and stage == "before send":
            hold()
        diloco.step()
        if diloco.steps == MERGED_AT and stage == "merge":
            hold()
        outcome.digests[diloco.steps] = digests(diloco)
        if diloco.steps == PAUSE and not joins:
            report("continued")
            receive(LIMIT_S)
    outcome.last, outcome.steps, outcome.members = digests(diloco), diloco.steps, transport.view.members
    report(outcome)
    receive(LIMIT_S)
    transport.close()


@contextmanager
def struck(scenario: Scenario) -> Iterator[tuple[Processes, Callable[[], int]]]:
    """The processes of a scenario, and what starts a replacement of the victim, once the others have gone on."""
    with rendezvous(scenario.num_replicas) as address, Processes() as processes:
        processes.start(scenario.num_replicas, replica, scenario, address)
        addresses = [processes.next_report(m, LIMIT_S) for m in range(scenario.num_replicas)]
        assert processes.next_report(scenario.victim, LIMIT_S) == "held"
        processes.kill(scenario.victim)
        for rank in scenario.others:  # they have committed rounds without the victim
            assert processes.next_report(rank, LIMIT_S) == "continued"
        for rank in scenario.others:
            processes.send(rank, "go on")
        yield processes, lambda: processes.start(1, replica, scenario, addresses[scenario.others[0]])[0]


def outcomes_of(processes: Processes, ranks: Iterable[int]) -> list[Outcome]:
    """Return the outcomes of processes, which have closed their connections and ended by then."""
    outcomes = [processes.next_report(rank, LIMIT_S) for rank in ranks]
    for rank in ranks:
        processes.send(rank, "end")
    processes.results(LIMIT_S, ranks)
    return outcomes


CASES = [
    Scenario(stage="before send"),
    Scenario(stage="in flight", codec="float32"),
]


@pytest.mark.parametrize("scenario", CASES, ids=str)
def test_a_round_is_applied_by_all_who_are_left_or_by_none(scenario: Scenario) -> None:
    """Invariants 1 and 2."""
    with struck(scenario) as (processes, _):
        first, *more = outcomes_of(processes, scenario.others)
    for outcome in (first, *more):
        assert (outcome.digests, outcome.last, outcome.committed) == (first.digests, first.last, first.committed)
        assert (outcome.steps, outcome.members, outcome.void) == (LAST, scenario.others, {})
    newest = max(first.committed).outer_step
    for fragment in range(SCHEDULE.num_fragments):
        assert first.committed[RoundId(fragment, newest)] == scenario.others
    assert TARGET in first.committed
    assert replayed(scenario, first) == (first.digests, first.last)


class Replay(InProcessTransport):
    """Replicas in one thread whose rounds have the outcomes of another run."""

    def __init__(self, num_replicas: int, ended: Outcome) -> None:
        super().__init__(num_replicas)
        self._ended = ended

    def judge(self, contributions: Mapping[int, Contribution]) -> Verdict:
        (round_id,) = {each.round for each in contributions.values()}
        return Verdict(self._ended.committed.get(round_id, ()), "it was still in flight")


def replayed(scenario: Scenario, ended: Outcome) -> tuple[dict[int, tuple[str, ...]], tuple[str, ...]]:
    """Return the digests after each step and at the end of a run in one thread that commits the same rounds."""
    hub, codec = Replay(scenario.num_replicas, ended), make_codec(scenario.codec)
    replicas = [make_replica(hub.endpoint(m), codec, lambda event: None) for m in hub.view.members]
    witness, history = replicas[scenario.others[0]].diloco, {}
    for step in ended.digests:
        for each in replicas:
            each.train()
            each.diloco.begin()
        for each in replicas:
            each.diloco.finish()
        history[step] = digests(witness)
    return history, digests(witness)


RETURNS = [
    Scenario(stage="in flight", victim=0, codec="float32", returns=2),
    Scenario(stage="merge", num_replicas=2, returns=1),
]


@pytest.mark.parametrize("scenario", RETURNS, ids=str)
def test_a_new_process_takes_the_place_of_one_that_was_killed(scenario: Scenario) -> None:
    """Invariants 7 and 8. The others train on; the new one adopts their state meanwhile, and has it from then on."""
    with struck(scenario) as (processes, another):
        for _ in range(scenario.returns - 1):
            new = another()
            assert processes.next_report(new, LIMIT_S) == "joined"
            processes.kill(new)  # perhaps before its first contribution, perhaps after many
        new = another()
        assert [processes.next_report(new, LIMIT_S) for _ in range(2)] == ["joined", "settled"]
        ranks = (*scenario.others, new)
        for rank in ranks:
            os.kill(processes.pid(rank), signal.SIGTERM)
        *others, joiner = outcomes_of(processes, ranks)
    for outcome in (*others, joiner):
        assert outcome.members == tuple(range(scenario.num_replicas))
        assert (outcome.steps, outcome.last) == (joiner.steps, joiner.last)
    for outcome in others:
        assert (outcome.digests, outcome.committed) == (others[0].digests, others[0].committed)
        assert len(outcome.void) <= scenario.returns * (SCHEDULE.overlap_steps + 1), "more than the joins explain"
    for fragment in range(SCHEDULE.num_fragments):
        mine = min(each.outer_step for each in joiner.committed if each.fragment == fragment)
        assert all(each.outer_step < mine for each in joiner.void if each.fragment == fragment)
        merged_at = next(step for step in itertools.count(1) if Merge(fragment, mine) in SCHEDULE.actions(step))
        together = [step for step in joiner.digests if step >= merged_at]
        assert together
        for step in together:
            assert joiner.digests[step][fragment] == others[0].digests[step][fragment]
    assert joiner.committed.items() <= others[0].committed.items()


def present(rank: int, number: int, address: Address, keys: Path, *, is_last: bool) -> None:
    """Be a member until told to end, or until this process takes part in no more rounds."""
    place = Place(replica=number, num_replicas=3, rendezvous=address, identity=keys / f"{number}.key")
    connected = connect(place, RULES)
    transport = connected.transport
    if connected.joining:
        join(connected, LIMIT_S)
    report(transport.address)
    if is_last:
        transport.connections.wait_for(lambda: transport.failure, LIMIT_S)
        report((str(transport.failure), transport.view.members))
    else:
        receive(LIMIT_S)
    transport.close()


def test_a_frozen_member_that_was_replaced_does_not_go_on_alone_when_it_wakes(tmp_path: Path) -> None:
    """It has stood still for less than a silence. What it was told has to be read before anything is written."""
    with rendezvous(3) as address, Processes() as processes:
        for number in range(3):
            processes.start(1, partial(present, is_last=number == 2), number, address, tmp_path)
        addresses = [processes.next_report(rank, LIMIT_S) for rank in range(3)]
        processes.freeze(2)
        processes.start(1, partial(present, is_last=False), 2, addresses[0], tmp_path)
        assert processes.next_report(3, LIMIT_S)
        for rank in (0, 1, 3):
            processes.send(rank, "end")
        processes.results(LIMIT_S, (0, 1, 3))
        processes.thaw(2)
        why, members = processes.next_report(2, LIMIT_S)
    assert re.search(r"continued without replica 2: (it|replica 2) was started again", why)
    assert members == (0, 1, 2)
