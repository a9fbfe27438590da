"""The stated constants and errors of predictions match the committed results of the benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.simulator import real
from diloco.simulate import FITTED, Conditions, accuracy

RESULTS = Path(__file__).parents[2] / "benchmarks" / "simulator" / "results.json"


@pytest.fixture
def results() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return read


def test_payloads_of_a_swarm_travel_over_as_many_connections_as_over_torch() -> None:
    torch, swarm = (Conditions(wire=wire, loss=0.005).overheads(2) for wire in FITTED)
    assert torch.tcp == swarm.tcp


def test_the_stated_error_is_the_benchmarks(results: dict[str, Any]) -> None:
    errors = [abs(row["predicted"]["step_s"] / row["measured"]["step_s"] - 1) for row in results["processes"]]
    torch = FITTED["torch"]
    assert len(errors) == torch.runs
    assert median(errors) == pytest.approx(torch.median_error, abs=6e-4)
    assert max(errors) == pytest.approx(torch.largest_error, abs=6e-4)
    assert f"{torch.runs} runs on a CPU" in accuracy("torch")
    for wire, fitted in FITTED.items():
        assert tuple(results["fitted"][wire]["typical"]) == fitted.typical
        assert tuple(results["fitted"][wire]["careful"]) == fitted.careful
        of = [row for row in results["rounds"] if row["wire"] == wire]
        off = [abs(row["typical_s"] / median(row["times_s"]) - 1) for row in of]
        assert sum(len(row["times_s"]) for row in of) == fitted.rounds
        assert median(off) == pytest.approx(fitted.rounds_error, abs=6e-4)


def test_rounds_on_a_link_that_nothing_was_fitted_to_take_what_was_predicted(results: dict[str, Any]) -> None:
    tested = [row for row in results["rounds"] if "500 ms" in row["link"] and row["wire"] == "torch"]
    assert len(tested) >= 6
    assert not any(row["fitted"] for row in tested)
    assert median(abs(row["typical_s"] / median(row["times_s"]) - 1) for row in tested) < 0.1


def test_the_median_error_is_below_five_per_cent_and_the_virtual_clock_is_met_exactly(results: dict[str, Any]) -> None:
    assert FITTED["torch"].median_error < 0.05
    for row in results["in_process"]:
        for name, measured in row["measured"].items():
            assert row["predicted"][name] == pytest.approx(measured, rel=1e-9)


def test_plans_kept_their_word_and_one_that_did_not_would_be_found(results: dict[str, Any]) -> None:
    plans = [row for row in results["processes"] if row["planned"]]
    assert len(plans) >= 3
    assert real.missed(results["processes"]) == []
    (broken,) = real.missed([plans[0] | {"measured": {"compute_utilization": plans[0]["planned"]["target"] - 0.031}}])
    assert broken["link"] == plans[0]["link"]
