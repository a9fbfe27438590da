"""The content of the page as JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from diloco import __version__
from diloco.transport import PeerReport
from diloco.units import visible
from diloco.watch.alerts import find_alerts
from diloco.watch.history import ProcessHistory, RunHistory, replica_order

MAX_LINES = 8  # processes of a run whose curves are drawn; the table of peers has all


def page_data(runs: Sequence[RunHistory], now_s: float, **more: float) -> bytes:
    """Return the content of the page at ``now_s``, in seconds since 1970, as JSON; ``more`` is added to it."""
    return msgspec.json.encode({"version": __version__, "runs": [_shown(run, now_s) for run in runs], **more})


def _shown(run: RunHistory, now_s: float) -> msgspec.Raw:
    """Return the content of one run; a fault that its records reveal in this program is a problem of this run alone."""
    try:
        return msgspec.Raw(msgspec.json.encode(_run(run, now_s)))
    except Exception as error:
        problem = f"This run can't be shown: {type(error).__name__}: {error}"
        run = RunHistory(run.name, run.where, problems=[*run.problems, problem])
        return msgspec.Raw(msgspec.json.encode(_run(run, now_s)))


def _run(run: RunHistory, now_s: float) -> dict[str, Any]:
    """Return the content of one run. JSON has null for what is unknown or not finite."""
    alerts = find_alerts(run, now_s)
    lines = {name: run.processes[name] for name in sorted(run.processes, key=replica_order)[:MAX_LINES]}
    return {
        "name": visible(run.name),
        "where": visible(run.where, 1_000),
        "settings": run.settings,
        "problems": [visible(words, 1_000) for words in run.problems],
        "behind_bytes": run.behind_bytes,
        "header": _header(run, is_silent=any(alert.kind == "silent" for alert in alerts)),
        "lines": {
            name: {"steps": each.steps.shown(), "heldout": each.evaluations.shown(), "outer": each.outer.shown()}
            for name, each in lines.items()
        },
        "undrawn": max(0, len(run.processes) - MAX_LINES),
        "peers": _member_rows(run, now_s),
        "grid": {
            "fragments": sorted(run.grid.newest),
            "cells": {f"{p}:{k}": cell.shown() for (p, k), cell in sorted(run.grid.cells.items())},
        },
        "views": [view for view, _ in run.views],
        "samples": [sample for each in run.evaluated[:1] for sample in each.samples],
        "notes": list(run.first.notes),
        "alerts": alerts,
        "facts": {**started.facts, **started.details} if (started := run.first.started) else {},
    }


def _header(run: RunHistory, *, is_silent: bool) -> dict[str, Any]:
    """Return the figures at the top of the page."""
    process, step = run.first, run.step
    started, last, rows = process.started, process.last, process.steps.rows()
    summary = process.finished.summary if process.finished else {}
    recent = dict(zip(process.steps.columns, rows[-1], strict=True)) if rows else {}
    evaluations = [row[3] for each in run.evaluated[:1] for row in each.evaluations.rows()]
    lows = [row[4] for each in run.evaluated for row in each.evaluations.rows() if row[4] is not None]
    total, per_step = (started.total_steps, started.data_parallel_bytes_per_step) if started else (None, None)
    return {
        "state": _state(process, is_silent=is_silent),
        "fetched": process.fetched,
        "step": step if process.reported else None,
        "total_steps": total,
        "algorithm": started.algorithm if started else "",
        "parameters": started.parameters if started else None,
        "replicas": len(run.expected) or None,
        "tokens": last.tokens if last else None,
        "elapsed_s": process.elapsed_s if last else None,
        "left_s": process.step_s * max(0, total - step) if total is not None and process.step_s else None,
        "compute_utilization": last.compute_utilization if last else None,
        **{name: recent.get(name) for name in ("tokens_per_s", "mfu", "loss")},
        "heldout_loss": evaluations[-1] if evaluations else _number(summary.get("heldout_loss")),
        "best_heldout_loss": min(lows, default=None),
        "sent_bytes": _number(summary.get("sent_bytes_per_replica", last.sent_bytes if last else None)),
        "data_parallel_bytes": _number(summary.get("data_parallel_bytes_per_replica", per_step and per_step * step)),
        "merged": run.grid.merged if run.grid.newest else None,
        "void": run.grid.void if run.grid.newest else None,
    }


def _number(value: Any) -> float | None:
    return value if type(value) in (int, float) and abs(value) < 2**53 else None


def _state(process: ProcessHistory, *, is_silent: bool = False) -> str:
    if process.interrupted or process.finished:
        return "interrupted" if process.interrupted else "finished"
    if is_silent or not process.reported:
        return "silent" if is_silent else "not started"
    return "joining" if process.fetched else "running"


def _member_rows(run: RunHistory, now_s: float) -> list[dict[str, Any]]:
    """Return the rows of the table of peers, by replica.

    A peer with the number of another one has a row of its own, without the rounds of that number.
    """
    peers, (counted, missed) = {each.process: each for each in run.seen}, run.grid.participation()
    of_rounds, num_merged = _rounds_of_members(run), sum(cell.state == "merged" for cell in run.grid.recent())
    members = run.expected if run.views or not run.seen else ()  # the peers of a swarm have other numbers at first
    names = {**(run.first.started.names if run.first.started else {}), **(run.views[-1][0].names if run.views else {})}
    numbers = {f"replica {replica}": replica for replica in {*members, *of_rounds}}
    numbers |= {each.process: each.report.number for each in run.seen}
    rows = []
    for process_name, replica in sorted(numbers.items(), key=lambda each: (each[1], each[0])):
        process, peer = run.processes.get(process_name), peers.get(process_name)
        report, last = peer.report if peer else PeerReport("", replica), process.last if process else None
        row = {
            "replica": replica,
            "name": names.get(str(replica)),
            "peer": report.peer_id,
            "state": peer.state if peer else "gone" if replica not in run.expected else _state(process or run.first),
            "fetched": process.fetched if process else None,
            "heard_s": None if peer is None or peer.heard_s is None else round(max(0.0, now_s - peer.heard_s), 1),
            "way": report.route,
            "round_trip_s": report.round_trip_s,
            "steps_per_s": 1 / process.step_s if process and process.step_s else None,
        }
        row |= {name: report.status.get(name) for name in ("link_bits_per_s", "pace", "codec")}
        for name in ("step", "sent_bytes", "received_bytes"):
            row[name] = report.status.get(name, getattr(last, name, None))
        if process_name == f"replica {replica}":
            row |= of_rounds.get(replica, {})
            if num_merged:
                row |= {"counted": f"{counted[replica]} of {num_merged}", "missed": missed[replica]}
        rows.append(row)
    return rows


def _rounds_of_members(run: RunHistory) -> dict[int, dict[str, Any]]:
    """Return replica -> the cells of its row that come from its newest rounds."""
    newest_first = run.grid.recent()
    rows: defaultdict[int, dict[str, Any]] = defaultdict(dict)
    for cell in reversed(newest_first):
        for replica, (digest, weight) in cell.sent.items():
            rows[replica].update(weight=weight, digest="agrees" if digest else "")
        for replica, wait_s in cell.waits_s.items():
            rows[replica].update(wait_s=wait_s)
        for replica in rows.keys() & cell.late_s.keys():
            rows[replica].update(late_s=cell.late_s[replica])
    for replica in (replica for cell in newest_first[: len(run.grid.newest)] for replica in cell.minority()):
        rows[replica]["digest"] = "differs"
    return rows
