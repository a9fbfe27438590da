"""``python -m benchmarks.overhead.rounds``: what rounds over TCP take from the training of two processes.

Thread: processor seconds of the training thread per round and 1e9 parameters, beside a copy of as many float32 values,
made once a round so that it finds the same caches. The round has been decided before it is merged, so no wait is in it.
``everything else`` is all calls with nothing due. Rows are medians over rounds. Tokens: two processes train for some
seconds with rounds and without, in turn.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from diloco import DiLoCo, SyncSchedule, connect_tcp
from diloco.model import build_model, get_preset
from diloco.transport import Transport

Spread = tuple[float, float, float]  # median, least and greatest
SCHEDULE = SyncSchedule(inner_steps=4, num_fragments=1, overlap_steps=2)
SETS = 7  # of tokens, with rounds and without


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead.rounds", description=__doc__)
    parser.add_argument("--values", type=int, default=50_000_000, help="parameters of the fragment")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=60, help=f"training steps of each kind, {SETS} times")
    parser.add_argument("--codec", default="fp4")
    parser.add_argument("--at", default="", help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=MEASURES, help="only this one")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.at:
        with connect_tcp(replica=1, num_replicas=2, rendezvous=given.at) as transport:
            MEASURES[given.part](transport, given)
        return
    for part in [given.part] if given.part else MEASURES:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        command = [sys.executable, "-m", "benchmarks.overhead.rounds", *sys.argv[1:], "--part", part, "--at", address]
        with subprocess.Popen(command), connect_tcp(replica=0, num_replicas=2, rendezvous=address) as transport:
            rows = MEASURES[part](transport, given)
        if part == "thread":
            print(f"| {given.codec}, {given.values:,} parameters | s per 1e9 parameters | copies |\n|---|---|---|")
            for name, (seconds, *_) in rows.items():
                print(f"| {name} | {1e9 / given.values * seconds:.2f} | {seconds / rows['a copy'][0]:.2f} |")
        else:
            print("\n| one of two processes | median | least | greatest |\n|---|---|---|---|")
            for name, values in rows.items():
                print(f"| {name} | {' | '.join(f'{value:,.4g}' for value in values)} |")
        print(f"\nload: {os.getloadavg()[0]:.1f}", flush=True)


def of_thread(transport: Transport, given: argparse.Namespace) -> dict[str, Spread]:
    """Return the processor seconds of this thread by part of a round."""
    torch.manual_seed(0)
    num_values = given.values
    model = nn.ParameterList(nn.Parameter(torch.randn(1000, num_values // 10_000)) for _ in range(10))
    diloco = DiLoCo(
        model, torch.optim.SGD(model.parameters()), transport=transport, schedule=SCHEDULE, codec=given.codec
    )
    other, target = torch.randn(num_values), torch.randn(num_values)
    spent: dict[str, list[float]] = {"send": [], "merge": [], "everything else": [], "a copy": []}
    for step in range(1, SCHEDULE.inner_steps * (given.rounds + 1) + SCHEDULE.overlap_steps + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 - 1e-3)
        sends, merges = step % SCHEDULE.inner_steps == 0, step % SCHEDULE.inner_steps == SCHEDULE.overlap_steps
        if merges and (flight := diloco.fragments[0].flight):
            flight.pending.wait.__self__.done.wait()  # type: ignore[attr-defined]  # of a peer transport
        name = "send" if sends else "merge" if merges else "everything else"
        spent[name].append(timed(diloco.step))
        if merges:
            spent["a copy"].append(timed(lambda: target.copy_(other)))
    diloco.drain()
    others = SCHEDULE.inner_steps - 2
    idle = spent["everything else"]
    rows = {
        "send": spent["send"][1:],  # the first one only warms up
        "merge": spent["merge"][1:],
        "everything else": [sum(idle[start : start + others]) for start in range(others, len(idle), others)],
    }
    rows["a round"] = [sum(parts) for parts in zip(*rows.values(), strict=False)]
    return {name: spread(each) for name, each in (rows | {"a copy": spent["a copy"][1:]}).items()}


def spread(values: Sequence[float]) -> Spread:
    return statistics.median(values), min(values), max(values)


def timed(act: Callable[[], object]) -> float:
    started_s = time.thread_time()
    act()
    return time.thread_time() - started_s


def tokens_per_s(transport: Transport, given: argparse.Namespace) -> dict[str, Spread]:
    """Return the tokens per second of this process with rounds and without, and those per second of processor time.

    The latter, of all threads, says what rounds cost on a machine with other work, too.
    """
    model = build_model(replace(get_preset("tiny").model, vocab_size=257, width=256, ffn_width=704), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    schedule = SyncSchedule(inner_steps=10, num_fragments=2, overlap_steps=4)
    diloco = DiLoCo(model, optimizer, transport=transport, schedule=schedule, codec=given.codec)
    batch = torch.randint(0, 257, (4, 129), generator=torch.Generator().manual_seed(transport.replica))
    rates: dict[str, list[float]] = {}
    for number in range(2 * SETS):
        rounds, started_s = number % 2 == 0, (time.perf_counter(), time.process_time())
        for _ in range(given.steps):
            torch.autograd.backward(model.loss(batch[:, :-1], batch[:, 1:])[0])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if rounds:
                diloco.step()
        spent_s = time.perf_counter() - started_s[0], time.process_time() - started_s[1]
        for unit, seconds in zip(("second", "processor second"), spent_s, strict=True):
            name = f"tokens per {unit}, {'with rounds' if rounds else 'without'}"
            rates.setdefault(name, []).append(512 * given.steps / seconds)
    diloco.drain()
    return {name: spread(each) for name, each in sorted(rates.items())}


MEASURES: dict[str, Callable[[Transport, argparse.Namespace], dict[str, Spread]]] = {
    "thread": of_thread,
    "tokens": tokens_per_s,
}


if __name__ == "__main__":
    main()
