"""All checks of one run, as data for the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.chaos import checks
from benchmarks.chaos.plan import BOOTSTRAP, Event
from benchmarks.chaos.processes import Life
from benchmarks.chaos.records import Left

__all__ = ["judge"]

_SEEN_S = 45.0  # what others did within so long of an event is put down to it


_LOSS = "the loss is that of an undisturbed run"
_EVALUATED = "the loss was found at the end (and compared with nothing)"


def judge(left: Left, planned: Sequence[Event], undisturbed: Sequence[float]) -> dict[str, Any]:
    """What happened in a run, and which faults it shows.

    Args:
        left: by the run.
        planned: what was to happen.
        undisturbed: held-out losses without disturbance; none where that was not tried.
    """
    settings, logs, lives = left.settings, left.logs, left.lives
    limits_s = {"StepFinished": settings.stands_still_s, "RoundCommitted": settings.without_round_s}
    longest_s, still = checks.standing_still(logs, limits_s, settings.back_s)
    losses = [each["heldout_loss"] for each in left.summaries.values() if each["heldout_loss"] is not None]
    back = [seconds for log in logs for _, seconds in checks.came_back(log, settings.back_s)[0]]
    void = [record for log in logs for record in log.of("RoundVoid")]
    faults = {
        "nobody stood still for longer": still,
        "all ended with the same parameters": checks.unequal_ends(left.summaries),
        "no round was half applied": [*checks.half_applied(logs), *checks.repaired(logs)],
        _LOSS if undisturbed else _EVALUATED: _loss_faults(losses, undisturbed),
        "no process ended by itself": checks.unexpected_ends(lives),
    }
    return {
        "limits_s": limits_s,
        "back_limit_s": settings.back_s,
        "longest_s": {event: round(seconds, 1) for event, seconds in longest_s.items()},
        "back_s": sorted(round(seconds, 1) for seconds in back),
        "processes": len([life for life in lives if life.peer != BOOTSTRAP]),
        "ended_peers": len(left.summaries),
        "steps": settings.steps,
        "tokens": max((each["tokens"] for each in left.summaries.values()), default=0),
        "digests": sorted({each["global_params_digest"] for each in left.summaries.values()}),
        "rounds": len({(r["fragment"], r["outer_step"]) for log in logs for r in log.of("RoundCommitted")}),
        "void": len({(record["fragment"], record["outer_step"]) for record in void}),
        "views": max((record["view"] for log in logs for record in log.of("ViewChanged")), default=0),
        "heldout_loss": losses[0] if losses else None,
        "undisturbed": list(undisturbed),
        "kinds": dict(sorted(Counter(record["kind"] for record in left.happened).items())),
        "planned": len(planned),
        "happened": [_seen(record, left) for record in left.happened],
        "faults": faults,
    }


def _loss_faults(losses: Sequence[float], undisturbed: Sequence[float]) -> list[str]:
    if not losses:
        return ["nobody evaluated at the end"]
    return checks.loss_differs(losses[0], undisturbed) if undisturbed else []


def _seen(record: dict[str, Any], left: Left) -> dict[str, Any]:
    """An event with what followed: how long the others stood still, and when its peer took part again."""
    at_s = float(record["time_s"])
    fields = ("kind", "peer", "seconds", "with_daemon")
    event = Event(record["at_s"], **{name: record[name] for name in fields})
    times = {name: [(log, each["time_s"]) for log in left.logs for each in log.of(name)] for name in ("StepFinished",)}
    still = 0.0
    for log in left.logs:
        if log.life.peer == event.peer:
            continue
        _, busy, _ = checks.came_back(log, left.settings.back_s)
        steps_s = [time_s for owner, time_s in times["StepFinished"] if owner is log]
        nearby = [gap for gap, since_s in checks.gaps(steps_s, busy) if at_s - gap < since_s < at_s + _SEEN_S]
        still = max([still, *nearby])
    return {
        "at_s": round(at_s - left.began_s, 1),
        "peer": event.peer,
        "what": event.text,
        "others_stood_still_s": round(still, 1),
        "back_after_s": _back(event, at_s, left),
    }


def _back(event: Event, at_s: float, left: Left) -> float | None:
    """Seconds from when its peer could take part again until it did."""
    lives: list[Life] = [life for life in left.lives if life.peer == event.peer]
    for log in left.logs:
        if log.life not in lives:
            continue
        times, _, _ = checks.came_back(log, left.settings.back_s)
        for begin_s, seconds in times:
            if event.kind in ("resume", "join", "freeze", "slow", "cut") and 0 <= begin_s - at_s < 3.0:
                return round(seconds, 1)
    return None
