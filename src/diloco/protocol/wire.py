"""The messages between ranks: one typed schema, and the only place where received bytes become values.

A message is an object in MessagePack, whose field ``kind`` names its type. The types hold the bounds of every field, so
what has been decoded is in range. No input raises anything but `MessageError`, and lengths are checked before anything
is allocated. What depends on the state, such as how far ahead a round can be, the machine checks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from diloco.algorithm import UNKNOWN_UPLINK, RoundId, Uplink
from diloco.errors import ConfigurationError
from diloco.events import Site
from diloco.membership import GREATEST, Cause, Count, Digest, NextView, Rank, Ranks, Report, Words
from diloco.units import diff, visible
from diloco.waiting import described

PROTOCOL_VERSION = 26
"""The version of the protocol, raised whenever a replica of the previous version would misread this one's messages."""

_MOST_WORDS = 500
_Values = Annotated[int, Meta(ge=0, le=1 << 48)]


class MessageError(ValueError):
    """A message does not conform to the protocol. Its sender is at fault, unlike for any other error."""


class WireMessage(Struct, tag_field="kind", tag=str.lower, forbid_unknown_fields=True):
    """A message that one process sends to another. Its texts for users are printable."""

    def __post_init__(self) -> None:
        for name in ("reason", "why", "withdrawn", "refused", "waiting"):
            if text := getattr(self, name, ""):
                setattr(self, name, visible(text, _MOST_WORDS))


_ENCODER = msgspec.msgpack.Encoder()


