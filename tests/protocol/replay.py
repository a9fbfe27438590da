"""Runs logged events again: ``python -m tests.protocol.replay FILE`` prints the first effect that differs, by rank.

FILE has what ``diloco --debug train --log json`` wrote to standard error, of any number of ranks.
"""

import ast
import contextlib
import functools
import json
import operator
import re
import sys
from base64 import b64decode
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from diloco import errors
from diloco.protocol import Event, LoggedMachine, Rules

_ELEMENT = re.compile(r"RoundId\([^()]*\)|-?\d+")
_EVENTS: Any = functools.reduce(operator.or_, Event.__subclasses__())


class _Again:
    """The machine of one rank, made again."""

    def __init__(self, rules: dict[str, Any]) -> None:
        self.number = 0  # of the events that had the same effects
        self._entries: list[Any] = []
        self._machine = LoggedMachine(Rules(**rules), lambda words, fields: self._entries.append(fields))

    def differs(self, line: dict[str, Any]) -> str:
        """Run an event again; return how its effects differ from those that were logged, or ""."""
        event = _event(line["input"])
        with contextlib.suppress(Exception):  # it is an effect, too
            self._machine.handle(line["at_s"], event)
        then, now = line["effects"], self._entries[-1]["effects"]
        if _sorted(then) == _sorted(now):
            self.number += 1
            return ""
        return f"event {self.number + 1}, {line['message']}\n  then: {then}\n  now:  {now}"


def _sorted(text: str) -> str:
    """Return effects with the elements of each set in order."""
    return re.sub(r"frozenset\(\{([^{}]*)\}\)", lambda found: str(sorted(_ELEMENT.findall(found[1]))), text)


def replay(lines: Iterable[str]) -> dict[int, int | str]:
    """Return, by rank, the number of events that had the same effects, or how those of the first other one differ.

    A rank that loses the others and rejoins makes another machine. Lines about anything else are skipped.
    """
    ranks: dict[int, _Again] = {}
    found: dict[int, int | str] = {}
    for number, line in enumerate(lines, 1):
        try:
            _take(json.loads(line) if line.startswith("{") else {}, ranks, found)
        except Exception as error:  # of many types, as any part of the line may be damaged
            words = f"Line {number} is damaged, or of another version: {error!r}"
            raise SystemExit(f"{words}. Remove it, and the others run.") from error
    return found


def _take(fields: dict[str, Any], ranks: dict[int, _Again], found: dict[int, int | str]) -> None:
    """Run the event of a line again, if it has one."""
    rank: Any = fields.get("rank")
    if "rules" in fields:
        ranks[rank] = _Again(fields["rules"])
        found.setdefault(rank, 0)
    elif "input" in fields and isinstance(said := found.get(rank, 0), int):
        if rank not in ranks:
            raise SystemExit(f"No line says with which rules the machine of rank {rank} was made.")
        found[rank] = ranks[rank].differs(fields) or said + 1


def _event(packed: str) -> Any:
    return msgspec.msgpack.decode(b64decode(packed), type=_EVENTS, dec_hook=_error)


def _error(kind: type, text: str) -> Any:
    """Return the error whose `repr` is logged."""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    return getattr(errors, call.func.id)(*map(ast.literal_eval, call.args))


def main(file: str) -> None:
    with Path(file).open() as lines:
        found = replay(lines)
    for rank, said in sorted(found.items()):
        print(f"rank {rank}: {f'{said} events, the same effects' if isinstance(said, int) else said}")
    if not found or any(isinstance(said, str) for said in found.values()):
        raise SystemExit(f"{file} has no events. Did the run have --debug and --log json?" if not found else 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
