"""Metrics and health of a run over HTTP: what Prometheus reads, what Grafana shows, what a stranger can't do."""

import http.client
import json
import os
import re
import runpy
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from diloco import events
from diloco.errors import ConfigurationError
from diloco.events import PeerTraffic, Site
from diloco.monitor import Sinks
from diloco.waiting import waiting_for
from diloco.watch import PrometheusSink
from tests.monitor.made_events import committed, evaluated, sent, started, step, void


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        return int(unused.getsockname()[1])


@pytest.fixture
def sink(port: int) -> Iterator[PrometheusSink]:
    with closing(PrometheusSink("127.0.0.1", port, "mine")) as sink:
        yield sink


def ask(port: int, path: str) -> tuple[int, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def values(text: str) -> dict[str, float]:
    """Return what was exported, such as ``diloco_rounds_void_total`` -> 1."""
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def reached(port: int, name: str, value: float) -> dict[str, float]:
    """Ask until a metric has the value: the figures are up to a second old."""
    while (found := values(ask(port, "/metrics")[1])).get(name) != value:
        pass
    return found


def tell(sink: PrometheusSink | Sinks) -> None:
    for event in (
        started(rounds_committed=10, rounds_void=2),
        step(1, tokens=100, received_bytes=7, model_flops_utilization=0.5),
        sent(0, 0, 1, digest="d"),
        committed(0, 0, 1, late_s=(0.0, 0.25), wait_s=1.5, gain=0.75, peers={"1": PeerTraffic(300, 200, 0.05)}),
        void(0, 0, 2),
        evaluated(1, 2.5, sites={"0": Site(1, 2.0, 300, 0.5), "1": Site(1, 4.0, 100, 7.5)}, sites_loss=2.5),
        events.CheckpointSaved(step=1, path="p", size_bytes=9, save_s=1.0, free_bytes=5),
        step(2, loss=float("nan"), tokens=200),
    ):
        sink.handle(event)


def test_prometheus_reads_every_metric_of_what_was_reported(sink: PrometheusSink, port: int) -> None:
    assert values(ask(port, "/metrics")[1])["diloco_step"] == 0
    tell(sink)
    found = reached(port, "diloco_step", 2)
    expected = {
        "tokens_total": 200,
        "heldout_loss": 2.5,
        "sites_loss": 2.5,
        'replica_loss{replica="1"}': 4.0,
        'replica_tokens{replica="0"}': 300,
        'replica_passes{replica="1"}': 7.5,
        "tokens_per_s": 16,
        "compute_utilization": 0.75,
        "model_flops_utilization": 0.5,
        "sent_bytes_total": 2000,
        "run_sent_bytes": 2000,
        'gain{fragment="0"}': 0.75,
        'peer_sent_bytes_total{peer="1"}': 300,
        'peer_received_bytes_total{peer="1"}': 200,
        'peer_round_trip_s{peer="1"}': 0.05,
        'peer_late_s{peer="1"}': 0.25,
        "rounds_committed_total": 1,
        "rounds_void_total": 1,
        "run_rounds_committed": 11,
        "run_rounds_void": 3,
        'wait_s_total{fragment="0"}': 1.5,
        "view_replicas": 2,
        "checkpoint_step": 1,
        "checkpoint_free_bytes": 5,
        'alerts{kind="not finite",level="error"}': 1,
        'alerts{kind="disk",level="error"}': 1,
        'state{state="training"}': 1,
    }
    assert {name: found.get(f"diloco_{name}") for name in expected} == expected
    assert found["diloco_loss"] != found["diloco_loss"], "NaN"
    assert abs(time.time() - found["diloco_checkpoint_timestamp_s"]) < 600


def test_a_run_that_resumes_counts_no_work_again() -> None:
    """Prometheus takes the first value of a counter after a fall for new work: here 28,160 tokens in a few minutes."""
    before = {"rounds_committed": 100, "rounds_void": 3, "tokens": 28160, "sent_bytes": 365364, "received_bytes": 9}
    with closing(PrometheusSink("127.0.0.1", 0, "run")) as sink:
        sink.handle(started(step=110, **before))
        while (found := values(sink.metrics().decode())).get("diloco_run_tokens") != 28160:
            pass
        first = {name: value for name, value in found.items() if name.endswith("_total")}
        sink.handle(void(0, 0, 111))
        sink.handle(step(111, tokens=28416, sent_bytes=365500, received_bytes=9))
        sink.made = -1.0, b""
        while (found := values(sink.metrics().decode())).get("diloco_run_tokens") != 28416:
            sink.made = -1.0, b""
        sink.handle(committed(1, 0, 111))  # void for one replica only
        sink.handle(step(112, tokens=28672, sent_bytes=365600, received_bytes=9))
        while (last := values(sink.metrics().decode())).get("diloco_run_tokens") != 28672:
            sink.made = -1.0, b""
    assert {*first.values()} == {0.0}
    assert found["diloco_tokens_total"] == 256
    assert found["diloco_sent_bytes_total"] == 136
    assert found["diloco_received_bytes_total"] == 0
    assert found["diloco_rounds_void_total"] == 1
    assert all(last[name] >= value for name, value in found.items() if name.endswith("_total")), "a counter never falls"
    assert found["diloco_run_rounds_committed"] == 100


def test_a_name_that_is_not_utf8_and_the_waits_of_several_replicas() -> None:
    with closing(PrometheusSink("127.0.0.1", 0, os.fsdecode(b"run\xff"))) as sink:
        for replica in (0, 1):
            sink.handle(committed(replica, 0, 1, wait_s=1.5))
        sink.handle(step(1))
        while values(sink.metrics().decode())["diloco_step"] < 1:
            pass
        found = values(sink.metrics().decode())
    assert found['diloco_wait_s_total{fragment="0"}'] == 1.5
    assert any(r"run\\udcff" in name for name in found)


def test_health_is_training_waiting_or_lost(sink: PrometheusSink, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def health() -> tuple[int, str, str]:
        status, text = ask(port, "/healthz")
        return status, *json.loads(text).values()

    with monkeypatch.context() as late:
        late.setattr(sink, "lost_s", -1.0)
        assert health() == (200, "waiting", "the next step"), "it has not begun yet, as it may read much text"
    tell(sink)
    reached(port, "diloco_step", 2)
    assert health() == (200, "training", "")
    monkeypatch.setattr("diloco.waiting.FIRST_REPORT_S", -1.0)
    with waiting_for(lambda: "2 more replicas"):
        assert health() == (200, "waiting", "2 more replicas")
    sink.handle(events.Lost(step=2, reason="replica 1 is gone."))
    reached(port, 'diloco_state{state="lost"}', 1)
    assert health() == (503, "lost", "replica 1 is gone. It is searching for the other replicas.")
    sink.handle(step(3))
    reached(port, 'diloco_state{state="training"}', 1)
    monkeypatch.setattr(sink, "silent_s", -1e9)
    assert health()[:2] == (200, "waiting")
    monkeypatch.setattr(sink, "lost_s", -1.0)
    assert health()[:2] == (503, "lost")


def test_health_is_told_and_threads_are_few_while_strangers_ask_for_figures(
    sink: PrometheusSink, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of threads waited for their turn, also those of health checks, and an orchestrator ended the run."""
    released, entered = threading.Event(), threading.Semaphore(0)

    def figures() -> bytes:
        entered.release()
        released.wait()
        return b""

    monkeypatch.setattr(sink, "metrics", figures)
    before = threading.active_count()
    with ExitStack() as stack:
        stack.callback(released.set)

        def flood(count: int) -> list[socket.socket]:
            opened = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(count)]
            for each in opened:
                each.sendall(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
            return opened

        flood(50)
        for _ in range(50):
            assert entered.acquire(timeout=60)
        assert ask(port, "/healthz")[0] == 200
        most = before
        for _ in range(6):
            last = flood(50)[-1]
            most = max(most, threading.active_count())
        assert last.recv(1) == b"", "it is hung up on"
        assert most - before <= 2 * 64
    while threading.active_count() > before:
        pass
    assert ask(port, "/healthz")[0] == 200, "places are given back"


def test_a_system_that_starts_no_more_threads_ends_no_server(
    sink: PrometheusSink, port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", refuse)
        for _ in range(200):
            with pytest.raises((OSError, http.client.HTTPException)):
                ask(port, "/healthz")
    assert ask(port, "/healthz")[0] == 200
    assert "Traceback" not in capsys.readouterr().err


def test_a_port_in_use_is_refused_at_the_start(sink: PrometheusSink, port: int) -> None:
    assert ask(port, "/")[0] == 404
    with pytest.raises(ConfigurationError, match=rf"127.0.0.1:{port} can't be listened at: .* Choose another port"):
        PrometheusSink("127.0.0.1", port, "mine")
    with pytest.raises(ConfigurationError, match=r"127.0.0.1:65536 can't be listened at"):  # of a further process
        PrometheusSink("127.0.0.1", 65536, "mine")


def test_a_fault_of_the_metrics_ends_them_and_not_the_run(
    sink: PrometheusSink, capsys: pytest.CaptureFixture[str]
) -> None:
    sink.handle(step(1, step_s=None))
    sinks = Sinks({"the metrics": sink})
    while sinks.sinks:
        tell(sinks)
    assert "the metrics failed at step" in capsys.readouterr().err


def test_the_dashboard_has_a_panel_of_each_metric_and_draws_only_what_is_exported(
    sink: PrometheusSink, port: int
) -> None:
    exported = {*re.findall(r"^# TYPE (\S+)", ask(port, "/metrics")[1], re.MULTILINE)}
    folder = Path(__file__).parents[2] / "launch" / "grafana"
    made = runpy.run_path(str(folder / "dashboard.py"))["dashboard"]()
    assert json.loads((folder / "dashboard.json").read_text()) == made, "run python launch/grafana/dashboard.py"
    drawn = {name for panel in made["panels"] for name in re.findall(r"diloco_\w+", panel["targets"][0]["expr"])}
    assert drawn <= exported
    assert {name for name in events.METRICS if not drawn & {f"diloco_{name}", f"diloco_{name}_total"}} == set()
