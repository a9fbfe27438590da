"""Running a rank's protocol: events are passed to its machine, and their effects are carried out."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from diloco.algorithm import RoundId
from diloco.errors import ConfigurationError, RendezvousError, RoundVoidError, TransportError
from diloco.membership import NextView, View
from diloco.protocol import (
    Average,
    Effects,
    Entry,
    FactsMessage,
    GiveVerdict,
    Header,
    Machine,
    Meet,
    MessageError,
    Registry,
    Rules,
    StartExchange,
    Store,
    Timer,
    Welcome,
    events,
)
from diloco.transport.address import Address
from diloco.transport.connections.connection_manager import ConnectionManager
from diloco.transport.connections.link import PeerLinks, round_tag
from diloco.transport.connections.streams import Streams, within
from diloco.transport.peers.exchange import PayloadExchange
from diloco.transport.peers.pending import Contributed
from diloco.waiting import in_thread, waiting_for

__all__ = ["ProtocolRunner"]

_STOP_TOGETHER_S = 5.0  # how long a rank that is to stop waits for others that are


class ProtocolRunner:
    """One rank's machine, and the connections, timers, payload links and threads that its effects need.

    The machine handles one event at a time, in the control thread and under a lock. Other threads read its state under
    the same lock.
    """

    view: View  # the current view
    registry: Registry

    def __init__(self, rules: Rules, streams: Streams, links: type[PeerLinks]) -> None:
        self.rules = rules
        self.reason = ""  # why the current view replaced the one before
        # called in the control thread with each next view; its result is sent to the ranks that join with that view
        self.on_change: Callable[[NextView], bytes | None] = lambda following: None
        self._machine = Machine(rules)
        self._changed = threading.Condition()  # its lock guards the machine; notified after each event
        self._contributed = Contributed()
        self._closed = False
        self._asked_to_stop = False
        self._timers: dict[Timer, asyncio.TimerHandle] = {}
        self._exchanges: dict[tuple[int, RoundId], PayloadExchange] = {}
        self.connections = ConnectionManager(rules, streams, self._on_event)
        self.connections.on_fault = self._end_waiting
        self._running: set[Future[None]] = set()  # threads of exchanges
        self.links = links(self.connections)

    # For any thread.

    def _post(self, event: events.Event) -> None:
        """Let the machine handle an event soon."""
        self.connections.post(self._handle, event)

    def _call(self, event: events.Event, timeout_s: float | None = None) -> None:
        """Let the machine handle an event, and wait until its effects are carried out.

        Raises:
            TransportError: The connections are closed, or an internal error has ended them.
            TimeoutError: It takes longer than ``timeout_s``.
        """

        async def handle() -> None:
            self._handle(event)
            if self.connections.fault:
                raise TransportError(self.connections.fault)

        self.connections.call(handle(), timeout_s)

    def _wait_for(self, predicate: Callable[[], object], timeout_s: float) -> None:
        """Wait until ``predicate`` holds, at most ``timeout_s``. It is evaluated after each event.

        Raises:
            TransportError: The transport was closed in the meantime, or has ended after an internal error.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self.connections.fault or predicate(), min(timeout_s, threading.TIMEOUT_MAX)
            )
            if self.connections.fault:
                raise TransportError(self.connections.fault)
            if self._closed:
                raise TransportError(f"replica {self.rules.replica} has closed its transport. It stops waiting.")

    # For the training thread: what ranks agree on outside their rounds.

    def agree(self, facts: Mapping[str, str]) -> None:
        """Compare facts with the other replicas; see `Transport.agree`."""
        entry = Entry(self.rules.rank, str(self.connections.address), dict(facts))
        timeout_s = self.rules.round_timeout_s
        agreement, present = self._machine.agreement, self._machine.present

        def unready() -> list[int]:
            return sorted({self.rules.replica_of(rank) for rank in agreement.awaited(present())})

        self._post(events.Announce(FactsMessage(entry)))
        with waiting_for(lambda: f"{len(unready())} of the replicas to create DiLoCo", timeout_s), self._changed:
            self._wait_for(lambda: agreement.mine == entry and (agreement.refusal() or not unready()), timeout_s)
            why, missing = agreement.refusal(), unready()
        if why:
            raise ConfigurationError(f"{why}. All replicas must pass the same arguments to DiLoCo.")
        if missing:
            raise RendezvousError(
                f"replica {self.rules.replica} has waited {timeout_s:g} s for {_named(missing)}, which "
                f"{'are' if len(missing) > 1 else 'is'} connected but not ready to train: no DiLoCo was created there.",
                replicas=missing,
            )

    def ask_to_stop(self) -> None:
        """Ask all ranks to agree soon on the step that `stop_step` returns. For any thread; it does not wait."""
        self._asked_to_stop = True
        self._post(events.Announce(Meet("stop", 0)))

    def stop_step(self) -> int | None:
        """Return the inner step after which this rank stops, or None if it does not.

        All stop after the same step if more members ask for it than could lie. One that is alone leaves.
        """
        machine = self._machine
        if self._asked_to_stop:
            self._wait_for(lambda: machine.barriers.stopping, self.rules.silence_s)
        if not machine.barriers.stopping:
            return None
        if not machine.stop_is_agreed():
            with contextlib.suppress(TimeoutError), self._changed:
                self._wait_for(machine.stop_is_agreed, min(_STOP_TOGETHER_S, self.rules.silence_s))
        return max(self._met("stop").values()) + 1 if machine.stop_is_agreed() else machine.rounds.step

    def meet(self, name: str, value: int) -> dict[int, int]:
        """Submit ``value`` to the barrier ``name`` and wait until all connected ranks have. Each name is used once."""
        self._post(events.Announce(Meet(name, value)))
        return self._met(name)

    def _met(self, name: str, *, unless: Callable[[], bool] = lambda: False) -> dict[int, int]:
        """Wait until all connected ranks have reached a barrier, or ``unless`` holds. Return the values by rank."""
        barriers, present = self._machine.barriers, self._machine.present
        self._wait_for(lambda: unless() or not barriers.awaited(name, present()), self.rules.guard_s)
        return barriers.values(name)

    # In the control thread.

    def _on_event(self, event: events.Event) -> None:
        """Process an event of a control connection."""
        match event:
            case events.Received(sender, Store(topic, content)):
                self.links.receive(sender, topic, content)
                return
            case events.Received(sender, Header() as header) if sender in self.links.by_rank:
                link, fragment, outer_step = self.links.by_rank[sender], *header.round
                link.note_ready(round_tag(header.view, header.id))
                # it has decided the rounds before; it need not have acknowledged the one just before yet
                link.stop_sending(round_tag(header.view, RoundId(fragment, outer_step - 2)))
            case events.ConnectionMade(rank) if self._is_peer(rank):
                self.links.connect(rank)
            case events.ConnectionEnded(rank):
                self.links.disconnect(rank)
        self._handle(event)

    def _handle(self, event: events.Event) -> None:
        """Let the machine handle an event, and carry out all its effects, whatever happens to one of them.

        Raises:
            MessageError: The event is a malformed message. Any other error ends this transport.
        """
        if self.connections.fault:
            if isinstance(event, events.Submitted):
                self._end_waiting()
            return
        try:
            with self._changed:
                effects = self._machine.handle(event, time.monotonic())
                self._changed.notify_all()
        except Exception as error:
            if isinstance(event, events.Received) and isinstance(error, MessageError):
                raise
            self.connections.fail(error)
            return
        errors = []
        for act, many in self._acts(effects):
            for each in many:
                try:
                    act(*each)
                except Exception as error:
                    errors.append(error)
        if errors:
            self.connections.fail(errors[0])

    def _fail(self, error: BaseException) -> None:
        """End this transport because of an internal error. For any thread."""
        self.connections.post(self.connections.fail, error)

    def _end_waiting(self) -> None:
        """Let all who wait learn of an internal error."""
        fault = TransportError(self.connections.fault)
        with self._changed:
            self._changed.notify_all()
        self._contributed.end(
            lambda each: fault if self.rules.raises(each) else RoundVoidError(f"{each} is void: {fault}")
        )
        self.links.close()
        for exchange in list(self._exchanges.values()):
            if not exchange.verdict.done():
                exchange.verdict.set_exception(fault)

    def _acts(self, effects: Effects) -> list[tuple[Callable[..., object], Iterable[tuple[Any, ...]]]]:
        """Return what the effects of an event come to: functions, and the arguments of all calls of each."""
        return [
            (self.connections.send, effects.messages),
            (self._hang_up, zip(effects.hang_ups)),
            (self._set_timer, effects.timers.items()),
            (self._resolve, effects.outcomes),
            (self._adopt, effects.adopted),
            (self._start, zip(effects.exchanges)),
            (self._give, zip(effects.verdicts)),
            (self._open, [(effects.view,)] if effects.view is not None else []),
            (self._cancel, [(lambda key: True,)] if effects.closed else []),
            (self._register, zip(effects.registered)),
            (self._introduce, zip(effects.introduced)),
        ]

    def _hang_up(self, rank: int) -> None:
        self.links.disconnect(rank)
        self.connections.hang_up(rank)

    def _set_timer(self, timer: Timer, delay_s: float | None) -> None:
        if handle := self._timers.pop(timer, None):
            handle.cancel()
        if delay_s is not None:
            self._timers[timer] = self.connections.loop.call_later(delay_s, self._fire, timer)

    def _resolve(self, round_id: RoundId, outcome: Average | TransportError) -> None:
        if isinstance(outcome, TransportError):
            self._cancel(lambda key: key[1] == round_id)
        self._contributed.resolve(round_id, outcome)

    def _adopt(self, following: NextView, reason: str, joined: Sequence[int]) -> None:
        self.view, self.reason = following.view, reason
        self.connections.trust(self.rules.ranks(self.view.members))
        note = self.on_change(following) or b""
        for rank in joined:
            self.connections.send(rank, Welcome(following, note))

    def _start(self, started: StartExchange) -> None:
        key = started.view.id, started.contribution.round
        exchange = PayloadExchange(started, self.connections.loop, self.rules.piece_bytes)
        self._exchanges[key] = exchange
        here = {self.rules.replica_of(rank): self.links.by_rank.get(rank) for rank in self._peers(started.view)}
        exchange.begin({replica: link for replica, link in here.items() if link is not None})
        running = in_thread(lambda: self._exchange(key), f"diloco-{key[1].fragment}")
        self._running.add(running)
        running.add_done_callback(self._ended)

    def _ended(self, running: Future[None]) -> None:
        self._running.discard(running)
        if (error := running.exception()) is not None:
            self._fail(error)

    def _give(self, given: GiveVerdict) -> None:
        exchange = self._exchanges.get((given.view_id, given.round))
        if exchange is not None and not exchange.verdict.done():  # else the exchange has failed
            exchange.verdict.set_result(given)
            if given.verdict.void:  # at once: nothing more of it is sent
                exchange.cancel()

    def _open(self, view: View) -> None:
        """Keep payload links to the members of a view, and end the exchanges of earlier ones."""
        self.links.want(self._peers(view))
        self._cancel(lambda key: key[0] != view.id)

    def _register(self, entry: Entry) -> None:
        self.registry.note(entry, keep={*self.rules.ranks(self.view.members), *self.connections.connected})

    def _introduce(self, entry: Entry) -> None:
        streams, rank, known = self.connections.streams, entry.rank, self.registry.entries.get(entry.rank)
        if rank in self.rules.ranks(self.view.members) and known is not None and known.address != entry.address:
            return  # nobody else can take a member's place, or that of this process
        if streams.named and rank not in {self.rules.rank, *self.connections.connected}:  # over TCP it connects itself
            self.connections.begin(self._call_back(entry.rank, streams.locate(entry)))

    async def _call_back(self, rank: int, address: Address) -> None:
        """Open a connection to a rank that can't open it itself."""
        with contextlib.suppress(OSError, EOFError, TransportError, TimeoutError):
            await within(self.rules.silence_s, self.connections.connect(rank, address))

    def _fire(self, timer: Timer) -> None:
        self._timers.pop(timer, None)
        self._handle(timer)

    def _peers(self, view: View) -> list[int]:
        """Return the ranks of the same position in the other replicas of a view."""
        return [rank for rank in self.rules.ranks(view.members) if self._is_peer(rank)]

    def _is_peer(self, rank: int) -> bool:
        rules = self.rules
        return rank % rules.ranks_per_replica == rules.position and rules.replica_of(rank) != rules.replica

    def _cancel(self, ended: Callable[[tuple[int, RoundId]], bool]) -> None:
        """End the exchanges of rounds that are void, or whose view has ended."""
        for key in filter(ended, list(self._exchanges)):
            self._exchanges[key].cancel()

    def _exchange(self, key: tuple[int, RoundId]) -> None:
        """Run an exchange in a thread of its own and pass on its events."""
        exchange = self._exchanges[key]
        for event in exchange.run():
            if isinstance(event, events.ExchangeEnded):
                self.connections.post(exchange.cancel)  # releases what is left of it
                del self._exchanges[key]
            self._post(event)


def _named(replicas: Sequence[int]) -> str:
    return f"replica{'s' if len(replicas) > 1 else ''} {', '.join(map(str, replicas))}"
