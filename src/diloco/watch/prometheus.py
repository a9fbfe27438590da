"""The figures of a running process for Prometheus (``/metrics``), and its health for orchestrators (``/healthz``).

Training only puts events into a queue. A thread keeps their history, and requests are answered from it in threads of
their own: at most so many at a time, and with figures that are made at most once a second. Health waits for no figures.
"""

from __future__ import annotations

import functools
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
from diloco.units import visible
from diloco.waiting import in_thread, waits
from diloco.watch.history import RunHistory
from diloco.watch.page_data import SILENT_S, alerts
from diloco.watch.server import LocalHandler, LocalServer

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("training", "waiting", "lost")
_FRESH_S = 1.0  # figures are this old at most

_OF_STEPS = (  # name, the field of `StepFinished`, and what it is
    ("train_loss_nats", "loss", "Training loss of the last step, per token."),
    ("learning_rate", "learning_rate", "Inner learning rate."),
    ("gradient_norm", "gradient_norm", "Gradient norm before clipping."),
    ("step_seconds", "step_s", "Time of the last inner step."),
    ("compute_utilization_ratio", "compute_utilization", "Share of the time spent computing."),
    ("model_flops_utilization_ratio", "model_flops_utilization", "Share of the peak of this process's device."),
)

_TOTALS: Sequence[tuple[str, str, Sequence[str], Mapping[tuple[str, ...], str]]] = (
    ("tokens", "Tokens trained by all replicas", (), {(): "tokens"}),
    (
        *("payload_bytes", "Payload bytes of this replica", ("direction",)),
        {("sent",): "sent_bytes", ("received",): "received_bytes"},
    ),
    ("rounds", "Rounds by outcome", ("outcome",), {("committed",): "rounds_committed", ("void",): "rounds_void"}),
)
"""Name, what it is, labels, and by their values the field of `StepFinished` and `RunStarted` that has the total."""


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
        self._peers: Mapping[str, tuple[int, int, float]] = {}
        self._late_s: Mapping[str, float] = {}
        self._waits_s: dict[int, float] = {}  # by replica
        self._counted: dict[tuple[str, ...], float] = {}  # the highest value of each counter so far
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
            case events.RoundCommitted():
                self._waits_s[event.replica] = self._waits_s.get(event.replica, 0.0) + event.wait_s
                self._peers = event.peers
                self._late_s = dict(zip(map(str, event.contributors), event.late_s, strict=False))
            case events.CheckpointSaved():
                self._saved_s = time_s

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
        def gauge(
            name: str, words: str, values: Mapping[Any, float | None], labels: Sequence[str] = (), kind: Any = None
        ) -> Any:
            """Return a metric with a value for each combination of its labels' values; None is left out."""
            family = (kind or self._core.GaugeMetricFamily)(f"diloco_{name}", words, labels=labels)
            for key, value in values.items():
                if value is not None:
                    family.add_metric(key, value)
            return family

        counter = functools.partial(gauge, kind=self._core.CounterMetricFamily)
        run, process, grid = self._run, self._run.first, self._run.grid
        started, last, saved = process.started, process.last, process.checkpoint
        yield gauge("info", "The run and its version.", {(run.name, __version__): 1.0}, ("run", "version"))
        states = {(each,): float(each == state) for each in STATES}
        yield gauge("state", "1 for the state of this process, else 0.", states, ("state",))
        yield gauge("step", "Inner steps finished.", {(): process.step})
        yield gauge("planned_steps", "Inner steps to train.", {(): getattr(started, "total_steps", None)})
        heldout = process.evaluations.rows()
        recent = dict(zip(process.steps.columns, rows[-1], strict=True)) if (rows := process.steps.rows()) else {}
        for name, attribute, words in _OF_STEPS:
            yield gauge(name, words, {(): getattr(last, attribute, None)})
        for name, words, value in (
            ("tokens_per_second", "Tokens of all replicas per second of training.", recent.get("tokens_per_s")),
            ("heldout_loss_nats", "Last held-out loss, per token.", heldout[-1][3] if heldout else None),
            ("own_data_loss_nats", "Held-out loss over all own data, by tokens.", events.mean_loss(run.sites)),
            ("view_replicas", "Replicas in the current view.", len(run.expected)),
            ("checkpoint_step", "Step of the last checkpoint.", getattr(saved, "step", None)),
            ("checkpoint_size_bytes", "Size of the last checkpoint.", getattr(saved, "size_bytes", None)),
            ("checkpoint_timestamp_seconds", "When it was written, since 1970.", self._saved_s),
        ):
            yield gauge(name, words, {(): value})
        for name, words, attribute in (
            ("heldout_loss_nats", "Held-out loss on a replica's own data, per token.", "loss"),
            ("tokens", "Tokens of its own data on which a replica has trained.", "tokens"),
            ("passes", "Passes of a replica over its own data.", "passes"),
        ):
            by_replica = {(number,): getattr(site, attribute) for number, site in run.sites.items()}
            yield gauge(f"replica_{name}", words, by_replica, ("replica",))
        rounds = {"rounds_committed": grid.merged, "rounds_void": grid.void}
        for name, words, labels, fields in _TOTALS:
            of_run, of_process = dict[Any, float | None](), dict[Any, float | None]()
            for label, attribute in fields.items():
                of_run[label] = rounds.get(attribute, getattr(last or started, attribute, None))
                of_process[label] = self._since_start((name, *label), of_run[label], getattr(started, attribute, 0))
            yield gauge(f"run_{name}", f"{words}, in the whole run.", of_run, labels)
            yield counter(name, f"{words}, since this process began to train.", of_process, labels)
        words = "Time spent waiting for means, by the replica of this process that waited most."
        yield counter("wait_seconds", words, {(): max(self._waits_s.values(), default=0.0)})
        by_peer = {(peer, "sent"): of[0] for peer, of in self._peers.items()}
        by_peer |= {(peer, "received"): of[1] for peer, of in self._peers.items()}
        words = "Bytes on the wire of the current connection to a peer."
        yield counter("peer_bytes", words, by_peer, ("peer", "direction"))
        trips = {(peer,): of[2] or None for peer, of in self._peers.items()}
        yield gauge("peer_round_trip_seconds", "Shortest round trip to a peer.", trips, ("peer",))
        late = {(peer,): late_s for peer, late_s in self._late_s.items()}
        words = "Time after the first contribution of the last round at which that of a peer came."
        yield gauge("peer_late_seconds", words, late, ("peer",))
        active = Counter((alert.kind, alert.level) for alert in alerts(run, now_s))
        yield gauge("alerts", "Active alerts.", {**active}, ("kind", "level"))

    def _since_start(self, key: tuple[str, ...], total: float | None, before: float) -> float | None:
        """Return a counter: a checkpoint takes a run back, and a round that was void for one may be committed."""
        if total is None:
            return None
        self._counted[key] = max(self._counted.get(key, 0.0), total - before)
        return self._counted[key]


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
