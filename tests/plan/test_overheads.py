"""The stated errors of predictions are those of the benchmark's committed results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulator.__main__ import accuracy
from diloco.plan import ACCURACY, Conditions

RESULTS = Path(__file__).parents[2] / "benchmarks" / "simulator" / "results.jsonl"


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def test_the_stated_errors_are_those_of_the_benchmark(results: list[dict[str, Any]]) -> None:
    assert accuracy(results) == ACCURACY
    assert sum(row["kind"] == "run" for row in results) > 20


def test_runs_on_the_virtual_clock_are_predicted_exactly(results: list[dict[str, Any]]) -> None:
    rows = [row for row in results if row["kind"] == "virtual"]
    assert len(rows) == 18
    for row in rows:
        assert row["predicted"] == pytest.approx(row["measured"], rel=1e-9)


def test_p90_is_never_faster_than_typical() -> None:
    typical, p90 = Conditions(), Conditions().at_p90()
    for name in ("queue_trips", "average_s_per_value", "send_s_per_value", "merge_s_per_value"):
        assert getattr(typical, name) < getattr(p90, name)
