"""Run histories built from artificial events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from diloco.events import Event, to_record
from diloco.watch import RunHistory

NOW_S = 1_000_000.0


def history(events: Iterable[Event], process: str = "", into: RunHistory | None = None, **fields: Any) -> RunHistory:
    """Return the history of events written one second apart, the last one at `NOW_S`."""
    run, told = into or RunHistory(), list(events)
    for number, event in enumerate(told):
        run.take(process, {**to_record(event), "time_s": NOW_S - len(told) + 1 + number, **fields})
    return run
