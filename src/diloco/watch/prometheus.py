"""The figures of a running process for Prometheus (``/metrics``), and its health for orchestrators (``/healthz``).

Training only puts events into a queue. A thread keeps their history, and requests are answered from it in threads of
their own: at most so many at a time, and with figures that are made at most once a second. Health waits for no figures.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from diloco import __version__, events
from diloco.errors import ConfigurationError, from_extra
from diloco.metrics import Metric, metrics_of
from diloco.units import visible
from diloco.waiting import in_thread, waits
from diloco.watch.history import RunHistory
from diloco.watch.page_data import SILENT_S, alerts
from diloco.watch.server import LocalHandler, LocalServer

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("training", "waiting", "lost")
_FRESH_S = 1.0  # figures are this old at most


class PrometheusSink:
    """Serves the figures and the health of run ``run`` of this process at ``host`` and ``port`` until it is closed."""

    silent_s = SILENT_S  # a process is not training after so much silence, which is also at least ten steps
    lost_s = 900.0  # silence without a known wait after which it is lost; a round takes 10 min at most

    def __init__(self, host: str, port: int, run: str) -> None:
        with from_extra("monitor", "monitor.prometheus needs prometheus-client"):
            from prometheus_client import core, generate_latest
        self._core, self._generate = core, generate_latest
        self._events: SimpleQueue[tuple[events.Event, float] | None] = SimpleQueue()
        self._run, self._lock = RunHistory(visible(run), ""), threading.Lock()
        self._measurements = events.Measurements()
        self._measured: dict[str, dict[tuple[str, str], float]] = {}  # metric -> label and its value -> newest value
        self._counted: dict[str, float] = {}  # the highest value of each total since the start of this process
        self._lost, self._heard_s = "", time.monotonic()
        self._saved_s: float | None = None
        self.made = -math.inf, b""  # when the figures were made, and they
        self._making = threading.Lock()
        try:
            self._server = _Server(host, port, self)
        except (OSError, OverflowError) as error:  # the port of a further process may be too high
            raise ConfigurationError(
                f"monitor.prometheus: {host}:{port} can't be listened at: {error}. Choose another port."
            ) from error
        self._server.__enter__()
        self._thread = in_thread(self._follow, "diloco-metrics")

    def handle(self, event: events.Event) -> None:
        """Note ``event``, which another thread processes."""
        if self._thread.done():  # it has failed
            self._thread.result()
        self._events.put((event, time.time()))

    def close(self) -> None:
        """Stop answering."""
        self._events.put(None)
        self._thread.exception()  # `handle` has raised it
        self._server.__exit__()

    def _follow(self) -> None:
        while (record := self._events.get()) is not None:
            with self._lock:
                self._take(*record)

    def _take(self, event: events.Event, time_s: float) -> None:
        self._run.take("", (event, time_s))
        self._heard_s = time.monotonic()
        match event:
            case events.Lost():
                self._lost = event.reason
            case events.StepFinished():
                self._lost = ""
                if event.step % 64 == 0:  # else a run that nobody asks would keep all rounds
                    self._run.grid.prune()
            case events.CheckpointSaved():
                self._saved_s = time_s
        news = [*self._measurements.of(event)]
        if isinstance(event, events.RoundCommitted) and news:  # a peer of an earlier round may have left
            for metric in (*metrics_of(events.PeerTraffic).values(), *metrics_of(events.Arrival).values()):
                self._measured.pop(metric.name, None)
        for metric, value, label, which in news:
            values = self._measured.setdefault(metric.name, {})
            before = values.get((label, which), 0.0) if metric.kind == "part" else 0.0
            values[label, which] = before + value

    def health(self) -> tuple[str, str]:
        """Return one of `STATES`, and why; "" while it trains."""
        waiting = "; ".join(waits())
        with self._lock:
            silent_s, step_s = time.monotonic() - self._heard_s, self._run.first.step_s or 0.0
            if self._lost:
                return "lost", f"{self._lost} It is searching for the other replicas."
            if waiting:
                return "waiting", waiting
            if self._run.first.last and silent_s < max(self.silent_s, 10 * step_s):
                return "training", ""
            if silent_s < self.lost_s or self._run.first.started is None:  # reading all text may take an hour
                return "waiting", "the next step"
            return "lost", f"Nothing has been reported for {silent_s:.0f} s."

    def metrics(self) -> bytes:
        """Return the figures as text."""
        with self._making:
            if time.monotonic() - self.made[0] > _FRESH_S:
                self.made = time.monotonic(), self._generate(self)
            return self.made[1]

    def collect(self) -> list[Any]:
        """Return the metrics of prometheus-client: base units, and counters whose names end in ``_total``."""
        state, _ = self.health()
        with self._lock:
            self._run.grid.prune()
            return list(self._families(state, time.time()))

    def _families(self, state: str, now_s: float) -> Iterator[Any]:
        run, process = self._run, self._run.first
        started, saved = process.started, process.checkpoint
        states = {(state_name,): float(state_name == state) for state_name in STATES}
        active = Counter((alert.kind, alert.level) for alert in alerts(run, now_s))
        yield self._gauge("info", "The run and its version.", {(run.name, __version__): 1.0}, ("run", "version"))
        yield self._gauge("state", "1 for the state of this process, else 0.", states, ("state",))
        yield self._gauge("alerts", "Active alerts.", {**active}, ("kind", "level"))
        for name, about, value in (
            ("step", "Inner steps finished.", process.step),
            ("total_steps", "Inner steps to train.", getattr(started, "total_steps", None)),
            ("view_replicas", "Replicas in the current view.", len(run.expected)),
            ("checkpoint_step", "Step of the last checkpoint.", getattr(saved, "step", None)),
            ("checkpoint_timestamp_s", "When it was written, since 1970.", self._saved_s),
        ):
            yield self._gauge(name, about, {(): value})
        counted = {"rounds_committed": run.grid.merged, "rounds_void": run.grid.void}
        for metric in events.METRICS.values():
            if metric.kind == "total":
                total = counted.get(metric.name, getattr(process.last or started, metric.name, None))
                yield from self._total(metric, total, getattr(started, metric.name, 0))
            else:
                yield self._family(metric)

    def _total(self, metric: Metric, total: float | None, before: float) -> Iterator[Any]:
        """Yield a metric of the whole run, and the counter of what was added to it since this process began.

        The counter never falls, though a checkpoint takes a run back, and a round that was void for one replica may be
        committed.
        """
        if total is not None:
            self._counted[metric.name] = max(self._counted.get(metric.name, 0.0), total - before)
        since = {(): self._counted.get(metric.name)}
        yield self._gauge(f"run_{metric.name}", f"{metric.title}, in the whole run.", {(): total})
        yield self._gauge(metric.name, f"{metric.title}, since this process began to train.", since, is_counter=True)

    def _family(self, metric: Metric) -> Any:
        """Return a metric with its newest values."""
        measured = self._measured.get(metric.name, {})
        label = next((label for label, _ in measured if label), "")
        values = {(which,) if label else (): value for (_, which), value in measured.items()}
        about = f"{metric.title} ({metric.unit})." if metric.unit else f"{metric.title}."
        is_counter = metric.kind in ("part", "counter")
        return self._gauge(metric.name, about, values, (label,) if label else (), is_counter=is_counter)

    def _gauge(
        self,
        name: str,
        about: str,
        values: Mapping[Any, float | None],
        labels: Sequence[str] = (),
        *,
        is_counter: bool = False,
    ) -> Any:
        """Return a figure with a value for each combination of its labels' values; None is left out."""
        make = self._core.CounterMetricFamily if is_counter else self._core.GaugeMetricFamily
        family = make(f"diloco_{name}", about, labels=labels)
        for key, value in values.items():
            if value is not None:
                family.add_metric(key, value)
        return family


class _Handler(LocalHandler):
    server: _Server

    def answer(self) -> None:
        path, sink, status = self.path.partition("?")[0], self.server.sink, 200
        if path == "/metrics":
            body, kind = sink.metrics(), CONTENT_TYPE
        elif path == "/healthz":
            state, why = sink.health()
            body, kind = json.dumps({"state": state, "why": why}).encode(), "application/json"
            status = 503 if state == "lost" else 200
        else:
            body, kind, status = b"There are /metrics and /healthz.", "text/plain", 404
        self.send(status, body, Content_Type=kind)


class _Server(LocalServer):
    def __init__(self, host: str, port: int, sink: PrometheusSink) -> None:
        self.sink = sink
        super().__init__(host, port, _Handler)
