"""A contribution of this rank in flight, as the training thread sees it; the copy of one from a GPU."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from diloco.algorithm import Contribution, RoundId
from diloco.errors import RoundTimeoutError, RoundVoidError, TransportError
from diloco.protocol import Average
from diloco.waiting import in_thread

if TYPE_CHECKING:
    from diloco.transport.peers.transport import PeerTransport


@dataclass(eq=False)
class PeerPending:
    round: RoundId
    payload_bytes: int
    digest: str  # of the state behind the contribution
    transport: PeerTransport  # names missing replicas, and counts the bytes of outcomes
    on_commit: Callable[[Average], None] | None  # gets the average as soon as there is one, in another thread
    sent_s: float = field(default_factory=time.monotonic)
    decided_s: float | None = None  # when the round was decided, by `time.monotonic`; None until then
    void: bool = False  # whether the round is void
    outcome: Average | TransportError | None = None  # None until the round is decided, and after `wait`
    done: threading.Event = field(default_factory=threading.Event)

    def decide(self, outcome: Average | TransportError) -> None:
        """End the round, unless it has ended already."""
        if self.decided_s is None:
            self.outcome, self.void, self.decided_s = outcome, isinstance(outcome, RoundVoidError), time.monotonic()
            if self.on_commit is not None and isinstance(outcome, Average):
                self.on_commit(outcome)
            self.done.set()

    def wait(self, timeout_s: float | None = None) -> Average:
        if self.done.is_set() and self.outcome is None:
            raise TransportError(f"the average of {self.round} has already been returned. Nothing is in flight.")
        started_s = time.monotonic()
        allowed_s = self.transport.rules.guard_s if timeout_s is None else timeout_s
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


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for copies from a device, in the order in which they are started."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's stub


def host_copy(contribution: Contribution) -> tuple[Contribution, Future[None]]:
    """Return the contribution with its payload in pinned host memory, which is filled once the future is done."""
    payload = contribution.payload
    stream = _stream(payload.device)
    host = torch.empty(payload.shape, dtype=payload.dtype, device="cpu", pin_memory=True)
    stream.wait_stream(torch.cuda.current_stream(payload.device))
    with torch.cuda.stream(stream):
        host.copy_(payload, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's stub
        copied.record(stream)
    payload.record_stream(stream)  # its memory is not reused before the copy is done
    return replace(contribution, payload=host), in_thread(copied.synchronize, "diloco-copy")
