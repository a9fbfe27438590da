"""What the machine wants done: frozen values, carried out by its owner in the order in which it hands them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from diloco.algorithm.averaging import Contribution, Mean, RoundId, Verdict
from diloco.algorithm.exchange import Exchange
from diloco.algorithm.mean_encoding import Stretch
from diloco.errors import TransportError
from diloco.membership.reports import NextView
from diloco.membership.view import View
from diloco.protocol.registry import Entry

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
    """Names a timer."""

    # ``expire``: a round has taken too long, or the votes of others have; ``look``: look who keeps a round waiting;
    # ``renew``: form the view anew, since a payload connection has broken; ``settle``: a change of views has taken too
    # long
    kind: Literal["expire", "look", "renew", "settle"]
    view_id: int  # of the view in which it was set
    round: RoundId | None = None  # None for ``renew`` and ``settle``


@dataclass(frozen=True)
class SendMessage:
    """Send a message to a rank, if it is connected."""

    rank: int
    message: Mapping[str, Any]


@dataclass(frozen=True)
class HangUp:
    """End the connection to a rank; that is no loss."""

    rank: int


@dataclass(frozen=True)
class SetTimer:
    """Let `TimerFired` come after ``delay_s``, unless the timer is cancelled."""

    timer: Timer
    delay_s: float


@dataclass(frozen=True)
class CancelTimer:
    """Forget a timer, whether or not it is set."""

    timer: Timer


@dataclass(frozen=True)
class OpenLinks:
    """Make the payload connections of a view; those of the view before are closed."""

    view: View


@dataclass(frozen=True)
class CloseLinks:
    """End the payload connections of a view, and forget what was needed to make them."""

    view: View


@dataclass(frozen=True, eq=False)
class StartExchange:
    """Move the payloads of a round over the links of ``view``, and wait for the verdict."""

    view: View
    contribution: Contribution
    plan: Exchange


@dataclass(frozen=True)
class GiveVerdict:
    """Tell a round's exchange what to sum."""

    view_id: int
    round: RoundId
    verdict: Verdict
    weights: Mapping[int, float]  # replica -> weight, of all contributors
    # replica -> stretch of values of which it holds what was lost of earlier means, of all members
    residuals: Mapping[int, Stretch]


@dataclass(frozen=True, eq=False, kw_only=True)
class Average(Mean):
    """What a replica gets from a committed round: its mean, bit-identical on every replica, and how the round went."""

    round: RoundId  # which round
    view: View  # who took part
    sent_bytes: int  # payload moved by this replica for this round
    received_bytes: int
    wait_s: float  # how long this replica stood still for it (virtual seconds on an emulated link)
    note: str = ""  # who was left out of the mean, or whose messages were refused, and why; empty when all was well
    # of each contributor, how many seconds after the first one this replica heard of it; empty where that is not known
    late_s: tuple[float, ...] = ()
    # None: the average applies to the state that this replica holds. Else this replica is still taking over the
    # fragment's state, which that one holds, and its own contribution did not count.
    donor: int | None = None
    held: str = ""  # digest of that state


@dataclass(frozen=True, eq=False)
class Commit:
    """A round is applied by all: this rank gets ``average``."""

    average: Average


@dataclass(frozen=True)
class Void:
    """Nobody applies a round: this rank gets ``failure``."""

    round: RoundId
    failure: TransportError


@dataclass(frozen=True)
class Adopt:
    """A view was adopted: tell the owner, and send ``welcome`` with the owner's note to those who join."""

    following: NextView  # what was adopted
    reason: str  # why, with what happened as this rank heard it
    joined: tuple[int, ...]  # ranks that join
    welcome: Mapping[str, Any]  # what they are told, but for the note


@dataclass(frozen=True)
class Register:
    """A rank that asks to join says where it listens."""

    entry: Entry


@dataclass(frozen=True)
class Introduce:
    """Somebody can't open a connection to this rank: open one to it."""

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