@cache
def _decoder_of(expected: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(described(expected))


def encode(message: object) -> bytes:
    """Return a message, or a part of one, as bytes."""
    return _ENCODER.encode(message)


def decode(data: bytes, expected: Any) -> Any:
    """Return the message in ``data``, whose size the caller has bounded.

    Args:
        data: as `encode` returns it.
        expected: a type of messages, or several as a union.

    Raises:
        MessageError: anything else.

    >>> decode(encode(Excluded(3, "it is\\nlate")), Excluded | Beat)
    Excluded(view=3, reason='it is\\\\nlate')
    >>> decode(encode({"kind": "excluded", "view": -1, "reason": ""}), Excluded)
    Traceback (most recent call last):
        ...
    diloco.protocol.wire.MessageError: Expected `int` >= 0 - at `$.view`
    """
    try:
        return _decoder_of(expected).decode(data)
    except (ValueError, RecursionError) as error:
        raise MessageError(visible(str(error))) from None


# What ranks announce about themselves.

MAX_NAME = 32
"""The most characters of the name of a replica."""

_MOST_KNOWN = 1000
_MOST_ENTRIES = 1 << 12
_MAX_TEXT = 1 << 12
_MAX_FACTS = 1 << 8
_MAX_FACTS_BYTES = 13 << 10  # in all, so that an entry fits into the 16 kB that a stranger may send

_Text = Annotated[str, Meta(max_length=_MAX_TEXT)]
_Swarm = Annotated[str, Meta(max_length=64)]
HeldStep = Annotated[int, Meta(ge=-1, le=GREATEST)]  # the newest step that a rank could resume from; -1 for none
Facts = Annotated[Mapping[_Text, _Text], Meta(max_length=_MAX_FACTS)]
Topic = Literal["stop", "finished", "speed"]


def check_facts(facts: Mapping[str, str]) -> None:
    """Raise `ConfigurationError` for facts that no other rank would take: it would close the connection unread.

    >>> check_facts({"data": "x" * 4097})
    Traceback (most recent call last):
    diloco.errors.ConfigurationError: The fact 'data' has 4097 characters, and at most 4096 can be compared. Give a \
digest of it, such as hashlib.sha256(text.encode()).hexdigest().
    """
    digest = "such as hashlib.sha256(text.encode()).hexdigest()"
    for name, value in facts.items():
        size = max(len(name), len(value))
        if size > _MAX_TEXT:
            raise ConfigurationError(
                f"The fact {visible(name, MAX_NAME)!r} has {size} characters, and at most {_MAX_TEXT} can be compared. "
                f"Give a digest of it, {digest}."
            )
    size = len(encode(facts))
    if len(facts) > _MAX_FACTS or size > _MAX_FACTS_BYTES:
        raise ConfigurationError(
            f"There are {len(facts)} facts of {size} bytes, and at most {_MAX_FACTS} of {_MAX_FACTS_BYTES} bytes can "
            f"be compared. Give one digest of several of them, {digest}."
        )


@dataclass(frozen=True)
class Entry:
    """What a rank announces about itself before step 0."""

    rank: Rank  # the rank r, of replica r // S at position r % S
    # ``HOST:PORT`` of the rank's control port; a host name has at most 253 characters
    address: Annotated[str, Meta(max_length=300)]
    # a hash of the public key that the process proves to have over each connection; "" proves nothing
    key: Annotated[str, Meta(max_length=100)] = ""
    facts: Facts = field(default_factory=dict)  # what must be the same on all ranks: name -> value
    held_step: HeldStep = -1
    # further addresses of the rank, in the network's own format
    places: Annotated[tuple[_Text, ...], Meta(max_length=16)] = ()
    name: Annotated[str, Meta(max_length=MAX_NAME)] = ""  # what people call it

    def __post_init__(self) -> None:
        if not f"{self.address}{self.key}{self.name}".isprintable():
            raise ConfigurationError("the address, the key and the name of a rank must be printable.")
        check_facts(self.facts)

    def diff(self, other: Entry, ranks_per_replica: int = 1) -> str:
        """Return the first difference of the facts of two ranks, the lower one first, or "" if there is none."""
        first, second = sorted((self, other), key=lambda entry: entry.rank)  # the sentence is the same on both
        names = (f"replica {entry.rank // ranks_per_replica} ({entry.address})" for entry in (first, second))
        return diff(first.facts, second.facts, *names)


Table = Annotated[tuple[Entry, ...], Meta(max_length=_MOST_ENTRIES)]


def table_of(entries: Iterable[Entry]) -> Table:
    """Return entries as they are sent, without facts: these take kilobytes, and all registered ranks have the same."""
    return tuple(replace(entry, facts={}) for entry in entries)


def note(known: dict[int, Entry], entry: Entry, keep: Collection[int]) -> None:
    """Record among the ``known`` entries, by rank, where a rank of a run with changing ranks can be reached.

    Of the ranks that are not in ``keep``, only the last one of each key stays, and about a thousand in all.
    """
    others = [rank for rank in known if rank not in keep]
    former = [rank for rank in others if known[rank].key == entry.key]
    for rank in (*former, *others[: max(0, len(others) - _MOST_KNOWN)]):
        known.pop(rank, None)
    known[entry.rank] = entry


# Between any two processes.


class Beat(WireMessage):
    """A heartbeat."""


class GivenUp(WireMessage, tag="given-up"):
    """The sender ends the connection, as it has received nothing for too long."""


class FactsMessage(WireMessage, tag="facts"):
    """The arguments of a rank's training loop."""

    entry: Entry
    answer: bool = False  # whether the receiver has already sent its own


class Join(WireMessage):
    """The sender asks to become a member."""

    entry: Entry
    connected: Ranks = ()  # the ranks to which it is connected


class Welcome(WireMessage):
    """The receiver has become a member."""

    following: NextView
    note: Annotated[bytes, Meta(max_length=1 << 18)] = b""  # from the sender's owner to the receiver's


class Refused(WireMessage):
    """The receiver can't become a member, or take part."""

    reason: Words
    for_good: bool = False  # whether it need not ask again
    waits: bool = False  # whether the sender waits for others itself, so that the receiver can't be a member yet


class Store(WireMessage):
    """A short value for another part of the receiver."""

    key: Annotated[str, Meta(max_length=200)]
    value: Annotated[bytes, Meta(max_length=1 << 16)]


# From and to a process that looks for the members.


class Ask(WireMessage):
    """The sender asks who the members are."""

    entry: Entry
    unreachable: Rank | None = None  # a member that the sender can't reach, and that is to connect to it instead
    # the replicas of the view in which the sender goes on, or of its view that it hears; empty: it looks for one
    members: Ranks = ()
    waits: bool = False  # whether it waits for others


class Members(WireMessage, dict=True):
    """The members, as one of them sees them."""

    known: Table  # of the members and of processes that are about to join
    members: Ranks  # the replicas of the view
    step: Count = 0  # inner steps that the member has begun to synchronise
    swarm: _Swarm = ""  # the swarm's name, chosen by its founder; "": it is none
    founded_step: Count = 0  # step of the checkpoint that the swarm was founded from; 0 for none
    # why these members wait for others to be back, which may have gone on elsewhere; "": they don't wait
    waiting: Words = ""

    def __post_init__(self) -> None:
        if not self.swarm.isprintable() or not self.members:
            raise ValueError("it has no members, or a name that does not print")

    @cached_property
    def entries(self) -> Mapping[int, Entry]:
        return {each.rank: each for each in self.known}


class Looking(WireMessage):
    """The sender is looking for the members, too."""

    number: Rank  # its replica number
    held_step: HeldStep = -1
    founds: bool = True  # whether it may found a view


def choose_founder(looking: Iterable[Looking]) -> int | None:
    """Return the number of the replica that founds the first view, of those that are looking for one; None: none may.

    It is the one with the newest step; of several, the one with the lowest number.

    >>> choose_founder([Looking(2, 150), Looking(1, 100), Looking(0, 150), Looking(3, 200, founds=False)])
    0
    """
    candidates = [(-each.held_step, each.number) for each in looking if each.founds]
    return min(candidates)[1] if candidates else None


class Over(WireMessage):
    """The sender, of this replica, has finished the run."""

    replica: Rank


# Between members.


class Announcement(WireMessage):
    """A number of the sender: the step at which it wants to stop or has finished, or its speed in steps/s."""

    topic: Topic
    value: Annotated[float, Meta(ge=0, le=GREATEST)]


class SiteMessage(WireMessage, tag="site"):
    """How the sender fares with data of its own."""

    site: Site


class Introduce(WireMessage):
    """The receiver should open a connection to a rank that can't open one to it."""

    entry: Entry


class Excluded(WireMessage):
    """The sender's view continues, or has ended, without the receiver, or with another process in its place."""

    view: Count  # the greatest possible if it is any
    reason: Words


class Header(WireMessage):
    """A contribution without its payload."""

    view: Count
    round: RoundId
    numel: Count  # the number of values in the payload
    weight: float  # the weight in the mean
    base_weight: float  # the weight of a full window of the sender
    digest: Digest  # digest of the sender's global parameters and outer state of the fragment
    buffers: _Values | None = None  # number of floating-point buffer values sent with the payload, or None
    integers: _Values | None = None  # number of integer buffer values sent with the payload, or None
    withdrawn: Words = ""  # why the sender withdraws the contribution, or ""
    # whether the sender has joined, and this is its first round of the fragment: neither its digest nor its work counts
    taking_over: bool = False
    # what the sender knows of its uplink, for the plan of the exchange
    uplink: Uplink = UNKNOWN_UPLINK

    @property
    def layout(self) -> tuple[int | None, ...]:
        """See `Contribution`."""
        return self.numel, self.buffers, self.integers


class RoundVote(WireMessage, tag="vote"):
    """The final vote of a member on a round."""

    view: Count
    round: RoundId
    digest: Digest = ""  # of the average that the sender holds and is ready to apply; "": it is against the round
    reason: Words = ""  # why it is against it
    diverged: Ranks = ()  # replicas whose state differs from the majority's

    @property
    def ok(self) -> bool:
        """Whether the sender is for the round."""
        return bool(self.digest)


class Change(WireMessage):
    """A report on the end of a view, and the reason for the change."""

    report: Report
    why: Words
    cause: Cause

    @property
    def view(self) -> int:
        """The view that ends."""
        return self.report.view_id


class Propose(WireMessage):
    """What is to follow a view, by the proposer of a ballot."""

    ballot: Count
    following: NextView
    again: bool = False  # whether it is the proposal of an earlier ballot, which some members may have adopted

    @property
    def view(self) -> int:
        """The view that ends."""
        return self.following.previous.id


class Accept(WireMessage):
    """The sender has accepted the proposal of a ballot."""

    view: Count
    ballot: Count


class Adopted(WireMessage):
    """What followed a view, for a rank that is still in it."""

    following: NextView

    @property
    def view(self) -> int:
        """The view that ended."""
        return self.following.previous.id


class Leaving(WireMessage):
    """The sender's replica leaves after inner step ``step``."""

    view: Count
    step: Count


ViewMessage = Header | RoundVote | Change | Propose | Accept | Adopted | Leaving
"""Messages about a view."""

Message = (
    Beat | GivenUp | FactsMessage | Join | Welcome | Refused | Store | Announcement | SiteMessage | Introduce | Excluded
) | ViewMessage
"""All messages of a control connection."""
