"""What is known of a run, gathered from the records of its processes. Pure: time is in the records."""

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

_SPIKE = 2.0  # gradient norms of this many times their median are kept; what is alarming is for others to say

_MEDIAN_OF = 101
_PLACES = ("step", "tokens", "time_s")
OF_OUTER_STEPS = ("mean_norm", "mean_cosine", "momentum_cosine", "gain", "spread")
_OF_STEPS = ("loss", "gradient_norm", "learning_rate", "step_s", "mfu", "compute", "sent_bytes")


@dataclass(frozen=True)
class Spike:
    """A gradient norm far above the median of those before."""

    step: int
    norm: float
    median: float
    time_s: float | None  # by the clock of its process


class _Median:
    """Of the last `_MEDIAN_OF` values."""

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
    """One process of a run: a replica, or all of them."""

    started: Record = field(default_factory=dict)  # the last ``RunStarted``; empty before
    last: Record = field(default_factory=dict)  # the last ``StepFinished``; empty before
    # the last ``StateFetched``, while the state of others is being taken over; else empty
    fetched: Record = field(default_factory=dict)
    steps: Series = field(default_factory=lambda: Series(_PLACES, _OF_STEPS))  # curves of its steps
    evaluations: Series = field(default_factory=lambda: Series(_PLACES, ("heldout_loss",), 256))  # held-out losses
    evaluated_at: int = 0  # the step of the newest evaluation or sample
    # telemetry of its rounds, at each outer step the mean over fragments
    outer: Series = field(default_factory=lambda: Series(_PLACES, OF_OUTER_STEPS, 256))
    best: float | None = None  # the lowest held-out loss
    samples: deque[Record] = field(default_factory=lambda: deque(maxlen=8))  # the newest texts, newest last
    notes: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=30))  # (step, words), newest last
    checkpoint: Record = field(default_factory=dict)  # the last ``CheckpointSaved``; empty before
    finished: Mapping[str, Any] = field(default_factory=dict)  # the summary, once it has ended
    interrupted: str = ""  # the signal that stopped it; "" for none
    # gradient norms far above the median, newest last
    spikes: deque[Spike] = field(default_factory=lambda: deque(maxlen=32))
    # steps whose loss or gradient norm was no finite number, newest last, each with when it was told
    not_finite: deque[tuple[int, float | None]] = field(default_factory=lambda: deque(maxlen=32))
    newest_s: float | None = None  # when it wrote its newest record, by its own clock; None before
    _began_s: float | None = None
    # fragment -> its round of this outer step, of the replica that told of it first
    _rounds: dict[int, Record] = field(default_factory=dict)
    _norms: _Median = field(default_factory=_Median)
    _step_s: _Median = field(default_factory=_Median)

    @property
    def step(self) -> int:
        """Inner steps done."""
        return max((int(each["step"]) for each in (self.last, self.started) if each), default=0)

    @property
    def elapsed_s(self) -> float:
        """From the beginning to the newest record, without the time between an end and a resumption."""
        return 0.0 if self.newest_s is None or self._began_s is None else max(0.0, self.newest_s - self._began_s)

    @property
    def step_s(self) -> float | None:
        """Median time of the last steps; None before there are ten."""
        return self._step_s.value

    @property
    def over(self) -> bool:
        """Whether it has said that it ends."""
        return bool(self.finished)

    def take(self, record: Record) -> None:
        """Take in a record; what it lacks stays unknown."""
        written_s = number(record, "time_s")
        if record["event"] == "RunStarted" and written_s is not None:  # what lay between is no time of the run
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
        if fragment in self._rounds:  # its next outer step: the last one is complete
            told = [[number(each, name) for each in self._rounds.values()] for name in OF_OUTER_STEPS]
            seen = [[value for value in values if value is not None and math.isfinite(value)] for values in told]
            means = [sum(values) / len(values) if values else None for values in seen]
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
        if step_s is not None and math.isfinite(step_s):
            self._step_s.add(step_s)
        values["mfu"] = number(record, "model_flops_utilization")
        values["compute"] = number(record, "compute_utilization")
        values["sent_bytes"] = number(record, "sent_bytes")
        self.steps.add(self._place(record), values)


def _order(name: str) -> tuple[int, str]:
    """Names of processes in the order of their numbers."""
    return len(name), name


@dataclass
class RunHistory:
    """All processes of a run."""

    # by name, such as "replica 3"; "" for one that is all of the run
    processes: dict[str, ProcessHistory] = field(default_factory=dict)
    grid: Grid = field(default_factory=Grid)  # of the rounds
    views: deque[Record] = field(default_factory=lambda: deque(maxlen=100))  # the newest changes, as records
    expected: tuple[int, ...] = ()  # replicas that take part: the members of the newest view, or all that are to begin
    _reporting: set[int] = field(default_factory=set)
    _newest_view: int = -1

    @property
    def step(self) -> int:
        """Inner steps done, by whoever has done most."""
        return max((each.step for each in self.processes.values()), default=0)

    @property
    def first(self) -> ProcessHistory:
        """The process that speaks for the run: of those that are not far behind, that of the lowest replica."""
        newest = self.step
        near = [name for name, each in self.processes.items() if each.step >= newest - max(20, newest // 20)]
        return self.processes[min(near, key=_order)] if near else ProcessHistory()

    @property
    def evaluated(self) -> list[ProcessHistory]:
        """Processes with an evaluation or a sample, those with the newest ones first: not every one evaluates."""
        told = [each for each in self.processes.values() if len(each.evaluations) or each.samples]
        return sorted(told, key=lambda each: each.evaluated_at, reverse=True)

    @property
    def names(self) -> list[str]:
        """Of the processes, in the order of their replicas."""
        return sorted(self.processes, key=_order)

    def take(self, process: str, record: Record) -> None:
        """Take in a record of a process."""
        self.processes.setdefault(process, ProcessHistory()).take(record)
        match record["event"]:
            case "RoundSent" | "RoundCommitted" | "RoundVoid":
                replica = whole(record, "replica")
                if replica is not None and replica not in self._reporting:
                    self._reporting.add(replica)
                    self._expect()
                self.grid.take(record, self.expected)
            case "ViewChanged" if (view := whole(record, "view")) is not None and view > self._newest_view:
                self._newest_view, self.expected = view, numbers(record, "members")
                self.views.append(record)
            case "RunStarted":
                self._expect()

    def _expect(self) -> None:
        """Before a view is told of: all that are to begin, or whoever is there where replicas are not counted."""
        if self._newest_view < 0:
            numbered = range(min(whole(self.first.started, "num_replicas") or 0, 1_024))
            counted = all(replica in numbered for replica in self._reporting)
            self.expected = tuple(numbered) if counted else tuple(sorted(self._reporting))

    def newest_cells(self) -> list[ReportedRound]:
        """Of every fragment, the newest round."""
        return [self.grid.cells[key] for key in self.grid.newest.items() if key in self.grid.cells]
