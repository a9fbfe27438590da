"""Runs all checks on one run and returns the data of the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.chaos import checks, ends
from benchmarks.chaos.events import BOOTSTRAP, RETURNS, Event
from benchmarks.chaos.records import RunRecords

__all__ = ["judge"]

_SEEN_S = 45.0  # stalls of others up to this long after an event are attributed to it
_STARTED_S = 35.0  # the longest time from an event to its process start: the previous process may have to end first

_LOSS = "the loss is that of an undisturbed run"
_EVALUATED = "the loss was found at the end (and compared with nothing)"


def judge(records: RunRecords, planned: Sequence[Event], undisturbed: Sequence[float]) -> dict[str, Any]:
    """Return the figures of a run and the faults that the checks found.

    Args:
        records: the records of the run.
        planned: the planned events.
        undisturbed: the held-out losses of undisturbed runs; empty if there were none.
    """
    settings, logs, lives = records.settings, records.logs, records.lives
    limits_s = {"StepFinished": settings.stall_limit_s, "RoundCommitted": settings.round_gap_limit_s}
    longest_s, still = checks.stalled(logs, limits_s, settings.recovery_limit_s)
    # any peer may evaluate, also the one that was frozen at the end
    found = [record for log in logs for record in log.of("Evaluated") if record["final"]]
    losses = [record["heldout_loss"] for record in found if record["step"] == settings.steps]
    back = [seconds for log in logs for _, seconds in checks.recoveries(log, settings.recovery_limit_s)[0]]
    void = [record for log in logs for record in log.of("RoundVoid")]
    put_out = checks.evicted(logs, settings.recovery_limit_s, settings.silence_s)
    faults = {
        "nobody stood still for longer": still,
        "all ended with the same parameters": ends.unequal_ends(records.summaries),
        "no round was half applied": [*checks.half_applied(logs), *checks.repaired(logs)],
        _LOSS if undisturbed else _EVALUATED: _loss_faults(losses, undisturbed),
        "no process ended by itself": ends.unexpected_ends(lives),
        "a link that flaps costs the others at most its own peer": _while_flapping(put_out, records),
        "what is said is said in a few sentences": ends.tracebacks(lives),
    }
    return {
        "limits_s": limits_s,
        "back_limit_s": settings.recovery_limit_s,
        "longest_s": {event: round(seconds, 1) for event, seconds in longest_s.items()},
        "back_s": sorted(round(seconds, 1) for seconds in back),
        "processes": len([life for life in lives if life.peer != BOOTSTRAP]),
        "ended_peers": len(records.summaries),
        "steps": settings.steps,
        "tokens": max((each["tokens"] for each in records.summaries.values()), default=0),
        "digests": sorted({each["global_params_digest"] for each in records.summaries.values()}),
        "rounds": len({(r["fragment"], r["outer_step"]) for log in logs for r in log.of("RoundCommitted")}),
        "void": len({(record["fragment"], record["outer_step"]) for record in void}),
        "views": max((record["view"] for log in logs for record in log.of("ViewChanged")), default=0),
        "put_out": [words for _, words in put_out],
        "heldout_loss": losses[0] if losses else None,
        "undisturbed": list(undisturbed),
        "kinds": dict(sorted(Counter(record["kind"] for record in records.happened).items())),
        "planned": len(planned),
        "happened": _seen(records),
        "faults": faults,
    }


def _loss_faults(losses: Sequence[float], undisturbed: Sequence[float]) -> list[str]:
    if not losses:
        return ["no peer evaluated at the end"]
    return ends.loss_differs(losses[0], undisturbed) if undisturbed else []


def _while_flapping(put_out: Sequence[tuple[float, str]], records: RunRecords) -> list[str]:
    flaps = [(each["time_s"], each["time_s"] + each["seconds"]) for each in records.happened if each["kind"] == "flap"]
    return [words for time_s, words in put_out if any(since <= time_s <= until for since, until in flaps)]


def _seen(records: RunRecords) -> list[dict[str, Any]]:
    """Return the events with their effects: the longest step of the others, and the time until recovery."""
    came = [(log, *checks.recoveries(log, records.settings.recovery_limit_s)[:2]) for log in records.logs]
    still = [
        (log.life.peer, gap, since_s)
        for log, _, busy in came
        for gap, since_s in checks.gaps([record["time_s"] for record in log.of("StepFinished")], busy)
    ]
    seen = []
    for record in records.happened:
        event, at_s = _event(record), float(record["time_s"])
        nearby = [
            gap
            for peer, gap, since_s in still
            if peer not in event.stalls and at_s - gap < since_s < at_s + event.seconds + _SEEN_S
        ]
        back = [
            seconds
            for log, times, _ in came
            for begin_s, seconds in times
            if log.life.peer in event.stalls and -0.05 <= begin_s - at_s < _STARTED_S
        ]
        returns = event.timetable or event.kind in RETURNS
        seen.append(
            {
                "at_s": round(at_s - records.began_s, 1),
                "kind": event.kind,
                "peer": event.peer,
                "what": event.text,
                "others_stood_still_s": round(max(nearby, default=0.0), 1),
                "back_after_s": round(max(back), 1) if back and returns else None,
            }
        )
    return seen


def _event(record: dict[str, Any]) -> Event:
    fields = ("at_s", "kind", "peer", "seconds", "with_daemon", "clock_s")
    return Event(**{name: record[name] for name in fields}, others=tuple(record["others"]))
