"""``python -m benchmarks.overhead``: the cost of a step with nothing due, and the memory that is kept.

Time: the bare loop and the loop with ``diloco.step()`` alternate step by step on the quick start's model and batch, so
that other work on the machine affects both. Medians are compared. The call itself is also timed separately.
Memory: the storages of all live tensors before and after, with all fragments in flight and at rest.
Isotropic means (``--isotropic WIDTH``, which measures nothing else): the processor time of a matrix of that width,
which a round takes once, beside Muon's iteration, which a step takes once.
Prometheus (``--prometheus``, which measures nothing else): the time of an event in the training thread, and the
processor time of a scrape, of a run of several replicas with all the rounds that are kept.
"""

import argparse
import gc
import math
import socket
import statistics
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from diloco import DiLoCo, FragmentLayout, RebaseMerge, SyncSchedule, events
from diloco.algorithm import isotropic, newton_schulz
from diloco.model import Transformer, build_model, get_preset
from diloco.watch import PrometheusSink


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--steps", type=int, default=200, help="steps of each loop")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--isotropic", type=int, default=0, metavar="WIDTH", help="measure only isotropic means")
    parser.add_argument("--prometheus", action="store_true", help="measure only what metrics and scrapes cost")
    given = parser.parse_args(arguments)
    if given.prometheus:
        print_metrics()
        return
    if given.isotropic:
        print_isotropic(given.isotropic)
        return
    model = make(given.preset, given.device)
    batch = torch.randint(0, 257, (4, 129), generator=torch.Generator().manual_seed(0)).to(given.device)
    print(f"{given.preset}, {model.num_parameters():,} parameters, {given.device}, {torch.get_num_threads()} threads\n")
    print_overhead(model, batch, given.steps)
    print_memory(given.preset, given.device, batch)


def print_isotropic(width: int) -> None:
    layout = FragmentLayout(0, ("matrix",), ((width, width),))
    matrices = {"matrix": torch.nn.Parameter(torch.empty(width, width))}
    mean = torch.randn(width * width, generator=torch.Generator().manual_seed(0))
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "isotropic mean, float64": lambda: isotropic(mean, layout, matrices),
        "Muon's iteration, float32": lambda: newton_schulz(mean.view(1, width, width)),
    }
    print(f"| {width} x {width} | processor time, median of 5 |\n|---|---|")
    for name, call in calls.items():
        times_s = []
        for _ in range(5):
            started_s = time.process_time()
            call()
            times_s.append(time.process_time() - started_s)
        print(f"| {name} | {statistics.median(times_s):.3f} s |")


def print_metrics(replicas: int = 4, fragments: int = 3, outer_steps: int = 64, scrapes: int = 200) -> None:
    """Tell the sink of a run of all its rounds, timing each event, then scrape it and count the processor time."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    sink, times_s = PrometheusSink("127.0.0.1", port, "run"), []
    usual: dict[str, Any] = {"learning_rate": 0.1, "gradient_norm": 1.0, "step_s": 0.1, "compute_utilization": 0.9}
    round_: dict[str, Any] = {"replica": 0, "contributors": tuple(range(replicas)), "late_s": (0.1,) * replicas}
    round_ |= {"wait_s": 0.1, "peers": {str(each): (10**9, 10**9, 0.05) for each in range(replicas)}}
    sent: dict[str, Any] = {"sent_bytes": 1, "received_bytes": 1}
    for step in range(1, 10 * outer_steps + 1):
        told: list[events.Event] = [events.StepFinished(step=step, loss=1.0, tokens=step, **usual, **sent)]
        for fragment in range(fragments if step % 10 == 0 else 0):
            about: dict[str, Any] = {"step": step, "fragment": fragment, "outer_step": step // 10}
            told.append(events.RoundCommitted(**about, **round_, **sent))
        for event in told:
            started_s = time.perf_counter()
            sink.handle(event)
            times_s.append(time.perf_counter() - started_s)
    time.sleep(2)
    used_s = 0.0
    for _ in range(scrapes):
        began_s = time.process_time()
        sink.made = -math.inf, b""
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            size = len(answer.read())
        used_s += time.process_time() - began_s
    sink.close()
    print(f"| {replicas} replicas, {fragments} fragments, {outer_steps} outer steps | |\n|---|---|")
    print(f"| an event, in the training thread | {1e6 * statistics.median(times_s):.1f} us |")
    print(f"| a scrape of {size:,} bytes, client included | {1e3 * used_s / scrapes:.2f} ms of processor time |")


def make(preset: str, device: str) -> Transformer:
    settings = replace(get_preset(preset).model, vocab_size=257)
    return build_model(settings, seed=0, device=device)


def train_step(model: Transformer, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    loss, _ = model.loss(batch[:, :-1], batch[:, 1:])
    torch.autograd.backward(loss)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if batch.is_cuda:
        torch.cuda.synchronize()


def print_overhead(model: Transformer, batch: torch.Tensor, steps: int) -> None:
    """Time two alternating loops, in which nothing is sent."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    diloco = DiLoCo(model, optimizer, schedule=SyncSchedule(inner_steps=10 * steps, num_fragments=3, overlap_steps=5))
    bare_s, with_s, call_s = [], [], []
    for _ in range(5):
        train_step(model, optimizer, batch)
    for _ in range(steps):
        started_s = time.perf_counter()
        train_step(model, optimizer, batch)
        bare_s.append(time.perf_counter() - started_s)
        started_s = time.perf_counter()
        train_step(model, optimizer, batch)
        called_s = time.perf_counter()
        diloco.step()
        ended_s = time.perf_counter()
        with_s.append(ended_s - started_s)
        call_s.append(ended_s - called_s)
    bare, around, call = statistics.median(bare_s), statistics.median(with_s), statistics.median(call_s)
    print("| | median |\n|---|---|")
    print(f"| bare step | {1e3 * bare:.3f} ms |")
    print(f"| step with diloco.step(), nothing due | {1e3 * around:.3f} ms ({100 * (around / bare - 1):+.2f} %) |")
    print(f"| diloco.step() alone | {1e6 * call:.1f} us, {100 * call / bare:.3f} % of a bare step (limit: 1 %) |\n")


def print_memory(preset: str, device: str, batch: torch.Tensor) -> None:
    """Print the bytes per parameter that DiLoCo keeps, at rest and with all fragments in flight."""
    model = make(preset, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    train_step(model, optimizer, batch)
    parameters = model.num_parameters()
    before = tensor_bytes()
    schedule = SyncSchedule(inner_steps=4, num_fragments=3, overlap_steps=2, offsets=(0, 0, 0))
    diloco = DiLoCo(model, optimizer, schedule=schedule, merge=RebaseMerge(), codec="fp4")
    for _ in range(8):
        train_step(model, optimizer, batch)
        diloco.step()
    in_flight = tensor_bytes() - before
    for _ in range(2):
        train_step(model, optimizer, batch)
        diloco.step()
    assert not diloco.in_flight
    at_rest = tensor_bytes() - before
    print("| memory kept by DiLoCo (Nesterov) | bytes | per parameter |\n|---|---|---|")
    print(f"| at rest, after 2 rounds of 3 fragments | {at_rest:,} | {at_rest / parameters:.3f} |")
    print(f"| all fragments in flight, fp4, rebase | {in_flight:,} | {in_flight / parameters:.3f} |")


def tensor_bytes() -> int:
    """Return the bytes of the storages of all live tensors, each counted once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):  # isinstance would touch lazy proxies, which warn
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


if __name__ == "__main__":
    main()
