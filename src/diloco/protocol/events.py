"""What happens to a rank: frozen values, all that the machine is ever told.

A connection is named by a number of its own: whoever takes a rank's place comes over another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from diloco.algorithm.averaging import Contribution, Mean, RoundId
from diloco.errors import TransportError
from diloco.membership.reports import NextView, Report
from diloco.membership.view import View
from diloco.protocol.actions import Action, SendMessage, Timer
from diloco.protocol.failure_detector import Loss

__all__ = [
    "Begin",
    "Close",
    "Computed",
    "ConnectionEnded",
    "ConnectionMade",
    "Enter",
    "Event",
    "ExchangeEnded",
    "HandedIn",
    "Leave",
    "LinksFailed",
    "Lost",
    "Outbox",
    "Received",
    "Say",
    "Spoilt",
    "TimerFired",
    "ViewBegan",
]


# Events: from the network.


@dataclass(frozen=True)
class ConnectionMade:
    """A control connection stands; it replaces the one to the same rank, if there is one."""

    rank: int
    connection: int
    address: str


@dataclass(frozen=True)
class ConnectionEnded:
    """A control connection has ended; why is being found out."""

    rank: int


@dataclass(frozen=True)
class Lost:
    """Why the connection to a rank has ended, or was given up."""

    rank: int
    loss: Loss


@dataclass(frozen=True)
class Received:
    """A control message came in, also one that is but a sign of life: JSON, which takes ``num_bytes``, and a blob."""

    sender: int
    message: Mapping[str, Any]
    blob: bytes = b""
    num_bytes: int = 0


@dataclass(frozen=True)
class TimerFired:
    """A timer that was set has run out."""

    timer: Timer


@dataclass(frozen=True)
class LinksFailed:
    """Payload connections of a view to some replicas could not be made."""

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
    """The payloads of a round move no more."""

    view_id: int
    round: RoundId
    failure: str = ""  # why the exchange came to no mean; "" where it did, or where the round is void
    link_broken: bool = False  # whether it failed because a payload connection ended
    spoiler: int | None = None  # the replica whose values are at fault, as this rank has seen; None: nobody's


# Events: from this rank's owner.


@dataclass(frozen=True)
class Begin:
    """The control connections stand."""

    view: View  # the first one
    member: bool  # whether this rank is a member of it; else it looks on until it enters
    closed: str = ""  # why nobody can join for now; "" where all can


@dataclass(frozen=True)
class Enter:
    """Become a member of the view that a welcome names; ``connections``: rank -> connection, when the welcome came."""

    following: NextView
    connections: Mapping[int, int]


@dataclass(frozen=True, eq=False)
class HandedIn:
    """A contribution."""

    contribution: Contribution  # its tensors on the CPU
    step: int  # the inner step at which it was sent
    sent_s: float
    # how much of the time since then the members have been changing, so that its round stood still
    paused_s: float = 0.0


@dataclass(frozen=True)
class Say:
    """Say to the others what they would hear as this message: ``meet``, ``facts``, ``speed`` or ``join``."""

    message: Mapping[str, Any]


@dataclass(frozen=True)
class Leave:
    """Leave for good; the others go on."""


@dataclass(frozen=True)
class Close:
    """Take part no more; whoever waits for a round gets ``failure``."""

    failure: TransportError


@dataclass(frozen=True)
class ViewBegan:
    """The machine tells itself that a view has begun."""

    following: NextView | None = None  # None: it is the first one
    mine: Report | None = None  # what was known of the end of the view before; None: this rank was no member of that


@dataclass(frozen=True)
class Spoilt:
    """The machine tells itself that replicas have spoilt too many rounds of a view, or somebody one; why, in words."""

    view_id: int
    replicas: frozenset[int]
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
    | HandedIn
    | Say
    | Leave
    | Close
    | ViewBegan
    | Spoilt
)


@dataclass(eq=False)
class Outbox:
    """Where the parts of the machine leave what they want done."""

    actions: list[Action] = field(default_factory=list)  # for the shell, in order
    # events that the machine is still to handle, before it hands out the actions
    queue: deque[Event] = field(default_factory=deque)
    now_s: float = 0.0  # when the event came that is being handled

    def send(self, ranks: Iterable[int], message: Mapping[str, Any]) -> None:
        """Send a message to each of ``ranks``."""
        self.actions += [SendMessage(rank, message) for rank in ranks]
