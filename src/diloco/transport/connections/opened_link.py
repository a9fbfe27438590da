"""How payload links are asked for; one with what keeps its connections, and what it shows of its way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco.transport.connections.path import PathEstimate, PathSample
from diloco.transport.connections.payload_connection import PayloadConnection
from diloco.transport.connections.reliable_link import ReliableLink
from diloco.transport.connections.streams import Stream
from diloco.transport.tcp import Counters
from diloco.units import format_rate

__all__ = ["LinkRequest", "OpenLink", "OpenedLink", "Route"]


@dataclass(frozen=True)
class LinkRequest:
    """A link that two ranks are to open, each from its side."""

    key: str  # names this link and this attempt, alike on both sides
    rank: int  # the other one
    first: bool  # whether I am the one of the lower rank
    streams: int  # connections that this end would open
    chosen: bool  # whether the user chose their number
    timeout_s: float  # the longest to wait for the other one


OpenLink = Callable[[LinkRequest], ReliableLink]
"""Opens a link, in a thread of its own; `TransportError` if it does not come to be, and nothing stays open then."""


@dataclass(frozen=True)
class Route:
    """What carries a link's connections."""

    name: str  # in words
    single: bool = False  # whether more than one connection is of no use
    dials: bool | None = None  # whether this end opens them; None: the end of the lower rank does
    offer: object = None  # of direct streams, by the other end
    first: list[Stream] = field(default_factory=list)  # a connection that stands already


@dataclass(eq=False)
class OpenedLink:
    """A link, what keeps its connections, and what they show of its way."""

    request: LinkRequest  # how it was opened
    route: Route
    link: ReliableLink
    path: PathEstimate = field(default_factory=PathEstimate)  # the estimate of its way
    # what the kernel had told of each connection when it was last asked
    counted: dict[PayloadConnection, Counters] = field(default_factory=dict)
    acknowledged_bytes: int = 0  # of the link, then
    was_active: bool = False  # whether it was in use, then
    told: int = 0  # connections that the other side was told to open
    # tasks, one for each connection that this end opens
    keeping: list[asyncio.Task[None]] = field(default_factory=list)
    watching: asyncio.Task[None] | None = None  # notices its end

    @property
    def dials(self) -> bool:
        return self.request.first if self.route.dials is None else self.route.dials

    def observe(self, interval_s: float) -> PathSample:
        """What the link did since this was last called, so long ago."""
        found: dict[PayloadConnection, Counters] = {}
        pairs: list[tuple[Counters, Counters]] = []
        for each in self.link.connections.values():
            if (told := each.counters()) is None:
                continue
            before = self.counted.get(each, told)
            found[each] = now = told.after(before)
            pairs.append((before, now))
            each.keep_pace((now.acknowledged_bytes - before.acknowledged_bytes) / interval_s)
            each.notice(now.paced_bits_per_s)
        acknowledged = sum(now.acknowledged_bytes - before.acknowledged_bytes for before, now in pairs)
        if not pairs:  # the kernel does not tell
            acknowledged = self.link.acknowledged_bytes - self.acknowledged_bytes
        moving = [now for before, now in pairs if now.acknowledged_bytes > before.acknowledged_bytes]
        sample = PathSample(
            interval_s,
            acknowledged,
            sum(now.sent_segments - before.sent_segments for before, now in pairs),
            sum(now.resent_segments - before.resent_segments for before, now in pairs),
            sum(now.round_trip_s for now in moving) / len(moving) if moving else 0.0,
            min((now.least_round_trip_s for now in moving), default=0.0),
            busy=self.was_active and self.link.active,
        )
        self.was_active = self.link.active
        self.counted, self.acknowledged_bytes = found, self.link.acknowledged_bytes
        self.path.observe(sample)
        if not self.link.active:
            self.path.end_burst()
        return sample

    def describe(self, bits_per_s: float) -> None:
        """Say what carries the link, as far as this end decides it.

        Args:
            bits_per_s: at which payloads leave for all replicas; 0: they are not held back.
        """
        count = len(self.keeping)
        number = f", {count} connection{'s' if count > 1 else ''}" if count else ""
        pace = f"; what leaves for all replicas is held back to {format_rate(bits_per_s)}" if bits_per_s else ""
        self.link.words = f"{self.route.name}{number}{pace}"
