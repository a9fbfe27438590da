"""``python -m benchmarks.cluster``: a round of each transport between processes, beside torch's own all-reduce.

Every process contributes the same number of values and waits for the average, a few times; rows are medians over
rounds. Time is from the submission to the average, CPU that of a process in that time, with all its threads. Payloads
are encoded beforehand. "copy" only copies the payload.

``--kill`` and ``--shard`` instead make whole runs under torchrun; see `benchmarks.cluster.torchruns`.
"""

import argparse
import json
import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch.multiprocessing.spawn import spawn

from benchmarks.cluster.rounds import measure
from benchmarks.cluster.torchruns import kill_one_of_four, shard_replicas
from benchmarks.markdown import table

RESULTS = Path(__file__).with_name("results.jsonl")
CODECS = ("float32", "int8", "fp4")
DTYPES = ("float32", "bfloat16")
RUNS = {"--kill": kill_one_of_four, "--shard": shard_replicas}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--values", type=int, default=16_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    for name, run in RUNS.items():
        parser.add_argument(name, dest="run", action="store_const", const=run, help=run.__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="rows are added to this file")
    given = parser.parse_args(arguments)
    if given.run is not None:
        with tempfile.TemporaryDirectory() as folder:
            _add(given.out, [given.run(Path(folder))])
        return
    methods = [f"{kind} {codec}" for codec in CODECS for kind in ("torch", "tcp")]
    methods += [f"all-reduce {dtype}" for dtype in DTYPES] + [f"copy {codec}" for codec in CODECS]
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as probe:
        first, results = probe.getsockname()[1] + 1, torch.multiprocessing.get_context("spawn").SimpleQueue()
        ports = {method: first + number for number, method in enumerate(methods)}
        spawn(measure, (given, str(Path(folder) / "store"), ports, results), nprocs=given.replicas)  # type: ignore[no-untyped-call]  # torch's
    measured = [results.get() for _ in range(given.replicas * len(methods))]
    about = {"replicas": given.replicas, "values": given.values}
    rows = []
    for method in methods:
        of_ranks = [(time_s, cpu_s) for name, time_s, cpu_s in measured if name == method]
        round_s, cpu_s = (max(each) for each in zip(*of_ranks, strict=True))
        rows.append({"method": method, "round_s": round(round_s, 4), "cpu_s": round(cpu_s, 4), **about})
    _add(given.out, rows)
    print(table(["method", "round, s", "CPU of a process, s"], [[r["method"], r["round_s"], r["cpu_s"]] for r in rows]))


def _add(out: Path, rows: Sequence[dict[str, Any]]) -> None:
    about = {"load": round(os.getloadavg()[0], 1), "torch": torch.__version__}
    with out.open("a", encoding="utf-8") as file:
        for row in rows:
            print(json.dumps(row | about))
            file.write(json.dumps(row | about) + "\n")


if __name__ == "__main__":
    main()
