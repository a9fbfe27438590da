"""The events that a machine handles, as frozen values: its only input.

A connection has a number of its own, since a process that takes a rank's place uses another connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from diloco.algorithm import UNKNOWN_UPLINK, Contribution, Mean, RoundId, Uplink
from diloco.errors import TransportError
from diloco.membership import NextView, Report, View
from diloco.protocol.actions import Action, SendMessage, Timer
from diloco.protocol.suspicion import Loss
from diloco.protocol.wire import FactsMessage, Join, Meet, Message, Speed, WireMessage

__all__ = [
    "Announce",
    "Begin",
    "Close",
    "Computed",
    "ConnectionEnded",
    "ConnectionMade",
    "Enter",
    "Event",
    "ExchangeEnded",
    "Leave",
    "LinkStalled",
    "LinksFailed",
    "Lost",
    "Outbox",
    "Received",
    "RoundsFailed",
    "Submitted",
    "TimerFired",
    "ViewBegan",
]


# Events: from the network.


@dataclass(frozen=True)
class ConnectionMade:
    """A control connection is open; it replaces an earlier one to the same rank."""

    rank: int
    connection: int
    address: str


@dataclass(frozen=True)
class ConnectionEnded:
    """A control connection has ended; the reason is still unknown."""

    rank: int


@dataclass(frozen=True)
class Lost:
    """The reason why the connection to a rank has ended or was dropped."""

    rank: int
    loss: Loss


@dataclass(frozen=True)
class Received:
    """A control message was received, which may be a mere heartbeat."""

    sender: int
    message: Message


@dataclass(frozen=True)
class TimerFired:
    """A timer has run out."""

    timer: Timer


@dataclass(frozen=True)
class LinksFailed:
    """The payload connections of a view to some replicas could not be opened."""

    view_id: int
    replicas: tuple[int, ...]
    reason: str


# Events: from the exchange of a round's payloads.


@dataclass(frozen=True, eq=False)
class Computed:
    """This rank holds the mean of a round; ``digest`` covers everything that the mean would change."""

    view_id: int
    round: RoundId
    mean: Mean
    digest: str


@dataclass(frozen=True)
class ExchangeEnded:
    """The exchange of a round's payloads has ended."""

    view_id: int
    round: RoundId
    failure: str = ""  # why there is no mean; "" if there is one, or if the round is void
    link_broken: bool = False  # whether the exchange failed because a payload connection ended
    spoiler: int | None = None  # the replica whose values this rank has found to be at fault, or None


# Events: from this rank's owner.


@dataclass(frozen=True)
class Begin:
    """The control connections are open, and the machine starts."""

    view: View  # the first view
    member: bool  # whether this rank is a member of the view; otherwise it observes until it enters one
    closed: str = ""  # why no replica can join for now; "" if all can


@dataclass(frozen=True)
class Enter:
    """This rank becomes a member of the view that a welcome names.

    ``connections`` maps each rank to its connection at the time of the welcome.
    """

    following: NextView
    connections: Mapping[int, int]


@dataclass(frozen=True, eq=False)
class Submitted:
    """This rank submits a contribution."""

    contribution: Contribution  # its tensors are on the CPU
    step: int  # the inner step at which it was sent
    sent_s: float
    # how much of the time since then went into view changes, during which the round made no progress
    paused_s: float = 0.0
    uplink: Uplink = UNKNOWN_UPLINK  # what is known about this rank's uplink
    # the last round whose average this rank had taken by then, the same on all ranks; its headers name the uplinks by
    # which this round is planned
    after: RoundId | None = None


@dataclass(frozen=True)
class Announce:
    """This rank is to announce a message."""

    message: Meet | FactsMessage | Speed | Join


@dataclass(frozen=True)
class Leave:
    """This rank leaves for good; the others continue."""


@dataclass(frozen=True)
class Close:
    """This rank no longer takes part; rounds in flight end with ``failure``."""

    failure: TransportError


@dataclass(frozen=True)
class ViewBegan:
    """Internal: a view has begun."""

    following: NextView | None = None  # None: the view is the first one
    mine: Report | None = None  # this rank's final report on the previous view; None: it was no member of that


@dataclass(frozen=True)
class RoundsFailed:
    """Internal: the view is to end without some replicas, or because a round is disputed."""

    view_id: int
    reason: str
    behind: frozenset[int]  # replicas that keep a round waiting, or spoil rounds, and still send something
    unheard: frozenset[int]
    anyway: bool  # whether the view ends even if the others can't continue


@dataclass(frozen=True)
class LinkStalled:
    """Internal: a payload connection has broken, so a view of the same members is to follow."""

    view_id: int
    reason: str


Event: TypeAlias = (
    ConnectionMade
    | ConnectionEnded
    | Lost
    | Received
    | TimerFired
    | LinksFailed
    | Computed
    | ExchangeEnded
    | Begin
    | Enter
    | Submitted
    | Announce
    | Leave
    | Close
    | ViewBegan
    | RoundsFailed
    | LinkStalled
)


@dataclass(eq=False)
class Outbox:
    """The actions and events that the parts of the machine produce."""

    actions: list[Action] = field(default_factory=list)  # for the owner, in order
    # events that the machine handles before it returns the actions
    queue: deque[Event] = field(default_factory=deque)
    now_s: float = 0.0  # when the current event was received

    def send(self, ranks: Iterable[int], message: WireMessage) -> None:
        """Send a message to each of ``ranks``."""
        self.actions += [SendMessage(rank, message) for rank in ranks]
