"""``python -m benchmarks.overhead``: time of a step with nothing to send or merge, and lasting memory.

Time: the bare loop and the loop with ``diloco.step()`` take turns, step by step, on the quick start's model and batch,
so that whatever else the machine does befalls both; medians are compared. The call itself is timed apart, too.
Memory: every tensor alive before and after, by storage, at rest after several rounds.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from diloco import DiLoCo, RebaseMerge, SyncSchedule
from diloco.model.presets import get_preset
from diloco.model.transformer import Transformer, build_model


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--steps", type=int, default=200, help="steps of each loop")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args(arguments)
    model = make(given.preset, given.device)
    batch = torch.randint(0, 257, (4, 129), generator=torch.Generator().manual_seed(0)).to(given.device)
    print(f"{given.preset}, {model.num_parameters():,} parameters, {given.device}, {torch.get_num_threads()} threads\n")
    print_overhead(model, batch, given.steps)
    print_memory(given.preset, given.device, batch)


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
    """Two loops in turns; the schedule's first send lies beyond the last step."""
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
    """Bytes per parameter that DiLoCo keeps, at rest and with everything in flight."""
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
    flying = tensor_bytes() - before
    for _ in range(2):
        train_step(model, optimizer, batch)
        diloco.step()
    assert not diloco.in_flight
    resting = tensor_bytes() - before
    print("| memory kept by DiLoCo (Nesterov) | bytes | per parameter |\n|---|---|---|")
    print(f"| at rest, after 2 rounds of 3 fragments | {resting:,} | {resting / parameters:.3f} |")
    print(f"| all fragments in flight, fp4, rebase | {flying:,} | {flying / parameters:.3f} |")


def tensor_bytes() -> int:
    """Bytes of all tensor storages alive, each once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):  # isinstance would ask lazy proxies, which warn
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


if __name__ == "__main__":
    main()
