"""Asking those who are members to become one of them, and what they answer."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from diloco.protocol.registry import Entry
from diloco.transport.peers.connection_manager import ConnectionManager

__all__ = ["Joining"]

_MOST_ANSWERS = 1000


class Joining:
    """One rank's wish to be a member.

    Args:
        connections: control connections.
    """

    def __init__(self, connections: ConnectionManager) -> None:
        self._connections = connections
        self._answers: list[Mapping[str, Any]] = []
        self._changed = threading.Condition()

    # In the training thread.

    def ask(self, entry: Entry) -> None:
        """Tell all that this rank is connected to that it wants to be a member."""
        message = {"kind": "join", **entry.to_message(), "connected": sorted(self._connections.connected)}
        for rank in self._connections.connected:
            self._connections.post(self._connections.send, rank, message)

    def answer(self, timeout_s: float) -> Mapping[str, Any] | None:
        """What a member answered, or None; a welcome rather than anything else.

        Under ``lineup`` is whom this rank was connected to when it came: rank -> the connection.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._answers), timeout_s)
            answers, self._answers = self._answers, []
            return next((each for each in answers if each["kind"] == "welcome"), answers[-1] if answers else None)

    # In the control thread.

    def heard(self, message: Mapping[str, Any]) -> None:
        """A member answers."""
        with self._changed:
            lineup = {rank: self._connections.connection(rank) for rank in self._connections.connected}
            self._answers = [*self._answers[-_MOST_ANSWERS:], {**message, "lineup": lineup}]
            self._changed.notify_all()
