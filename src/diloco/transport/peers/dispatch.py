"""What comes in over the control connections, and to whom in this rank it goes. In the control thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from diloco.protocol.registry import Entry, Registry
from diloco.transport.peers.agreement import Agreement
from diloco.transport.peers.connection_manager import ConnectionManager
from diloco.transport.peers.joining import Joining
from diloco.transport.peers.meetings import Meetings
from diloco.transport.peers.speeds import Speeds
from diloco.transport.peers.threads import Mailbox
from diloco.transport.peers.views import ViewKeeper

__all__ = ["Dispatch", "Received"]

_MOST_EARLY = 1000
_FOR_MEMBERS = ("meet", "introduce", "excluded", "replaced", "speed")

Received = tuple[int, dict[str, Any], bytes]
"""The sender's rank, the message and its blob."""


class Dispatch:
    """Messages by their kind; what is about views waits until somebody keeps them.

    Args:
        ranks_per_replica: S.
        connections: control connections.
        mailbox: gets what payload connections are made with.
        meetings: get the numbers that ranks agree on.
        joining: gets what members answer to this rank's wish to be one.
        speeds: get how fast the members train.
        agreement: gets the facts of the others' loops.
        introduced: called with the entry of somebody who can't open a connection to this rank and wants one.
    """

    def __init__(
        self,
        ranks_per_replica: int,
        connections: ConnectionManager,
        mailbox: Mailbox,
        meetings: Meetings,
        joining: Joining,
        speeds: Speeds,
        agreement: Agreement,
        introduced: Callable[[Entry], None],
    ) -> None:
        self._size = ranks_per_replica
        self._connections = connections
        self._mailbox = mailbox
        self._meetings = meetings
        self._joining = joining
        self._speeds = speeds
        self._agreement = agreement
        self._introduced = introduced
        self._views: tuple[ViewKeeper, Registry] | None = None
        self._early: list[Received] = []

    def begin(self, keeper: ViewKeeper, registry: Registry) -> Sequence[Received]:
        """From now on there are views.

        Args:
            keeper: of them.
            registry: of all ranks, kept up to date with those who ask to join.

        Returns:
            What waited for that, to be delivered now.
        """
        self._views = keeper, registry
        early, self._early = self._early, []
        return early

    def deliver(self, sender: int, message: dict[str, Any], blob: bytes) -> None:
        """Hand a message on.

        Raises:
            KeyError, ValueError, TypeError: it is none of this protocol.
        """
        kind = message["kind"]
        if kind in _FOR_MEMBERS and not self._is_member(sender):
            pass  # who is connected and no member has no say
        elif kind == "store":
            self._mailbox.put(str(message["key"]), blob)
        elif kind == "meet":
            self._meetings.heard(sender, str(message["name"]), int(message["value"]))
        elif kind in ("welcome", "refused"):
            self._joining.heard(message)
        elif kind == "facts":
            self._agreement.hear(sender, message, is_member=self._is_member(sender))
        elif self._views is None and len(self._early) > _MOST_EARLY:
            raise ValueError("it says too much to somebody who is not ready")
        elif self._views is None:
            self._early.append((sender, message, blob))
        elif kind == "speed":
            self._speeds.hear(sender // self._size, message)
        elif kind == "introduce":
            self._introduced(Entry.from_message(message["entry"]))
        else:
            self._about_views(*self._views, sender, message)

    def _about_views(self, keeper: ViewKeeper, registry: Registry, sender: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "join":
            entry = Entry.from_message(message)
            if entry.rank != sender or entry.address != str(self._connections.address_of(sender)):
                raise ValueError("it wants to join in the name of another one")
            registry.entries[sender] = entry
            keeper.attendance.join(sender, frozenset(int(rank) for rank in message["connected"]))
        elif kind == "excluded":
            if int(message["view"]) >= keeper.view.id:
                keeper.exclude(str(message["reason"]))
        elif kind == "replaced":
            keeper.exclude("another process has come in its place")
        else:
            keeper.heard(sender, message)

    def _is_member(self, sender: int) -> bool:
        """As far as is known: before there are views, anybody may be one."""
        return self._views is None or sender // self._size in self._views[0].view.members
