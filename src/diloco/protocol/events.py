"""What goes into the machine and what comes out: events, and the effects of each on connections, timers and rounds.

A connection has a number of its own, since a process that takes a rank's place uses another connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from diloco.algorithm import UNKNOWN_UPLINK, Contribution, Exchange, Mean, RoundId, Uplink, Verdict
from diloco.errors import TransportError
from diloco.membership import NextView, Report, View
from diloco.protocol.registry import Entry
from diloco.protocol.suspicion import Loss
from diloco.protocol.wire import FactsMessage, Join, Meet, Message, Speed, WireMessage


class Event:
    """What the machine handles."""


# Events: from the network.


@dataclass(frozen=True)
class ConnectionMade(Event):
    """A control connection is open; it replaces an earlier one to the same rank."""

    rank: int
    connection: int
    address: str


@dataclass(frozen=True)
class ConnectionEnded(Event):
    """A control connection has ended; the reason is still unknown."""

    rank: int


@dataclass(frozen=True)
class Lost(Event):
    """The reason why the connection to a rank has ended or was dropped."""

    rank: int
    loss: Loss


@dataclass(frozen=True)
class Received(Event):
    """A control message was received, which may be a mere heartbeat."""

    sender: int
    message: Message


@dataclass(frozen=True)
class Timer(Event):
    """A timer, which is also the event that it has run out."""

    # ``expire``: a round, or the votes on it, have taken too long; ``look``: check which replicas keep a round waiting;
    # ``settle``: look at the clock of a view change
    kind: Literal["expire", "look", "settle"]
    view_id: int  # the view in which the timer was set
    round: RoundId | None = None  # None for ``settle``


# Events: from the exchange of a round's payloads.


@dataclass(frozen=True, eq=False)
class Computed(Event):
    """This rank holds the mean of a round; ``digest`` covers everything that the mean would change."""

    view_id: int
    round: RoundId
    mean: Mean
    digest: str


@dataclass(frozen=True)
class ExchangeEnded(Event):
    """The exchange of a round's payloads has ended."""

    view_id: int
    round: RoundId
    failure: str = ""  # why there is no mean; "" if there is one, or if the round is void
    peer_lost: bool = False  # whether it failed with a connection, whose loss ends the view
    spoiler: int | None = None  # the replica whose values this rank has found to be at fault, or None


# Events: from this rank's owner.


@dataclass(frozen=True)
class Begin(Event):
    """The control connections are open, and the machine starts."""

    view: View  # the first view
    member: bool  # whether this rank is a member of the view; otherwise it observes until it enters one
    closed: str = ""  # why no replica can join for now; "" if all can


@dataclass(frozen=True)
class Enter(Event):
    """This rank becomes a member of the view that a welcome names.

    ``connections`` maps each rank to its connection at the time of the welcome.
    """

    following: NextView
    connections: Mapping[int, int]


@dataclass(frozen=True, eq=False)
class Submitted(Event):
    """This rank submits a contribution."""

    contribution: Contribution  # its tensors are on the CPU
    step: int  # the inner step at which it was sent
    sent_s: float
    # how much of the time since then went into view changes, during which the round made no progress
    paused_s: float = 0.0
    uplink: Uplink = UNKNOWN_UPLINK  # what is known about this rank's uplink


@dataclass(frozen=True)
class Announce(Event):
    """This rank is to announce a message."""

    message: Meet | FactsMessage | Speed | Join


@dataclass(frozen=True)
class Eject(Event):
    """Another rank has told this one, which has told the others, that some replicas have to go."""

    replicas: frozenset[int]
    by: int | None  # the rank; None: this one heard of it otherwise
    why: str


@dataclass(frozen=True)
class Leave(Event):
    """This rank leaves for good; the others continue."""


@dataclass(frozen=True)
class Close(Event):
    """This rank no longer takes part; rounds in flight end with ``failure``."""

    failure: TransportError


