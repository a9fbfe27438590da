"""What comes out of the machine: the effects of an event on connections, timers and rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from diloco.algorithm import Exchange, Mean, RoundId, Uplink, Verdict
from diloco.errors import TransportError
from diloco.membership import Cause, NextView, Report, View
from diloco.protocol.events import Timer
from diloco.protocol.wire import Entry, Refused, Welcome, WireMessage

Answer = tuple[Welcome | Refused, Mapping[int, int]]
"""A message, and rank -> connection at the time when the message was received."""


@dataclass(frozen=True)
class GiveVerdict:
    """Tell the exchange of a round which contributions to sum."""

    view_id: int
    round: RoundId
    verdict: Verdict
    weights: Mapping[int, float]  # replica -> weight, for all contributors
    uplinks: tuple[Uplink, ...]  # of the members, in order, for the plan of the exchange; empty: the round is void


@dataclass(frozen=True, eq=False, kw_only=True)
class Commit:
    """How a round went that every replica applies."""

    round: RoundId
    view: View  # the view whose members took part
    contributors: tuple[int, ...]  # the replicas in the mean, ascending
    note: str = ""  # why replicas were left out of the mean or messages were refused; "" if nothing was wrong
    # for each contributor, how many seconds after the first one this replica received its contribution; empty if
    # unknown
    late_s: tuple[float, ...] = ()
    # None: the average applies to the state that this replica holds. Otherwise this replica is still adopting the
    # fragment's state, which the donor holds, and its own contribution did not count.
    donor: int | None = None
    held: str = ""  # the digest of the donor's state


@dataclass(frozen=True, eq=False, kw_only=True)
class Average(Mean, Commit):
    """The result of a committed round: its mean, bit-identical on every replica, and how the round went."""

    sent_bytes: int  # payload bytes that this replica sent for the round
    received_bytes: int
    choice: str = ""  # what slow uplinks have changed in the plan of the round, and what that costs; "": nothing
    wait_s: float = 0.0  # how long this replica stalled for it (virtual seconds on an emulated link)

    @classmethod
    def of(cls, plan: Exchange, replica: int, *, view: View, **more: Any) -> Self:
        """Return the result of a round that was exchanged by a plan, for a member of its view."""
        index = view.members.index(replica)
        sent_bytes, received_bytes = plan.sent[index], plan.received[index]
        return cls(view=view, sent_bytes=sent_bytes, received_bytes=received_bytes, choice=plan.choice, **more)


@dataclass(eq=False)
class Effects:
    """What one event causes. The owner carries it out field by field, exchanges before verdicts."""

    messages: list[tuple[int, WireMessage]] = field(default_factory=list)  # to which rank, if it is connected
    hang_ups: list[int] = field(default_factory=list)  # ranks whose connection to close; this doesn't count as a loss
    # timer -> after how many seconds to deliver it, in place of an earlier setting; None: not at all
    timers: dict[Timer, float | None] = field(default_factory=dict)
    # rounds that are applied by every replica, each with the mean that it holds, or by none, with the error
    outcomes: list[tuple[RoundId, Commit | TransportError]] = field(default_factory=list)
    # views that were adopted, each with what happened (the reason as this rank learned it, and what has become of the
    # members) and the cause; a `Welcome` with the owner's note goes to the ranks that join
    adopted: list[tuple[NextView, str, Cause]] = field(default_factory=list)
    welcomed: list[int] = field(default_factory=list)  # ranks to which the last `Welcome` goes once more
    # rounds of which to exchange the payloads with the members of a view, once there is a verdict
    exchanges: list[tuple[View, RoundId]] = field(default_factory=list)
    verdicts: list[GiveVerdict] = field(default_factory=list)
    waiting: str = ""  # why the change to the next view waits for members to be back; "": it does not, or there is none
    view: View | None = None  # the view that is active from now on, if it changes: all exchanges of others end
    registered: list[Entry] = field(default_factory=list)  # ranks that ask to join, and their addresses
    introduced: list[Entry] = field(default_factory=list)  # ranks to which to open a connection, as they can't
    answers: list[Answer] = field(default_factory=list)  # to this rank's request to join; no refusal follows a welcome
    silent: list[int] = field(default_factory=list)  # ranks that count as lost by silence
    stalled: bool = False  # this process stood still, so whoever owes it something has time again


@dataclass(frozen=True)
class RoundFailed:
    """The view is to end without those that are ``late``, or as a round is disputed.

    ``anyway``: even if the others may not go on without them; the view change then waits.
    """

    view_id: int
    why: str
    cause: Cause
    late: frozenset[int]
    anyway: bool


@dataclass(frozen=True)
class ViewBegan:
    """A view has begun. ``following`` is how it followed another one; None: nothing is known of one before it.

    ``mine`` is this rank's report on the end of the one before; None: it was not a member of that.
    """

    following: NextView | None = None
    mine: Report | None = None


@dataclass(eq=False)
class Outbox:
    """What the parts of the machine produce during an event."""

    effects: Effects = field(default_factory=Effects)
    queue: deque[RoundFailed | ViewBegan] = field(default_factory=deque)  # for other parts, before the event ends
    now_s: float = 0.0

    def send(self, ranks: Iterable[int], message: WireMessage) -> None:
        self.effects.messages += [(rank, message) for rank in ranks]
