"""The processes of a case: all replicas train in the same way, and the victim stops at an exact point of one round.

There it reports to the test and waits for the fault that the test injects.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn

from diloco.algorithm import Mean, Nesterov, RoundId, partition
from diloco.errors import TransportError
from diloco.events import Event
from diloco.outer import DiLoCo
from diloco.transport import (
    Address,
    ConnectionManager,
    Contributed,
    PayloadExchange,
    Place,
    ReliableLink,
    Transport,
    connect,
    join,
)
from tests.processes import PRELOADED, receive, report
from tests.replicas import quadratic
from tests.transport.cut import Cut
from tests.transport.fault_scenarios import (
    BEFORE,
    LAST,
    LIMIT_S,
    MERGED_AT,
    NEVER_S,
    PAUSE,
    SCHEDULE,
    SENT_AT,
    TARGET,
    Outcome,
    Scenario,
)

__all__ = ["digests", "make_replica", "replica"]

PRELOADED.extend(["torch._dynamo", __name__])  # the first optimizer of a process imports the former, which takes 3 s


class Stretches(nn.Module):
    """Three parameters of several fp4 blocks each, one for each of three fragments."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(1024, generator=generator))
        self.second = nn.Parameter(torch.randn(5, 205, generator=generator))
        self.third = nn.Parameter(torch.randn(1023, generator=generator))


def make_replica(transport: Transport, codec: str, note: Callable[[Event], None]) -> tuple[DiLoCo, Callable[[], None]]:
    """A replica and its training step, up to the call of `DiLoCo.step`."""
    model, gradient = Stretches(), quadratic()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fragments = partition(model, num_fragments=3, strategy="balanced")
    outer = Nesterov(learning_rate=0.4)
    diloco = DiLoCo(
        model,
        inner,
        transport=transport,
        schedule=SCHEDULE,
        fragments=fragments,
        outer_optimizer=outer,
        codec=codec,
        on_event=note,
    )

    def train() -> None:
        gradient(transport.replica, diloco.steps, model)
        inner.step()
        inner.zero_grad()

    return diloco, train


def digests(diloco: DiLoCo) -> tuple[str, ...]:
    return tuple(diloco.outer_loop.digest(fragment.index) for fragment in diloco.fragments)


class Words:
    """The commands of the test to this process, received by a thread of their own.

    Most commands wait until `next` asks for them. ``silent`` acts at once: this process drops the ranks that it names,
    whatever the clock says. So does ``heal``; see `Cut.heal`.
    """

    def __init__(self) -> None:
        self.connections: ConnectionManager | None = None
        self.acts: dict[str, Callable[[], None]] = {}
        self._waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def next(self) -> str:
        return self._waiting.get(timeout=LIMIT_S)

    def _give_up(self, connections: ConnectionManager, ranks: list[int]) -> None:
        """Drop ranks one heartbeat later, when their earlier messages have been received."""

        def drop_all() -> None:
            connections.drop_silent(connections.connected.intersection(ranks))

        connections.loop.call_later(connections.timing.heartbeat_s, drop_all)

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):  # the test has ended
            while True:
                word, *ranks = receive(NEVER_S)
                if word == "silent":
                    assert self.connections is not None
                    self.connections.post(self._give_up, self.connections, ranks)
                elif word in self.acts:
                    self.acts[word]()
                else:
                    self._waiting.put(word)


class Victim:
    """Makes a process stop at the stage of its scenario."""

    def __init__(self, scenario: Scenario, words: Words) -> None:
        self.scenario = scenario
        self.words = words
        self.way = Cut()
        self.links: list[ReliableLink] = []
        self.connections: ConnectionManager | None = None
        self.decided = {TARGET: threading.Event(), BEFORE: threading.Event()}
        words.acts["heal"] = self.heal
        if scenario.stage == "in flight":
            self._stop_in_flight()
        elif scenario.stage == "vote":
            self._stop_at_vote()
        resolve, made = Contributed.resolve, ReliableLink.__init__

        def remembered(link: ReliableLink, *arguments: Any) -> None:
            made(link, *arguments)
            self.links.append(link)

        def resolved(contributed: Contributed, round_id: RoundId, outcome: Any) -> None:
            resolve(contributed, round_id, outcome)
            if round_id in self.decided:
                self.decided[round_id].set()

        Contributed.resolve = resolved  # type: ignore[method-assign]
        ReliableLink.__init__ = remembered  # type: ignore[method-assign]

    def hold(self) -> None:
        """Report that the stage is reached, and wait for the fault, in the calling thread."""
        if self.scenario.fault == "freeze":
            assert self.connections is not None
            self.connections.pulse.begin(-math.inf)  # so that it notices a long freeze when it is thawed
        report("held")
        match self.words.next():
            case "cut":
                self.way.cut()
            case "links":
                for link in self.links:
                    link.close()

    def heal(self) -> None:
        assert self.connections is not None
        self.way.heal(self.connections)

    def _stop_in_flight(self) -> None:
        send, pieces = ReliableLink.send, 0

        def stop_at_second(link: ReliableLink, tag: int, data: memoryview, sent: Future[None]) -> None:
            nonlocal pieces
            if tag >> 18 == 4 * (TARGET.fragment + 1) + TARGET.outer_step:
                pieces += 1
                if pieces == self.scenario.num_replicas:  # each of the other replicas has one piece
                    self.hold()
            send(link, tag, data, sent)

        ReliableLink.send = stop_at_second  # type: ignore[method-assign]

    def _stop_at_vote(self) -> None:
        reduce, send, last = PayloadExchange.reduce, ConnectionManager.send, max(self.scenario.others)

        def reduced(exchange: PayloadExchange, *arguments: Any) -> Mean:
            mean = reduce(exchange, *arguments)
            if exchange.contribution.round == TARGET:
                assert self.decided[BEFORE].wait(LIMIT_S)
                report("summed")
                self.words.next()
            return mean

        def stop_before_last(connections: ConnectionManager, rank: int, message: Any, blob: bytes = b"") -> None:
            if rank == last and _is_vote(message):
                self.hold()
            send(connections, rank, message, blob)

        PayloadExchange.reduce = reduced  # type: ignore[method-assign]
        ConnectionManager.send = stop_before_last  # type: ignore[method-assign]


