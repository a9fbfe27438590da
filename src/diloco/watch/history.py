"""The history of a run, gathered from the records of its processes. Nothing here does I/O or reads a clock."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco.watch.grid import MOST_FRAGMENTS, Grid, ReportedRound
from diloco.watch.records import Record, number, numbers, text, whole
from diloco.watch.series import Series

__all__ = ["OF_OUTER_STEPS", "ProcessHistory", "RunHistory", "Spike"]

_SPIKE = 2.0  # gradient norms above this many times their median are kept; `alerts` decides which deserve an alert

_MEDIAN_OF = 101
_PLACES = ("step", "tokens", "time_s")
OF_OUTER_STEPS = ("mean_norm", "mean_cosine", "momentum_cosine", "gain", "spread")
_OF_STEPS = ("loss", "gradient_norm", "learning_rate", "step_s", "mfu", "compute", "sent_bytes")


@dataclass(frozen=True)
class Spike:
    """A gradient norm far above the median of the previous ones."""

    step: int
    norm: float
    median: float
    time_s: float | None  # when it was recorded, by the clock of its process


class _Median:
    """The median of the last `_MEDIAN_OF` values; None before there are ten."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._ordered: list[float] = []

    def add(self, value: float) -> None:
        self._recent.append(value)
        insort(self._ordered, value)
        if len(self._recent) > _MEDIAN_OF:
            del self._ordered[bisect_left(self._ordered, self._recent.popleft())]

    @property
    def value(self) -> float | None:
        return self._ordered[len(self._ordered) // 2] if len(self._ordered) >= 10 else None


@dataclass
class ProcessHistory:
    """The history of one process of a run, which is a replica or all replicas."""

    started: Record = field(default_factory=dict)  # the last ``RunStarted``, or empty
    last: Record = field(default_factory=dict)  # the last ``StepFinished``, or empty
    fetched: Record = field(default_factory=dict)  # the last ``StateFetched`` while state is being fetched, or empty
    steps: Series = field(default_factory=lambda: Series(_PLACES, _OF_STEPS))  # curves over its steps
    evaluations: Series = field(default_factory=lambda: Series(_PLACES, ("heldout_loss",), 256))  # held-out losses
    evaluated_at: int = 0  # the step of the newest evaluation or sample
    # telemetry of its rounds: at each outer step, the mean over fragments
    outer: Series = field(default_factory=lambda: Series(_PLACES, OF_OUTER_STEPS, 256))
    best: float | None = None  # the lowest held-out loss
    samples: deque[Record] = field(default_factory=lambda: deque(maxlen=8))  # the newest samples, newest last
    notes: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=30))  # (step, text), newest last
    checkpoint: Record = field(default_factory=dict)  # the last ``CheckpointSaved``, or empty
    finished: Mapping[str, Any] = field(default_factory=dict)  # the summary once the process has ended, or empty
    interrupted: str = ""  # the signal that stopped it, or ""
    # gradient norms far above the median, newest last
    spikes: deque[Spike] = field(default_factory=lambda: deque(maxlen=32))
    # (step, time of its record) of steps with a non-finite loss or gradient norm, newest last
    not_finite: deque[tuple[int, float | None]] = field(default_factory=lambda: deque(maxlen=32))
    newest_s: float | None = None  # the time of its newest record, by its own clock
    reported: bool = False  # whether there is any record; a loop of one's own may report nothing but its rounds
    seen_step: int = 0  # the greatest step of its records since its start
    _began_s: float | None = None
    # fragment -> its round of the current outer step, as reported by the first replica that reported one
    _rounds: dict[int, Record] = field(default_factory=dict)
    _norms: _Median = field(default_factory=_Median)
    _step_s: _Median = field(default_factory=_Median)

    @property
    def step(self) -> int:
        """The number of inner steps finished."""
        return self.seen_step

    @property
    def elapsed_s(self) -> float:
        """The time from the start to the newest record, not counting pauses between an end and a resumption."""
        return 0.0 if self.newest_s is None or self._began_s is None else max(0.0, self.newest_s - self._began_s)

    @property
    def step_s(self) -> float | None:
        """The median time of recent steps; None before there are ten."""
        return self._step_s.value

    @property
    def over(self) -> bool:
        """Whether it has reported its end."""
        return bool(self.finished)

    def take(self, record: Record) -> None:
        """Process a typed record. Fields that it lacks are treated as unknown."""
        step, self.reported = int(record["step"]), True
        self.seen_step = step if record["event"] == "RunStarted" else max(step, self.seen_step)
        written_s = number(record, "time_s")
        if record["event"] == "RunStarted" and written_s is not None:  # the pause does not count as time of the run
            self._began_s, self.newest_s = written_s - self.elapsed_s, written_s
        if written_s is not None and math.isfinite(written_s):
            self._began_s = written_s if self._began_s is None else self._began_s
            self.newest_s = max(written_s, self.newest_s or written_s)
        match record["event"]:
            case "RunStarted":
                self.started, self.fetched, self.finished, self.interrupted = record, {}, {}, ""
            case "StepFinished":
                self._stepped(record)
            case "StateFetched":
                self.fetched = record
            case "Evaluated":
                self.evaluated_at = int(record["step"])
                loss = number(record, "heldout_loss")
                self.evaluations.add(self._place(record), {"heldout_loss": loss})
                if loss is not None and math.isfinite(loss):
                    self.best = loss if self.best is None else min(loss, self.best)
            case "RoundCommitted":
                self._committed(record)
            case "SampleGenerated":
                self.evaluated_at = int(record["step"])
                self.samples.append(record)
            case "CheckpointSaved":
                self.checkpoint = record
            case "Interrupted":
                self.interrupted = text(record, "signal") or "a signal"
            case "Note":
                self.notes.append((int(record["step"]), text(record, "text")))
            case "RunFinished":
                summary = record.get("summary")
                self.finished = summary if isinstance(summary, dict) and summary else {"finished": True}

    def _place(self, record: Record) -> dict[str, float]:
        tokens = number(record, "tokens")
        if tokens is None:
            tokens = number(self.last, "tokens") or 0.0
        return {"step": record["step"], "tokens": tokens, "time_s": self.elapsed_s}

    def _committed(self, record: Record) -> None:
        fragment, mine = whole(record, "fragment"), next(iter(self._rounds.values()), record)
        if fragment is None or record.get("replica") != mine.get("replica"):
            return
        if fragment in self._rounds:  # this is its next outer step, so the current one is complete
            reported = [[number(each, name) for each in self._rounds.values()] for name in OF_OUTER_STEPS]
            finite = [[value for value in values if value is not None and math.isfinite(value)] for values in reported]
            means = [sum(values) / len(values) if values else None for values in finite]
            if any(value is not None for value in means):
                self.outer.add(self._place(mine), dict(zip(OF_OUTER_STEPS, means, strict=True)))
            self._rounds = {}
        if len(self._rounds) < MOST_FRAGMENTS:
            self._rounds[fragment] = record

    def _stepped(self, record: Record) -> None:
        self.last, self.fetched = record, {}
        values = {name: number(record, name) for name in ("loss", "gradient_norm", "learning_rate", "step_s")}
        norm, step_s = values["gradient_norm"], values["step_s"]
        if any(
            values[name] is not None and not math.isfinite(values[name] or 0.0) for name in ("loss", "gradient_norm")
        ):
            self.not_finite.append((int(record["step"]), self.newest_s))
        if norm is not None and math.isfinite(norm):
            median = self._norms.value
            if median is not None and norm > _SPIKE * median > 0:
                self.spikes.append(Spike(int(record["step"]), norm, median, self.newest_s))
            self._norms.add(norm)
        if step_s is not None and step_s > 0:
            self._step_s.add(step_s)
        values["mfu"] = number(record, "model_flops_utilization")
        values["compute"] = number(record, "compute_utilization")
        values["sent_bytes"] = number(record, "sent_bytes")
        self.steps.add(self._place(record), values)


