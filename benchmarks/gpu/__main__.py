"""``python -m benchmarks.gpu``: measure the package on one GPU. Parts can run separately and add to one results file.

python -m benchmarks.gpu --parts checks 150m       # the others: 1b, rounds, sharing
python -m benchmarks.gpu --tiny                    # everything in seconds, also on a CPU; the figures mean nothing
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.checks import run_checks
from benchmarks.gpu.report import report
from benchmarks.gpu.rounds import measure_rounds
from benchmarks.gpu.sharing import measure_sharing
from benchmarks.gpu.sizes import FULL, TINY
from benchmarks.gpu.training import measure_training

PACKAGES = ("torch", "triton", "transformers", "accelerate", "numpy")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("checks", *FULL.jobs, "rounds", "sharing")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--only", default="", help="measure only ways of training whose names contain this")
    parser.add_argument("--tiny", action="store_true", help="run everything at the size of a test")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peak-flops-per-s", type=float, help="peak of a device that the package does not know")
    parser.add_argument("--out", type=Path, default=Path("gpu-results.json"), help="results are added to this file")
    given = parser.parse_args(arguments)
    sizes, device = TINY if given.tiny else FULL, torch.device(given.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch's
    measures: dict[str, Callable[[], Any]] = {
        "checks": lambda: run_checks(sizes, device),
        "rounds": lambda: measure_rounds(sizes.jobs["150m"], sizes, device),
        "sharing": lambda: measure_sharing(sizes.small, sizes, device),
    }
    for name, job in sizes.jobs.items():
        measures[name] = lambda job=job: measure_training(job, sizes, device, given.peak_flops_per_s, given.only)  # type: ignore[misc]  # bound in this iteration
    results = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {}
    results["about"] = about(device)
    for part in given.parts:
        print(f"{part}:", flush=True)
        started_s = time.perf_counter()
        results[part] = measures[part]()
        print(f"{part} took {time.perf_counter() - started_s:.1f} s", flush=True)
        # written after each part, so that a run cut off keeps the results it had
        given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print("\n" + report(results, sizes))
    return int(any(row["ok"] is False for row in results.get("checks", ())))


def about(device: torch.device) -> dict[str, Any]:
    """Return the command, the device and the versions of the measurement."""
    on_cuda = device.type == "cuda"
    return {
        "command": " ".join(["python -m benchmarks.gpu", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name(device) if on_cuda else f"CPU, {platform.machine()}",
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": {each.name: each.version for each in metadata.distributions() if each.name in PACKAGES},
    }


if __name__ == "__main__":
    sys.exit(main())
