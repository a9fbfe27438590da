"""The history of a run, gathered from the events of its processes. Nothing here does I/O or reads a clock."""

import math
import statistics
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco import events
from diloco.events import RoundCommitted, RoundSent, RoundVoid
from diloco.metrics import Metric, metrics_of
from diloco.transport import PeerReport

OUTER_STEPS = 64  # the number of newest outer steps that are kept per fragment
MAX_FRAGMENTS = 256
MAX_RECENT = 256  # rounds
MAX_BYTES = 64 << 20  # of all rounds, if they are not trusted


@dataclass(slots=True)
class Cell:
    """One round, as the replicas have reported it."""

    step: int = 0  # the step of its newest record
    expected: tuple[int, ...] = ()  # replicas that should take part in it
    sent: dict[int, tuple[str, float]] = field(default_factory=dict)  # replica -> digest and weight of its contribution
    contributors: tuple[int, ...] = ()  # replicas whose contributions are in the mean
    clipped: tuple[int, ...] = ()  # those whose contributions were scaled down
    waits_s: dict[int, float] = field(default_factory=dict)  # replica that applied the mean -> how long it waited
    late_s: dict[int, float] = field(default_factory=dict)
    """Contributor -> seconds after the first one, as seen by the replica that saw the longest such time."""
    void: bool = False  # whether a replica has reported that it did not apply it
    times_void: int = 0  # a void round may be repeated under its outer step
    why: str = ""  # why it is void, or why replicas are not in the mean

    @property
    def state(self) -> str:
        """The state of the round: "sent", "merged" if at least one replica merged it, or "void"."""
        if self.waits_s:
            return "merged"
        return "void" if self.void else "sent"

    @property
    def absent(self) -> list[int]:
        """The expected replicas whose contributions are not in the mean."""
        return sorted({*self.expected} - {*self.contributors}) if self.waits_s else []

    @property
    def cost(self) -> tuple[int, int]:
        """The number of replicas that reported it, negative, and about the bytes that it takes, or more."""
        numbers = len(self.contributors) + len(self.clipped) + 3 * len(self.late_s) + 3 * len(self.waits_s)
        digests = sum(200 + 4 * len(digest) for digest, _ in self.sent.values())
        return -len(self.sent.keys() | self.waits_s.keys()), 500 + 4 * len(self.why) + 40 * numbers + digests

    def minority(self) -> list[int]:
        """Return the replicas whose digests differ from the most frequent one; on a tie, the lowest replica's wins."""
        digests = {replica: digest for replica, (digest, _) in sorted(self.sent.items()) if digest}
        most = Counter(digests.values()).most_common(1)
        return [replica for replica, digest in digests.items() if digest != most[0][0]]

    def shown(self) -> dict[str, Any]:
        """Return the round for the page."""
        last = max(self.late_s, key=lambda replica: self.late_s[replica], default=None)
        return {
            **{name: getattr(self, name) for name in ("state", "step", "contributors", "absent", "why", "clipped")},
            "sent": sorted(self.sent),
            "merged": sorted(self.waits_s),
            "wait_s": max(self.waits_s.values(), default=None),
            "last": last,
            "last_after_s": None if last is None else self.late_s[last],
            "differ": self.minority(),
        }


