"""One donor as an asker sees it, and what the two say to each other. No I/O."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any

import xxhash

from diloco.errors import TransportError
from diloco.transport.address import Address
from diloco.transport.peers.state_transfer import Stretch
from diloco.transport.peers.state_wire import Description

__all__ = ["FIRST_PAUSE_S", "GivenUp", "Side", "check_chunk", "request"]

FIRST_PAUSE_S = 0.05


class GivenUp(Exception):
    """A donor that is not asked again."""


class Side:
    """One donor, as the asker sees it.

    Attributes:
        offer: what it holds, if it has said so and not taken it back.
        answered: whether it was heard, or failed to be, since it was last waited for.
        trouble: what went wrong last, or what it waits for.
        given_up: for this fetch.
        failures: in a row.
        asked: blocks that it is to send.
        sent_s: when it last ended a block, or was asked for the first one.
    """

    def __init__(self, replica: int, address: Address) -> None:
        self.replica = replica
        self.address = address
        self.offer: Description | None = None
        self.answered = False
        self.trouble = "nothing was heard of it"
        self.given_up = False
        self.failures = 0
        self.pause_s = FIRST_PAUSE_S
        self.asked: deque[Stretch] = deque()
        self.sent_s = 0.0
        self.task: asyncio.Task[None] | None = None

    def went_well(self) -> None:
        """Something useful came."""
        self.failures, self.pause_s = 0, FIRST_PAUSE_S

    def excuse(self, message: Mapping[str, Any]) -> None:
        """An answer without a state: note why it is to be asked again.

        Raises:
            GivenUp: if it is not.
        """
        reason = str(message.get("reason", f"it answered {message['kind']!r}"))[:500]
        if message["kind"] != "later":
            raise GivenUp(reason)
        self.failures = 0
        self.trouble = reason


def request(
    fragment: int, after: int, snapshot: Description | None = None, stretch: Stretch | None = None
) -> dict[str, Any]:
    """To be told what a donor holds; or for what is missing of a block of its snapshot."""
    asked: dict[str, Any] = {"kind": "fetch", "fragment": fragment, "after": after, "snapshot": ""}
    if snapshot is not None and stretch is not None:
        asked |= {"snapshot": snapshot.digest, "offset": stretch.offset, "size": stretch.missing_bytes}
    return asked


def check_chunk(message: Mapping[str, Any], data: bytes, stretch: Stretch) -> None:
    """Whether these are the next bytes of a block, as they were sent.

    Raises:
        TransportError: if not.
    """
    if message["offset"] != stretch.offset or not 0 < len(data) <= stretch.missing_bytes:
        place = str(message["offset"])[:40]
        raise TransportError(f"{len(data)} bytes at {place} came where {stretch.offset} was due")
    if message["checksum"] != xxhash.xxh3_64_hexdigest(data):
        raise TransportError(f"bytes {stretch.offset} to {stretch.offset + len(data)} were damaged on their way")
