"""Looking into messages that anybody may have written: a field is what it should be, or `ValueError` names it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["GREATEST", "Fields"]

GREATEST = 1 << 53
"""No step, size or number of anything here is larger; JSON's numbers are exact up to it."""

_MOST_ITEMS = 1 << 16
_MOST_CHARACTERS = 1 << 16


class Fields:
    """The fields of one message.

    >>> Fields({"step": 3}).integer("step")
    3
    >>> Fields({"step": True}).integer("step")
    Traceback (most recent call last):
        ...
    ValueError: its 'step' is True, and should be an integer from 0 to 9007199254740992
    """

    def __init__(self, message: Mapping[str, Any]) -> None:
        self._message = message

    def integer(self, name: str, least: int = 0, greatest: int = GREATEST) -> int:
        """An integer from ``least`` to ``greatest``."""
        return _integer(name, self._of(name), least, greatest)

    def optional_integer(self, name: str, greatest: int) -> int | None:
        """An integer from 0 to ``greatest``, or None."""
        return None if self._of(name) is None else self.integer(name, 0, greatest)

    def text(self, name: str) -> str:
        """A text of bounded length."""
        return _text(name, self._of(name))

    def flag(self, name: str) -> bool:
        """True or False."""
        value = self._of(name)
        if not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
        return value

    def number_in_text(self, name: str) -> float:
        """A number that travels as text, since JSON has neither NaN nor infinity."""
        value = self.text(name)
        try:
            return float(value)
        except ValueError:
            raise _wrong(name, value, "a number in a text") from None

    def integers(self, name: str, least: int = 0, greatest: int = GREATEST) -> tuple[int, ...]:
        """A list of integers from ``least`` to ``greatest``."""
        return tuple(_integer(name, value, least, greatest) for value in _list(name, self._of(name)))

    def round(self, name: str) -> tuple[int, int]:
        """A fragment and an outer step; fragments below 0 are gradients."""
        return _pair(name, self._of(name), -1)

    def pairs(self, name: str, least: int = 0) -> frozenset[tuple[int, int]]:
        """A list of pairs of integers; ``least`` bounds the first of each."""
        return frozenset(_pair(name, value, least) for value in _list(name, self._of(name)))

    def digests(self, name: str) -> dict[tuple[int, int], str]:
        """A list of ``[fragment, outer step, digest]``, by round."""
        return dict(self._digests(name))

    def numbered(self, name: str) -> tuple[int, Mapping[str, Any]]:
        """An integer and another message."""
        both = _list(name, self._of(name))
        if len(both) != 2 or not isinstance(both[1], dict):
            raise _wrong(name, both, "an integer and a message")
        return _integer(name, both[0], 0, GREATEST), both[1]

    def is_none(self, name: str) -> bool:
        """Whether the field is there and holds nothing."""
        return self._of(name) is None

    def _digests(self, name: str) -> Iterator[tuple[tuple[int, int], str]]:
        for value in _list(name, self._of(name)):
            if len(_list(name, value)) != 3:
                raise _wrong(name, value, "a list of [fragment, outer step, digest]")
            yield _pair(name, value[:2], -1), _text(name, value[2])

    def _of(self, name: str) -> Any:
        if name not in self._message:
            raise ValueError(f"it has no {name!r}")
        return self._message[name]


def _wrong(name: str, value: object, expected: str) -> ValueError:
    # an integer of thousands of digits can't even be printed
    words = "a huge integer" if isinstance(value, int) and abs(value) > 1 << 100 else f"{value!r:.80}"
    return ValueError(f"its {name!r} is {words}, and should be {expected}")


def _integer(name: str, value: object, least: int, greatest: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= greatest:
        raise _wrong(name, value, f"an integer from {least} to {greatest}")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or len(value) > _MOST_CHARACTERS:
        raise _wrong(name, value, f"a text of at most {_MOST_CHARACTERS} characters")
    return value


def _list(name: str, value: object) -> list[Any]:
    if not isinstance(value, list) or len(value) > _MOST_ITEMS:
        raise _wrong(name, value, f"a list of at most {_MOST_ITEMS}")
    return value


def _pair(name: str, value: object, least: int) -> tuple[int, int]:
    both = _list(name, value)
    if len(both) != 2:
        raise _wrong(name, value, "a pair of integers")
    return _integer(name, both[0], least, GREATEST), _integer(name, both[1], 0, GREATEST)
