"""This rank's contributions in flight, one per round, as the training thread sees them; their copies from a GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from diloco.algorithm import Contribution, RoundId
from diloco.errors import RoundTimeoutError, RoundVoidError, TransportError
from diloco.protocol import Average

if TYPE_CHECKING:
    from diloco.transport.peers.transport import PeerTransport


@dataclass(eq=False)
class PeerPending:
    round: RoundId
    payload_bytes: int
    guard_s: float  # longer than a decision ever takes
    transport: PeerTransport  # names missing replicas, and counts the bytes of outcomes
    sent_s: float = field(default_factory=time.monotonic)
    decided_s: float | None = None  # when the round was decided, by `time.monotonic`; None until then
    void: bool = False  # whether the round is void
    outcome: Average | TransportError | None = None  # None until the round is decided, and after `wait`
    on_commit: Callable[[Average], None] | None = None  # gets the average as soon as there is one, in another thread
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self, timeout_s: float | None = None) -> Average:
        if self.done.is_set() and self.outcome is None:
            raise TransportError(f"the average of {self.round} has already been returned. Nothing is in flight.")
        started_s = time.monotonic()
        allowed_s = self.guard_s if timeout_s is None else timeout_s
        if not self.done.wait(min(allowed_s, threading.TIMEOUT_MAX)):
            missing = self.transport.missing(self.round)
            names = ", ".join(map(str, missing))
            what = f"no contribution arrived from replica {names}" if missing else "some votes did not arrive"
            raise RoundTimeoutError(
                f"{self.round} was not decided within {allowed_s:g} s: {what}. Nothing was applied.",
                round=str(self.round),
                replicas=missing,
            )
        outcome, self.outcome = self.outcome, None  # keeps no tensors alive, as this object may live longer
        assert outcome is not None
        waited_s = time.monotonic() - started_s
        self.transport.count(self, outcome, waited_s)
        if isinstance(outcome, TransportError):
            try:
                raise outcome
            finally:
                del outcome  # its traceback refers to this frame, and so to the caller's contribution
        return replace(outcome, wait_s=waited_s)


class Contributed:
    """All contributions of this rank."""

    def __init__(self) -> None:
        self.digests: dict[int, str] = {}  # fragment -> digest of the state behind its last contribution
        self._sent: dict[int, PeerPending] = {}
        self._undecided: dict[RoundId, PeerPending] = {}
        self._closed: TransportError | None = None
        self._lock = threading.Lock()  # the control thread decides rounds while another thread may close

    def add(self, contribution: Contribution, guard_s: float, transport: PeerTransport) -> PeerPending:
        """Register a contribution to a round that this replica has not contributed to, or that became void."""
        replica, round_id = contribution.replica, contribution.round
        before = self._sent.get(round_id.fragment)
        if before is not None and before.round == round_id and not before.void:
            raise TransportError(
                f"replica {replica} has already contributed to {round_id}. Only one contribution per round is "
                "accepted, and the first one stands.",
                round=str(round_id),
                replicas=[replica],
            )
        pending = PeerPending(round_id, contribution.payload.numel(), guard_s, transport)
        with self._lock:
            if self._closed is not None:
                raise TransportError(f"{self._closed}. Its contribution to {round_id} was not accepted.")
            self._sent[round_id.fragment] = self._undecided[round_id] = pending
        self.digests[round_id.fragment] = contribution.digest
        return pending

    def resolve(self, round_id: RoundId, outcome: Average | TransportError) -> None:
        with self._lock:
            if pending := self._undecided.pop(round_id, None):  # else `close` has resolved it
                pending.outcome, pending.void = outcome, isinstance(outcome, RoundVoidError)
                pending.decided_s = time.monotonic()
                if pending.on_commit is not None and isinstance(outcome, Average):
                    pending.on_commit(outcome)
                pending.done.set()

    def end(self, outcome: Callable[[RoundId], TransportError]) -> None:
        """Let each round in flight end with its ``outcome``. For any thread."""
        for round_id in list(self._undecided):
            self.resolve(round_id, outcome(round_id))

    def close(self, failure: TransportError) -> None:
        with self._lock:
            self._closed = failure
        self.end(lambda round_id: failure)

    def decided_rounds(self, fragment: int) -> int:
        """Return the number of decided rounds of ``fragment``. A replica that has finished fewer is behind."""
        sent = self._sent.get(fragment)
        return 0 if sent is None else sent.round.outer_step + (1 if sent.decided_s is not None else 0)


class HostCopies:
    """Copies payloads from a GPU to the host, in the order in which they are started. Resources are created lazily."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._waiting: ThreadPoolExecutor | None = None

    def start(self, contribution: Contribution) -> tuple[Contribution, torch.cuda.Event]:
        """Return the contribution with its payload in pinned host memory, filled once the event has occurred."""
        payload = contribution.payload
        if payload.device not in self._streams:
            self._streams[payload.device] = torch.cuda.Stream(payload.device)  # type: ignore[no-untyped-call]  # torch's stub
        stream = self._streams[payload.device]
        host = torch.empty(payload.shape, dtype=payload.dtype, device="cpu", pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(payload.device))
        with torch.cuda.stream(stream):
            host.copy_(payload, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's stub
            copied.record(stream)
        payload.record_stream(stream)  # its memory is not reused before the copy is done
        return replace(contribution, payload=host), copied

    def after(
        self, copied: torch.cuda.Event, act: Callable[[], None], on_error: Callable[[BaseException], object]
    ) -> None:
        """Call ``act`` in another thread once the copy is done, or ``on_error`` if it fails."""
        if self._waiting is None:
            self._waiting = ThreadPoolExecutor(1, thread_name_prefix="diloco-copies")

        def wait() -> None:
            try:
                copied.synchronize()
                act()
            except BaseException as error:
                on_error(error)

        self._waiting.submit(wait)

    def close(self) -> None:
        if self._waiting is not None:
            self._waiting.shutdown()
