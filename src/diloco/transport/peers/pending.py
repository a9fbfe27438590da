"""A round on its way, as the training thread sees it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from diloco.algorithm.averaging import RoundId
from diloco.errors import RoundTimeoutError, RoundVoidError, TransportError
from diloco.transport.base import Average

__all__ = ["PeerPending"]


class PeerPending:
    """Resolved once, by the control thread: with the average, or with the error that everybody gets.

    Args:
        round_id: which round.
        payload_bytes: of the contribution.
        guard_s: longer than any round can take to be decided.
        missing: says which replicas were not heard of.
        taken: called with this and the outcome when it is taken.

    Attributes:
        decided_s: when it was decided, by the clock of `time.monotonic`; None: not yet.
        void: whether it was decided that nobody applies the round.
    """

    def __init__(
        self,
        round_id: RoundId,
        payload_bytes: int,
        guard_s: float,
        missing: Callable[[RoundId], tuple[int, ...]],
        taken: Callable[[PeerPending, Average | TransportError], None],
    ) -> None:
        self.round = round_id
        self.payload_bytes = payload_bytes
        self.sent_s = time.monotonic()
        self.decided_s: float | None = None
        self._guard_s = guard_s
        self._missing = missing
        self._taken = taken
        self._done = threading.Event()
        self._outcome: Average | TransportError | None = None
        self.void = False
        self._was_taken = False

    @property
    def outcome(self) -> Average | TransportError | None:
        """None until it is decided, and again once it was taken."""
        return self._outcome

    @property
    def decided(self) -> bool:
        """Whether there is an outcome, be it taken already."""
        return self.decided_s is not None

    def resolve(self, outcome: Average | TransportError) -> None:
        """Decide; a second decision changes nothing."""
        if self.decided_s is None:
            self._outcome = outcome
            self.void = isinstance(outcome, RoundVoidError)
            self.decided_s = time.monotonic()
            self._done.set()

    def wait(self, timeout_s: float | None = None) -> Average:
        """See `Pending.wait`."""
        if self._was_taken:
            raise TransportError(f"{self.round} was waited for and had; there is nothing in flight.")
        started_s = time.monotonic()
        allowed_s = self._guard_s if timeout_s is None else timeout_s
        if not self._done.wait(min(allowed_s, threading.TIMEOUT_MAX)):
            missing = self._missing(self.round)
            names = f"replica {', '.join(map(str, missing))}" if missing else "the votes of the others"
            raise RoundTimeoutError(
                f"{self.round} was not decided within {allowed_s:g} s: nothing was heard of {names}. "
                "Nothing was applied.",
                round=str(self.round),
                replicas=missing,
            )
        self._was_taken = True
        outcome, self._outcome = self._outcome, None  # whoever waited has it now; I may be kept for longer
        assert outcome is not None
        self._taken(self, outcome)
        if isinstance(outcome, TransportError):
            try:
                raise outcome
            finally:
                del outcome  # which holds this frame, and with it the contribution of whoever called
        return replace(outcome, wait_s=time.monotonic() - started_s)
