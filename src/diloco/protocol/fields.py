"""The one place where JSON of others is read: it is what it should be, or `ValueError` says what it is instead.

Whatever the bytes are, nothing else is raised, and what is kept is bounded: `json_object` bounds depth and number of
values, and `Fields` the range of each of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from diloco.units import visible

__all__ = [
    "GREATEST",
    "LEAST_FRAGMENT",
    "MOST_DIGEST",
    "MOST_RANK",
    "MOST_ROUNDS",
    "Fields",
    "json_object",
    "room_bytes",
]

GREATEST = 1 << 53
"""No step, size or count of anything here is larger; JSON's numbers are exact up to it."""

LEAST_FRAGMENT = -3
"""Fragments below 0 are gradients: -1, and less where a void round of them is tried again."""

MOST_RANK = (1 << 31) - 1
"""The greatest number of a rank or a replica, at whatever door it comes in."""

MOST_DIGEST = 256
"""Characters of a digest."""

MOST_ROUNDS = 4096
"""Rounds that one member can have committed lately: two of each fragment."""

_MOST_ITEMS = 1 << 16
_MOST_VOTES = 1 << 10  # each is to be checked, which takes a tenth of a millisecond
_MOST_DIGITS = 64
_MOST_FLOAT = 1.7e308
_MOST_CHARACTERS, _MOST_TEXTS = 1 << 12, 1 << 8
_MOST_WORDS = 500
_MOST_DEPTH = 32
_MOST_CONTAINERS = 1 << 14
_CONTAINER_BYTES = 64


def json_object(data: bytes) -> dict[str, Any]:
    """The JSON object in ``data``, whose size the caller has bounded.

    Raises:
        ValueError: it is none, is nested too deeply, or holds something that is neither a finite number nor text.

    >>> json_object(b'{"kind": "beat"}')
    {'kind': 'beat'}
    >>> json_object(b'{"speed": 1e400}')
    Traceback (most recent call last):
        ...
    ValueError: the number 1e400 is not finite
    """
    text = data.decode()
    if text.count("[") + text.count("{") > _MOST_CONTAINERS:
        raise ValueError(f"it holds more than {_MOST_CONTAINERS} lists and objects")
    try:
        found = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    level: list[Any] = [found]
    for _ in range(_MOST_DEPTH):
        inner = (value for each in level for value in (each.values() if isinstance(each, dict) else each))
        level = [value for value in inner if isinstance(value, dict | list)]
    if level:
        raise ValueError(f"it is nested more than {_MOST_DEPTH} levels deep")
    if "\\ud" in text or "\\uD" in text:  # half of a pair, which is no text
        json.dumps(found, ensure_ascii=False).encode()
    return found


