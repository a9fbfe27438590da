"""Quantities as text, and reports of waits at growing intervals."""

import logging
import math
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

from diloco.units import format_bytes, format_count, format_duration, format_perplexity, format_ratio
from diloco.waiting import report_wait, say, waiting_for

EDGES = {
    format_bytes: {999.4: "999 B", 999.6: "1.0 kB", 99_949: "99.9 kB", 99_950: "100 kB", 1e19: "10000 PB"},
    format_count: {math.inf: "inf"},
    format_perplexity: {math.nan: "nan"},
    format_duration: {0.9994: "999ms", 0.9996: "1.0s", 59.4: "59s", 59.5: "1m00s", 86_399.7: "1d00h", math.inf: "inf"},
    format_ratio: {1.006: "1.01x", 1.949: "1.95x", 1.96: "2.0x", 9.94: "9.9x", 9.96: "10x"},
}


@pytest.mark.parametrize("write", EDGES)
def test_quantities_at_the_edges_of_their_units(write) -> None:  # type: ignore[no-untyped-def]  # functions of several types
    assert {value: write(value) for value in EDGES[write]} == EDGES[write]


@pytest.mark.parametrize(("end_s", "reports"), [(1.9, []), (70, [2, 4, 8, 16, 32, 62])])
def test_long_wait_is_reported_ever_more_rarely(
    end_s: float, reports: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [0.0]

    def ended(seconds: float) -> bool:
        now_s[0] += seconds
        return now_s[0] > end_s

    report_wait(lambda: "replica 1", 300, ended)
    assert [record.getMessage() for record in caplog.records] == [
        f"waiting for replica 1 for {second} s; gives up after 300 s" for second in reports
    ]


def test_reports_end_with_the_wait(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.waiting.FIRST_REPORT_S", 0.01)
    reported = threading.Event()

    def whom() -> str:
        reported.set()
        return "it"

    with waiting_for(whom):
        assert reported.wait(10)
    assert not any(thread.name == "diloco-waiting" for thread in threading.enumerate())
    assert caplog.records[0].levelno == logging.WARNING, "what a program that has not configured logging prints"


def test_a_message_is_written_at_once_also_while_another_thread_imports_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report ended the wait, such as that of an export, with an error; the lines of two threads could mix."""
    written: list[str] = []
    monkeypatch.setitem(sys.modules, "tqdm", ModuleType("tqdm"))
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=written.append, flush=lambda: None))
    say("one")
    assert [*filter(None, written)] == ["diloco: one\n"]
