"""``python -m benchmarks.overhead.memory``: the peak memory of a run of several replicas in one process.

``--other SRC`` compares with the package in another folder, such as the ``src`` of a git worktree, in turns.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

TRAIN = (
    "train --steps 12 --inner-steps 5 --evaluation.every-steps 0 --evaluation.sequences 4 "
    "--evaluation.sample-prompts --checkpoint.every-steps 0 --monitor.console quiet"
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead.memory", description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--other", type=Path, help="a folder with another version of the package")
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args(arguments)
    sources = [Path(__file__).parents[2] / "src", *([given.other] if given.other else [])]
    print(f"| replicas | {' | '.join(map(str, sources))} |\n|---|{'---|' * len(sources)}")
    for replicas in given.replicas:
        peaks: list[list[float]] = [[] for _ in sources]
        for _ in range(given.turns):
            for source, row in zip(sources, peaks, strict=True):
                row.append(peak_mib(source, replicas))
        cells = (f"{statistics.median(row):.0f} MiB ({min(row):.0f} to {max(row):.0f})" for row in peaks)
        print(f"| {replicas} | {' | '.join(cells)} |", flush=True)


def peak_mib(source: Path, replicas: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        words = f"{TRAIN} --replicas {replicas} --out {folder}/run"
        command = [sys.executable, "-m", "diloco", *words.split()]
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(source)}, cwd=folder)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} failed with {process.returncode}")
        return usage.ru_maxrss / 1024


if __name__ == "__main__":
    main()
