"""``python -m benchmarks.same_bits.kernels``: the numeric tests under the kernels of other processors.

Each row runs the tests in a process whose libraries choose other vector instructions, or another number of threads. A
test that holds a value whose bits depend on the order of a sum fails in one of the rows.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

from benchmarks.markdown import table

NUMERIC_TESTS = (
    "tests/algorithm",
    "tests/outer",
    "tests/model",
    "tests/train/test_golden_runs.py",
    "tests/train/test_inner.py",
    "tests/train/test_state.py",
)
KERNELS: Mapping[str, Mapping[str, str]] = {
    "this processor's own": {},
    "ATEN_CPU_CAPABILITY=default": {"ATEN_CPU_CAPABILITY": "default"},
    "ATEN_CPU_CAPABILITY=avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "ATEN_CPU_CAPABILITY=avx512": {"ATEN_CPU_CAPABILITY": "avx512"},
    "ONEDNN_MAX_CPU_ISA=AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "MKL_ENABLE_INSTRUCTIONS=AVX2, as on an AMD with AVX-512": {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "all three at their least": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    },
    "OMP_NUM_THREADS=1": {"OMP_NUM_THREADS": "1"},
    "OMP_NUM_THREADS=3": {"OMP_NUM_THREADS": "3"},
}
OUTCOME = re.compile(r"(\d+) (passed|failed|skipped|error)")
KERNEL_OF_TORCH = "import torch; print(torch.backends.cpu.get_cpu_capability())"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.same_bits.kernels", description=__doc__)
    parser.add_argument("tests", nargs="*", default=NUMERIC_TESTS, help="paths for pytest; default: %(default)s")
    given = parser.parse_args(arguments)
    rows = []
    for name, changes in KERNELS.items():
        counts, failed = outcome(given.tests, changes)
        rows.append((name, capability(changes), counts.get("passed", 0), counts.get("failed", 0), failed))
        print(rows[-1], file=sys.stderr, flush=True)
    print(table(("kernels", "torch's vectors", "passed", "failed", "which"), rows))


def capability(changes: Mapping[str, str]) -> str:
    return run(["-c", KERNEL_OF_TORCH], changes).stdout.strip()


def outcome(tests: Sequence[str], changes: Mapping[str, str]) -> tuple[dict[str, int], str]:
    """Run the tests; return how many passed, failed and so on, and the names of those that failed."""
    output = run(["-m", "pytest", "--durations=0", "-p", "no:cacheprovider", *tests], changes).stdout
    *_, last = output.strip().splitlines()
    counts = {outcome: int(number) for number, outcome in OUTCOME.findall(last)}
    return counts, ", ".join(re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE))


def run(command: Sequence[str], changes: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env=os.environ | changes, stdout=subprocess.PIPE, text=True, check=False
    )


if __name__ == "__main__":
    main()
