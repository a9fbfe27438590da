"""Alerts about a run, computed from its history, thresholds and the current time. Nothing here does I/O."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from diloco.errors import ConfigurationError
from diloco.units import format_bytes, format_duration
from diloco.watch.history import RunHistory
from diloco.watch.members import GONE, Seen
from diloco.watch.records import number, numbers, text, whole

__all__ = ["Alert", "Thresholds", "find_alerts"]

_RECENT_STEPS, _RECENT_S = 200, 60.0  # an alert about one event stays for this many inner steps, or this long
_RECENT_ROUNDS = 5  # an alert about one round stays for this many rounds of its fragment


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The thresholds of the alerts."""

    silent_s: float = 60.0
    """Alert if a process that should be training has been silent for this many seconds and ten of its steps."""
    missed_rounds: int = 3
    """Alert if this many consecutive rounds were merged without a replica."""
    void_rounds: int = 3
    """Alert if this many consecutive rounds of a fragment were void."""
    gradient_norm_factor: float = 5.0
    """Alert if a gradient norm is more than this many times the median of the previous 101."""
    slower_factor: float = 1.5
    """Alert if the step time of a replica is more than this many times the median of the others."""
    free_checkpoints: float = 3.0
    """Alert if the disk has space for fewer checkpoints than this."""

    def __post_init__(self) -> None:
        for name in ("silent_s", "gradient_norm_factor", "slower_factor", "free_checkpoints"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"alert.{name} must be positive, got {getattr(self, name)}.")
        for name in ("missed_rounds", "void_rounds"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"alert.{name} must be at least 1, got {getattr(self, name)}.")


@dataclass(frozen=True)
class Alert:
    """A condition that the operator should look at."""

    level: Literal["error", "warning"]  # "error" if the run is harmed, "warning" if it may be
    kind: str  # the kind of the condition
    who: str  # the process, replica or fragment concerned
    words: str  # the message, without the step
    step: int | None = None  # the inner step concerned, if there is one


def find_alerts(
    run: RunHistory, seen: Sequence[Seen], thresholds: Thresholds, now_s: float, free_bytes: int | None = None
) -> list[Alert]:
    """Return the current alerts, errors first.

    Args:
        run: the history of the run.
        seen: the peers of a swarm as last seen; empty for a folder.
        thresholds: the thresholds of the alerts.
        now_s: the current time in seconds since 1970, by the clock that wrote the records or that received them.
        free_bytes: free space on the disk of the run folder, or None if it is unknown.
    """
    away = _away(run, seen)
    found = [
        *_silent(run, seen, away, thresholds, now_s),
        *_lost(run),
        *_digests(run),
        *_rounds(run, thresholds),
        *_numbers(run, thresholds),
        *_slow(run, away, thresholds),
        *_disk(run, away, thresholds, free_bytes),
    ]
    return sorted(found, key=lambda alert: alert.level != "error")


def _named(run: RunHistory, name: str) -> str:
    return name if len(run.processes) > 1 or name else "the run"


def _is_recent(run: RunHistory, step: int, time_s: float | None) -> bool:
    """Return whether an event is recent, in steps or in seconds: 200 short steps may pass before anyone sees it."""
    newest_s = run.first.newest_s
    return run.step - step <= _RECENT_STEPS or bool(time_s and newest_s and newest_s - time_s <= _RECENT_S)


def _away(run: RunHistory, seen: Sequence[Seen]) -> set[str]:
    """Return the processes that need not report: those that have ended or are no longer members."""
    over = {name for name, process in run.processes.items() if process.over}
    members = {"", *(f"replica {replica}" for replica in run.expected)}
    without = {name for name in run.processes if name not in members} if run.views else set()
    return over | without | {peer.process for peer in seen if peer.state in GONE}


def _silent(
    run: RunHistory, seen: Sequence[Seen], away: set[str], thresholds: Thresholds, now_s: float
) -> Iterator[Alert]:
    peers = {peer.process: peer for peer in seen}
    for name, process in run.processes.items():
        peer = peers.get(name)
        heard_s = peer.heard_s if peer else process.newest_s
        if name in away or heard_s is None:
            continue
        silent_s = now_s - heard_s
        if silent_s > max(thresholds.silent_s, 10 * (process.step_s or 0.0)):
            who = _named(run, name)
            over_s = silent_s // 30 * 30  # a screen reader would read a text that changes every second every second
            words = f"{who} has reported nothing for more than {format_duration(over_s)}."
            yield Alert("error", "silent", who, words[0].upper() + words[1:], process.step)


