"""The newest events of a replica, for people who watch a swarm without taking part in it."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from diloco.events import Event, to_record

__all__ = ["RecentEvents"]

KEPT = {
    "RunStarted": 1,
    "StepFinished": 256,
    "RoundSent": 128,
    "RoundCommitted": 128,
    "RoundVoid": 128,
    "ViewChanged": 32,
    "StateFetched": 16,
    "Evaluated": 64,
    "SampleGenerated": 4,
    "CheckpointSaved": 1,
    "RunFinished": 1,
}
"""How many of each kind are kept. Notes are not told: they hold addresses and paths."""

_UNTOLD = ("facts", "resumed_from", "path", "summary")  # fields that speak of this machine

_MOST_TOLD = 600
_LONGEST_TEXT = 2_000


class RecentEvents:
    """Events are added by the training thread, and asked for by others.

    >>> from diloco.events import Note, RoundVoid
    >>> recent = RecentEvents()
    >>> for outer_step in (4, 5):
    ...     recent.add(RoundVoid(step=7, replica=1, fragment=0, outer_step=outer_step, reason="late"))
    >>> told = recent.since(1)
    >>> told["next_event"], [record["outer_step"] for record in told["events"]]
    (2, [5])
    """

    def __init__(self) -> None:
        self._kept: dict[str, deque[tuple[int, dict[str, Any]]]] = {
            kind: deque(maxlen=most) for kind, most in KEPT.items()
        }
        self._next = 0
        self._lock = threading.Lock()

    def add(self, event: Event) -> None:
        """Keep ``event`` for a while, if it is one that others may hear of."""
        kept = self._kept.get(type(event).__name__)
        if kept is None:
            return
        fields = {name: value for name, value in to_record(event).items() if name not in _UNTOLD}
        short = {name: value[:_LONGEST_TEXT] if isinstance(value, str) else value for name, value in fields.items()}
        with self._lock:
            kept.append((self._next, {**short, "time_s": round(time.time(), 3)}))
            self._next += 1

    def since(self, number: int) -> dict[str, Any]:
        """As JSON: ``events`` from ``number`` on, oldest first, and ``next_event``, to ask from the next time."""
        with self._lock:
            found = [each for kept in self._kept.values() for each in kept if each[0] >= number]
            events = [record for _, record in sorted(found, key=lambda each: each[0])]
            return {"events": events[-_MOST_TOLD:], "next_event": self._next}
