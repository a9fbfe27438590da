"""Alerts about a run, computed from its history and the current time. Nothing here does I/O.

A new alert is a function that yields `Alert`, and its line in `_ALERTS`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from diloco.units import format_bytes, format_duration
from diloco.watch.history import RunHistory

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
    words: str  # the message, without the step
    step: int | None = None  # the inner step concerned, if there is one


def find_alerts(run: RunHistory, now_s: float) -> list[Alert]:
    """Return the alerts at ``now_s``, in seconds since 1970 by the clock of the records; errors first."""
    alerts = [alert for kind in _ALERTS for alert in kind(run, now_s)]
    return sorted(alerts, key=lambda alert: alert.level != "error")


def _is_recent(run: RunHistory, step: int, time_s: float | None) -> bool:
    """Return whether an event is recent, in steps or in seconds: 200 short steps may pass before anyone sees it."""
    newest_s = run.first.newest_s
    return run.step - step <= _RECENT_STEPS or bool(time_s and newest_s and newest_s - time_s <= _RECENT_S)


def _training(run: RunHistory) -> list[str]:
    """Return the processes that should report: members that have not ended."""
    members = {"", *(f"replica {replica}" for replica in run.expected)} if run.views else {*run.processes}
    gone = {peer.process for peer in run.seen if peer.state in _GONE}
    return [name for name, each in run.processes.items() if name in members - gone and not each.finished]


def _silent(run: RunHistory, now_s: float) -> Iterator[Alert]:
    heard = {peer.process: peer.heard_s for peer in run.seen}
    for name in _training(run):
        process = run.processes[name]
        heard_s = heard.get(name, process.newest_s)
        if heard_s is not None and now_s - heard_s > max(SILENT_S, 10 * (process.step_s or 0.0)):
            who = name or "the run"
            # a screen reader would read a text that changes every second every second
            over_s = (now_s - heard_s) // 30 * 30
            words = f"{_capital(who)} has reported nothing for more than {format_duration(over_s)}."
            yield Alert("error", "silent", who, words, process.step)


def _lost(run: RunHistory, now_s: float) -> Iterator[Alert]:
    """Report lost replicas until they rejoin, others take their places, the run ends, or the loss is long ago."""
    for view, time_s in run.views if not run.first.finished else ():
        gone = sorted({*view.lost} - {*run.expected})
        replaced = len(run.expected) >= len(view.members) - len(view.joined) + len(view.left)
        if view.members and gone and not replaced and _is_recent(run, view.step, time_s):
            who = f"replica{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}"
            words = f"{_capital(who)} left without announcing it: {view.reason}."
            yield Alert("warning", "lost", who, words, view.step)


def _digests(run: RunHistory, now_s: float) -> Iterator[Alert]:
    for (fragment, outer_step), cell in sorted(run.grid.cells.items()):
        for replica in cell.minority() if outer_step > run.grid.newest[fragment] - _RECENT_ROUNDS else ():
            words = (
                f"Replica {replica} had a different state of fragment {fragment} than the majority in outer step "
                f"{outer_step}. Such a round is void, and the replica adopts the state of the majority."
            )
            yield Alert("error", "digest", f"replica {replica}", words, cell.step)


def _missed(run: RunHistory, now_s: float) -> Iterator[Alert]:
    _, missed = run.grid.participation()
    for replica in run.expected:
        if missed[replica] >= MISSED_ROUNDS:
            words = f"The last {missed[replica]} rounds were merged without replica {replica}."
            yield Alert("warning", "missed", f"replica {replica}", words)


def _void(run: RunHistory, now_s: float) -> Iterator[Alert]:
    grid = run.grid
    for fragment in sorted(grid.newest):
        void = [*takewhile(lambda cell: not cell.waits_s, grid.of_fragment(fragment))]
        times = sum(cell.times_void for cell in void)
        if times >= VOID_ROUNDS:
            last = next(cell for cell in void if cell.times_void)
            words = f"The last {times} rounds of fragment {fragment} were void. The reason of the last one: {last.why}"
            yield Alert("error", "void", f"fragment {fragment}", words, last.step)


def _numbers(run: RunHistory, now_s: float) -> Iterator[Alert]:
    for name, process in run.processes.items():
        who = name or "the run"
        event, time_s = process.diverged or (None, None)
        if event and _is_recent(run, event.step, time_s):
            words = f"The loss or the gradient norm of {who} was NaN or infinite."
            yield Alert("error", "not finite", who, words, event.step)
        before, recent = [*process.norms][:-10], [*process.norms][-10:]
        if len(before) < 20:
            continue
        high, usual = statistics.median(recent), statistics.median(before)
        if high > HIGH_NORM * usual > 0:  # one spike alone is ordinary
            words = f"The last gradient norms of {who} were {high:.3g}, {high / usual:.1f}x those before."
            yield Alert("warning", "gradient norm", who, words)


def _slow(run: RunHistory, now_s: float) -> Iterator[Alert]:
    processes = run.processes
    times = {name: step_s for name in _training(run) if (step_s := processes[name].step_s)}
    for name, step_s in times.items():
        usual_s = statistics.median([each for other, each in times.items() if other != name] or [step_s])
        if step_s > SLOWER * usual_s:
            took = f"{format_duration(step_s)} per step, {step_s / usual_s:.1f}x the median of the others."
            yield Alert("warning", "slow", name, f"{_capital(name)} takes {took}")


def _disk(run: RunHistory, now_s: float) -> Iterator[Alert]:
    for name in _training(run):
        saved = run.processes[name].checkpoint
        free = saved.free_bytes if saved else None
        if saved and free is not None and free < FREE_CHECKPOINTS * saved.size_bytes:
            who = name or "the run"
            sizes = f"{format_bytes(free)} left, and a checkpoint takes {format_bytes(saved.size_bytes)}"
            level: Literal["error", "warning"] = "error" if free < saved.size_bytes else "warning"
            yield Alert(level, "disk", who, f"The disk of {who} has {sizes}.", saved.step)


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]


_ALERTS = (_silent, _lost, _digests, _missed, _void, _numbers, _slow, _disk)