class Grid:
    """The newest rounds of every fragment, built from the events of all replicas in any order among replicas."""

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int], Cell] = {}  # (fragment, outer step) -> round
        self.merged = self.void = 0  # numbers of rounds so far that a replica merged, and that were void
        self.newest: dict[int, int] = {}  # fragment -> its newest outer step, as the following are set by `prune`
        self._reached: dict[int, dict[int, int]] = {}  # fragment -> replica -> its newest outer step

    def recent(self) -> list[Cell]:
        """Return the newest rounds of all fragments, the newest first."""
        newest_first = sorted(self.cells.items(), key=lambda item: (item[1].step, item[0]), reverse=True)
        return [cell for _, cell in newest_first[:MAX_RECENT]]

    def participation(self) -> tuple[Counter[int], Counter[int]]:
        """Return replica -> in how many recent means it is, and how many it has missed since the last of them."""
        counted, missed = Counter[int](), Counter[int]()
        for cell in reversed(self.recent()):
            counted.update(cell.contributors)
            missed.update(cell.absent)
            missed.update({replica: -missed[replica] for replica in cell.contributors})
        return counted, missed

    def take(self, event: RoundSent | RoundCommitted | RoundVoid, expected: tuple[int, ...]) -> None:
        """Process an event of a round; ``expected`` are the replicas that should take part in it."""
        fragment, outer_step = key = event.fragment, event.outer_step
        if fragment >= MAX_FRAGMENTS or outer_step <= self.newest.get(fragment, 0) - OUTER_STEPS:
            return
        reached = self._reached.setdefault(fragment, {})
        reached[event.replica] = max(outer_step, reached.get(event.replica, 0))
        cell = self.cells.setdefault(key, Cell())
        cell.step = max(cell.step, event.step)
        match event:
            case RoundSent():
                if event.replica in cell.sent and cell.void:  # it is repeated
                    cell.sent, cell.void = {}, False
                cell.sent[event.replica] = event.digest, event.weight
            case RoundCommitted():
                if not cell.waits_s:
                    self.merged += 1
                    self.void -= cell.void  # replicas that missed the commit have reported it as void
                    cell.expected, cell.contributors = expected, event.contributors
                cell.waits_s[event.replica] = event.wait_s
                cell.clipped, cell.why = cell.clipped or event.clipped, event.note or cell.why
                if max(event.late_s, default=-1.0) > max(cell.late_s.values(), default=-1.0):
                    cell.late_s = dict(zip(event.contributors, event.late_s, strict=False))
            case RoundVoid():
                if not cell.void and not cell.waits_s:
                    self.void += 1
                    cell.times_void += 1
                cell.void, cell.why = True, cell.why or event.reason or "no reason was given"

    def forget(self, replicas: Collection[int], step: int) -> None:
        """Forget what ``replicas`` have reported about rounds after ``step``, which a resumption has superseded."""
        for key, cell in [*self.cells.items()]:
            if cell.step > step:
                state = cell.state
                for replica in replicas:
                    cell.sent.pop(replica, None)
                    cell.waits_s.pop(replica, None)
                if not cell.sent and not cell.waits_s:
                    self.merged -= state == "merged"
                    self.void -= state == "void"
                    del self.cells[key]
        for reached in self._reached.values():
            for replica in replicas:
                reached.pop(replica, None)
        self.newest = {}

    def prune(self, members: Collection[int] | None = None) -> None:
        """Forget all but the newest rounds.

        If ``members`` are given, no single one of them can set the newest outer step, nor fill the memory: if there is
        too much, what the fewest have reported goes first, and then what is large.
        """
        for fragment, reached in self._reached.items():
            known = sorted([reached[member] for member in members or () if member in reached] or reached.values())
            if known:
                self.newest[fragment] = known[-1] if members is None else known[-2:][0]
        for key in [key for key in self.cells if abs(key[1] - self.newest.get(key[0], 0)) >= OUTER_STEPS]:
            del self.cells[key]
        room = MAX_BYTES if members is not None else math.inf
        for key, cell in sorted(self.cells.items(), key=lambda item: item[1].cost):
            room -= cell.cost[1]
            if room < 0:
                del self.cells[key]


_MAX_REPLICAS = 1_024
_RECENT = 101  # steps
CURVED: Sequence[type[events.Event]] = (
    events.StepFinished,
    events.Evaluated,
    events.RoundCommitted,
    events.CheckpointSaved,
)
"""The events whose metrics have curves."""


Record = tuple[events.Event, float | None]
"""An event, and when it was written in seconds since 1970 by the clock of its process; None if unknown."""

_Bucket = tuple[int, Sequence[float], list[tuple[float, int, float, float]]]
"""The number of points, where the last one is, and the sum, number, minimum and maximum of each finite value."""


def _merged(first: _Bucket, second: _Bucket) -> _Bucket:
    pairs = zip(first[2], second[2], strict=True)
    values = [(a[0] + b[0], a[1] + b[1], min(a[2], b[2]), max(a[3], b[3])) for a, b in pairs]
    return first[0] + second[0], second[1], values


