"""Requests for payload links, and an open link together with the tasks and measurements that belong to it."""

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
    """A link that two ranks are to open, each from its own side."""

    key: str  # name of this link and this attempt, the same on both sides
    rank: int  # the other rank
    first: bool  # whether this rank is the lower one
    streams: int  # number of connections that this end would open
    chosen: bool  # whether the user chose that number
    timeout_s: float  # how long to wait for the other side


OpenLink = Callable[[LinkRequest], ReliableLink]
"""Opens a link; blocks, so it runs in a thread of its own. On failure it raises `TransportError`, and leaves nothing
open."""


@dataclass(frozen=True)
class Route:
    """How the connections of a link are made."""

    name: str  # for display
    single: bool = False  # whether a second connection would be useless
    dials: bool | None = None  # whether this end opens the connections; None: the lower rank does
    offer: object = None  # direct streams that the other end offers
    first: list[Stream] = field(default_factory=list)  # a connection that is already open


@dataclass(eq=False)
class OpenedLink:
    """A link, the tasks that maintain its connections, and the measurements of its path."""

    request: LinkRequest
    route: Route
    link: ReliableLink
    path: PathEstimate = field(default_factory=PathEstimate)
    counted: dict[PayloadConnection, Counters] = field(default_factory=dict)  # TCP counters at the last observation
    acknowledged_bytes: int = 0  # of the link, at the last observation
    was_active: bool = False  # whether the link had data in flight at the last observation
    told: int = 0  # number of connections that this end has asked the other side for
    keeping: list[asyncio.Task[None]] = field(default_factory=list)  # one for each connection that this end opens
    watching: asyncio.Task[None] | None = None  # forgets the link when it ends

    @property
    def dials(self) -> bool:
        """Whether this end opens the connections."""
        return self.request.first if self.route.dials is None else self.route.dials

    def observe(self, interval_s: float) -> PathSample:
        """Return what the link did since the last call, ``interval_s`` ago, and adjust its connections accordingly."""
        found: dict[PayloadConnection, Counters] = {}
        pairs: list[tuple[Counters, Counters]] = []
        for each in self.link.connections.values():
            if (told := each.counters()) is None:
                continue
            before = self.counted.get(each, told)
            found[each] = now = told.after(before)
            pairs.append((before, now))
            each.limit_unsent((now.acknowledged_bytes - before.acknowledged_bytes) / interval_s)
            each.probe_if_slow(now.paced_bits_per_s)
        acknowledged = sum(now.acknowledged_bytes - before.acknowledged_bytes for before, now in pairs)
        if not pairs:  # the kernel reports no counters
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
        """Set the description of the link, as far as this end determines it.

        Args:
            bits_per_s: The pacing rate of the payloads for all replicas together; 0: they are not paced.
        """
        count = len(self.keeping)
        number = f", {count} connection{'s' if count > 1 else ''}" if count else ""
        pace = f"; payloads for all replicas are paced to {format_rate(bits_per_s)}" if bits_per_s else ""
        compressed = ", compressed" if self.link.compressed else ""
        self.link.description = f"{self.route.name}{number}{compressed}{pace}"
