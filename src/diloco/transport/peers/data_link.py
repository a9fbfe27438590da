"""What rounds need of the way for payloads between two ranks, whatever carries them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

__all__ = ["DataLink", "LinkRequest", "OpenLink", "Work"]


class Work(Protocol):
    """A message on its way."""

    def wait(self) -> None:
        """Return when it is sent, or has come.

        Raises:
            TransportError: if the connection ended before.
        """


class DataLink(Protocol):
    """The way for payloads to one other rank. Messages of one tag arrive in the order sent."""

    def send(self, values: Tensor, tag: int) -> Work:
        """Start sending a contiguous CPU tensor; it must stay as it is until the work is done.

        Raises:
            TransportError: if the connection has ended.
        """

    def receive(self, values: Tensor, tag: int) -> Work:
        """Start receiving into a contiguous CPU tensor what the peer sends with the same tag.

        Raises:
            TransportError: if the connection has ended.
        """

    @property
    def words(self) -> str:
        """What carries it, for people."""

    def close(self) -> None:
        """End the connections; whoever waits on them gets an error at once."""


@dataclass(frozen=True)
class LinkRequest:
    """A link that two ranks are to open, each from its side."""

    key: str  # names this link and this attempt, alike on both sides
    rank: int  # the other one
    first: bool  # whether I am the one of the lower rank
    streams: int  # connections that this end would open
    chosen: bool  # whether the user chose their number
    timeout_s: float  # the longest to wait for the other one


OpenLink = Callable[[LinkRequest], DataLink]
"""Opens a link, in a thread of its own; `TransportError` if it does not come to be, and nothing stays open then."""
