"""``python -m benchmarks.decentralised --wan SCRIPT``: make the missing runs one at a time, and write the tables.

Without ``--wan`` only the runs on loopback are made. benchmarks/wan says what SCRIPT must support. Rivals run with
``--rivals-python``; without it they are skipped. A run whose result is in results.json is not repeated unless
``--again`` is given.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.decentralised.conduct import conduct
from benchmarks.decentralised.phases import summarise
from benchmarks.decentralised.plan import CASES, SETTINGS, Case, Job, Setting
from benchmarks.decentralised.report import write_report
from benchmarks.wan.counters import wait_for_quiet
from benchmarks.wan.network import Loopback, Network
from benchmarks.wan.plan import Link
from benchmarks.wan.report import disturbance, least_disturbed
from benchmarks.wan.run import run_job
from diloco.errors import ConfigurationError

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
_NO_LINK = Link("loopback", 0, float("inf"), 0.0)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decentralised", description=__doc__)
    parser.add_argument("--wan", type=Path, help="script that makes the network")
    parser.add_argument("--prefix", default="dc", help="WAN_PREFIX for the script")
    parser.add_argument("--rivals-python", type=Path, help="interpreter with hivemind and numpy < 2.4")
    parser.add_argument("--settings", nargs="+", default=["*"], help="the settings, as shell-style patterns")
    parser.add_argument("--cases", nargs="+", default=["*"], help="the cases, as shell-style patterns")
    parser.add_argument("--values", type=int, default=Job.values, help="float32 values in a round")
    parser.add_argument("--rounds", type=int, default=Job.rounds, help="measured rounds")
    parser.add_argument("--limit-s", type=float, default=300.0, help="stop a run that takes longer")
    parser.add_argument("--runs", type=Path, default=Path("runs/decentralised"), help="folder for logs and keys")
    parser.add_argument("--results", type=Path, default=RESULTS, help="another file, for trials: no tables are written")
    parser.add_argument("--tables", action="store_true", help="run nothing, only write the tables")
    parser.add_argument("--again", action="store_true", help="repeat runs that have a result")
    parser.add_argument(
        "--again-above", type=float, default=1.0, help="... if other programs used more than this share of the CPU"
    )
    parser.add_argument(
        "--quiet", type=float, default=1.0, help="before a run, wait until the CPU is used less than this share"
    )
    return parser.parse_args(arguments)


def chosen(settings: Sequence[str], cases: Sequence[str]) -> list[tuple[Setting, Case]]:
    """Return the pairs to run.

    Raises:
        ConfigurationError: if the patterns match no pair; the message lists the names.
    """
    pairs = [
        (setting, case)
        for setting in SETTINGS
        if any(fnmatchcase(setting.name, pattern) for pattern in settings)
        for case in CASES
        if setting.name in case.settings and any(fnmatchcase(case.name, pattern) for pattern in cases)
    ]
    if not pairs:
        names = "; ".join([*(setting.name for setting in SETTINGS), *(case.name for case in CASES)])
        raise ConfigurationError(
            f"--settings {' '.join(settings)} with --cases {' '.join(cases)} matches nothing. Give names from this "
            f"list, or patterns: {names}. Nothing was started."
        )
    return pairs


def run_one(setting: Setting, case: Case, given: argparse.Namespace) -> dict[str, Any]:
    """Set up the network, make one run, and return its row."""
    network = Network(given.wan, given.prefix) if setting.link else Loopback()
    name = f"{setting.name} {case.name}"
    folder = given.runs.resolve() / "".join(letter if letter.isalnum() else "-" for letter in name)
    job = Job(
        case.method,
        setting.peers,
        tuple(network.address(node) for node in range(setting.peers)),
        str(folder),
        timeout_s=given.limit_s,
        values=given.values,
        rounds=given.rounds,
        wan=setting.link is not None,
    )
    python = given.rivals_python if case.method.rival else Path(sys.executable)
    wait_for_quiet(given.quiet)
    with network.up(setting.link or _NO_LINK):
        started_s = time.monotonic()
        measured = run_job(
            network, job, python, folder, given.limit_s, module="benchmarks.decentralised.worker", conducted_by=conduct
        )
        run_s = time.monotonic() - started_s
    if case.kind == "joiner" and measured["outcome"] == "finished":
        measured["replicas"] = summarise(measured["replicas"])
    print(f"{name} | {measured['outcome']} {measured.get('reason', '')} {run_s:.0f} s", flush=True)
    return {"setting": setting.name, "case": case.name, "values": given.values, "run_s": run_s, **measured}


def main(arguments: Sequence[str] | None = None) -> None:
    given = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers and network are removed
    path: Path = given.results
    results: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    for setting, case in [] if given.tables else chosen(given.settings, given.cases):
        same = [row for row in results if (row["setting"], row["case"]) == (setting.name, case.name)]
        if (setting.link and not given.wan) or (case.method.rival and not given.rivals_python):
            missing = "--wan" if setting.link else "--rivals-python"
            print(f"skipped, because {missing} is not given: {setting.name} {case.name}")
        elif given.again or not same or max(map(disturbance, same)) > given.again_above:
            made = run_one(setting, case, given)
            kept = made if given.again else least_disturbed([*same, made])
            results = [row for row in results if row not in same] + [kept]
            path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if path == RESULTS:
        write_report(results, HERE / "README.md")


if __name__ == "__main__":
    main()
