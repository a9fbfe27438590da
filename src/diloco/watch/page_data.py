"""The content of the page as JSON, with its alerts: pure functions of the history of a run and the current time.

A new alert is a function that yields `Alert`, and its line in `_ALERTS`.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any, Literal

import msgspec

from diloco.events import Evaluated, Site, StepFinished, mean_loss
from diloco.membership import names_of
from diloco.metrics import measured, metrics_of
from diloco.transport import PeerReport
from diloco.units import format_bytes, format_duration, visible
from diloco.watch.history import CURVED, ProcessHistory, RunHistory

SILENT_S = 60.0  # silence of a process that should be training; also at least ten of its steps
MISSED_ROUNDS = 3  # consecutive rounds that were merged without a replica
VOID_ROUNDS = 3  # consecutive void rounds of a fragment
HIGH_NORM = 5.0  # the median of the last ten gradient norms as a multiple of the median of those before
SLOWER = 1.5  # the step time of a replica as a multiple of the median of the others
FREE_CHECKPOINTS = 3.0  # checkpoints for which the disk has space

_GONE = ("gone", "finished")  # states in which a peer is not expected to answer
_RECENT_STEPS, _RECENT_S = 200, 60.0  # an alert about one event stays for this many inner steps, or this long
_RECENT_ROUNDS = 5  # an alert about one round stays for this many rounds of its fragment


@dataclass(frozen=True)
class Alert:
    """A condition that the operator should look at."""

    level: Literal["error", "warning"]  # "error" if the run is harmed, "warning" if it may be
    kind: str  # the kind of the condition
    who: str  # the process, replica or fragment concerned
    words: str  # the rest of the sentence that begins with it
    step: int | None = None  # the inner step concerned, if there is one


def _is_recent(run: RunHistory, step: int, time_s: float | None) -> bool:
    """Return whether an event is recent, in steps or in seconds: 200 short steps may pass before anyone sees it."""
    newest_s = run.first.newest_s
    return run.step - step <= _RECENT_STEPS or bool(time_s and newest_s and newest_s - time_s <= _RECENT_S)


def _training(run: RunHistory) -> list[str]:
    """Return the processes that should report: members that have not ended."""
    members = {"", *(f"replica {replica}" for replica in run.expected)} if run.views else {*run.processes}
    gone = {peer.process for peer in run.seen if peer.state in _GONE}
    return [name for name, process in run.processes.items() if name in members - gone and not process.finished]


def _silent(run: RunHistory, now_s: float) -> Iterator[Alert]:
    heard = {peer.process: peer.heard_s for peer in run.seen}
    for name in _training(run):
        process = run.processes[name]
        heard_s = heard.get(name, process.newest_s)
        if heard_s is not None and now_s - heard_s > max(SILENT_S, 10 * (process.step_s or 0.0)):
            # a screen reader would read a text that changes every second every second
            over_s = (now_s - heard_s) // 30 * 30
            words = f"has reported nothing for more than {format_duration(over_s)}."
            yield Alert("error", "silent", name or "the run", words, process.step)


def _lost(run: RunHistory, now_s: float) -> Iterator[Alert]:
    """Report lost replicas until they rejoin, others take their places, the run ends, or the loss is long ago."""
    for view, time_s in run.views if not run.first.finished else ():
        gone = sorted({*view.lost} - {*run.expected})
        replaced = len(run.expected) >= len(view.members) - len(view.joined) + len(view.left)
        if view.members and gone and not replaced and _is_recent(run, view.step, time_s):
            yield Alert("warning", "lost", names_of(gone), f"left without announcing it: {view.reason}.", view.step)


def _digests(run: RunHistory, now_s: float) -> Iterator[Alert]:
    for (fragment, outer_step), cell in sorted(run.grid.cells.items()):
        for replica in cell.minority() if outer_step > run.grid.newest[fragment] - _RECENT_ROUNDS else ():
            words = (
                f"had a different state of fragment {fragment} than the majority in outer step {outer_step}. Such a "
                "round is void, and the replica adopts the state of the majority."
            )
            yield Alert("error", "digest", f"replica {replica}", words, cell.step)


def _missed(run: RunHistory, now_s: float) -> Iterator[Alert]:
    _, missed = run.grid.participation()
    for replica in run.expected:
        if missed[replica] >= MISSED_ROUNDS:
            words = f"is not in the last {missed[replica]} merged rounds."
            yield Alert("warning", "missed", f"replica {replica}", words)


def _void(run: RunHistory, now_s: float) -> Iterator[Alert]:
    for fragment in sorted(run.grid.newest):
        newest_first = [cell for (of, _), cell in sorted(run.grid.cells.items(), reverse=True) if of == fragment]
        void = [*takewhile(lambda cell: not cell.waits_s, newest_first)]
        times = sum(cell.times_void for cell in void)
        if times >= VOID_ROUNDS:
            last = next(cell for cell in void if cell.times_void)
            words = f"has had {times} void rounds in a row. The reason of the last one: {last.why}"
            yield Alert("error", "void", f"fragment {fragment}", words, last.step)


def _numbers(run: RunHistory, now_s: float) -> Iterator[Alert]:
    for name, process in run.processes.items():
        who = name or "the run"
        event, time_s = process.diverged or (None, None)
        if event and _is_recent(run, event.step, time_s):
            words = "had a loss or a gradient norm that was NaN or infinite."
            yield Alert("error", "not finite", who, words, event.step)
        before, recent = [*process.norms][:-10], [*process.norms][-10:]
        if len(before) < 20:
            continue
        high, usual = statistics.median(recent), statistics.median(before)
        if high > HIGH_NORM * usual > 0:  # one spike alone is ordinary
            words = f"has gradient norms of {high:.3g}, {high / usual:.1f}x those before."
            yield Alert("warning", "gradient norm", who, words)


def _slow(run: RunHistory, now_s: float) -> Iterator[Alert]:
    times = {name: step_s for name in _training(run) if (step_s := run.processes[name].step_s)}
    for name, step_s in times.items():
        usual_s = statistics.median([other_s for other, other_s in times.items() if other != name] or [step_s])
        if step_s > SLOWER * usual_s:
            words = f"takes {format_duration(step_s)} per step, {step_s / usual_s:.1f}x the median of the others."
            yield Alert("warning", "slow", name, words)


def _disk(run: RunHistory, now_s: float) -> Iterator[Alert]:
    for name in _training(run):
        saved = run.processes[name].checkpoint
        free = saved.free_bytes if saved else None
        if saved and free is not None and free < FREE_CHECKPOINTS * saved.size_bytes:
            words = f"has {format_bytes(free)} left on its disk; a checkpoint takes {format_bytes(saved.size_bytes)}."
            yield Alert("error" if free < saved.size_bytes else "warning", "disk", name or "the run", words, saved.step)


_ALERTS = (_silent, _lost, _digests, _missed, _void, _numbers, _slow, _disk)


def alerts(run: RunHistory, now_s: float) -> list[Alert]:
    """Return what the operator should look at, errors first."""
    return sorted((alert for kind in _ALERTS for alert in kind(run, now_s)), key=lambda alert: alert.level != "error")


_METRICS = [
    {"event": kind.__name__, **asdict(metric)} for kind in (*CURVED, Site) for metric in metrics_of(kind).values()
]

MAX_LINES = 8  # processes of a run whose curves are drawn; the table of peers has all


def page_data(runs: Sequence[RunHistory], now_s: float, **more: float) -> bytes:
    """Return the content of the page at ``now_s``, in seconds since 1970, as JSON; ``more`` is added to it."""
    return msgspec.json.encode({"metrics": _METRICS, "runs": [_shown(run, now_s) for run in runs], **more})


def _shown(run: RunHistory, now_s: float) -> msgspec.Raw:
    """Return the content of one run; a fault that its records reveal in this program is a problem of this run alone."""
    try:
        return msgspec.Raw(msgspec.json.encode(_run(run, now_s)))
    except Exception as error:
        problem = f"This run can't be shown: {type(error).__name__}: {error}"
        return _shown(RunHistory(run.name, run.where, problems=[*run.problems, problem]), now_s)


def _run(run: RunHistory, now_s: float) -> dict[str, Any]:
    """Return the content of one run. JSON has null for what is unknown or not finite."""
    active = alerts(run, now_s)
    by_number = sorted(run.processes, key=lambda name: (len(name), name))
    lines = {name: run.processes[name] for name in by_number[:MAX_LINES]}
    return {
        "name": visible(run.name),
        "where": visible(run.where, 1_000),
        "settings": run.settings,
        "problems": [visible(words, 1_000) for words in run.problems],
        "behind_bytes": run.behind_bytes,
        "header": _header(run, is_silent=any(alert.kind == "silent" for alert in active)),
        "lines": {
            name: {
                kind.__name__: {"columns": curve.columns, "stride": curve.stride, "rows": curve.rows()}
                for kind, curve in process.curves.items()
            }
            for name, process in lines.items()
        },
        "undrawn": max(0, len(run.processes) - MAX_LINES),
        "peers": _member_rows(run, now_s),
        "grid": {
            "fragments": sorted(run.grid.newest),
            "cells": {f"{p}:{k}": cell.shown() for (p, k), cell in sorted(run.grid.cells.items())},
        },
        "views": [view for view, _ in run.views],
        "samples": [*run.evaluated[0].samples] if run.evaluated else [],
        "notes": list(run.first.notes),
        "alerts": active,
        "facts": {**started.facts, **started.details} if (started := run.first.started) else {},
    }


def _header(run: RunHistory, *, is_silent: bool) -> dict[str, Any]:
    process, step = run.first, run.step
    started, last, recent = process.started, process.last, process.curves[StepFinished]
    summary = process.finished.summary if process.finished else {}
    heldout_loss = run.evaluated[0].curves[Evaluated].last("heldout_loss") if run.evaluated else None
    lows = [started.best_heldout_loss] if started else []
    for evaluated in run.evaluated:
        lows += evaluated.curves[Evaluated].column("heldout_loss_low")
    state, has_ended = _state(process), process.interrupted or process.finished
    if is_silent and not has_ended:
        state = "silent"
    total, per_step = (started.total_steps, started.data_parallel_bytes_per_step) if started else (None, None)
    return {
        "state": state,
        "fetched": process.fetched,
        "step": step if process.reported else None,
        "total_steps": total,
        "algorithm": started.algorithm if started else "",
        "parameters": started.parameters if started else None,
        "replicas": len(run.expected) or None,
        "tokens": last.tokens if last else None,
        "elapsed_s": process.elapsed_s if last else None,
        "left_s": _left_s(process),
        "compute_utilization": last.compute_utilization if last else None,
        **{name: recent.last(name) for name in ("tokens_per_s", "model_flops_utilization", "loss")},
        "heldout_loss": _number(summary.get("heldout_loss")) if heldout_loss is None else heldout_loss,
        "sites_loss": mean_loss(run.sites),
        "best_heldout_loss": min((low for low in lows if low is not None), default=None),
        "sent_bytes": _number(summary.get("sent_bytes_per_replica", last.sent_bytes if last else None)),
        "data_parallel_bytes": _number(summary.get("data_parallel_bytes_per_replica", per_step and per_step * step)),
        "rounds_committed": run.grid.merged if run.grid.newest else None,
        "rounds_void": run.grid.void if run.grid.newest else None,
    }


def _number(value: Any) -> float | None:
    is_number = type(value) in (int, float) and abs(value) < 2**53
    return value if is_number else None


def _left_s(process: ProcessHistory) -> float | None:
    """Return the time left; a step after the shared start takes as long as one in it without the exchange."""
    started, last = process.started, process.last
    if started is None or last is None or not process.step_s:
        return None
    left = max(0, started.total_steps - process.step)
    shared = min(left, max(0, started.shared_start_steps - process.step))
    alone = left - shared
    return process.step_s * (shared + alone * (last.compute_utilization if shared else 1.0))


def _state(process: ProcessHistory) -> str:
    if process.interrupted or process.finished:
        return "interrupted" if process.interrupted else "finished"
    if not process.reported:
        return "not started"
    return "joining" if process.fetched else "running"


def _member_rows(run: RunHistory, now_s: float) -> list[dict[str, Any]]:
    """Return the rows of the table of peers, by replica.

    A peer with the number of another one has a row of its own, without the rounds of that number.
    """
    newest_first, (counted, missed) = run.grid.recent(), run.grid.participation()
    of_rounds: defaultdict[int, dict[str, Any]] = defaultdict(dict)  # replica -> the cells of its newest rounds
    for cell in reversed(newest_first):
        for replica, (digest, weight) in cell.sent.items():
            of_rounds[replica].update(weight=weight, digest="agrees" if digest else "")
        for replica, wait_s in cell.waits_s.items():
            of_rounds[replica].update(wait_s=wait_s)
        for replica in of_rounds.keys() & cell.late_s.keys():
            of_rounds[replica].update(late_s=cell.late_s[replica])
    for replica in (replica for cell in newest_first[: len(run.grid.newest)] for replica in cell.minority()):
        of_rounds[replica]["digest"] = "differs"
    num_merged = sum(cell.state == "merged" for cell in newest_first)
    members = run.expected if run.views or not run.seen else ()  # the peers of a swarm have other numbers at first
    names = {**(run.first.started.names if run.first.started else {}), **(run.views[-1][0].names if run.views else {})}
    sites = run.sites
    seen = {peer.process: peer for peer in run.seen}
    numbers = {f"replica {replica}": replica for replica in {*members, *of_rounds}}
    numbers |= {name: peer.report.number for name, peer in seen.items()}
    rows = []
    for process_name, replica in sorted(numbers.items(), key=lambda item: (item[1], item[0])):
        process, peer = run.processes.get(process_name), seen.get(process_name)
        report, last = peer.report if peer else PeerReport("", replica), process.last if process else None
        status = report.status
        if peer:
            state = peer.state
        elif replica in run.expected:
            state = _state(process or run.first)
        else:
            state = "gone"
        heard_s = peer.heard_s if peer else None
        row = {
            "replica": replica,
            "name": names.get(str(replica)),
            "peer": report.peer_id,
            "state": state,
            "fetched": process.fetched if process else None,
            "heard_s": None if heard_s is None else round(max(0.0, now_s - heard_s), 1),
            "way": report.route,
            "round_trip_s": report.round_trip_s,
            "steps_per_s": 1 / process.step_s if process and process.step_s else None,
            **{name: getattr(status, name, None) for name in ("link_bits_per_s", "pace", "codec")},
            **{name: getattr(status or last, name, None) for name in ("step", "sent_bytes", "received_bytes")},
        }
        if site := sites.get(str(replica)):
            row |= {metric.name: value for metric, value, _, _ in measured(site)}
        if process_name == f"replica {replica}":
            row |= of_rounds.get(replica, {})
            row |= {"counted": f"{counted[replica]} of {num_merged}", "missed": missed[replica]} if num_merged else {}
        rows.append(row)
    return rows
