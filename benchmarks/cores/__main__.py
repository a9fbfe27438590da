"""``python -m benchmarks.cores``: waiting policies of OpenMP, alone and next to a busy process.

The quick start's inner step with different waiting policies of OpenMP, one process each. The processes
take turns of a few steps in a rotating order, so that other load on the machine affects all of them equally. Each
policy is compared with libgomp's default turn by turn.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

POLICIES: dict[str, Mapping[str, str]] = {
    "libgomp's own, 300,000 spins": {"GOMP_SPINCOUNT": "300000"},
    "10,000 spins": {"GOMP_SPINCOUNT": "10000"},
    "1,000 spins (chosen)": {"GOMP_SPINCOUNT": "1000"},
    "100 spins": {"GOMP_SPINCOUNT": "100"},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
LOADS = ("nothing else runs", "next to one busy process")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cores", description=__doc__)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=24, help="number of turns of each")
    given = parser.parse_args(arguments)
    if given.worker:
        work()
    else:
        print_waiting(given.rounds)


def print_waiting(rounds: int) -> None:
    workers = {name: start_worker(changes) for name, changes in POLICIES.items()}
    names, columns = list(workers), []
    with busy_process() as load:
        for loaded in (False, True):
            load.send_signal(signal.SIGCONT if loaded else signal.SIGSTOP)
            step_s: dict[str, list[float]] = {name: [] for name in names}
            for number in range(rounds):
                first = number % len(names)
                for name in names[first:] + names[:first]:
                    step_s[name].append(take_turn(workers[name], 4))
            columns.append(step_s)
    for worker in workers.values():
        worker.communicate()
    print(f"| quick start's inner step | {' | '.join(f'{load}, ms | times as fast' for load in LOADS)} |")
    print("|---|---|---|---|---|")
    for name in names:
        cells = []
        for step_s in columns:
            own, mine = step_s[names[0]], step_s[name]
            faster = statistics.median(a / b for a, b in zip(own, mine, strict=True))
            cells.append(f"{1e3 * statistics.median(mine):.1f} | {faster:.2f}")
        print(f"| {name} | {' | '.join(cells)} |")


@contextmanager
def busy_process() -> Iterator[subprocess.Popen[bytes]]:
    """Provide a process that uses one core unless it is stopped."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def start_worker(changes: Mapping[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.cores", "--worker"]
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "MKL_", "KMP_"))
    }
    pipe = subprocess.PIPE
    worker = subprocess.Popen(command, env=clean | dict(changes), stdin=pipe, stdout=pipe, text=True)
    take_turn(worker, 2)
    return worker


def take_turn(worker: subprocess.Popen[str], steps: int) -> float:
    """Let the worker take steps, and return the seconds per step."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    print(steps, file=worker.stdin, flush=True)
    return float(worker.stdout.readline())


def work() -> None:
    """For each number on standard input, take this many inner steps and print the seconds per step."""
    import torch

    from diloco.model import build_model, get_preset

    model = build_model(replace(get_preset("tiny").model, vocab_size=257), seed=0, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = torch.randint(0, 257, (4, 129), generator=torch.Generator().manual_seed(0))
    for line in sys.stdin:
        started_s = time.perf_counter()
        for _ in range(int(line)):
            loss, _ = model.loss(batch[:, :-1], batch[:, 1:])
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        print((time.perf_counter() - started_s) / int(line), flush=True)


if __name__ == "__main__":
    main()