class Series:
    """Curves of ``metrics`` over the same points, in at most ``max_buckets`` buckets with equal numbers of points.

    A bucket has the mean of each metric's values, of one that is `Metric.of_model` also the minimum and the maximum.
    When all buckets are full, neighbouring ones are merged in pairs, which halves the resolution.

    Args:
        max_buckets: an even number.

    >>> losses = Series({"loss": Metric("Loss", of_model=True, name="loss")}, max_buckets=2)
    >>> for step, loss in enumerate([4.0, 2.0, float("nan"), 9.0, 1.0]):
    ...     losses.add([step, 8 * step, 0.5 * step], {"loss": loss})
    >>> losses.columns[3:], losses.rows()
    (['loss', 'loss_low', 'loss_high'], [[3, 24, 1.5, 5.0, 2.0, 9.0], [4, 32, 2.0, 1.0, 1.0, 1.0]])
    >>> losses.column("loss_low"), losses.last("loss_low")
    ([2.0, 1.0], 1.0)
    """

    def __init__(self, metrics: Mapping[str, Metric], max_buckets: int = 512) -> None:
        self.columns = ["step", "tokens", "time_s"]
        for metric in metrics.values():
            self.columns.append(metric.name)
            if metric.of_model:
                self.columns += [f"{metric.name}_low", f"{metric.name}_high"]
        self.stride = 1  # the number of points in a full bucket
        self._metrics, self._max_buckets = metrics, max_buckets
        self._buckets: list[_Bucket] = []

    def add(self, point: Sequence[float], values: Mapping[str, float | None]) -> None:
        """Add the values of the metrics, by field, at a point: step, tokens, time. None and NaN are unknown."""
        known = []
        for field_name in self._metrics:
            value = values.get(field_name)
            if value is None or not math.isfinite(value):
                known.append((0.0, 0, math.inf, -math.inf))
            else:
                known.append((value, 1, value, value))
        bucket = 1, point, known
        if self._buckets and self._buckets[-1][0] < self.stride:
            self._buckets[-1] = _merged(self._buckets[-1], bucket)
            return
        if len(self._buckets) == self._max_buckets:
            self._buckets = [*map(_merged, self._buckets[::2], self._buckets[1::2])]
            self.stride *= 2
        self._buckets.append(bucket)

    def cut(self, step: int) -> None:
        """Remove the buckets that have a point after ``step``."""
        self._buckets = [bucket for bucket in self._buckets if bucket[1][0] <= step]

    def rows(self) -> list[list[float | None]]:
        """Return one list per bucket, in the order of `columns`; None stands for a bucket without finite values."""
        return [self._row(bucket) for bucket in self._buckets]

    def column(self, name: str) -> list[float | None]:
        """Return the values of one column."""
        number = self.columns.index(name)
        return [row[number] for row in self.rows()]

    def last(self, name: str) -> float | None:
        """Return the last value of one column; None if there is none."""
        return self._row(self._buckets[-1])[self.columns.index(name)] if self._buckets else None

    def _row(self, bucket: _Bucket) -> list[float | None]:
        row: list[float | None] = [round(coordinate, 3) for coordinate in bucket[1]]
        for metric, (total, number, low, high) in zip(self._metrics.values(), bucket[2], strict=True):
            cells: list[float | None] = [None, None, None]
            if number:
                cells = [float(f"{value:.6g}") for value in (total / number, low, high)]
            row += cells if metric.of_model else cells[:1]
        return row


def _curves() -> dict[type[events.Event], Series]:
    curves = {}
    for kind in CURVED:
        metrics = {name: metric for name, metric in metrics_of(kind).items() if name != "tokens"}  # which are an axis
        curves[kind] = Series(metrics, 512 if kind is events.StepFinished else 256)
    return curves