def room_bytes(data: bytes) -> int:
    """About how much memory the JSON in ``data`` takes once it is read, and how long that takes: an empty list is more
    than two letters."""
    return len(data) + _CONTAINER_BYTES * (data.count(b"[") + data.count(b"{"))


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is not finite")
    return value


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

    def rank(self, name: str, least: int = 0) -> int:
        """The number of a rank or a replica, or ``least``, which may be -1 for none."""
        return self.integer(name, least, MOST_RANK)

    def ranks(self, name: str) -> tuple[int, ...]:
        """A list of numbers of ranks or replicas."""
        return self.integers(name, 0, MOST_RANK)

    def text(self, name: str, most: int = _MOST_CHARACTERS) -> str:
        """A text of at most ``most`` characters, to be compared with others and not to be shown as it is."""
        return _text(name, self._of(name), most)

    def printable(self, name: str, most: int = 64) -> str:
        """A text of at most ``most`` characters that can be shown as it is: a name or an address."""
        value = self.text(name, most)
        if not value.isprintable():
            raise _wrong(name, value, "a text that can be printed")
        return value

    def words(self, name: str) -> str:
        """What the sender says to people: visible and cut, whatever it is."""
        value = self._of(name)
        if not isinstance(value, str):
            raise _wrong(name, value, "a text")
        return visible(value, _MOST_WORDS)

    def texts(self, name: str) -> dict[str, str]:
        """An object of at most 256 texts."""
        value = self._of(name)
        if not isinstance(value, dict) or len(value) > _MOST_TEXTS:
            raise _wrong(name, value, f"an object of at most {_MOST_TEXTS} texts")
        return {_text(name, key, _MOST_CHARACTERS): _text(name, each, _MOST_CHARACTERS) for key, each in value.items()}

    def list_of_texts(self, name: str, most: int) -> tuple[str, ...]:
        """The first ``most`` of a list of texts."""
        return tuple(_text(name, each, _MOST_CHARACTERS) for each in _list(name, self._of(name))[:most])

    def list_of_messages(self, name: str) -> list[dict[str, Any]]:
        """A list of messages, each of which is to be looked into."""
        values = _list(name, self._of(name))
        if wrong := [value for value in values if not isinstance(value, dict)]:
            raise _wrong(name, wrong[0], "a list of messages")
        return values

    def message(self, name: str) -> dict[str, Any]:
        """Another message, which is to be looked into."""
        value = self._of(name)
        if not isinstance(value, dict):
            raise _wrong(name, value, "a message")
        return value

    def number(self, name: str, least: float = -math.inf, greatest: float = math.inf) -> float:
        """A finite number from ``least`` to ``greatest``."""
        value = self._of(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MOST_FLOAT:
            raise _wrong(name, value, "a finite number")
        if not least <= value <= greatest:
            raise _wrong(name, value, f"a number from {least:g} to {greatest:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or False."""
        value = self._of(name)
        if not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
        return value

    def number_in_text(self, name: str) -> float:
        """A number that travels as text, since JSON has neither NaN nor infinity."""
        value = self.text(name, _MOST_DIGITS)
        try:
            return float(value)
        except ValueError:
            raise _wrong(name, value, "a number in a text") from None

    def integers(self, name: str, least: int = 0, greatest: int = GREATEST) -> tuple[int, ...]:
        """A list of integers from ``least`` to ``greatest``."""
        values = _list(name, self._of(name))
        if not _are_integers(values, least, greatest):
            values = [_integer(name, value, least, greatest) for value in values]  # which says what is wrong
        return tuple(values)

    def stretch(self, name: str, greatest: int) -> tuple[int, int]:
        """The start and the end of a part of ``greatest`` things."""
        ends = self.integers(name, 0, greatest)
        if len(ends) != 2 or ends[0] > ends[1]:
            raise _wrong(name, list(ends), f"where a part of {greatest} begins and ends")
        return ends[0], ends[1]

    def round(self, name: str) -> tuple[int, int]:
        """A fragment and an outer step."""
        return _pair(name, self._of(name), LEAST_FRAGMENT)

    def pairs(self, name: str, least: int = 0) -> frozenset[tuple[int, int]]:
        """A list of pairs of integers; ``least`` bounds the first of each."""
        values = _list(name, self._of(name))
        if {*map(type, values)} <= {list} and {*map(len, values)} <= {2}:
            first, second = [value[0] for value in values], [value[1] for value in values]
            if _are_integers(first, least, GREATEST) and _are_integers(second, 0, GREATEST):
                return frozenset(zip(first, second, strict=True))
        return frozenset(_pair(name, value, least) for value in values)  # which says what is wrong

    def digests(self, name: str) -> dict[tuple[int, int], str]:
        """A list of ``[fragment, outer step, digest]``, by round."""
        values, found = _list(name, self._of(name)), {}
        if len(values) > MOST_ROUNDS:
            raise _wrong(name, values, f"a list of at most {MOST_ROUNDS}")
        for value in values:
            if len(_list(name, value)) != 3:
                raise _wrong(name, value, "a list of [fragment, outer step, digest]")
            found[_pair(name, value[:2], LEAST_FRAGMENT)] = _text(name, value[2], MOST_DIGEST)
        return found

    def numbered_texts(self, name: str, greatest: int, most: int) -> list[tuple[int, str]]:
        """A list of ``[integer, text]``, the integers at most ``greatest`` and the texts of ``most`` characters."""
        values = _list(name, self._of(name))
        if wrong := [value for value in values if len(_list(name, value)) != 2]:
            raise _wrong(name, wrong[0], "a list of [integer, text]")
        return [(_integer(name, number, 0, greatest), _text(name, text, most)) for number, text in values]

    def votes(self, name: str, most: int) -> list[tuple[int, tuple[int, int], bool, str, str]]:
        """A list of ``[rank, fragment, outer step, flag, digest, signature]``; signatures have ``most`` characters."""
        values, found = _list(name, self._of(name)), []
        if len(values) > _MOST_VOTES:
            raise _wrong(name, values, f"a list of at most {_MOST_VOTES}")
        for value in values:
            if len(_list(name, value)) != 6 or not isinstance(value[3], bool):
                raise _wrong(name, value, "a list of [rank, fragment, outer step, flag, digest, signature]")
            rank, key = _integer(name, value[0], 0, MOST_RANK), _pair(name, value[1:3], LEAST_FRAGMENT)
            found.append((rank, key, value[3], _text(name, value[4], MOST_DIGEST), _text(name, value[5], most)))
        return found

    def numbered(self, name: str) -> tuple[int, Mapping[str, Any]]:
        """An integer and another message."""
        both = _list(name, self._of(name))
        if len(both) != 2 or not isinstance(both[1], dict):
            raise _wrong(name, both, "an integer and a message")
        return _integer(name, both[0], 0, GREATEST), both[1]

    def is_none(self, name: str) -> bool:
        """Whether the field is there and holds nothing."""
        return self._of(name) is None

    def _of(self, name: str) -> Any:
        if name not in self._message:
            raise ValueError(f"it has no {name!r}")
        return self._message[name]


def _wrong(name: str, value: object, expected: str) -> ValueError:
    # an integer of thousands of digits can't even be printed
    words = "a huge integer" if isinstance(value, int) and abs(value) > 1 << 100 else visible(repr(value), 80)
    return ValueError(f"its {name!r} is {words}, and should be {expected}")


def _integer(name: str, value: object, least: int, greatest: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= greatest:
        raise _wrong(name, value, f"an integer from {least} to {greatest}")
    return value


def _are_integers(values: list[Any], least: int, greatest: int) -> bool:
    return not values or ({*map(type, values)} == {int} and least <= min(values) and max(values) <= greatest)


def _text(name: str, value: object, most: int) -> str:
    if not isinstance(value, str) or len(value) > most:
        raise _wrong(name, value, f"a text of at most {most} characters")
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
