"""The content of the page as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from diloco import __version__
from diloco.transport import PeerReport
from diloco.units import visible
from diloco.watch.alerts import find_alerts
from diloco.watch.history import ProcessHistory, RunHistory, Watched, replica_order

__all__ = ["MAX_LINES", "page_data"]

MAX_LINES = 8  # processes of a run whose curves are drawn; the table of peers has all


def page_data(runs: Sequence[Watched], now_s: float, **more: float) -> bytes:
    """Return the content of the page at ``now_s``, in seconds since 1970, as JSON; ``more`` is added to it."""
    return msgspec.json.encode({"version": __version__, "runs": [_shown(run, now_s) for run in runs], **more})


def _shown(run: Watched, now_s: float) -> msgspec.Raw:
    """Return the content of one run; a fault that its records reveal in this program is a problem of this run alone."""
    try:
        return msgspec.Raw(msgspec.json.encode(_run(run, now_s)))
    except Exception as error:
        problem = f"This run can't be shown: {type(error).__name__}: {error}"
        run = Watched(run.name, run.where, problems=[*run.problems, problem])
        return msgspec.Raw(msgspec.json.encode(_run(run, now_s)))


def _run(run: Watched, now_s: float) -> dict[str, Any]:
    """Return the content of one run. JSON has null for what is unknown or not finite."""
    history, alerts = run.history, find_alerts(run, now_s)
    lines = {name: history.processes[name] for name in sorted(history.processes, key=replica_order)[:MAX_LINES]}
    return {
        "name": visible(run.name),
        "where": visible(run.where, 1_000),
        "settings": run.settings,
        "problems": [visible(words, 1_000) for words in run.problems],
        "behind_bytes": run.behind_bytes,
        "header": _header(history, is_silent=any(alert.kind == "silent" for alert in alerts)),
        "lines": {
            name: {"steps": each.steps.shown(), "heldout": each.evaluations.shown(), "outer": each.outer.shown()}
            for name, each in lines.items()
        },
        "undrawn": max(0, len(history.processes) - MAX_LINES),
        "peers": _member_rows(run, now_s),
        "grid": {
            "fragments": sorted(history.grid.newest),
            "cells": {f"{p}:{k}": cell.shown() for (p, k), cell in sorted(history.grid.cells.items())},
        },
        "views": [view for view, _ in history.views],
        "samples": [sample for each in history.evaluated[:1] for sample in each.samples],
        "notes": list(history.first.notes),
        "alerts": alerts,
        "facts": {**started.facts, **started.details} if (started := history.first.started) else {},
    }


def _header(history: RunHistory, *, is_silent: bool) -> dict[str, Any]:
    """Return the figures at the top of the page."""
    process, step = history.first, history.step
    started, last, rows = process.started, process.last, process.steps.rows()
    summary = process.finished.summary if process.finished else {}
    recent = dict(zip(process.steps.columns, rows[-1], strict=True)) if rows else {}
    evaluations = [row[3] for each in history.evaluated[:1] for row in each.evaluations.rows()]
    lows = [row[4] for each in history.evaluated for row in each.evaluations.rows() if row[4] is not None]
    per_step = started.data_parallel_bytes_per_step if started else None
    return {
        "state": _state(process, is_silent=is_silent),
        "fetched": process.fetched,
        "step": step if process.reported else None,
        "total_steps": started.total_steps if started else None,
        "algorithm": started.algorithm if started else "",
        "parameters": started.parameters if started else None,
        "replicas": len(history.expected) or None,
        "tokens": last.tokens if last else None,
        "elapsed_s": process.elapsed_s if last else None,
        "left_s": process.step_s * max(0, started.total_steps - step) if started and process.step_s else None,
        "tokens_per_s": recent.get("tokens_per_s"),
        "compute_utilization": last.compute_utilization if last else None,
        "mfu": recent.get("mfu"),
        "loss": recent.get("loss"),
        "heldout_loss": evaluations[-1] if evaluations else _number(summary.get("heldout_loss")),
        "best_heldout_loss": min(lows, default=None),
        "sent_bytes": _number(summary.get("sent_bytes_per_replica", last.sent_bytes if last else None)),
        "data_parallel_bytes": _number(summary.get("data_parallel_bytes_per_replica", per_step and per_step * step)),
        "merged": history.grid.merged if history.grid.newest else None,
        "void": history.grid.void if history.grid.newest else None,
    }


def _number(value: Any) -> float | None:
    return value if type(value) in (int, float) and abs(value) < 2**53 else None


def _state(process: ProcessHistory, *, is_silent: bool = False) -> str:
    if process.interrupted or process.finished:
        return "interrupted" if process.interrupted else "finished"
    if is_silent or not process.reported:
        return "silent" if is_silent else "not started"
    return "joining" if process.fetched else "running"


def _member_rows(watched: Watched, now_s: float) -> list[dict[str, Any]]:
    """Return the rows of the table of peers, by replica.

    A peer with the number of another one has a row of its own, without the rounds of that number.
    """
    run, peers = watched.history, {each.process: each for each in watched.seen}
    newest_first, (counted, missed) = run.grid.recent(), run.grid.participation()
    num_merged = sum(cell.state == "merged" for cell in newest_first)
    of_rounds: dict[int, dict[str, Any]] = {}  # replica -> the cells of its row that come from the grid
    for cell in reversed(newest_first):
        for replica, sent in cell.sent.items():
            of_rounds.setdefault(replica, {}).update(weight=sent.weight, digest="agrees" if sent.digest else "")
        for replica, wait_s in cell.waits_s.items():
            of_rounds.setdefault(replica, {}).update(wait_s=wait_s)
        for replica in of_rounds.keys() & cell.late_s.keys():
            of_rounds[replica].update(late_s=cell.late_s[replica])
    for replica in (replica for cell in newest_first[: len(run.grid.newest)] for replica in cell.minority()):
        of_rounds[replica]["digest"] = "differs"
    members = run.expected if run.views or not watched.seen else ()  # the peers of a swarm have other numbers at first
    names = {**(run.first.started.names if run.first.started else {}), **(run.views[-1][0].names if run.views else {})}
    numbers = {f"replica {replica}": replica for replica in {*members, *of_rounds}}
    numbers |= {each.process: each.report.number for each in watched.seen}
    rows = []
    for process_name, replica in sorted(numbers.items(), key=lambda each: (each[1], each[0])):
        process, peer = run.processes.get(process_name), peers.get(process_name)
        report, last = peer.report if peer else PeerReport("", replica), process.last if process else None
        status = report.status
        row = {
            "replica": replica,
            "name": names.get(str(replica)),
            "peer": report.peer_id,
            "state": peer.state if peer else "gone" if replica not in run.expected else _state(process or run.first),
            "step": status.get("step", last.step if last else None),
            "fetched": process.fetched if process else None,
            "heard_s": None if peer is None or peer.heard_s is None else round(max(0.0, now_s - peer.heard_s), 1),
            "way": report.route,
            "round_trip_s": report.round_trip_s,
            "sent_bytes": status.get("sent_bytes", last.sent_bytes if last else None),
            "received_bytes": status.get("received_bytes", last.received_bytes if last else None),
            "link_bits_per_s": status.get("link_bits_per_s"),
            "steps_per_s": 1 / process.step_s if process and process.step_s else None,
            "pace": status.get("pace"),
            "codec": status.get("codec"),
        }
        if process_name == f"replica {replica}":
            row |= of_rounds.get(replica, {})
            if num_merged:
                row |= {"counted": f"{counted[replica]} of {num_merged}", "missed": missed[replica]}
        rows.append(row)
    return rows
