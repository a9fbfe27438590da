"""The content of the page as JSON-ready values, and the difference between two versions of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from diloco import __version__
from diloco.watch.alerts import Thresholds, find_alerts
from diloco.watch.history import OF_OUTER_STEPS, ProcessHistory, RunHistory
from diloco.watch.members import Seen, fetched, member_rows
from diloco.watch.records import Record, finite, first, number, numbers, text, whole
from diloco.watch.series import Series

__all__ = ["CHUNK_ROWS", "MOST_LINES", "Watched", "difference", "page_data"]

CHUNK_ROWS = 64  # rows of a curve that are sent together when one of them changes
MOST_LINES = 8  # the most processes of a run whose curves are drawn; the table of peers has all

_APART = re.compile(r"out$|monitor\.|swarm\.(identity|listen|announce)")
"""Settings that are not compared between runs, because they don't affect training."""


@dataclass
class Watched:
    """One run on the page."""

    name: str  # the name of the run
    where: str  # its folder, or how its swarm is reached
    history: RunHistory = field(default_factory=RunHistory)  # the history from its records
    settings: Mapping[str, str] = field(default_factory=dict)  # key -> value as text
    seen: Sequence[Seen] = ()  # the peers of a swarm; empty for a folder
    free_bytes: int | None = None  # free space on the disk of its folder; None if it is unknown
    problems: Sequence[str] = ()  # messages about data that could not be read
    behind_bytes: int = 0  # bytes of records that are still to be read


