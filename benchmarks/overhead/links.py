"""``python -m benchmarks.overhead.links``: rounds of two replicas over TCP on the loopback interface, and their cost.

Two processes average contributions in float32, which are neither compressed nor computed: what is measured is moving,
summing and deciding them.
"""

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from diloco import connect_tcp
from diloco.algorithm import Contribution, RoundId, make_codec

WARM = 3


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead.links", description=__doc__)
    parser.add_argument("--values", type=int, default=4_000_000, help="values of a contribution")
    parser.add_argument("--rounds", type=int, default=30, help="number of measured rounds")
    parser.add_argument("--at", default="", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.at:
        exchange(1, given.at, given.values, given.rounds)
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = ["--values", str(given.values), "--rounds", str(given.rounds), "--at", address]
    with subprocess.Popen([sys.executable, "-m", "benchmarks.overhead.links", *options]):
        seconds, user_s, system_s = exchange(0, address, given.values, given.rounds)
    per_gb = (user_s + system_s) / (8 * given.values) * 1e9  # float32, sent and received
    print(
        "| MB each way | ms per round | CPU of a process per round, ms: user, system | CPU-s per GB sent and received |"
    )
    print("|---|---|---|---|")
    cpu = f"{1e3 * user_s:.1f}, {1e3 * system_s:.1f}"
    print(f"| {4 * given.values / 1e6:.0f} | {1e3 * seconds:.1f} | {cpu} | {per_gb:.2f} |")


def exchange(replica: int, address: str, num_values: int, rounds: int) -> tuple[float, float, float]:
    """Average so many rounds, and return the seconds of one: elapsed, and of the processor for this process."""
    torch.set_num_threads(1)
    codec = make_codec("float32")
    payload = codec.encode(torch.randn(num_values))
    with connect_tcp(replica=replica, num_replicas=2, rendezvous=address, compress=False) as transport:
        for number in range(WARM + rounds):
            if number == WARM:
                before, began_s = os.times(), time.perf_counter()
            transport.average(
                Contribution(
                    round=RoundId(0, number),
                    replica=replica,
                    codec=codec,
                    numel=num_values,
                    payload=payload,
                    digest="d",
                )
            ).wait()
        seconds, after = (time.perf_counter() - began_s) / rounds, os.times()
    return seconds, (after[0] - before[0]) / rounds, (after[1] - before[1]) / rounds


if __name__ == "__main__":
    main()
