"""A hold-back queue for messages that can't be processed yet, bounded in messages and bytes for each sender."""

from __future__ import annotations

from dataclasses import dataclass

from diloco.protocol.wire import Message, decode, encode

__all__ = ["HeldMessage", "HoldBackQueue"]

_MOST_MESSAGES = 1000  # many times what a rank sends in a view before all have adopted it
_MOST_BYTES, _NON_MEMBER_BYTES = 1 << 22, 1 << 19  # of one sender's messages
_NON_MEMBERS_BYTES = 1 << 22  # of all non-members together, one of which may be about to become a member


@dataclass(frozen=True, eq=False)
class HeldMessage:
    """A message that waits; encoded, as that takes the least memory."""

    sender: int  # the sender's rank
    data: bytes
    connection: int | None  # the connection that it was received on; None: that had ended by then
    from_member: bool  # whether the sender was a member then

    @property
    def message(self) -> Message:
        """The message."""
        message: Message = decode(self.data, Message)
        return message


class HoldBackQueue:
    """Messages in the order of their arrival, held until a view begins."""

    def __init__(self) -> None:
        self._messages: list[HeldMessage] = []

    def keep(self, sender: int, message: Message, connection: int | None, *, from_member: bool) -> bool:
        """Add a message. Return False if its sender has reached its limit.

        All non-members together have a limit, too: their oldest messages are dropped.
        """
        held = HeldMessage(sender, encode(message), connection, from_member)
        earlier = [each for each in self._messages if each.sender == sender]
        most_bytes = _MOST_BYTES if from_member else _NON_MEMBER_BYTES
        if len(earlier) >= _MOST_MESSAGES or sum(len(each.data) for each in earlier) + len(held.data) > most_bytes:
            return False
        self._messages.append(held)
        if not from_member:
            non_members = [each for each in self._messages if not each.from_member]
            excess_bytes = sum(len(each.data) for each in non_members) - _NON_MEMBERS_BYTES
            for oldest in non_members:
                if excess_bytes <= 0:
                    break
                self._messages.remove(oldest)
                excess_bytes -= len(oldest.data)
        return True

    def release(self) -> list[HeldMessage]:
        """Return all messages, and empty the queue."""
        messages, self._messages = self._messages, []
        return messages
