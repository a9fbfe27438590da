"""Attacks on the simulated network by a connected peer that is not a member."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.hostile.attack import Attack, Outcome
from benchmarks.hostile.members import HEADER, VOTE, adopted, change, entry
from benchmarks.hostile.simulated import attacked_by_non_member

__all__ = ["ATTACKS"]

Message = Mapping[str, Any]
ENTRY = entry(2, address="simulated:2")
_LISTS: Message = {"x": [[]] * 3000}


def sends(name: str, messages: Callable[[], Iterable[Message]], before: str = "") -> Attack:
    """Return a row for a non-member that sends these messages."""

    def run() -> Outcome:
        return attacked_by_non_member(messages())

    return Attack(name=f"{name}, by a stranger", who="stranger", where="simulated", run=run, before=before)


ATTACKS = [
    sends("nothing", lambda: []),
    sends("headers", lambda: [HEADER] * 50),
    sends(
        "votes against every round",
        lambda: [{**VOTE, "ok": False, "round": [p, n]} for p in range(3) for n in range(7)],
    ),
    sends("votes of views far away", lambda: [{**VOTE, "view": 1 << 40}] * 1000),
    sends("a change that loses all", lambda: [change(0, gone=[0, 1])]),
    sends("changes of views far away", lambda: [change(1 << 40, why="x" * 15_000)] * 200, "+772 MB"),
    sends("a view adopted", lambda: [adopted(0, [2])]),
    sends("a welcome", lambda: [adopted(0, [2]) | {"kind": "welcome", "note": {}}]),
    sends(
        "welcomes full of lists",
        lambda: [adopted(0, [2]) | {"kind": "welcome", "note": _LISTS}] * 50,
        "stalls of 5 to 8 s",
    ),
    sends("refusals", lambda: [{"kind": "refused", "reason": "\x1b[2J", "for_good": True}] * 50),
    sends("an exclusion", lambda: [{"kind": "excluded", "view": 1 << 50, "reason": "go"}]),
    sends("a replacement", lambda: [{"kind": "replaced"}]),
    sends("it leaves", lambda: [{"kind": "leaving", "view": 0, "step": 3, "commits": [[0, 1, "x"]]}]),
    sends("a meeting to stop", lambda: [{"kind": "meet", "name": "stop", "value": 1}]),
    sends("meetings with many names", lambda: [{"kind": "meet", "name": str(n), "value": 1} for n in range(1000)]),
    sends("a speed of 1e308", lambda: [{"kind": "speed", "steps_per_s": "1e308"}]),
    sends("a wish to join in another's name", lambda: [{"kind": "join", **ENTRY, "rank": 1, "connected": [0, 1]}]),
    sends("a wish to join of lists", lambda: [{"kind": "join", "rank": [], "connected": {}}]),
    sends("a wish to join, and silence", lambda: [{"kind": "join", **ENTRY, "connected": [0, 1]}], "waited for"),
    sends("wishes to join, unconnected", lambda: [{"kind": "join", **ENTRY, "connected": []}] * 300),
    sends(
        "facts, again and again", lambda: [{"kind": "facts", "answer": True, **ENTRY, "facts": {"x": "y" * 4000}}] * 500
    ),
    sends("an introduction", lambda: [{"kind": "introduce", "entry": ENTRY}] * 50),
    sends("nothing known", lambda: [{"kind": "?"}]),
    sends("beats, 3,000", lambda: [{"kind": "beat", "view": "x"}] * 3000),
]
