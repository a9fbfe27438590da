"""``python -m benchmarks.simulator``: compare predictions with runs on the virtual clock and with real processes.

The command trains in one process on emulated links (a minute), reads what `benchmarks.wan` measured with processes, and
writes results.jsonl and the tables of the README.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.markdown import table, write_below
from benchmarks.simulator import real, virtual

__all__ = ["accuracy", "main"]

HERE = Path(__file__).parent
MARK = "<!-- what follows is written by python -m benchmarks.simulator -->"


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(prog="python -m benchmarks.simulator", description=__doc__).parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        rows = [*virtual.compare(Path(folder)), *real.compare()]
    (HERE / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    write_below(MARK, report(rows), HERE / "README.md")
    print(report(rows))


def accuracy(rows: Sequence[dict[str, Any]]) -> str:
    """Return the errors of the predictions for runs of real processes, in words."""
    runs = [row for row in rows if row["kind"] == "run"]
    rounds = [abs(row["round_s"] / median(row["rounds_s"]) - 1) for row in runs]
    steps = [abs(row["predicted"]["step_s"] / row["measured"]["step_s"] - 1) for row in runs]
    return (
        f"median error {median(rounds):.0%} of the time of a round (largest {max(rounds):.0%}) and {median(steps):.1%} "
        f"of the whole time (largest {max(steps):.0%}), in {len(runs)} runs on a CPU"
    )


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Return the summary and the table of runs."""
    in_process, runs = ([row for row in rows if row["kind"] == kind] for kind in ("virtual", "run"))
    worst = max(
        abs(row["predicted"][name] / row["measured"][name] - 1) for row in in_process for name in row["measured"]
    )
    within = [time_s <= row["p90_round_s"] for row in runs for time_s in row["rounds_s"]]
    heads = ["link", "method", "round: predicted, s", "at p90", "measured: median", "max", "CU: predicted", "measured"]
    return "\n\n".join(
        [
            f"**In one process**, {len(in_process)} runs: largest error of utilisation and time {worst:.0e}.",
            f"**Real processes**: {accuracy(rows)}. {sum(within) / len(within):.0%} of {len(within)} rounds took no "
            "longer than predicted at p90.",
            table(heads, map(_cells, runs)) + "\n",
        ]
    )


def _cells(row: dict[str, Any]) -> list[str]:
    times_s = row["rounds_s"]
    rounds_s = (row["round_s"], row["p90_round_s"], median(times_s), max(times_s))
    shares = (row[name]["compute_utilization"] for name in ("predicted", "measured"))
    return [row["link"], row["method"], *(f"{time_s:.2f}" for time_s in rounds_s), *(f"{cu:.1%}" for cu in shares)]


if __name__ == "__main__":
    main()