# Events: from one part of the machine to another.


@dataclass(frozen=True)
class ViewBegan(Event):
    """A view has begun."""

    following: NextView | None = None  # None: the view is the first one
    mine: Report | None = None  # this rank's final report on the previous view; None: it was no member of that


@dataclass(frozen=True)
class RoundsFailed(Event):
    """The view is to end without some replicas, or because a round is disputed."""

    view_id: int
    reason: str
    behind: frozenset[int]  # replicas that keep a round waiting, or spoil rounds
    anyway: bool  # whether the view ends even if the others can't continue


# Effects.


@dataclass(frozen=True, eq=False)
class StartExchange:
    """Exchange the payloads of a round with the members of ``view``, once there is a verdict."""

    view: View
    contribution: Contribution


@dataclass(frozen=True)
class GiveVerdict:
    """Tell the exchange of a round which contributions to sum, and how payloads are exchanged."""

    view_id: int
    round: RoundId
    verdict: Verdict
    weights: Mapping[int, float]  # replica -> weight, for all contributors
    plan: Exchange | None  # None: the round is void


@dataclass(frozen=True, eq=False, kw_only=True)
class Average(Mean):
    """The result of a committed round: its mean, bit-identical on every replica, and how the round went."""

    round: RoundId  # the round
    view: View  # the view whose members took part
    sent_bytes: int  # payload bytes that this replica sent for the round
    received_bytes: int
    wait_s: float  # how long this replica stalled for it (virtual seconds on an emulated link)
    note: str = ""  # why replicas were left out of the mean or messages were refused; "" if nothing was wrong
    # for each contributor, how many seconds after the first one this replica received its contribution; empty if
    # unknown
    late_s: tuple[float, ...] = ()
    # None: the average applies to the state that this replica holds. Otherwise this replica is still adopting the
    # fragment's state, which the donor holds, and its own contribution did not count.
    donor: int | None = None
    held: str = ""  # the digest of the donor's state
    choice: str = ""  # what slow uplinks have changed in the plan of the round, and what that costs; "": nothing


@dataclass(eq=False)
class Effects:
    """What one event causes. The owner carries it out field by field; no effect depends on the success of another."""

    messages: list[tuple[int, WireMessage]] = field(default_factory=list)  # to which rank, if it is connected
    hang_ups: list[int] = field(default_factory=list)  # ranks whose connection to close; that is no loss
    # timer -> after how many seconds to deliver it, in place of an earlier setting; None: not at all
    timers: dict[Timer, float | None] = field(default_factory=dict)
    # rounds that were applied by every replica, with the average, or by none, with the error
    outcomes: list[tuple[RoundId, Average | TransportError]] = field(default_factory=list)
    # views that were adopted, each with the reason as this rank learned it, and the decision; and the ranks that join,
    # to which a `Welcome` with the owner's note goes
    adopted: list[tuple[NextView, str, tuple[int, ...]]] = field(default_factory=list)
    exchanges: list[StartExchange] = field(default_factory=list)
    verdicts: list[GiveVerdict] = field(default_factory=list)
    view: View | None = None  # the view that is active from now on, if it changes: all exchanges of others end
    closed: bool = False  # whether this rank takes part in no more rounds: all exchanges end
    registered: list[Entry] = field(default_factory=list)  # ranks that ask to join, and their addresses
    introduced: list[Entry] = field(default_factory=list)  # ranks to which to open a connection, as they can't


@dataclass(eq=False)
class Outbox:
    """What the parts of the machine produce while it handles an event."""

    effects: Effects = field(default_factory=Effects)
    queue: deque[Event] = field(default_factory=deque)  # events to handle before the effects are returned
    now_s: float = 0.0  # when the current event was received

    def send(self, ranks: Iterable[int], message: WireMessage) -> None:
        """Send a message to each of ``ranks``."""
        self.effects.messages += [(rank, message) for rank in ranks]
