"""A machine whose events and effects are logged, so that `tests.protocol.replay` can run them again."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping

import msgspec

from diloco.protocol.effects import Effects
from diloco.protocol.events import Event
from diloco.protocol.machine import Machine
from diloco.protocol.rules import Rules

Write = Callable[[str, Mapping[str, object]], object]
"""Writes an entry: what has happened, for people, and fields for JSON."""


class LoggedMachine(Machine):
    """A machine that writes what it was made with, and each event with its effects."""

    def __init__(self, rules: Rules, write: Write) -> None:
        super().__init__(rules)
        self._write = write
        write(f"the machine of rank {rules.rank} is made", {"rank": rules.rank, "rules": vars(rules)})

    def handle(self, now_s: float, event: Event) -> Effects:
        try:
            effects = super().handle(now_s, event)
        except Exception as error:
            self._note(now_s, event, repr(error))
            raise
        self._note(now_s, event, str({name: effect for name, effect in vars(effects).items() if effect}))
        return effects

    def _note(self, now_s: float, event: Event, effects: str) -> None:
        # an event as text for people can't be read again, and JSON has no dictionaries by round
        packed = b64encode(msgspec.msgpack.encode(event, enc_hook=repr)).decode()
        self._write(str(event), {"rank": self.rules.rank, "at_s": now_s, "input": packed, "effects": effects})
