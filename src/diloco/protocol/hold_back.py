"""A hold-back queue for messages that can't be processed yet, bounded in messages and bytes for each sender."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["HeldMessage", "HoldBackQueue"]

_MOST_MESSAGES = 1000  # many times what a rank sends in a view before all have adopted it

_MOST_BYTES, _NON_MEMBER_BYTES = 1 << 22, 1 << 19
"""The most memory of one sender's messages: of a member's, and of a non-member's, which may be about to become one."""

_NON_MEMBERS_BYTES = 1 << 22


@dataclass(frozen=True, eq=False)
class HeldMessage:
    """A received message."""

    sender: int  # the sender's rank
    message: Mapping[str, Any]  # the message as received
    connection: int | None  # the connection that it was received on; None: that had ended by then
    num_bytes: int  # its memory, see `room_bytes`
    from_member: bool  # whether the sender was a member then


class HoldBackQueue:
    """Messages in the order of their arrival, held until a view begins."""

    def __init__(self) -> None:
        self._messages: list[HeldMessage] = []

    def keep(self, held: HeldMessage) -> bool:
        """Add a message. Return False if its sender has reached its limit.

        All non-members together have a limit, too: their oldest messages are dropped.
        """
        earlier = [each for each in self._messages if each.sender == held.sender]
        most_bytes = _MOST_BYTES if held.from_member else _NON_MEMBER_BYTES
        if len(earlier) >= _MOST_MESSAGES or sum(each.num_bytes for each in earlier) + held.num_bytes > most_bytes:
            return False
        self._messages.append(held)
        if not held.from_member:
            non_members = [each for each in self._messages if not each.from_member]
            excess_bytes = sum(each.num_bytes for each in non_members) - _NON_MEMBERS_BYTES
            for oldest in non_members:
                if excess_bytes <= 0:
                    break
                self._messages.remove(oldest)
                excess_bytes -= oldest.num_bytes
        return True

    def release(self) -> list[HeldMessage]:
        """Return all messages, and empty the queue."""
        messages, self._messages = self._messages, []
        return messages
