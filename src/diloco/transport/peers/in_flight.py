"""This rank's rounds in flight: what the training thread waits for, and the exchanges of their payloads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from diloco.algorithm import Contribution, Mean, RoundId, Uplink
from diloco.devices import side_stream
from diloco.errors import ReplicaLostError, RoundTimeoutError, RoundVoidError, TransportError
from diloco.membership import View
from diloco.protocol import Average, Commit, Computed, Exchanged, GiveVerdict, Submitted, header_of
from diloco.transport.connections.links import PeerLinks
from diloco.transport.peers.exchange import PayloadExchange
from diloco.waiting import at_once, elapsed_s, in_thread

if TYPE_CHECKING:
    from diloco.transport.peers.transport import PeerTransport

_ENDING_S = 2.0  # for threads that wait for links; one that is still opening a link may take longer, harmlessly


@dataclass(eq=False)
class PeerPending:
    """A round in flight to which this rank has contributed, for the thread that waits for its average."""

    contribution: Contribution | None  # None once the round is decided
    transport: PeerTransport  # counts the bytes of outcomes
    on_mean: Callable[[Mean], None] | None  # gets the mean before the round is decided, in another thread
    sent_s: float = field(default_factory=elapsed_s)
    decided_s: float | None = None  # when the round was decided, by `elapsed_s`; None until then
    void: bool = False  # whether the round is void
    exchange: PayloadExchange | None = None  # the last one; None before the first, and once the round is decided
    outcome: Average | TransportError | None = None  # None until the round is decided, and after `wait`
    done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        assert self.contribution is not None
        self.round, self.digest = self.contribution.round, self.contribution.digest  # of the state behind it
        self.payload_bytes = self.contribution.payload.numel()

    def decide(self, outcome: Commit | TransportError) -> None:
        """End the round, unless it has ended already."""
        if self.decided_s is None:
            decided_s = elapsed_s()
            if isinstance(outcome, Commit):
                assert self.exchange is not None, "this rank has voted"
                fields = vars(self.exchange.mean) | vars(outcome)
                outcome = Average.of(self.exchange.plan, self.transport.replica, **fields)
            self.outcome, self.decided_s, self.void = outcome, decided_s, isinstance(outcome, RoundVoidError)
            self.contribution = self.exchange = None
            self.done.set()

    def wait(self) -> Average:
        if self.done.is_set() and self.outcome is None:
            raise TransportError(f"the average of {self.round} has already been returned. Nothing is in flight.")
        started_s = elapsed_s()
        allowed_s = self.transport.rules.guard_s
        while not self.done.wait(min(allowed_s, threading.TIMEOUT_MAX)):
            views, failure = self.transport.views, f"{self.round} was not decided within {allowed_s:g} s"
            if not views.waiting:
                raise RoundTimeoutError(f"{failure}. Nothing was applied.", round=str(self.round))
            if self.transport.rules.raise_on_loss:
                raise ReplicaLostError(
                    f"{failure}: {views.waiting}. Nothing was applied.", replicas=sorted(views.missing)
                )
        outcome, self.outcome = self.outcome, None  # keeps no tensors alive, as this object may live longer
        assert outcome is not None
        waited_s = elapsed_s() - started_s
        self.transport.count(self, outcome, waited_s)
        if isinstance(outcome, TransportError):
            try:
                raise outcome
            finally:
                del outcome  # its traceback refers to this frame, and so to the caller's contribution
        return replace(outcome, wait_s=waited_s)


class RoundsInFlight:
    """All rounds in flight of this rank, each decided once.

    The machine gets the headers of contributions, and digests of means.
    """

    def __init__(self, links: PeerLinks) -> None:
        self.last: dict[int, PeerPending] = {}  # fragment -> the last contribution to it
        self._links, self._rules, self._connections = links, links.rules, links.connections
        self._closed: TransportError | None = None
        self._exchanges: dict[tuple[int, RoundId], PayloadExchange] = {}  # by view and round
        self._running: set[Future[Any]] = set()  # threads of exchanges and copies
        self._lock = threading.RLock()  # the control thread decides rounds while another thread may close

    def submit(self, pending: PeerPending, step: int, uplink: Uplink, ready: Future[Any] | None) -> None:
        """Give a contribution to the machine once its payload is filled; if ``ready`` fails, the caller knows."""
        contribution = pending.contribution
        assert contribution is not None
        with self._lock:
            if self._closed is not None:
                raise TransportError(f"{self._closed}. Its contribution to {pending.round} was not accepted.")
            self.last[pending.round.fragment] = pending
        copied = None
        if ready is None and contribution.payload.is_cuda:
            pending.contribution, copied = _host_copy(contribution)
        ready = ready or copied or at_once(lambda: None)

        def filled(ready: Future[Any]) -> None:
            self._running.discard(ready)
            if ready.exception() is None:
                self._connections.post(self._submit, pending, step, uplink)
            elif ready is copied:
                self._connections.post(self._connections.fail, ready.exception())

        self._running.add(ready)
        ready.add_done_callback(filled)

    def decided_rounds(self, fragment: int) -> int:
        """Return the number of decided rounds of ``fragment``. A replica that has finished fewer is behind."""
        last = self.last.get(fragment)
        return 0 if last is None else last.round.outer_step + (last.decided_s is not None)

    def decide_all(self, outcome: Callable[[RoundId], TransportError]) -> None:
        """Let each round in flight end with its ``outcome``. For any thread."""
        with self._lock:
            for pending in self.last.values():
                pending.decide(outcome(pending.round))

    def close(self, failure: TransportError) -> None:
        with self._lock:
            self._closed = failure
        self.decide_all(lambda round_id: failure)

    def wait_for_threads(self) -> None:
        futures.wait(list(self._running), _ENDING_S)  # a thread inside PyTorch would abort a process that ends

    # In the control thread.

    def _submit(self, pending: PeerPending, step: int, uplink: Uplink) -> None:
        if pending.contribution is not None:  # else the transport has ended
            header = header_of(pending.contribution.checked(), uplink)
            self._connections.handle(Submitted(header, step, pending.sent_s))

    def resolve(self, round_id: RoundId, outcome: Commit | TransportError) -> None:
        if isinstance(outcome, TransportError):
            self.cancel(lambda key: key[1] == round_id)
        with self._lock:
            pending = self.last.get(round_id.fragment)
            if pending is not None and pending.round == round_id:
                pending.decide(outcome)

    def start(self, view: View, round_id: RoundId) -> None:
        pending = self.last[round_id.fragment]
        if pending.contribution is None or pending.round != round_id:  # it has been decided, as the transport ends
            return
        key, ranks, connected = (view.id, round_id), self._links.peers(view), self._connections.peers
        links = {self._rules.replica_of(rank): connected[rank].link for rank in ranks if rank in connected}
        exchange = PayloadExchange(pending.contribution, view, links, self._connections)
        pending.exchange = self._exchanges[key] = exchange

        def on_mean(mean: Mean) -> None:
            computed = Computed(*key, mean.digest())
            if pending.on_mean is not None:
                pending.on_mean(mean)  # a thread computes what follows from it, also while votes are on their way
            self._connections.post_event(computed)

        running = in_thread(lambda: exchange.run(on_mean), f"diloco-exchange-{round_id.fragment}")
        self._running.add(running)
        running.add_done_callback(self._ended)

    def give(self, given: GiveVerdict) -> None:
        exchange = self._exchanges.get((given.view_id, given.round))
        if exchange is not None and not exchange.verdict.done():  # else the exchange has failed
            exchange.give(given)

    def open(self, view: View) -> None:
        """Keep payload links to the members of a view, and end the exchanges of earlier ones."""
        self._links.want(self._links.peers(view))
        self.cancel(lambda key: key[0] != view.id)

    def cancel(self, ended: Callable[[tuple[int, RoundId]], bool] = lambda key: True) -> None:
        """End the exchanges of rounds that are void, or whose view has ended; by default all."""
        for key, exchange in self._exchanges.items():
            if ended(key):
                exchange.cancel()

    def _end(self, ended: Exchanged) -> None:
        self._exchanges.pop((ended.view_id, ended.round)).cancel()  # releases what is left of it
        self._connections.handle(ended)

    # In the thread of an exchange.

    def _ended(self, running: Future[Exchanged]) -> None:
        self._running.discard(running)
        if (error := running.exception()) is not None:
            self._connections.post(self._connections.fail, error)
        else:
            self._connections.post(self._end, running.result())


def _host_copy(contribution: Contribution) -> tuple[Contribution, Future[None]]:
    """Return the contribution with its payload in pinned host memory, which is filled once the future is done."""
    payload = contribution.payload
    stream = side_stream(payload.device)
    host = torch.empty(payload.shape, dtype=payload.dtype, device="cpu", pin_memory=True)
    stream.wait_stream(torch.cuda.current_stream(payload.device))
    with torch.cuda.stream(stream):
        host.copy_(payload, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's stub
        copied.record(stream)
    payload.record_stream(stream)  # its memory is not reused before the copy is done
    copy = replace(contribution, payload=host, device=payload.device)
    return copy, in_thread(copied.synchronize, "diloco-copy")