def _lost(run: RunHistory) -> Iterator[Alert]:
    """Report lost replicas until they rejoin, others take their places, the run ends, or the loss is no longer
    recent."""
    for record in run.views if not run.first.over else ():
        members, joined, left = (numbers(record, name) for name in ("members", "joined", "left"))
        gone = sorted({*numbers(record, "lost")} - {*run.expected})
        replaced = len(run.expected) >= len(members) - len(joined) + len(left)
        if not members or not gone or replaced or not _is_recent(run, record["step"], number(record, "time_s")):
            continue
        who = f"replica{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}"
        words = f"{who} left without announcing it: {text(record, 'reason')}."
        yield Alert("warning", "lost", who, words[0].upper() + words[1:], record["step"])


def _digests(run: RunHistory) -> Iterator[Alert]:
    newest = run.grid.newest
    for (fragment, outer_step), cell in sorted(run.grid.cells.items()):
        for replica in cell.minority() if outer_step > newest[fragment] - _RECENT_ROUNDS else ():
            words = (
                f"Replica {replica} had a different state of fragment {fragment} than the majority in outer step "
                f"{outer_step}. Such a round is void, and the replica adopts the state of the majority."
            )
            yield Alert("error", "digest", f"replica {replica}", words, cell.step)


def _rounds(run: RunHistory, thresholds: Thresholds) -> Iterator[Alert]:
    for replica in run.expected:
        missed = run.grid.parts[replica].missed if replica in run.grid.parts else 0
        if missed >= thresholds.missed_rounds:
            words = f"The last {missed} rounds were merged without replica {replica}."
            yield Alert("warning", "missed", f"replica {replica}", words)
    for fragment, count in sorted(run.grid.void_in_a_row.items()):
        if count >= thresholds.void_rounds:
            newest = max(key for key in run.grid.cells if key[0] == fragment and run.grid.cells[key].void)
            cell = run.grid.cells[newest]
            words = f"The last {count} rounds of fragment {fragment} were void. The reason of the last one: {cell.void}"
            yield Alert("error", "void", f"fragment {fragment}", words, cell.step)


def _numbers(run: RunHistory, thresholds: Thresholds) -> Iterator[Alert]:
    for name, process in run.processes.items():
        who = _named(run, name)
        if process.not_finite and _is_recent(run, *process.not_finite[-1]):
            step, _ = process.not_finite[-1]
            words = f"The loss or the gradient norm of {who} was NaN or infinite."
            yield Alert("error", "not finite", who, words, step)
        high = [each for each in process.spikes if each.norm > thresholds.gradient_norm_factor * each.median]
        if high and _is_recent(run, high[-1].step, high[-1].time_s):
            spike = high[-1]
            factor = spike.norm / spike.median
            words = f"The gradient norm of {who} was {spike.norm:.3g}, {factor:.1f}x the median of the previous ones."
            yield Alert("warning", "gradient norm", who, words, spike.step)


def _slow(run: RunHistory, away: set[str], thresholds: Thresholds) -> Iterator[Alert]:
    training = {name: each for name, each in run.processes.items() if name not in away}
    times = {name: step_s for name, each in training.items() if (step_s := each.step_s)}
    for name, step_s in times.items():
        others = [each for other, each in times.items() if other != name]
        if not others:
            return
        usual_s = statistics.median(others)
        if step_s > thresholds.slower_factor * usual_s:
            words = (
                f"{name} takes {format_duration(step_s)} per step, {step_s / usual_s:.1f}x the median of the others."
            )
            yield Alert("warning", "slow", name, words[0].upper() + words[1:])


def _disk(run: RunHistory, away: set[str], thresholds: Thresholds, free_bytes: int | None) -> Iterator[Alert]:
    for name, process in run.processes.items():
        size, free = whole(process.checkpoint, "size_bytes"), whole(process.checkpoint, "free_bytes")
        free = free_bytes if free_bytes is not None else free
        if name in away or size is None or free is None or free >= thresholds.free_checkpoints * size:
            continue
        who = _named(run, name)
        words = f"The disk of {who} has {format_bytes(free)} left, and a checkpoint takes {format_bytes(size)}."
        yield Alert("error" if free < size else "warning", "disk", who, words, int(process.checkpoint["step"]))
