"""What predictions say about themselves is what the benchmark's committed results say."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from diloco.simulate.overheads import LARGEST_ERROR, MEASURED, MEDIAN_ERROR, RUNS, accuracy

RESULTS = Path(__file__).parents[2] / "benchmarks" / "simulator" / "results.json"


def test_the_stated_error_is_the_benchmarks() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    errors = [abs(row["predicted"]["step_s"] / row["measured"]["step_s"] - 1) for row in results["processes"]]
    assert len(errors) == RUNS
    assert median(errors) == pytest.approx(MEDIAN_ERROR, abs=6e-4)
    assert max(errors) == pytest.approx(LARGEST_ERROR, abs=6e-4)
    assert (MEASURED.goodput, MEASURED.round_trips) == (
        results["overheads"]["goodput"],
        results["overheads"]["round_trips"],
    )
    assert f"{RUNS} real runs" in accuracy()


def test_the_median_error_is_below_five_per_cent_and_the_virtual_clock_is_met_exactly() -> None:
    assert MEDIAN_ERROR < 0.05
    for row in json.loads(RESULTS.read_text(encoding="utf-8"))["in_process"]:
        for name, measured in row["measured"].items():
            assert row["predicted"][name] == pytest.approx(measured, rel=1e-9)
