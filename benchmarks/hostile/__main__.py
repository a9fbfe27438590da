"""``python -m benchmarks.hostile``: try every attack, and write results.jsonl and the table of README.md.

``--only NAME`` tries the attacks whose names begin with NAME, and writes nothing. ``--fuzz-minutes 10`` instead feeds
every parser with generated inputs for that time, and writes fuzz.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.hostile.fuzz import fuzz
from benchmarks.hostile.report import write_report
from benchmarks.hostile.table import ATTACKS

HERE = Path(__file__).parent


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="try only attacks whose names begin with one of these")
    parser.add_argument("--fuzz-minutes", type=float, default=0.0, help="fuzz the parsers for this time instead")
    parser.add_argument("--list", action="store_true", help="list the attacks without trying them")
    given = parser.parse_args(arguments)
    chosen = [each for each in ATTACKS if not given.only or each.name.startswith(tuple(given.only))]
    if given.list:
        print("\n".join(f"{each.where:10} {each.who:8} {each.name}" for each in chosen))
        return 0
    if given.fuzz_minutes:
        outcome = fuzz(given.fuzz_minutes)
        (HERE / "fuzz.json").write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")
        print(
            f"{outcome['examples']:,} examples for {len(outcome['parsers'])} parsers in {given.fuzz_minutes:g} minutes"
        )
        print(
            "\n".join(f"{name} raised {what}" for name, what in outcome["failures"].items())
            or "no parser raised anything but refusals"
        )
        return int(bool(outcome["failures"]))
    rows = []
    for attack in chosen:
        began_s = time.monotonic()
        rows.append(row := attack.row())
        words = "; ".join(row["harm"]) or "no harm"
        print(f"{attack.name}: {words} ({time.monotonic() - began_s:.1f} s)", flush=True)
    if not given.only:
        (HERE / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        write_report(HERE / "README.md", rows)
    return int(any(row["harm"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
