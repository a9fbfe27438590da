"""The actions that the machine requests, as frozen values. Its owner carries them out in the given order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from diloco.algorithm import Contribution, Exchange, Mean, RoundId, Verdict
from diloco.errors import TransportError
from diloco.membership import NextView, View
from diloco.protocol.registry import Entry
from diloco.protocol.wire import WireMessage

__all__ = [
    "Action",
    "Adopt",
    "Average",
    "CancelTimer",
    "CloseLinks",
    "Commit",
    "GiveVerdict",
    "HangUp",
    "Introduce",
    "OpenLinks",
    "Register",
    "SendMessage",
    "SetTimer",
    "StartExchange",
    "Timer",
    "Void",
]


@dataclass(frozen=True)
class Timer:
    """The identity of a timer."""

    # ``expire``: a round, or the votes on it, have taken too long; ``look``: check which replicas keep a round waiting;
    # ``renew``: install a new view, since a payload connection has broken; ``settle``: a view change has taken too long
    kind: Literal["expire", "look", "renew", "settle"]
    view_id: int  # the view in which the timer was set
    round: RoundId | None = None  # None for ``renew`` and ``settle``


@dataclass(frozen=True)
class SendMessage:
    """Send a message to a rank, if it is connected."""

    rank: int
    message: WireMessage


@dataclass(frozen=True)
class HangUp:
    """Close the connection to a rank; this does not count as a loss."""

    rank: int


@dataclass(frozen=True)
class SetTimer:
    """Deliver `TimerFired` after ``delay_s``, unless the timer is cancelled."""

    timer: Timer
    delay_s: float


@dataclass(frozen=True)
class CancelTimer:
    """Cancel a timer, whether or not it is set."""

    timer: Timer


@dataclass(frozen=True)
class OpenLinks:
    """Open the payload connections of a view; those of the previous view are closed."""

    view: View


@dataclass(frozen=True)
class CloseLinks:
    """Close the payload connections of a view, and discard what was needed to open them."""

    view: View


@dataclass(frozen=True, eq=False)
class StartExchange:
    """Exchange the payloads of a round over the links of ``view``, and wait for the verdict."""

    view: View
    contribution: Contribution
    plan: Exchange


@dataclass(frozen=True)
class GiveVerdict:
    """Tell the exchange of a round which contributions to sum."""

    view_id: int
    round: RoundId
    verdict: Verdict
    weights: Mapping[int, float]  # replica -> weight, for all contributors


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


@dataclass(frozen=True, eq=False)
class Commit:
    """A round is applied by every replica: this rank gets ``average``."""

    average: Average


@dataclass(frozen=True)
class Void:
    """A round is applied by no replica: this rank gets ``failure``."""

    round: RoundId
    failure: TransportError


@dataclass(frozen=True)
class Adopt:
    """A view was adopted: notify the owner, and send a `Welcome` with the owner's note to the joining ranks."""

    following: NextView  # what was adopted
    reason: str  # the reason for the change as this rank learned it, and the decision
    joined: tuple[int, ...]  # the ranks that join


@dataclass(frozen=True)
class Register:
    """Record the address of a rank that asks to join."""

    entry: Entry


@dataclass(frozen=True)
class Introduce:
    """Open a connection to a rank that can't open one to this rank."""

    entry: Entry


Action: TypeAlias = (
    SendMessage
    | HangUp
    | SetTimer
    | CancelTimer
    | OpenLinks
    | CloseLinks
    | StartExchange
    | GiveVerdict
    | Commit
    | Void
    | Adopt
    | Register
    | Introduce
)
