"""Throughput of every codec compared with a plain copy of the same float32 values, measured in alternation.

    python -m benchmarks.codecs [--values N] [--repeats N] [--threads N] [--device cpu|cuda]

Prints a Markdown table. ``encode`` includes the allocation of its payload, as in training; ``decode`` and
``accumulate`` write to an existing tensor. Every operation is timed right after a copy, and the ratio is the median
over these pairs, because a busy machine slows both.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from diloco.algorithm import FP4, BFloat16, Codec, Float16, Float32, Int8, Sign, TopK2

MOST_COPIES = {
    ("float16", "torch"): 3.0,
    ("bfloat16", "torch"): 3.0,
    ("int8", "torch"): 6.0,
    ("fp4", "torch"): 6.0,
    ("int8", "native (C)"): 2.0,
    ("fp4", "native (C)"): 1.0,
    ("sign", "native (C)"): 1.5,
    ("topk2", "native (C)"): 4.0,
}
"""(codec, implementation) -> the aim: at most this many times the duration of a copy."""


@dataclass
class Case:
    """One operation of one codec, and its timings."""

    codec: Codec
    implementation: str
    operation: str
    run: Callable[[], object]
    times_s: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)

    def row(self, float32_bytes: int) -> str:
        """Return the case as a line of the table."""
        median_s, ratio = statistics.median(self.times_s), statistics.median(self.copies)
        aim = MOST_COPIES.get((self.codec.name, self.implementation))
        verdict = "" if aim is None else f"{aim:g} {'met' if ratio <= aim else 'missed'}"
        speed = float32_bytes / median_s / 1e9
        spread = f"{min(self.copies):.2f}-{max(self.copies):.2f}"
        return (
            f"| {self.codec.name} | {self.implementation} | {self.operation} | {median_s * 1e3:.1f} | {speed:.1f} "
            f"| {ratio:.2f} | {spread} | {verdict} |"
        )


def make_codecs(device: torch.device) -> Iterator[Codec]:
    """Yield every codec, those with C kernels in each implementation that can run on ``device``."""
    yield from (Float32(), Float16(), BFloat16())
    kernels = device.type == "cpu" and Int8().implementation != "torch"
    for codec in (Int8, FP4, Sign):
        yield codec(implementation="torch")
        if kernels:
            yield codec(implementation="native")
    yield TopK2(implementation="torch")
    if kernels:
        yield TopK2(implementation="native")


def make_cases(codec: Codec, values: torch.Tensor, out: torch.Tensor) -> Iterator[Case]:
    """Yield encode, decode and accumulate of one codec, which share a payload."""
    payload = codec.encode(values)
    codec.validate(payload, values.numel())
    implementation = codec.implementation if values.device.type == "cpu" else "torch"
    yield Case(codec, implementation, "encode", lambda: codec.encode(values))
    yield Case(codec, implementation, "decode", lambda: codec.decode(payload, values.numel(), out))
    yield Case(codec, implementation, "accumulate", lambda: codec.accumulate(payload, out, 0.25))


def timed(operation: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that ``operation`` takes, including the work that it starts on the device."""
    start = time.perf_counter()
    operation()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def measure(cases: list[Case], copy: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Time all cases, and return the times of all copies. The first turn is a warm-up and not kept."""
    copies = []
    for turn in range(repeats + 1):
        for case in cases:
            copy_s = timed(copy, device)
            case_s = timed(case.run, device)
            if turn:
                copies.append(copy_s)
                case.times_s.append(case_s)
                case.copies.append(case_s / copy_s)
    return copies


def processor_name(device: torch.device) -> str:
    """Return the name of the GPU or CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput of the codecs compared with a copy.")
    parser.add_argument(
        "--values", type=int, default=100_000_000, help="number of float32 values (default: 100 million)"
    )
    parser.add_argument("--repeats", type=int, default=7, help="timings of each operation (default: 7)")
    parser.add_argument("--threads", type=int, help="threads of torch (default: chosen by torch)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)

    device = torch.device(arguments.device)
    values = torch.randn(arguments.values, generator=torch.Generator().manual_seed(0)).mul_(1e-3).to(device)
    out = torch.zeros_like(values)
    copies: list[float] = []
    rows = []
    for codec in make_codecs(device):  # one codec at a time: its payload is up to 4 bytes a value
        cases = list(make_cases(codec, values, out.zero_()))
        copies += measure(cases, lambda: out.copy_(values), arguments.repeats, device)
        rows += [case.row(values.nbytes) for case in cases]

    copy_s = statistics.median(copies)
    print(
        f"{processor_name(device)}; torch {torch.__version__}, {torch.get_num_threads()} threads; C kernels: 1 thread"
    )
    print(f"{arguments.values:,} float32 values, median of {arguments.repeats}")
    print(f"copy: {copy_s * 1e3:.1f} ms, {values.nbytes / copy_s / 1e9:.1f} GB/s of float32 input")
    if Int8().implementation == "torch":
        print("without compiled kernels")
    print()
    print("| codec | implementation | operation | ms | GB/s | times a copy | spread | aim: at most |")
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