def _is_vote(message: Any) -> bool:
    return bool(message["kind"] == "vote" and message["round"] == [TARGET.fragment, TARGET.outer_step])


def _tell_of_votes(last: int) -> None:
    """Report to the test when this process has sent its vote to all replicas."""
    send = ConnectionManager.send

    def telling(connections: ConnectionManager, rank: int, message: Any, blob: bytes = b"") -> None:
        send(connections, rank, message, blob)
        if rank == last and _is_vote(message):
            report("voted")

    ConnectionManager.send = telling  # type: ignore[method-assign]


def replica(index: int, scenario: Scenario, address: Address) -> None:
    """The main function of a process: train, report ``continued``, wait at `PAUSE`, report the `Outcome`, wait to end.

    Processes beyond the first M replace the victim.
    """
    number = index if index < scenario.num_replicas else scenario.victim
    words = Words()
    victim = Victim(scenario, words) if index == scenario.victim else None
    if scenario.stage == "vote" and index in scenario.others:
        _tell_of_votes(max(other for other in range(scenario.num_replicas) if other != index))
    place = Place(replica=number, num_replicas=scenario.num_replicas, rendezvous=address)
    connected = connect(place, scenario.wire)
    transport, outcome = connected.transport, Outcome()
    words.connections = transport.connections
    diloco, train = make_replica(transport, scenario.codec, outcome.note)
    assert connected.joining == (index >= scenario.num_replicas)
    if connected.joining:
        diloco.take_over(transport.view.members)
        diloco.steps = join(connected, LIMIT_S)
        report("joined")
    if victim is not None:
        victim.connections = transport.connections
    try:
        while scenario.rejoins or number not in scenario.goes_on or diloco.steps < LAST:
            if connected.joining and _has_found_its_way(outcome, number):
                transport.ask_to_stop()
            stop = transport.stop_step()
            if stop is not None and diloco.steps >= stop:
                break
            train()
            _step(diloco, victim)
            outcome.digests[diloco.steps] = digests(diloco)
            if diloco.steps == PAUSE and number in scenario.goes_on and not connected.joining:
                report("continued")
                words.next()
    except TransportError as error:
        outcome.error, outcome.lost = (type(error).__name__, str(error)), error.replicas
    if outcome.error is None and transport.failure is not None:
        outcome.error, outcome.lost = ("failure", str(transport.failure)), transport.failure.replicas
    outcome.last, outcome.steps, outcome.members = digests(diloco), diloco.steps, transport.view.members
    report(outcome)
    words.next()
    if victim is not None:
        victim.heal()  # so that closing is not held back
    transport.close()


def _step(diloco: DiLoCo, victim: Victim | None) -> None:
    """Do `DiLoCo.step`, with the points at which the victim stops."""
    stage = victim.scenario.stage if victim is not None else ""
    if victim is not None and stage == "before send" and diloco.steps == SENT_AT - 1:
        victim.hold()
    diloco.begin()
    if victim is not None and stage == "commit" and diloco.steps == MERGED_AT:
        assert victim.decided[TARGET].wait(LIMIT_S)
        victim.hold()
    diloco.finish()
    if victim is not None and stage == "merge" and diloco.steps == MERGED_AT:
        victim.hold()


def _has_found_its_way(outcome: Outcome, number: int) -> bool:
    """Return whether two averages of each fragment contain this replica's own work."""
    mine = [round_id.fragment for round_id, contributors in outcome.committed.items() if number in contributors]
    return all(mine.count(fragment) >= 2 for fragment in range(SCHEDULE.num_fragments))
