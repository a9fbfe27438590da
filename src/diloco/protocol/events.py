"""What happens to a machine: what its connections, timers and owner tell it. Events are values, so they can be logged.

They hold no payloads: the machine gets headers of contributions, and digests of means.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from diloco.algorithm import RoundId
from diloco.errors import TransportError
from diloco.membership import Cause, NextView, View
from diloco.protocol.wire import Announcement, FactsMessage, Header, Join, Message, SiteMessage

Timer = RoundId | None
"""The round at which to look; ``None``: the change to the next view, or that an order to eject somebody has arrived.

No timer outlives its view."""


class Event(Struct, frozen=True, tag=True):
    """Something that happens to a machine."""


# From the network.


class Connected(Event, frozen=True):
    """A control connection is open; it replaces an earlier one to the same rank."""

    rank: int
    connection: int  # its number
    address: str  # on which the rank listens
    process: str = ""  # the name that the other process has given itself; "": unknown


class Disconnected(Event, frozen=True):
    """A control connection has ended; the reason is still unknown."""

    rank: int


class RankLost(Event, frozen=True):
    """The reason is known for which the connection to a rank has ended."""

    rank: int
    why: str
    cause: Cause  # "ended": nothing listens there any more


class Received(Event, frozen=True):
    """A control message has arrived, which may be a mere heartbeat."""

    sender: int
    message: Message


class BeatDue(Event, frozen=True):
    """This process sends a heartbeat, and looks from whom it has received none."""


class TimerFired(Event, frozen=True):
    timer: Timer


# From this rank's owner.


class Begun(Event, frozen=True):
    """The control connections are open."""

    view: View  # the first view
    member: bool  # whether this rank is a member of it; otherwise it observes until it enters one


class Entered(Event, frozen=True):
    """This rank becomes a member of the view that a welcome names."""

    following: NextView
    connections: Mapping[int, int]  # those of `Answer`


class ClosedToJoiners(Event, frozen=True):
    """No replica can join for now, for the reason ``why``; "": any can again."""

    why: str


class PresumedGone(Event, frozen=True):
    """Replicas that others left out seem to have ended."""

    replicas: frozenset[int]


class Announced(Event, frozen=True):
    """A message goes out in this rank's name, to whom it concerns."""

    message: Announcement | SiteMessage | FactsMessage | Join


class Stepped(Event, frozen=True):
    """This rank has begun to synchronise so many inner steps."""

    step: int


class Submitted(Event, frozen=True):
    """This rank contributes to a round."""

    header: Header  # without what the machine knows itself: the view, and whether the state is still being adopted
    step: int  # the inner step at which it was sent
    sent_s: float
    # how much of the time since then went into view changes, during which the round made no progress
    paused_s: float = 0.0


class Computed(Event, frozen=True):
    """This rank holds the mean of a round; ``digest`` covers everything that it would change."""

    view_id: int
    round: RoundId
    digest: str


class Exchanged(Event, frozen=True):
    """The exchange of a round's payloads has ended."""

    view_id: int
    round: RoundId
    failure: str = ""  # why there is no mean; "" if there is one, or if the round is void
    peer_lost: bool = False  # whether it failed with a connection, whose loss ends the view
    spoiler: int | None = None  # the replica whose values this rank has found to be at fault, or None


class Ejected(Event, frozen=True):
    """These replicas are to be members no more."""

    replicas: frozenset[int]
    by: int | None  # the rank that told this one; None: no rank did. This one has told the others
    why: str


class Left(Event, frozen=True):
    """This replica leaves for good, with all its ranks."""

    if_waiting: bool = False  # only once a view change waits for members, as this rank takes no more steps


class Yielded(Event, frozen=True):
    """This rank hangs up on all others, and takes part in no more rounds for the reason ``why``."""

    why: str


class Closed(Event, frozen=True):
    """This rank takes part in no more rounds; those in flight end with ``failure``."""

    failure: TransportError
