"""``python -m benchmarks.wan --wan SCRIPT``: make the missing runs one at a time, and write the tables.

SCRIPT needs root and network namespaces; ``--wan loopback`` tries the methods between two processes of this machine and
writes nothing. The rivals run with ``--rivals-python``, the interpreter of a virtual
environment with ``requirements-rivals.txt``; without it they are skipped. A run whose result is in results.json (with
``--grid``: in grid.json) is not repeated unless ``--again`` is given. Without ``--wan`` only the tables are written.

``--in-turn PYTHON ...`` compares versions of the package: each run is made with each of these interpreters in turn,
``--repeats`` times, every second time in the reverse order, since machines become slower or faster with time. Every row
is kept in in_turn.json with the commit of the interpreter's package. The benchmark's own code is that of this checkout
for all of them.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.wan.commits import commit_of
from benchmarks.wan.network import Loopback, Network
from benchmarks.wan.plan import GRID, LINKS, LOOPBACK, METHODS, Job, Link, Method, Work
from benchmarks.wan.report import write_report
from benchmarks.wan.run import run_job

HERE = Path(__file__).parent
RESULTS, GRID_RESULTS, IN_TURN = HERE / "results.json", HERE / "grid.json", HERE / "in_turn.json"
QUICK_START = HERE / "quick_start.json"  # of benchmarks.wan.quick_start


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wan", description=__doc__)
    parser.add_argument("--wan", type=Path, help="script that makes the network; without it, only tables are written")
    parser.add_argument("--prefix", default="wb", help="WAN_PREFIX for the script")
    parser.add_argument("--rivals-python", type=Path, help="interpreter that has the rivals installed")
    parser.add_argument(
        "--grid", action="store_true", help="run the links of the grid; Streaming fp4 unless --methods is given"
    )
    parser.add_argument("--links", nargs="+", default=["*"], help="the links, as shell-style patterns")
    parser.add_argument("--methods", nargs="+", help="the methods, as shell-style patterns")
    parser.add_argument(
        "--cycles", type=int, default=Work().cycles, help="length of a run, in H; rare events need more"
    )
    parser.add_argument("--limit-s", type=float, default=300.0, help="stop a run that takes longer")
    parser.add_argument("--runs", type=Path, default=Path("runs/wan"), help="folder for logs")
    parser.add_argument(
        "--in-turn", type=Path, nargs="+", metavar="PYTHON", help="interpreters whose packages are compared"
    )
    parser.add_argument("--repeats", type=int, default=2, help="with --in-turn: the runs of each interpreter")
    parser.add_argument("--again", action="store_true", help="repeat runs that have a result")
    given = parser.parse_args(arguments)
    if given.cycles < 1:
        parser.error(f"--cycles must be at least 1, got {given.cycles}. Nothing was started.")
    return given


def chosen(of: Sequence[Link], links: Sequence[str], methods: Sequence[str]) -> list[tuple[Link, Method]]:
    """Return the pairs of ``of`` and `METHODS` whose names match; without communication, one link for each M."""

    def named(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    first = {link.replicas: link for link in reversed(of)}
    picked = [method for method in METHODS if named(method.name, methods)]
    pairs = [(link, method) for link in of if named(link.name, links) for method in picked]
    if not pairs:
        names = "; ".join([*(each.name for each in of), *(each.name for each in METHODS)])
        raise SystemExit(f"--links and --methods match nothing of: {names}. Nothing was started.")
    return [(link, method) for link, method in pairs if method is not METHODS[0] or link is first[link.replicas]]


def run_one(
    network: Network, link: Link, method: Method, work: Work, given: argparse.Namespace, python: Path
) -> dict[str, Any]:
    """Set up the network, make one run, and return its row."""
    addresses = tuple(network.address(node) for node in range(link.replicas))
    job = Job(method, work, link.replicas, addresses, 2 * given.limit_s, link.rate_bits_per_s, device=network.device)
    name = f"{link.name} {method.name}"
    folder = given.runs.resolve() / "".join(letter if letter.isalnum() else "-" for letter in name)
    with network.up(link):
        started_s = time.monotonic()
        measured = run_job(network, job, python, folder, given.limit_s)
        run_s = time.monotonic() - started_s
    print(f"{link.name} | {method.name} | {measured['outcome']} {measured.get('reason', '')} {run_s:.0f} s", flush=True)
    return {"link": link.name, "method": method.name, "work": asdict(work), "run_s": run_s, **measured}


def run_in_turn(network: Network, link: Link, method: Method, work: Work, given: argparse.Namespace) -> None:
    """Make the missing runs of one link and method with each interpreter in turn, and keep each row at once."""
    for repeat in range(given.repeats):
        for python in given.in_turn if repeat % 2 == 0 else reversed(given.in_turn):
            commit = commit_of(python)
            rows = _read(IN_TURN)
            done = [
                row for row in rows if (row["link"], row["method"], row["commit"]) == (link.name, method.name, commit)
            ]
            if len(done) <= repeat:
                row = {"commit": commit, **run_one(network, link, method, work, given, python)}
                IN_TURN.write_text(json.dumps([*rows, row], indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    given = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers and network are removed
    links, path = (GRID, GRID_RESULTS) if given.grid else (LINKS, RESULTS)
    if loopback := str(given.wan) == "loopback":
        links, path = (LOOPBACK,), given.runs / "trial.json"
    methods = given.methods or ([METHODS[0].name, "Streaming fp4"] if given.grid else ["*"])
    results = _read(path)
    work = Work(cycles=given.cycles)
    if given.wan:
        network = Loopback() if loopback else Network(given.wan, given.prefix)
        for link, method in chosen(links, given.links, methods):
            if given.in_turn:
                run_in_turn(network, link, method, work, given)
                continue
            same = [row for row in results if (row["link"], row["method"]) == (link.name, method.name)]
            if method.rival and not given.rivals_python:
                print(f"skipped, because --rivals-python is not given: {method.name}")
            elif given.again or not same:
                python = given.rivals_python if method.rival else Path(sys.executable)
                row = run_one(network, link, method, work, given, python)
                results = [each for each in results if each not in same] + [row]
                path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if not loopback:
        write_report(_read(RESULTS), _read(GRID_RESULTS), _read(IN_TURN), _read(QUICK_START), HERE / "README.md")


def _read(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return rows


if __name__ == "__main__":
    main()
