"""The stated errors of predictions are those of the benchmark's committed results."""

import json
from pathlib import Path

from benchmarks.simulator.__main__ import accuracy
from diloco.plan import ACCURACY

RESULTS = Path(__file__).parents[2] / "benchmarks" / "simulator" / "results.jsonl"


def test_the_stated_errors_are_those_of_the_benchmark() -> None:
    results = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    assert accuracy(results) == ACCURACY
    assert len(results) > 20
