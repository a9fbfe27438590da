"""A machine whose events and effects are logged, so that `tests.protocol.replay` can run them again."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Callable, Mapping, Set
from typing import Any

import msgspec

from diloco.protocol.effects import Effects
from diloco.protocol.events import Event, Received
from diloco.protocol.machine import Machine
from diloco.protocol.rules import Rules
from diloco.protocol.wire import Store, Welcome

Write = Callable[[str, Mapping[str, Any]], object]
"""Writes an entry: what has happened, for people, and fields for JSON."""


class LoggedMachine(Machine):
    """A machine that writes what it was made with, and each event with its effects."""

    def __init__(self, rules: Rules, write: Write) -> None:
        super().__init__(rules)
        self._write = write
        write(f"the machine of rank {rules.rank} is made", {"rank": rules.rank, "rules": _plain(vars(rules))})

    def handle(self, now_s: float, event: Event) -> Effects:
        try:
            effects = super().handle(now_s, event)
        except Exception as error:
            self._note(now_s, event, error)
            raise
        self._note(now_s, event, effects)
        return effects

    def _note(self, now_s: float, event: Event, result: Effects | Exception) -> None:
        event = _without_notes(event)
        fields = {"rank": self.rules.rank, "at_s": now_s, "input": _packed(event), "effects": _plain(result)}
        self._write(str(event), fields)


def _without_notes(event: Event) -> Event:
    """Return an event without what the owners of two machines tell each other, which may be secret."""
    match event:
        case Received(sender, Store(key)):
            return Received(sender, Store(key, b""))
        case Received(sender, Welcome(following)):
            return Received(sender, Welcome(following))
    return event


def _packed(event: Event) -> str:
    """Return an event as text that can be read again. JSON has no dictionaries by round."""
    return b64encode(msgspec.msgpack.encode(event, enc_hook=_named)).decode()


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _plain(value: Any) -> Any:
    """Return a value for JSON, without bytes; that of equal values is equal, as sets and dictionaries are sorted."""
    match value:
        case Exception():
            return _named(value)
        case bytes():
            return ""
        case float() if not math.isfinite(value):
            return str(value)
        case Mapping():
            return {str(key): _plain(value[key]) for key in sorted(value, key=str)}
        case Set():
            return [_plain(each) for each in sorted(value)]
        case list() | tuple():
            return [_plain(each) for each in value]
        case Effects():
            return {name: _plain(each) for name, each in vars(value).items() if each}
    names = getattr(value, "__struct_fields__", None) or getattr(value, "__dataclass_fields__", None)
    if not names:
        return value
    return {"kind": type(value).__name__} | {name: _plain(getattr(value, name)) for name in names}
