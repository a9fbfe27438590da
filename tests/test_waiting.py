"""Reports of waits: at growing intervals, and none for a short wait."""

from __future__ import annotations

import logging
import math
import threading

import pytest

from diloco.waiting import LOGGER, sentence, tell, told_on_stderr, waiting_for


def told_by(end_s: float, caplog: pytest.LogCaptureFixture, limit_s: float = 300) -> list[str]:
    """Return the reports of a wait that ends at ``end_s`` on a virtual clock."""
    now_s = [0.0]

    def ended(seconds: float) -> bool:
        now_s[0] += seconds
        return now_s[0] > end_s

    tell(lambda: f"replica 1 (asked at {now_s[0]:g} s)", limit_s, ended)
    return [record.getMessage() for record in caplog.records]


def test_a_short_wait_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    assert told_by(1.9, caplog) == []


def test_a_long_one_is_told_at_two_seconds_and_then_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    told = told_by(299, caplog)
    assert told[0] == "waiting for replica 1 (asked at 2 s) for 2 s; gives up after 300 s"
    assert told[4] == "waiting for replica 1 (asked at 32 s) for 32 s; gives up after 300 s"
    assert [line.split(" for ")[2].split(" s")[0] for line in told] == ["2", "4", "8", "16", "32"] + [
        str(second) for second in range(62, 299, 30)
    ]


def test_a_wait_without_a_limit_names_none() -> None:
    assert sentence("others", 8, math.inf) == "waiting for others for 8 s"


def test_the_telling_ends_with_the_wait(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.waiting.FIRST_S", 0.01)
    told = threading.Event()

    def whom() -> str:
        told.set()
        return "it"

    with waiting_for(whom):
        assert told.wait(10)
    assert not any(thread.name == "diloco-waiting" for thread in threading.enumerate())
    assert caplog.records[0].levelno == logging.WARNING, "what a program that has not configured logging prints"


def test_a_command_tells_it_on_stderr(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOGGER, "handlers", [])
    told_on_stderr()
    told_on_stderr()
    LOGGER.warning("waiting for rank 1")
    assert capsys.readouterr().err == "diloco: waiting for rank 1\n"
