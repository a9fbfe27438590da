"""``python -m benchmarks.simulator``: compare predictions with runs on the virtual clock and with real processes.

The command trains in one process on emulated links (a minute), reads what `benchmarks.wan` measured with processes, and
writes results.jsonl and the summary in the README. ``--fit`` only searches for the constants that best fit rounds on
links of up to 300 ms, and prints them for `diloco.plan.overheads`.

The exit code is 1 if a planned run fell short of its target by more than 3 points.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.markdown import table, write_below
from benchmarks.simulator import real, virtual
from diloco.plan import FITTED

HERE = Path(__file__).parent
MARK = "<!-- what follows is written by python -m benchmarks.simulator -->"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator", description=__doc__)
    parser.add_argument("--fit", action="store_true", help="search for the constants, print them, and end")
    rounds = list(real.measured_rounds())
    if parser.parse_args(arguments).fit:
        for wire in FITTED:
            typical, p90 = real.fit([each for each in rounds if each.fitted and each.wire == wire])
            print(f"{wire}: typical={typical}, p90={p90}", flush=True)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        rows = list(virtual.compare(Path(folder)))
    rows += map(_described, rounds)
    rows += (runs := list(real.compare()))
    (HERE / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    write_below(MARK, report(rows), HERE / "README.md")
    print(report(rows))
    missed = real.missed(runs)
    for row in missed:
        print(f"{row['link']}: {_share(row, 'measured')} is below the target of {row['planned']['target']:.0%}.")
    return 1 if missed else 0


def _described(each: real.Rounds) -> dict[str, Any]:
    return {
        "kind": "rounds",
        "link": each.link.name,
        "method": each.method,
        "wire": each.wire,
        "values": each.values,
        "fitted": each.fitted,
        "times_s": [round(time_s, 4) for time_s in each.times_s],
        "typical_s": each.predicted_s(),
        "p90_s": each.predicted_s(p90=True),
    }


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Return the summary of all rows."""
    in_process, rounds, runs = ([row for row in rows if row["kind"] == kind] for kind in ("virtual", "rounds", "run"))
    worst = max(
        abs(row["predicted"][name] / row["measured"][name] - 1) for row in in_process for name in row["measured"]
    )
    errors = [row["predicted"]["step_s"] / row["measured"]["step_s"] - 1 for row in runs]
    kinds = {
        "fitted": [row for row in rounds if row["fitted"]],
        "on a link of 500 ms": [row for row in rounds if not row["fitted"] and "500 ms" in row["link"]],
        "all others": [row for row in rounds if not row["fitted"] and "500 ms" not in row["link"]],
    }
    groups = [
        (wire, kind, [row for row in chosen if row["wire"] == wire])
        for wire in FITTED
        for kind, chosen in kinds.items()
    ]
    return "\n\n".join(
        [
            f"**In one process**, {len(in_process)} runs: largest error of utilisation and time {worst:.0e}.",
            f"**Runs of real processes**, {len(errors)} over torch: median error of the wall-clock time "
            f"{median(map(abs, errors)):.1%}, largest {max(map(abs, errors)):.1%}, mean "
            f"{sum(errors) / len(errors):+.1%} (above 0: predicted too slow).",
            table(
                ["link", "method", "step: predicted, s", "measured, s", "utilisation: predicted", "measured"],
                [
                    [
                        row["link"],
                        row["method"],
                        *(f"{row[name]['step_s']:.3f}" for name in ("predicted", "measured")),
                        *(_share(row, name) for name in ("predicted", "measured")),
                    ]
                    for row in runs
                ],
            ),
            "**Rounds of real processes**; each is in results.jsonl.",
            table(
                ["transport", "rounds", "number", "median error", "largest", "within the p90 prediction"],
                [[wire, kind, *_errors(chosen)] for wire, kind, chosen in groups if chosen],
            )
            + "\n",
        ]
    )


def _share(row: dict[str, Any], name: str) -> str:
    return f"{row[name]['compute_utilization']:.1%}"


def _errors(rows: Sequence[dict[str, Any]]) -> list[str]:
    errors = [abs(row["typical_s"] / median(row["times_s"]) - 1) for row in rows]
    within = [time_s <= row["p90_s"] for row in rows for time_s in row["times_s"]]
    return [str(len(within)), f"{median(errors):.1%}", f"{max(errors):.0%}", f"{sum(within) / len(within):.0%}"]


if __name__ == "__main__":
    sys.exit(main())
