"""The history of a run, gathered from the events of its processes. Nothing here does I/O or reads a clock."""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco import events
from diloco.transport import PeerReport
from diloco.watch.grid import MAX_FRAGMENTS, Grid

_MAX_REPLICAS = 1_024
_RECENT = 101  # steps
_TELEMETRY = ("mean_norm", "mean_cosine", "momentum_cosine", "gain", "spread")
_BANDS = ("loss", "gradient_norm")
_MEANS = ("learning_rate", "mfu", "compute", "sent_bytes", "tokens_per_s")


Record = tuple[events.Event, float | None]
"""An event, and when it was written in seconds since 1970 by the clock of its process; None if unknown."""

_Bucket = tuple[int, Sequence[float], list[tuple[float, int, float, float]]]
"""The number of points, the place of the last one, and the sum, number, minimum and maximum of each finite value."""


def _merged(first: _Bucket, second: _Bucket) -> _Bucket:
    pairs = zip(first[2], second[2], strict=True)
    values = [(a[0] + b[0], a[1] + b[1], min(a[2], b[2]), max(a[3], b[3])) for a, b in pairs]
    return first[0] + second[0], second[1], values


class Series:
    """A curve of points in at most ``max_buckets`` buckets with equal numbers of points.

    When all buckets are full, neighbouring ones are merged in pairs, which halves the resolution.

    Args:
        bands: the names of values of which a bucket has the mean, the minimum and the maximum.
        means: the names of values of which it has only the mean.
        max_buckets: an even number.

    >>> losses = Series(bands=["loss"], max_buckets=2)
    >>> for step, loss in enumerate([4.0, 2.0, float("nan"), 9.0, 1.0]):
    ...     losses.add([step, 8 * step, 0.5 * step], [loss])
    >>> losses.columns[3:], losses.rows()
    (['loss', 'loss_low', 'loss_high'], [[3, 24, 1.5, 5.0, 2.0, 9.0], [4, 32, 2.0, 1.0, 1.0, 1.0]])
    """

    def __init__(self, bands: Sequence[str] = (), means: Sequence[str] = (), max_buckets: int = 512) -> None:
        banded = (f"{name}{end}" for name in bands for end in ("", "_low", "_high"))
        self.columns = ["step", "tokens", "time_s", *banded, *means]
        self.stride = 1  # the number of points in a full bucket
        self._num_bands, self._max_buckets = len(bands), max_buckets
        self._buckets: list[_Bucket] = []

    def add(self, place: Sequence[float], values: Sequence[float | None]) -> None:
        """Add a point at (step, tokens, time) with the values of ``bands`` and ``means``, None where unknown."""
        known = [value if value is not None and math.isfinite(value) else None for value in values]
        point = 1, place, [(0.0, 0, math.inf, -math.inf) if v is None else (v, 1, v, v) for v in known]
        if self._buckets and self._buckets[-1][0] < self.stride:
            self._buckets[-1] = _merged(self._buckets[-1], point)
            return
        if len(self._buckets) == self._max_buckets:
            self._buckets = [*map(_merged, self._buckets[::2], self._buckets[1::2])]
            self.stride *= 2
        self._buckets.append(point)

    def cut(self, step: int) -> None:
        """Remove the buckets that have a point after ``step``."""
        self._buckets = [bucket for bucket in self._buckets if bucket[1][0] <= step]

    def rows(self) -> list[list[float | None]]:
        """Return one list per bucket, in the order of `columns`; None stands for a bucket without finite values."""
        rows: list[list[float | None]] = []
        for _, place, values in self._buckets:
            row: list[float | None] = [round(each, 3) for each in place]
            for index, (total, number, low, high) in enumerate(values):
                parts = [float(f"{part:.6g}") for part in (total / number, low, high)] if number else [None] * 3
                row += parts[: 3 if index < self._num_bands else 1]
            rows.append(row)
        return rows

    def shown(self) -> dict[str, Any]:
        """Return the curve for the page."""
        return {"columns": self.columns, "stride": self.stride, "rows": self.rows()}


