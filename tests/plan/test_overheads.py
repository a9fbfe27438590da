"""The constants of predictions and their stated errors are those of the benchmark's committed results."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from diloco.plan import FITTED, Conditions

RESULTS = Path(__file__).parents[2] / "benchmarks" / "simulator" / "results.jsonl"


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def errors(rows: list[dict[str, Any]]) -> list[float]:
    return [abs(row["typical_s"] / median(row["times_s"]) - 1) for row in rows]


def test_payloads_of_a_swarm_travel_over_as_many_connections_as_over_torch() -> None:
    torch, swarm = (Conditions(wire=wire, loss=0.005).overheads(2) for wire in FITTED)
    assert torch.tcp == swarm.tcp


def test_the_stated_errors_are_those_of_the_benchmark(results: list[dict[str, Any]]) -> None:
    runs = [row for row in results if row["kind"] == "run"]
    of_runs = [abs(row["predicted"]["step_s"] / row["measured"]["step_s"] - 1) for row in runs]
    torch = FITTED["torch"]
    assert len(of_runs) == torch.runs
    assert median(of_runs) == pytest.approx(torch.median_error, abs=6e-4) < 0.05
    assert max(of_runs) == pytest.approx(torch.largest_error, abs=6e-4)
    for wire, fitted in FITTED.items():
        rounds = [row for row in results if row["kind"] == "rounds" and row["wire"] == wire]
        assert sum(len(row["times_s"]) for row in rounds) == fitted.rounds
        assert median(errors(rounds)) == pytest.approx(fitted.rounds_error, abs=6e-4)


def test_rounds_on_a_link_that_nothing_was_fitted_to_take_what_was_predicted(results: list[dict[str, Any]]) -> None:
    tested = [row for row in results if row["kind"] == "rounds" and row["wire"] == "torch" and "500 ms" in row["link"]]
    assert len(tested) >= 6
    assert not any(row["fitted"] for row in tested)
    assert median(errors(tested)) < 0.1


def test_runs_on_the_virtual_clock_are_predicted_exactly(results: list[dict[str, Any]]) -> None:
    rows = [row for row in results if row["kind"] == "virtual"]
    assert len(rows) == 18
    for row in rows:
        assert row["predicted"] == pytest.approx(row["measured"], rel=1e-9)
