"""Time of the digest of a state compared with a plain copy of the same values, and with XXH3 on the host.

    python -m benchmarks.codecs.digest [--values N] [--repeats N] [--device cpu|cuda]

Prints a Markdown table. Each way is timed right after a copy, and the ratio is the median over these pairs, because a
busy machine slows both. XXH3, which versions before protocol 23 used, gets values on the host, copied there first.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
import xxhash

from benchmarks.codecs.__main__ import processor_name, timed
from diloco.algorithm import digest_tensors
from diloco.devices import to_host


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of a digest compared with a copy and with XXH3.")
    parser.add_argument("--values", type=int, default=50_000_000, help="number of float32 values (default: 50 million)")
    parser.add_argument("--repeats", type=int, default=7, help="timings of each way (default: 7)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    device = torch.device(arguments.device)
    values = torch.randn(arguments.values, generator=torch.Generator().manual_seed(0)).to(device)
    out = torch.empty_like(values)
    ways: dict[str, Callable[[], object]] = {
        "as torch operations": lambda: digest_tensors({"": values}, "torch"),
        "XXH3, 128 bits": lambda: xxhash.xxh3_128_hexdigest(to_host(values).numpy().data),
    }
    if device.type == "cpu":
        ways = {"C kernel": lambda: digest_tensors({"": values}, "native")} | ways
    times_s: dict[str, list[float]] = {name: [] for name in ways}
    copies_s: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(arguments.repeats + 1):
        for name, way in ways.items():
            copy_s, way_s = timed(lambda: out.copy_(values), device), timed(way, device)
            if turn:  # the first turn is a warm-up
                copies_s[name].append(copy_s)
                times_s[name].append(way_s)

    print(f"{processor_name(device)}; torch {torch.__version__}, 1 thread")
    print(f"{arguments.values:,} float32 values, median of {arguments.repeats}\n")
    print("| digest | ms | GB/s | times a copy | spread |\n|---|---|---|---|---|")
    for name in ways:
        median_s = statistics.median(times_s[name])
        ratios = [way_s / copy_s for way_s, copy_s in zip(times_s[name], copies_s[name], strict=True)]
        spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
        speed = values.nbytes / median_s / 1e9
        print(f"| {name} | {median_s * 1e3:.1f} | {speed:.1f} | {statistics.median(ratios):.2f} | {spread} |")


if __name__ == "__main__":
    main()
