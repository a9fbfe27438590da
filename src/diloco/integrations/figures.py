"""What became of the rounds, for the logs of a framework."""

from __future__ import annotations

from collections.abc import Callable

from diloco.events import Event, RoundCommitted
from diloco.outer.diloco import DiLoCo

__all__ = ["Figures"]


class Figures:
    """What became of the rounds so far, as a framework's logs take it: name -> number.

    Args:
        also: called with every event, too.
    """

    def __init__(self, also: Callable[[Event], None] | None) -> None:
        self._also = also
        self._wait_s = 0.0
        self._contributors = 0

    def handle(self, event: Event) -> None:
        """Take note of ``event``."""
        if isinstance(event, RoundCommitted):
            self._wait_s += event.wait_s
            self._contributors = len(event.contributors)
        if self._also is not None:
            self._also(event)

    def of(self, diloco: DiLoCo) -> dict[str, float]:
        """Rounds and bytes since the beginning; the wait since this process began. Times in seconds."""
        return {
            "diloco/rounds": diloco.rounds_committed,
            "diloco/rounds_void": diloco.rounds_void,
            "diloco/contributors": self._contributors,
            "diloco/sent_bytes": diloco.transport.sent_bytes,
            "diloco/received_bytes": diloco.transport.received_bytes,
            "diloco/wait_s": self._wait_s,
        }
