"""Requests for payload links, and an open link together with the tasks that belong to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from diloco.transport.connections.reliable_link import ReliableLink
from diloco.transport.connections.streams import Stream

__all__ = ["LinkRequest", "OpenLink", "OpenedLink", "Route"]


@dataclass(frozen=True)
class LinkRequest:
    """A link that two ranks are to open, each from its own side."""

    key: str  # name of this link and this attempt, the same on both sides
    rank: int  # the other rank
    first: bool  # whether this rank is the lower one
    streams: int  # number of connections
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
    offer: Any = None  # direct streams that the other end offers
    first: list[Stream] = field(default_factory=list)  # a connection that is already open


@dataclass(eq=False)
class OpenedLink:
    """A link, and the tasks that maintain its connections."""

    request: LinkRequest
    route: Route
    link: ReliableLink
    keeping: list[asyncio.Task[None]] = field(default_factory=list)  # one for each connection that this end opens
    watching: asyncio.Task[None] | None = None  # forgets the link when it ends

    @property
    def dials(self) -> bool:
        """Whether this end opens the connections."""
        return self.request.first if self.route.dials is None else self.route.dials