@dataclass
class ProcessHistory:
    """The history of one process of a run, which is a replica or all replicas."""

    step: int = 0  # the number of inner steps finished
    reported: bool = False  # whether there is any event; a loop of one's own may report nothing but its rounds
    started: events.RunStarted | None = None  # the last one, as for all the following
    last: events.StepFinished | None = None
    fetched: events.StateFetched | None = None  # None unless state is being fetched
    checkpoint: events.CheckpointSaved | None = None
    finished: events.RunFinished | None = None  # None while it runs
    interrupted: str = ""  # the signal that stopped it, or ""
    steps: Series = field(default_factory=lambda: Series(_BANDS, _MEANS))  # curves over its steps
    evaluations: Series = field(default_factory=lambda: Series(("heldout_loss",), (), 256))
    outer: Series = field(default_factory=lambda: Series((), _TELEMETRY, 256))  # the mean over fragments
    evaluated_at: int = -1  # the step of the newest evaluation or sample; -1 if there is none
    samples: deque[events.SampleGenerated] = field(default_factory=lambda: deque(maxlen=8))
    notes: deque[events.Note] = field(default_factory=lambda: deque(maxlen=30))
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))  # recent finite gradient norms
    diverged: Record | None = None  # the last step with a non-finite loss or gradient norm
    newest_s: float | None = None  # the time of its newest record, by its own clock
    _began_s: float | None = None
    # fragment -> telemetry of its round of the current outer step, from the first replica that reported one, at a step
    _rounds: dict[int, list[float | None]] = field(default_factory=dict)
    _rounds_of: tuple[int, int] = (0, 0)  # that replica and step
    _step_times: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    @property
    def elapsed_s(self) -> float:
        """The time from the start to the newest record, not counting pauses between an end and a resumption."""
        return 0.0 if self.newest_s is None or self._began_s is None else max(0.0, self.newest_s - self._began_s)

    @property
    def step_s(self) -> float | None:
        """The median time of recent steps; None before there are ten."""
        return statistics.median(self._step_times) if len(self._step_times) >= 10 else None

    def take(self, record: Record) -> None:
        """Process a record."""
        (event, time_s), before = record, self.step
        is_start = isinstance(event, events.RunStarted)
        self.step, self.reported = event.step if is_start else max(event.step, self.step), True
        if time_s is not None:
            if is_start or self._began_s is None:  # the pause before a start is not time of the run
                self._began_s, self.newest_s = time_s - self.elapsed_s, time_s
            self.newest_s = max(time_s, self.newest_s or time_s)
        place = event.step, (self.last.tokens or 0) if self.last else 0, self.elapsed_s
        match event:
            case events.RunStarted():
                self.started, self.fetched, self.finished, self.interrupted = event, None, None, ""
                if event.step < before:  # this run has superseded what followed that step
                    self._cut(event.step)
            case events.StepFinished():
                self._stepped(event, time_s)
            case events.StateFetched():
                self.fetched = event
            case events.Evaluated():
                self.evaluated_at = event.step
                self.evaluations.add(place, [event.heldout_loss])
            case events.RoundCommitted():
                self._committed(event, place)
            case events.SampleGenerated():
                self.evaluated_at = event.step
                self.samples.append(event)
            case events.CheckpointSaved():
                self.checkpoint = event
            case events.Interrupted():
                self.interrupted = event.signal or "a signal"
            case events.Note():
                self.notes.append(event)
            case events.RunFinished():
                self.finished = event

    def _cut(self, step: int) -> None:
        for series in (self.steps, self.evaluations, self.outer):
            series.cut(step)
        for told in (self.samples, self.notes):
            while told and told[-1].step > step:
                told.pop()
        self.diverged, self.evaluated_at = None, min(self.evaluated_at, step)
        self.norms.clear()
        self._rounds.clear()

    def _committed(self, event: events.RoundCommitted, place: Sequence[float]) -> None:
        if self._rounds and event.replica != self._rounds_of[0]:
            return
        if event.fragment in self._rounds:  # this is its next outer step, so the current one is complete
            by_name = zip(*self._rounds.values(), strict=True)
            known = [[each for each in values if each is not None and math.isfinite(each)] for values in by_name]
            if any(known):
                means = [sum(each) / len(each) if each else None for each in known]
                self.outer.add((self._rounds_of[1], *place[1:]), means)
            self._rounds = {}
        if not self._rounds:
            self._rounds_of = event.replica, event.step
        if len(self._rounds) < MAX_FRAGMENTS:
            self._rounds[event.fragment] = [getattr(event, name) for name in _TELEMETRY]

    def _stepped(self, event: events.StepFinished, time_s: float | None) -> None:
        before, norm = self.last, event.gradient_norm
        tokens = event.tokens - before.tokens if before and event.tokens and before.tokens else 0
        seconds = (event.step - before.step) * event.step_s if before else 0.0
        tokens_per_s = tokens / seconds if tokens > 0 and seconds > 0 else None
        self.last, self.fetched = event, None
        if not math.isfinite(event.loss) or not (norm is None or math.isfinite(norm)):
            self.diverged = event, time_s
        if norm is not None and math.isfinite(norm):
            self.norms.append(norm)
        if event.step_s > 0:
            self._step_times.append(event.step_s)
        means = (event.learning_rate, event.model_flops_utilization, event.compute_utilization, event.sent_bytes)
        self.steps.add((event.step, event.tokens or 0, self.elapsed_s), (event.loss, norm, *means, tokens_per_s))


