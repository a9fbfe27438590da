"""``python -m benchmarks.simulator``: compare predictions with what `benchmarks.wan` measured with real processes.

It writes results.jsonl and the table of the README. That predictions equal the virtual clock of emulated links to
rounding is a property in `tests/plan/test_simulate.py`.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.markdown import table, write_below
from benchmarks.simulator import real

HERE = Path(__file__).parent
MARK = "<!-- what follows is written by python -m benchmarks.simulator -->"


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(prog="python -m benchmarks.simulator", description=__doc__).parse_args(arguments)
    rows = [*real.compare()]
    (HERE / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    write_below(MARK, report(rows), HERE / "README.md")
    print(report(rows))


def accuracy(rows: Sequence[dict[str, Any]]) -> str:
    """Return the errors of the predictions for runs of real processes, in words."""
    rounds = [abs(row["round_s"] / median(row["rounds_s"]) - 1) for row in rows]
    steps = [abs(row["predicted"]["step_s"] / row["measured"]["step_s"] - 1) for row in rows]
    return (
        f"median error {median(rounds):.0%} of the time of a round (largest {max(rounds):.0%}) and {median(steps):.1%} "
        f"of the whole time (largest {max(steps):.0%}), in {len(rows)} runs on a CPU"
    )


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Return the summary and the table of runs."""
    within = [time_s <= row["p90_round_s"] for row in rows for time_s in row["rounds_s"]]
    heads = ["link", "method", "round: predicted, s", "at p90", "measured: median", "max", "CU: predicted", "measured"]
    return "\n\n".join(
        [
            f"A {accuracy(rows)}. {sum(within) / len(within):.0%} of {len(within)} rounds took no "
            "longer than predicted at p90.",
            table(heads, map(_cells, rows)) + "\n",
        ]
    )


def _cells(row: dict[str, Any]) -> list[str]:
    times_s = row["rounds_s"]
    rounds_s = (row["round_s"], row["p90_round_s"], median(times_s), max(times_s))
    shares = (row[name]["compute_utilization"] for name in ("predicted", "measured"))
    return [row["link"], row["method"], *(f"{time_s:.2f}" for time_s in rounds_s), *(f"{cu:.1%}" for cu in shares)]


if __name__ == "__main__":
    main()
