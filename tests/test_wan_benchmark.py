"""The table of benchmarks/wan's grid: measurements, predictions, and runs that did not finish."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.wan.grid import grid_tables
from benchmarks.wan.plan import Work

STEP_S = 0.25


def row(link: str, **measured: Any) -> dict[str, Any]:
    return {"link": link, "method": "Streaming fp4", "work": asdict(Work()), "cpu_busy": 0.5, **measured}


def replica(step_s: float) -> dict[str, Any]:
    counted = {"wire_sent_bytes": 2.04e7, "payload_sent_bytes": 2e7, "syncs": 8, "failures": 0, "digest": "d"}
    return {"steps": 120, "wall_s": 120 * step_s, "waits_s": [0.1, 0.3], "transfers_s": [0.4], **counted}


def test_links_that_fall_short_are_listed_beside_what_was_predicted() -> None:
    done = {"outcome": "finished", "cpu_workers": 0.1}
    failed = {"outcome": "unfinished", "reason": "too long", "steps_done": 3, "elapsed_s": 300.0}
    rows = [
        row("200 Mbit/s, 500 ms, 2 replicas", replicas=[replica(0.26), replica(0.25)], **done),
        row("100 Mbit/s, 300 ms, 4 replicas", replicas=[replica(0.5)] * 4, **done),
        row("100 Mbit/s, 500 ms, 8 replicas", wire_sent_bytes=[1e6] * 8, **failed),
    ]

    table = grid_tables(rows, STEP_S)

    assert "3 of 36 links. 1 runs did not finish, 0 rounds were void." in table
    assert "Below 95 %, lowest first: 100 Mbit/s, 300 ms, 4 replicas: 50.0%." in table
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    header = next(line for line in lines if line.startswith("| link | CU predicted |"))
    ours = [line for line in lines if line.count(" ms, ") and "replicas |" in line and "model" not in line]
    assert [line.split(" | ")[0] for line in ours] == [
        "| 100 Mbit/s, 300 ms, 4 replicas",  # in grid order
        "| 100 Mbit/s, 500 ms, 8 replicas",
        "| 200 Mbit/s, 500 ms, 2 replicas",
    ]
    assert {line.count("|") for line in ours} == {header.count("|")}