@dataclass(frozen=True)
class Seen:
    """A peer of a swarm, as last seen."""

    process: str  # its name in `RunHistory.processes`
    state: str  # the state that it reports, or "no answer", "gone" or "finished"
    report: PeerReport  # its last report, whose status is untrusted
    heard_s: float | None = None  # when it last answered, by the clock of this machine; None if it never did


@dataclass
class RunHistory:
    """The history of one run on the page."""

    name: str  # the name of the run
    where: str  # its folder, or how its swarm is reached
    # whether the processes are our own. If not, a single one can't set the members or the step of the run
    trusted: bool = True
    settings: Mapping[str, str] = field(default_factory=dict)  # key -> value as text
    seen: Sequence[Seen] = ()  # the peers of a swarm; empty for a folder
    problems: Sequence[str] = ()  # messages about data that could not be read
    behind_bytes: int = 0  # bytes of records that are still to be read
    processes: dict[str, ProcessHistory] = field(default_factory=dict)  # "replica 3", or "" if it is the whole run
    grid: Grid = field(default_factory=Grid)
    # the newest views, and when they were reported
    views: deque[tuple[events.ViewChanged, float | None]] = field(default_factory=lambda: deque(maxlen=100))
    expected: tuple[int, ...] = ()  # members of the newest view, or all initial replicas before the first view change
    _reporters: dict[int, str] = field(default_factory=dict)  # replica with a reported round -> its process
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
        step = self.step
        near = [name for name, each in self.processes.items() if each.step >= step - max(20, step // 20)]
        return self.processes[min(near, key=replica_order)] if near else ProcessHistory()

    @property
    def evaluated(self) -> list[ProcessHistory]:
        """The processes with an evaluation or a sample, those with the newest one first. Not every process has one."""
        some = [each for each in self.processes.values() if each.evaluated_at >= 0]
        return sorted(some, key=lambda each: each.evaluated_at, reverse=True)

    def take(self, name: str, record: Record) -> None:
        """Process a record of the process called ``name``."""
        process = self.processes.setdefault(name, ProcessHistory())
        before = process.step
        process.take(record)
        match record[0]:
            case events.RoundSent() | events.RoundCommitted() | events.RoundVoid() as event:
                if event.replica not in self._reporters and len(self._reporters) < _MAX_REPLICAS:
                    self._reporters[event.replica] = name
                    self._expect()
                self.grid.take(event, self.expected)
            case events.ViewChanged() as event:
                self._views[name] = view = event.view, event.members
                reported = Counter([view] if self.trusted else self._views.values())
                newest = max(reported, key=lambda each: (reported[each], each[0]))
                if newest == view != self._newest_view and (not self.trusted or view[0] > self._newest_view[0]):
                    self._newest_view, self.expected = view, event.members
                    self.views.append((event, record[1]))
            case events.RunStarted() as event:
                if event.step < before:
                    self.grid.forget({each for each, of in self._reporters.items() if of == name}, event.step)
                self._expect()

    def _expect(self) -> None:
        """Set `expected` before the first view change: replicas 0 to M - 1, or those that report rounds if one of
        their numbers is outside this range."""
        if self._newest_view[0] < 0:
            started = self.first.started
            numbered = tuple(range(min(started.num_replicas if started else 0, _MAX_REPLICAS)))
            self.expected = numbered if {*self._reporters} <= {*numbered} else tuple(sorted(self._reporters))


def replica_order(name: str) -> tuple[int, str]:
    """Sort the names of processes by their numbers."""
    return len(name), name