def page_data(runs: Sequence[Watched], thresholds: Thresholds, now_s: float) -> dict[str, Any]:
    """Return the content of the whole page."""
    return {
        "version": __version__,
        "runs": {str(number): _shown(run, thresholds, now_s) for number, run in enumerate(runs)},
        "settings": _settings([run.settings for run in runs]),
        "thresholds": asdict(thresholds),
    }


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON merge patch (RFC 7396) that turns ``old`` into ``new``: None removes a key, and lists are sent
    whole.

    >>> difference({"a": 1, "b": {"c": [1], "d": 2}}, {"b": {"c": [1, 2], "d": 2}})
    {'a': None, 'b': {'c': [1, 2]}}
    """
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if inner := difference(before, value):
                patch[key] = inner
        elif before != value or key not in old:
            patch[key] = value
    return patch


def _shown(run: Watched, thresholds: Thresholds, now_s: float) -> dict[str, Any]:
    """Return the content of one run; a fault that its records reveal in this program is a problem of this run alone."""
    try:
        shown = _run(run, thresholds, now_s)
        json.dumps(shown, allow_nan=False)
    except Exception as error:
        problem = f"This run can't be shown: {type(error).__name__}: {error}"
        return _run(Watched(run.name, run.where, problems=[*run.problems, problem]), thresholds, now_s)
    return shown


def _run(run: Watched, thresholds: Thresholds, now_s: float) -> dict[str, Any]:
    history = run.history
    alerts = find_alerts(history, run.seen, thresholds, now_s, run.free_bytes)
    lines = {name: history.processes[name] for name in history.names[:MOST_LINES]}
    evaluated = history.evaluated[:1]
    facts = history.first.started.get("facts")
    return {
        "name": run.name,
        "where": run.where,
        "swarm": bool(run.seen),
        "problems": list(run.problems),
        "behind_bytes": run.behind_bytes,
        "header": _header(history, silent=any(alert.kind == "silent" for alert in alerts)),
        "lines": {name: _line(process) for name, process in lines.items()},
        "undrawn": max(0, len(history.processes) - MOST_LINES),
        "peers": member_rows(history, run.seen, now_s),
        "grid": {
            "fragments": list(history.grid.fragments),
            "cells": {f"{p}:{k}": cell.shown() for (p, k), cell in sorted(history.grid.cells.items())},
        },
        "views": [_view(record) for record in history.views],
        "samples": [_sample(record) for each in evaluated for record in each.samples],
        "notes": [[step, words] for step, words in history.first.notes],
        "alerts": [asdict(alert) for alert in alerts],
        "facts": {str(key): str(value) for key, value in facts.items()} if isinstance(facts, dict) else {},
    }


def _header(history: RunHistory, *, silent: bool) -> dict[str, Any]:
    """Return the figures at the top of the page; unknown ones are None."""
    process = history.first
    last, started, summary = process.last, process.started, process.finished
    rows = process.steps.rows()
    column = {name: index for index, name in enumerate(process.steps.columns)}
    recent = rows[-1] if rows else None
    per_step = number(started, "data_parallel_bytes_per_step")
    step = history.step
    best = [each.best for each in history.evaluated if each.best is not None]
    evaluations = [row for each in history.evaluated[:1] for row in each.evaluations.rows()]
    return {
        "state": _state(process, silent=silent),
        "fetched": fetched(process.fetched),
        "step": step if process.reported else None,
        "total_steps": whole(started, "total_steps"),
        "algorithm": text(started, "algorithm"),
        "parameters": whole(started, "parameters"),
        "replicas": len(history.expected) or None,
        "tokens": whole(last, "tokens"),
        "elapsed_s": round(process.elapsed_s, 1) if last else None,
        "left_s": _left_s(rows, whole(started, "total_steps"), step),
        "tokens_per_s": _throughput(process)[-1] if rows else None,
        "compute_utilization": finite(number(last, "compute_utilization")),
        "mfu": recent[column["mfu"]] if recent else None,
        "loss": recent[column["loss"]] if recent else None,
        "heldout_loss": evaluations[-1][3] if evaluations else finite(number(summary, "heldout_loss")),
        "best_heldout_loss": finite(min(best, default=None)),
        "sent_bytes": first(whole(summary, "sent_bytes_per_replica"), whole(last, "sent_bytes")),
        "data_parallel_bytes": first(
            whole(summary, "data_parallel_bytes_per_replica"), None if per_step is None else round(per_step * step)
        ),
        "merged": history.grid.merged if history.grid.newest else None,
        "void": history.grid.void if history.grid.newest else None,
    }


def _state(process: ProcessHistory, *, silent: bool) -> str:
    if process.interrupted:
        return "interrupted"
    if process.over:
        return "finished"
    if process.fetched and not silent:
        return "joining"
    return ("silent" if silent else "running") if process.reported else "not started"


def _left_s(rows: Sequence[Sequence[float | None]], total_steps: int | None, step: int) -> float | None:
    """Return the seconds left at the speed of the last quarter of the curve, pauses included, or None if the speed is
    unknown."""
    if total_steps is None or step >= total_steps or len(rows) < 2:
        return None
    before, last = rows[-max(2, len(rows) // 4)], rows[-1]
    steps, seconds = (last[0] or 0) - (before[0] or 0), (last[2] or 0) - (before[2] or 0)
    return round((total_steps - step) * seconds / steps, 1) if steps > 0 and seconds > 0 else None


def _throughput(process: ProcessHistory) -> list[float | None]:
    """Return the tokens per second in every bucket of the curve."""
    place = {name: index for index, name in enumerate(process.steps.columns)}
    rows, found = process.steps.rows(), []
    per_step = number(process.started, "tokens_per_step")
    step, tokens = float(rows[0][0] or 0) - 1 if rows else 0.0, None
    for row in rows:
        steps, step_s, now = (row[0] or 0) - step, row[place["step_s"]], row[place["tokens"]] or 0.0
        gained = (now - tokens) if tokens is not None and now >= tokens else (per_step or 0.0) * steps
        found.append(finite(gained / (steps * step_s)) if steps > 0 and step_s and gained > 0 else None)
        step, tokens = row[0] or 0, now
    return found


_DRAWN = (
    *("step", "tokens", "time_s", "loss", "loss_low", "loss_high"),
    *("gradient_norm", "gradient_norm_low", "gradient_norm_high", "learning_rate", "mfu", "compute", "sent_bytes"),
)


def _line(process: ProcessHistory) -> dict[str, Any]:
    """Return the curves of a process in chunks, so that little is sent when they grow."""
    drawn = zip(_columns(process.steps, _DRAWN), _throughput(process), strict=True)
    rows = [[*row, speed] for row, speed in drawn]
    return {
        "columns": [*_DRAWN, "tokens_per_s"],
        "outer_columns": [*_DRAWN[:3], *OF_OUTER_STEPS],
        "stride": process.steps.stride,
        "chunks": _chunks(rows),
        "heldout": _chunks(process.evaluations.rows()),
        "outer": _chunks(_columns(process.outer, (*_DRAWN[:3], *OF_OUTER_STEPS))),
    }


def _columns(series: Series, names: Sequence[str]) -> list[list[float | None]]:
    place = [series.columns.index(name) for name in names]
    return [[row[index] for index in place] for row in series.rows()]


def _chunks(rows: Iterable[Sequence[float | None]]) -> dict[str, list[list[float | None]]]:
    listed = [list(row) for row in rows]
    return {str(start // CHUNK_ROWS): listed[start : start + CHUNK_ROWS] for start in range(0, len(listed), CHUNK_ROWS)}


def _view(record: Record) -> dict[str, Any]:
    return {
        "step": record["step"],
        "view": whole(record, "view"),
        "members": list(numbers(record, "members")),
        "joined": list(numbers(record, "joined")),
        "left": list(numbers(record, "left")),
        "reason": text(record, "reason"),
    }


def _sample(record: Record) -> dict[str, Any]:
    return {"step": record["step"], "prompt": text(record, "prompt"), "text": text(record, "text")}


def _settings(runs: Sequence[Mapping[str, str]]) -> list[list[str | list[str]]]:
    """Return [key, values] of the settings in which the runs differ; nothing for a single run."""
    keys = sorted({key for run in runs for key in run if not _APART.match(key)}) if len(runs) > 1 else []
    given = [run for run in runs if run]
    return [[key, [run.get(key, "") for run in runs]] for key in keys if len({run.get(key, "") for run in given}) > 1]
