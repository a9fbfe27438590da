"""Messages that can't be read yet, with a bound in messages and bytes for each sender."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["HeldMessage", "HoldBackQueue"]

_MOST_MESSAGES = 1000  # many times what a rank sends in a view before all have adopted it

_MOST_BYTES, _NON_MEMBER_BYTES = 1 << 20, 1 << 17
"""Of the JSON of one sender: a member, and one that may be about to become a member."""

_NON_MEMBERS_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class HeldMessage:
    """A message that was received."""

    sender: int  # its rank
    message: Mapping[str, Any]  # as it came
    connection: int | None  # over which it came; None: that had ended by then
    num_bytes: int  # that its JSON takes, see `room_bytes`
    from_member: bool  # whether its sender was a member then


class HoldBackQueue:
    """Hold-back queue: messages in the order in which they came, until a view begins."""

    def __init__(self) -> None:
        self._letters: list[HeldMessage] = []

    def keep(self, letter: HeldMessage) -> bool:
        """Keep a message; False if its sender has too many here already.

        What ranks that are no members have here is bounded all in all, too: the oldest of it is dropped.
        """
        there = [each for each in self._letters if each.sender == letter.sender]
        most_bytes = _MOST_BYTES if letter.from_member else _NON_MEMBER_BYTES
        if len(there) >= _MOST_MESSAGES or sum(each.num_bytes for each in there) + letter.num_bytes > most_bytes:
            return False
        self._letters.append(letter)
        if not letter.from_member:
            strangers = [each for each in self._letters if not each.from_member]
            excess_bytes = sum(each.num_bytes for each in strangers) - _NON_MEMBERS_BYTES
            for oldest in strangers:
                if excess_bytes <= 0:
                    break
                self._letters.remove(oldest)
                excess_bytes -= oldest.num_bytes
        return True

    def release(self) -> list[HeldMessage]:
        """All messages; none is here afterwards."""
        letters, self._letters = self._letters, []
        return letters