def _order(name: str) -> tuple[int, str]:
    """Return a sort key that orders process names by their numbers."""
    return len(name), name


@dataclass
class RunHistory:
    """The history of a run, with all its processes.

    Args:
        trusted: whether the newest report of a view counts, and the greatest step. Otherwise the view counts that most
            processes report as their newest one, and the median step.
    """

    trusted: bool = True
    # name, such as "replica 3", -> process; "" if one process is the whole run
    processes: dict[str, ProcessHistory] = field(default_factory=dict)
    grid: Grid = field(default_factory=Grid)  # the rounds
    views: deque[Record] = field(default_factory=lambda: deque(maxlen=100))  # the newest ``ViewChanged`` records
    expected: tuple[int, ...] = ()  # members of the newest view, or all initial replicas before the first view change
    _reporting: set[int] = field(default_factory=set)  # replicas with a record of a round
    _newest_view: tuple[int, tuple[int, ...]] = (-1, ())  # its number and members
    _views: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)  # process -> the newest of its views

    @property
    def step(self) -> int:
        """The number of inner steps finished by the most advanced process, or by half of those that are not trusted."""
        steps = sorted(each.step for each in self.processes.values())
        return 0 if not steps else steps[-1] if self.trusted else steps[len(steps) // 2]

    @property
    def first(self) -> ProcessHistory:
        """The process that represents the run: the one of the lowest replica that is not far behind."""
        newest = self.step
        near = [name for name, each in self.processes.items() if each.step >= newest - max(20, newest // 20)]
        return self.processes[min(near, key=_order)] if near else ProcessHistory()

    @property
    def evaluated(self) -> list[ProcessHistory]:
        """The processes with an evaluation or a sample, those with the newest one first. Not every process has one."""
        found = [each for each in self.processes.values() if len(each.evaluations) or each.samples]
        return sorted(found, key=lambda each: each.evaluated_at, reverse=True)

    @property
    def names(self) -> list[str]:
        """The names of the processes, in the order of their replicas."""
        return sorted(self.processes, key=_order)

    def take(self, process: str, record: Record) -> None:
        """Process a record of the process called ``process``."""
        self.processes.setdefault(process, ProcessHistory()).take(record)
        match record["event"]:
            case "RoundSent" | "RoundCommitted" | "RoundVoid":
                replica = whole(record, "replica")
                if replica is not None and replica not in self._reporting:
                    self._reporting.add(replica)
                    self._expect()
                self.grid.take(record, self.expected)
            case "ViewChanged" if (number := whole(record, "view")) is not None:
                self._views[process] = view = number, numbers(record, "members")
                reported = [view] if self.trusted else list(self._views.values())
                newest = max(reported, key=lambda each: (reported.count(each), each[0]))
                if newest == view and (not self.trusted or number > self._newest_view[0]) and view != self._newest_view:
                    self._newest_view, self.expected = view, view[1]
                    self.views.append(record)
            case "RunStarted":
                self._expect()

    def _expect(self) -> None:
        """Set `expected` before the first view change: replicas 0 to M - 1, or those that report rounds if one of
        their numbers is outside this range."""
        if self._newest_view[0] < 0:
            numbered = range(min(whole(self.first.started, "num_replicas") or 0, 1_024))
            counted = all(replica in numbered for replica in self._reporting)
            self.expected = tuple(numbered) if counted else tuple(sorted(self._reporting))

    def newest_cells(self) -> list[ReportedRound]:
        """Return the newest round of every fragment."""
        return [self.grid.cells[key] for key in self.grid.newest.items() if key in self.grid.cells]
