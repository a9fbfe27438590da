"""The only parser of JSON from other processes: a value is valid, or an error says what is wrong with it.

No input raises anything but `ValueError` in `json_object` and `MessageError` in `Fields`, and what is kept is bounded:
`json_object` bounds the depth and the number of values, and `Fields` the range of each of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from diloco.membership import MOST_ROUNDS
from diloco.units import visible

__all__ = [
    "GREATEST",
    "LEAST_FRAGMENT",
    "MOST_DIGEST",
    "MOST_RANK",
    "Fields",
    "MessageError",
    "json_object",
    "room_bytes",
]

GREATEST = 1 << 53
"""The upper bound of every step, size and count; JSON numbers are exact up to it."""

LEAST_FRAGMENT = -3
"""The least fragment number. Fragments below 0 are gradients: -1, and less for further attempts after a void round."""

MOST_RANK = (1 << 31) - 1
"""The greatest number of a rank or a replica."""

MOST_DIGEST = 256
"""The most characters of a digest."""

_MOST_ITEMS = 1 << 16
_MOST_DIGITS = 64
_MOST_FLOAT = 1.7e308
_MOST_CHARACTERS, _MOST_TEXTS = 1 << 12, 1 << 8
_MOST_WORDS = 500
_MOST_DEPTH = 32
_MOST_CONTAINERS = 1 << 14
_MESSAGE_BYTES, _VALUE_BYTES = 512, 72


class MessageError(ValueError):
    """A message does not conform to the protocol. Its sender is at fault, unlike for any other error."""


def json_object(data: bytes) -> dict[str, Any]:
    """Parse the JSON object in ``data``, whose size the caller has bounded.

    Raises:
        ValueError: ``data`` is not a JSON object, is nested too deeply, or holds a number that is not finite or a
            string that is not valid text.

    >>> json_object(b'{"kind": "beat"}')
    {'kind': 'beat'}
    >>> json_object(b'{"speed": 1e400}')
    Traceback (most recent call last):
        ...
    ValueError: the number 1e400 is not finite
    """
    text = data.decode()
    if text.count("[") + text.count("{") > _MOST_CONTAINERS:
        raise ValueError(f"the JSON has more than {_MOST_CONTAINERS} lists and objects")
    try:
        found = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("the JSON is not an object")
    level: list[Any] = [found]
    for _ in range(_MOST_DEPTH):
        inner = (value for each in level for value in (each.values() if isinstance(each, dict) else each))
        level = [value for value in inner if isinstance(value, dict | list)]
    if level:
        raise ValueError(f"the JSON is nested more than {_MOST_DEPTH} levels deep")
    if "\\ud" in text or "\\uD" in text:  # an unpaired surrogate, which is no valid text
        json.dumps(found, ensure_ascii=False).encode()
    return found


def room_bytes(data: bytes) -> int:
    """Return an upper bound on the memory of the parsed JSON in ``data``, which also measures the time to parse it.

    A number, a short string or an empty list takes many times more than its characters.

    >>> room_bytes(b'{"a": [1, 2]}')
    813
    """
    values = sum(data.count(mark) for mark in (b",", b":", b"[", b"{"))
    widest = 4 if b"\\u" in data or not data.isascii() else 1  # bytes of a character in a string that has others
    return _MESSAGE_BYTES + widest * len(data) + _VALUE_BYTES * values


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
    diloco.protocol.fields.MessageError: field 'step' must be an integer from 0 to 9007199254740992, got True
    """

    def __init__(self, message: Mapping[str, Any]) -> None:
        self._message = message

    def integer(self, name: str, least: int = 0, greatest: int = GREATEST) -> int:
        """Return an integer from ``least`` to ``greatest``."""
        return _integer(name, self._of(name), least, greatest)

    def optional_integer(self, name: str, greatest: int) -> int | None:
        """Return an integer from 0 to ``greatest``, or None."""
        return None if self._of(name) is None else self.integer(name, 0, greatest)

    def rank(self, name: str, least: int = 0) -> int:
        """Return the number of a rank or a replica, at least ``least``, which may be -1 for none."""
        return self.integer(name, least, MOST_RANK)

    def ranks(self, name: str) -> tuple[int, ...]:
        """Return a list of rank or replica numbers."""
        return self.integers(name, 0, MOST_RANK)

    def text(self, name: str, most: int = _MOST_CHARACTERS) -> str:
        """Return a string of at most ``most`` characters, which is to be compared and not to be shown."""
        return _text(name, self._of(name), most)

    def printable(self, name: str, most: int = 64) -> str:
        """Return a printable string of at most ``most`` characters, such as a name or an address."""
        value = self.text(name, most)
        if not value.isprintable():
            raise _wrong(name, value, "a printable string")
        return value

    def words(self, name: str) -> str:
        """Return a message for users, made printable and truncated."""
        value = self._of(name)
        if not isinstance(value, str):
            raise _wrong(name, value, "a string")
        return visible(value, _MOST_WORDS)

    def texts(self, name: str) -> dict[str, str]:
        """Return an object of at most 256 strings."""
        value = self._of(name)
        if not isinstance(value, dict) or len(value) > _MOST_TEXTS:
            raise _wrong(name, value, f"an object of at most {_MOST_TEXTS} strings")
        return {_text(name, key, _MOST_CHARACTERS): _text(name, each, _MOST_CHARACTERS) for key, each in value.items()}

    def list_of_texts(self, name: str, most: int) -> tuple[str, ...]:
        """Return the first ``most`` of a list of strings."""
        return tuple(_text(name, each, _MOST_CHARACTERS) for each in _list(name, self._of(name))[:most])

    def list_of_messages(self, name: str) -> list[dict[str, Any]]:
        """Return a list of objects, whose fields are not checked."""
        values = _list(name, self._of(name))
        if wrong := [value for value in values if not isinstance(value, dict)]:
            raise _wrong(name, wrong[0], "a list of objects")
        return values

    def message(self, name: str) -> dict[str, Any]:
        """Return an object, whose fields are not checked."""
        value = self._of(name)
        if not isinstance(value, dict):
            raise _wrong(name, value, "an object")
        return value

    def number(self, name: str, least: float = -math.inf, greatest: float = math.inf) -> float:
        """Return a finite number from ``least`` to ``greatest``."""
        value = self._of(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MOST_FLOAT:
            raise _wrong(name, value, "a finite number")
        if not least <= value <= greatest:
            raise _wrong(name, value, f"a number from {least:g} to {greatest:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        """Return True or False."""
        value = self._of(name)
        if not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
        return value

    def number_in_text(self, name: str) -> float:
        """Return a number that is sent as a string, since JSON has neither NaN nor infinity."""
        value = self.text(name, _MOST_DIGITS)
        try:
            return float(value)
        except ValueError:
            raise _wrong(name, value, "a number in a string") from None

    def integers(self, name: str, least: int = 0, greatest: int = GREATEST) -> tuple[int, ...]:
        """Return a list of integers from ``least`` to ``greatest``."""
        values = _list(name, self._of(name))
        if not _are_integers(values, least, greatest):
            values = [_integer(name, value, least, greatest) for value in values]  # which says what is wrong
        return tuple(values)

    def round(self, name: str) -> tuple[int, int]:
        """Return a fragment and an outer step."""
        return _pair(name, self._of(name), LEAST_FRAGMENT)

    def pairs(self, name: str, least: int = 0) -> frozenset[tuple[int, int]]:
        """Return a list of pairs of integers; ``least`` bounds the first of each."""
        values = _list(name, self._of(name))
        if {*map(type, values)} <= {list} and {*map(len, values)} <= {2}:
            first, second = [value[0] for value in values], [value[1] for value in values]
            if _are_integers(first, least, GREATEST) and _are_integers(second, 0, GREATEST):
                return frozenset(zip(first, second, strict=True))
        return frozenset(_pair(name, value, least) for value in values)  # which says what is wrong

    def digests(self, name: str) -> dict[tuple[int, int], str]:
        """Return a list of ``[fragment, outer step, digest]`` as a mapping by round."""
        values, found = _list(name, self._of(name)), {}
        if len(values) > MOST_ROUNDS:
            raise _wrong(name, values, f"a list of at most {MOST_ROUNDS} items")
        for value in values:
            if len(_list(name, value)) != 3:
                raise _wrong(name, value, "a list of [fragment, outer step, digest]")
            found[_pair(name, value[:2], LEAST_FRAGMENT)] = _text(name, value[2], MOST_DIGEST)
        return found

    def numbered(self, name: str) -> tuple[int, Mapping[str, Any]]:
        """Return an integer and an object."""
        both = _list(name, self._of(name))
        if len(both) != 2 or not isinstance(both[1], dict):
            raise _wrong(name, both, "a list of an integer and an object")
        return _integer(name, both[0], 0, GREATEST), both[1]

    def is_none(self, name: str) -> bool:
        """Return whether the value of a field that must be present is null."""
        return self._of(name) is None

    def _of(self, name: str) -> Any:
        if name not in self._message:
            raise MessageError(f"field {name!r} is missing")
        return self._message[name]


def _wrong(name: str, value: object, expected: str) -> MessageError:
    # Python refuses to print an integer of thousands of digits
    words = "a huge integer" if isinstance(value, int) and abs(value) > 1 << 100 else visible(repr(value), 80)
    return MessageError(f"field {name!r} must be {expected}, got {words}")


def _integer(name: str, value: object, least: int, greatest: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= greatest:
        raise _wrong(name, value, f"an integer from {least} to {greatest}")
    return value


def _are_integers(values: list[Any], least: int, greatest: int) -> bool:
    return not values or ({*map(type, values)} == {int} and least <= min(values) and max(values) <= greatest)


def _text(name: str, value: object, most: int) -> str:
    if not isinstance(value, str) or len(value) > most:
        raise _wrong(name, value, f"a string of at most {most} characters")
    return value


def _list(name: str, value: object) -> list[Any]:
    if not isinstance(value, list) or len(value) > _MOST_ITEMS:
        raise _wrong(name, value, f"a list of at most {_MOST_ITEMS} items")
    return value


def _pair(name: str, value: object, least: int) -> tuple[int, int]:
    both = _list(name, value)
    if len(both) != 2:
        raise _wrong(name, value, "a pair of integers")
    return _integer(name, both[0], least, GREATEST), _integer(name, both[1], 0, GREATEST)
