"""``python -m benchmarks.means``: write the tables of the bytes that encoded means move, and of their effect on links.

This command trains nothing; `diloco sweep` does, with `study.toml` and `seeds.toml`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.markdown import table, write_below
from diloco.algorithm import MeanEncoding, SyncSchedule, make_codec, plan_exchange
from diloco.simulate import Cluster, Conditions, Workload, simulate_cycles
from diloco.transport import Link

MARKER = "<!-- what follows is written by python -m benchmarks.means -->"
REPLICAS = (2, 3, 4, 8, 16, 32, 64)
CODECS = ("float32", "bfloat16", "int8", "fp4")
SHORT = {"all-gather": "AG", "reduce-scatter": "RS"}

WORKLOAD = Workload(parameters=25_200_000, layers=8, step_time_s=0.254)
SCHEDULE = SyncSchedule(inner_steps=60, num_fragments=4, overlap_steps=10)
LINKS = {"100 Mbit/s, 100 ms": (1e8, 0.1), "50 Mbit/s, 300 ms": (5e7, 0.3), "20 Mbit/s, 150 ms": (2e7, 0.15)}


def traffic() -> str:
    """Return the table of the busiest replica's bytes per parameter and round, by the trainer's own plan."""
    numel = WORKLOAD.parameters // SCHEDULE.num_fragments
    rows = []
    for codec in CODECS:
        for mean in CODECS:
            plans = [plan_exchange(make_codec(codec), numel, number, mean=MeanEncoding.of(mean)) for number in REPLICAS]
            rows.append([codec, mean, *(f"{p.busiest_bytes / numel:.2f} ({SHORT[p.pattern]})" for p in plans)])
    return table(["contributions", "means", *(f"M = {number}" for number in REPLICAS)], rows)


def utilization() -> str:
    """Return the table of the compute utilisation on links, with the overheads of real runs."""
    rows = []
    for link, (rate, latency_s) in LINKS.items():
        for mean in ("float32", "int8", "fp4"):
            cells = []
            for number in REPLICAS:
                overheads = Conditions(congestion_control="bbr").overheads(number - 1)
                cluster = Cluster.of([Link(rate, latency_s)] * number, WORKLOAD.step_time_s, overheads=overheads)
                sent = WORKLOAD.traffic(SCHEDULE, [make_codec("fp4")], number, mean=MeanEncoding.of(mean))
                result = simulate_cycles(sent, cluster, cycles=2)
                cells.append(f"{100 * float(result.compute_utilization):.1f}")
            rows.append([link, mean, *cells])
    return table(["link", "means", *(f"M = {number}" for number in REPLICAS)], rows)


def main() -> None:
    argparse.ArgumentParser(prog="python -m benchmarks.means", description=__doc__).parse_args()
    text = [
        "## What a round moves",
        "Bytes per parameter that the busiest replica moves each way in a round (AG: all-gather, where no mean is "
        "sent; RS: reduce-scatter). The rows with float32 means are those of versions without `sync.arguments.average.codec`. "
        "The default, `auto`, is the int8 row from M = 8 on for contributions in int8 and fp4, and otherwise the "
        "float32 row.",
        traffic(),
        "## What it gains on a link",
        "Compute utilisation (%), simulated: 25.2M parameters, contributions in fp4, H = 60, P = 4, tau = 10, a step "
        "of 0.254 s on a CPU, one-way latency, bbr, with the typical overheads of real runs.",
        utilization(),
    ]
    write_below(MARKER, "\n\n".join(text) + "\n", Path(__file__).parent / "README.md")


if __name__ == "__main__":
    main()
