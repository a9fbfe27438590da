"""What somebody should look at: a pure function of what is known of a run, of thresholds, and of the time."""

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

_LATELY, _LATELY_S = 200, 60.0  # a single event stays worth an alert for so many inner steps, and for so long
_ROUNDS_LATELY = 5  # the same for rounds, of one fragment


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """From where on something is worth an alert."""

    silent_s: float = 60.0
    """A process that should be training and has told nothing for so long, and for ten of its steps."""
    missed_rounds: int = 3
    """Rounds in a row that were merged without a replica."""
    void_rounds: int = 3
    """Rounds in a row of one fragment that are void."""
    gradient_norm_factor: float = 5.0
    """A gradient norm of this many times the median of the 101 before."""
    slower_factor: float = 1.5
    """A replica that needs this many times as long for a step as the median of the others."""
    free_checkpoints: float = 3.0
    """Disk space for fewer checkpoints than this."""

    def __post_init__(self) -> None:
        for name in ("silent_s", "gradient_norm_factor", "slower_factor", "free_checkpoints"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"alert.{name}={getattr(self, name)} must be positive.")
        for name in ("missed_rounds", "void_rounds"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"alert.{name}={getattr(self, name)} must be at least 1.")


@dataclass(frozen=True)
class Alert:
    """Something to look at."""

    level: Literal["error", "warning"]  # "error" where the run is harmed, "warning" where it may be
    kind: str  # which threshold it is about
    who: str  # the culprit, in words; "" where nobody is
    words: str  # a sentence, without the step
    step: int | None = None  # of the run, where it belongs to one


def find_alerts(
    run: RunHistory, seen: Sequence[Seen], thresholds: Thresholds, now_s: float, free_bytes: int | None = None
) -> list[Alert]:
    """All there is to look at now, errors first.

    Args:
        seen: the peers of a swarm, as they were found last; empty for a folder.
        now_s: seconds since 1970, by the clock that wrote the records or that received them.
        free_bytes: disk space where the run is written; None if that is not known.
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


def _lately(run: RunHistory, step: int, time_s: float | None) -> bool:
    """Whether what was told at a step is no old news: 200 steps may be over before anybody has seen it."""
    newest_s = run.first.newest_s
    return run.step - step <= _LATELY or bool(time_s and newest_s and newest_s - time_s <= _LATELY_S)


def _away(run: RunHistory, seen: Sequence[Seen]) -> set[str]:
    """Processes of which nothing more is expected: they have ended, or the others go on without them."""
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
            over_s = silent_s // 30 * 30  # words that change each second would be read out each second
            words = f"{who} has told nothing for more than {format_duration(over_s)}."
            yield Alert("error", "silent", who, words, process.step)


def _lost(run: RunHistory) -> Iterator[Alert]:
    """Who is gone without a word and not back, until others have taken the places, the run ends, or it is long ago."""
    for record in run.views if not run.first.over else ():
        members, joined, left = (numbers(record, name) for name in ("members", "joined", "left"))
        gone = sorted({*numbers(record, "lost")} - {*run.expected})
        replaced = len(run.expected) >= len(members) - len(joined) + len(left)
        if not members or not gone or replaced or not _lately(run, record["step"], number(record, "time_s")):
            continue
        who = f"replica{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}"
        words = f"{who} {'are' if len(gone) > 1 else 'is'} gone without a word: {text(record, 'reason')}."
        yield Alert("warning", "lost", who, words[0].upper() + words[1:], record["step"])


def _digests(run: RunHistory) -> Iterator[Alert]:
    newest = run.grid.newest
    for (fragment, outer_step), cell in sorted(run.grid.cells.items()):
        for replica in cell.minority() if outer_step > newest[fragment] - _ROUNDS_LATELY else ():
            words = (
                f"Replica {replica} held another state of fragment {fragment} than most, in outer step {outer_step}. "
                "Such a round is void, and the replica takes over the state of the others."
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
            words = f"{count} rounds in a row of fragment {fragment} are void. The last one: {cell.void}"
            yield Alert("error", "void", f"fragment {fragment}", words, cell.step)


def _numbers(run: RunHistory, thresholds: Thresholds) -> Iterator[Alert]:
    for name, process in run.processes.items():
        who = _named(run, name)
        if process.not_finite and _lately(run, *process.not_finite[-1]):
            step, _ = process.not_finite[-1]
            words = f"The loss or the gradient norm of {who} was no finite number."
            yield Alert("error", "not finite", who, words, step)
        high = [each for each in process.spikes if each.norm > thresholds.gradient_norm_factor * each.median]
        if high and _lately(run, high[-1].step, high[-1].time_s):
            spike = high[-1]
            factor = spike.norm / spike.median
            words = f"The gradient norm of {who} was {spike.norm:.3g}, {factor:.1f}x the median of those before."
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
                f"{name} takes {format_duration(step_s)} for a step, {step_s / usual_s:.1f}x as long as the median of "
                "the others."
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