def _mean_of_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None


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
    # over its steps; of rounds, the mean over fragments
    curves: dict[type[events.Event], Series] = field(default_factory=_curves)
    sites: Mapping[str, events.Site] = field(default_factory=dict)  # as in its last evaluation
    evaluated_at: int = -1  # the step of the newest evaluation or sample; -1 if there is none
    samples: deque[events.SampleGenerated] = field(default_factory=lambda: deque(maxlen=8))
    notes: deque[events.Note] = field(default_factory=lambda: deque(maxlen=30))
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))  # recent finite gradient norms
    diverged: Record | None = None  # the last step with a non-finite loss or gradient norm
    newest_s: float | None = None  # the time of its newest record, by its own clock
    _began_s: float | None = None
    # fragment -> its newest round
    _rounds: dict[int, events.RoundCommitted] = field(default_factory=dict)
    _step_times: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    @property
    def elapsed_s(self) -> float:
        """The time from the start to the newest record, not counting pauses between an end and a resumption."""
        if self.newest_s is None or self._began_s is None:
            return 0.0
        return max(0.0, self.newest_s - self._began_s)

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
                self.sites = event.sites
                self._draw(event)
            case events.RoundCommitted() if event.fragment < MAX_FRAGMENTS:
                before_it = self._rounds.get(event.fragment)
                if before_it is None or before_it.outer_step < event.outer_step:  # not also from its other replicas
                    self._rounds[event.fragment] = event
                    self._draw(event, *(other for other in self._rounds.values() if other is not event))
            case events.SampleGenerated():
                self.evaluated_at = event.step
                self.samples.append(event)
            case events.CheckpointSaved():
                self.checkpoint = event
                self._draw(event)
            case events.Interrupted():
                self.interrupted = event.signal or "a signal"
            case events.Note():
                self.notes.append(event)
            case events.Lost():
                self.notes.append(events.Note(step=event.step, text=event.reason))
            case events.RunFinished():
                self.finished = event

    def _draw(self, event: events.Event, *others: events.Event) -> None:
        """Continue the curves of an event, each with the mean of what it and others of its kind know."""
        kind, values = type(event), dict[str, float | None]()
        for name in metrics_of(kind):
            values[name] = _mean_of_known(getattr(one, name) for one in (event, *others))
        tokens = (self.last.tokens or 0) if self.last else 0
        self.curves[kind].add((event.step, tokens, self.elapsed_s), values)

    def _cut(self, step: int) -> None:
        for series in self.curves.values():
            series.cut(step)
        for told in (self.samples, self.notes):
            while told and told[-1].step > step:
                told.pop()
        self.diverged, self.evaluated_at = None, min(self.evaluated_at, step)
        self.norms.clear()
        self._rounds.clear()

    def _stepped(self, event: events.StepFinished, time_s: float | None) -> None:
        norm = event.gradient_norm
        self.last, self.fetched = event, None
        if not math.isfinite(event.loss) or not (norm is None or math.isfinite(norm)):
            self.diverged = event, time_s
        if norm is not None and math.isfinite(norm):
            self.norms.append(norm)
        if event.step_s > 0:
            self._step_times.append(event.step_s)
        self._draw(event)


@dataclass(frozen=True)
class Seen:
    """A peer of a swarm, as last seen."""

    process: str  # its name in `RunHistory.processes`
    state: str  # the state that it reports, or "no answer", "refuses", "gone" or "finished"
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
        steps = sorted(process.step for process in self.processes.values())
        if not steps:
            return 0
        return steps[-1] if self.trusted else steps[len(steps) // 2]

    @property
    def first(self) -> ProcessHistory:
        """The process that represents the run: the one of the lowest replica that is not far behind."""
        step = self.step
        near = [name for name, process in self.processes.items() if process.step >= step - max(20, step // 20)]
        return self.processes[min(near, key=lambda name: (len(name), name))] if near else ProcessHistory()

    @property
    def evaluated(self) -> list[ProcessHistory]:
        """The processes with an evaluation or a sample, those with the newest one first. Not every process has one."""
        some = [process for process in self.processes.values() if process.evaluated_at >= 0]
        return sorted(some, key=lambda process: process.evaluated_at, reverse=True)

    @property
    def sites(self) -> dict[str, events.Site]:
        """What each replica with data of its own has told last, by number."""
        newest: dict[str, events.Site] = {}
        for process in self.processes.values():
            for number, site in process.sites.items():
                if number not in newest or site.step > newest[number].step:
                    newest[number] = site
        return newest

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
                newest = max(reported, key=lambda view: (reported[view], view[0]))
                if newest == view != self._newest_view and (not self.trusted or view[0] > self._newest_view[0]):
                    self._newest_view, self.expected = view, event.members
                    self.views.append((event, record[1]))
            case events.RunStarted() as event:
                if event.step < before:
                    self.grid.forget({replica for replica, of in self._reporters.items() if of == name}, event.step)
                if self.trusted and len(self.processes) == 1 and event.rounds_committed + event.rounds_void:
                    # also those of another log, and without those superseded that the grid no longer has
                    self.grid.merged, self.grid.void = event.rounds_committed, event.rounds_void
                self._expect()

    def _expect(self) -> None:
        """Set `expected` before the first view change: replicas 0 to M - 1, or those that report rounds if one of
        their numbers is outside this range."""
        if self._newest_view[0] < 0:
            started = self.first.started
            numbered = tuple(range(min(started.num_replicas if started else 0, _MAX_REPLICAS)))
            self.expected = numbered if {*self._reporters} <= {*numbered} else tuple(sorted(self._reporters))
