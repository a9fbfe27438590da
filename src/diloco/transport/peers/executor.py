"""Doing what the protocol wants of the network: messages, timers, payload links and the exchange of payloads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

from diloco.algorithm.averaging import RoundId
from diloco.membership.view import View
from diloco.protocol import actions, events
from diloco.protocol.rules import Policies, Rules
from diloco.transport.peers.connection_manager import ConnectionManager
from diloco.transport.peers.data_link import OpenLink
from diloco.transport.peers.payload_exchange import PayloadExchange
from diloco.transport.peers.payload_links import Links, PayloadLinks, UnlinkedError
from diloco.transport.peers.send_queue import SendQueue
from diloco.transport.peers.threads import Mailbox, Threads
from diloco.transport.shaping import Pacer

__all__ = ["Executor"]


class Executor:
    """One rank's control connections, timers, payload links and exchanges. In the control thread.

    Args:
        rules: who I am, and how rounds go.
        policies: how links are made.
        connections: control connections.
        mailbox: of payload links being made.
        pacer: emulates a slow link; None: none.
        tell: called, in the control thread, with what happens.

    Attributes:
        open_link: makes payload links; set before the first view.
    """

    open_link: OpenLink

    def __init__(
        self,
        rules: Rules,
        policies: Policies,
        connections: ConnectionManager,
        mailbox: Mailbox,
        pacer: Pacer | None,
        tell: Callable[[events.Event], None],
    ) -> None:
        self._rules = rules
        self._connections = connections
        self._mailbox = mailbox
        self._tell = tell
        self._threads = Threads()
        self._queue = SendQueue(pacer)
        self._links = PayloadLinks(rules, policies, connections, self._threads)
        self._linked: Future[Links] = Future()
        self._timers: dict[actions.Timer, asyncio.TimerHandle] = {}
        self._exchanges: dict[tuple[int, RoundId], PayloadExchange] = {}

    def do(self, action: actions.Action) -> None:
        """Carry out an action, if it is one that concerns the network."""
        match action:
            case actions.Send(rank, message):
                self._connections.send(rank, message)
            case actions.HangUp(rank):
                self._connections.hang_up(rank)
            case actions.SetTimer(timer, delay_s):
                self._timers[timer] = self._connections.loop.call_later(delay_s, self._fire, timer)
            case actions.CancelTimer(timer):
                if handle := self._timers.pop(timer, None):
                    handle.cancel()
            case actions.OpenLinks(view):
                self._linked = self._links.open(view, self.open_link)
                self._linked.add_done_callback(lambda links: self._opened(view, links))
            case actions.CloseLinks(view):
                self._links.close()
                self._mailbox.forget(f"{view.id}/")
            case actions.StartExchange(view, contribution):
                exchange = PayloadExchange(action, self._queue, self._rules.piece_bytes)
                self._exchanges[view.id, contribution.round] = exchange
                name = f"diloco-{contribution.round.fragment}"
                self._threads.start(self._exchange, exchange, self._linked, name=name)
            case actions.GiveVerdict(view_id, round_id) if (view_id, round_id) in self._exchanges:
                self._exchanges[view_id, round_id].verdict.set_result(action)

    def close(self, timeout_s: float) -> None:
        """After the connections have ended: wait, each so long, for what is being sent and for the threads."""
        self._queue.close(timeout_s)
        self._threads.join(timeout_s)

    def _fire(self, timer: actions.Timer) -> None:
        self._timers.pop(timer, None)
        self._tell(events.TimerFired(timer))

    def _opened(self, view: View, links: Future[Links]) -> None:
        error = links.exception()
        if isinstance(error, UnlinkedError):
            self._tell(events.LinksFailed(view.id, error.failed))

    def _exchange(self, exchange: PayloadExchange, links: Future[Links]) -> None:
        """In a thread of its own."""
        for event in exchange.run(links):
            self._connections.post(self._happened, event)

    def _happened(self, event: events.Event) -> None:
        if isinstance(event, events.ExchangeEnded):
            self._exchanges.pop((event.view_id, event.round), None)
        self._tell(event)
