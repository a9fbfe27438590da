"""The rounds of one process, by each method."""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from diloco import RoundId, connect_process_group, connect_tcp, make_codec
from diloco.algorithm import Contribution


@contextmanager
def exchanges(method: str, rank: int, given: argparse.Namespace, port: int) -> Iterator[Callable[[int], Any]]:
    """Yield a function that takes part in a round of the given number."""
    values = torch.randn(given.values, generator=torch.Generator().manual_seed(rank))
    kind, _, name = method.partition(" ")
    if kind == "all-reduce":
        sums = values.to(getattr(torch, name))
        yield lambda _: dist.all_reduce(sums)
        return
    codec, where = make_codec(name), {"replica": rank, "num_replicas": given.replicas}
    payload = codec.encode(values)
    if kind == "copy":
        copy = torch.empty_like(payload)
        yield lambda _: copy.copy_(payload)
        return

    def take_part(number: int) -> Any:
        round_id = RoundId(0, number)
        made = Contribution(round=round_id, replica=rank, codec=codec, numel=given.values, payload=payload)
        return transport.average(made).wait()

    connection = connect_process_group() if kind == "torch" else connect_tcp(**where, rendezvous=f"127.0.0.1:{port}")
    with connection as transport:
        yield take_part


def measure(rank: int, given: argparse.Namespace, store: str, ports: dict[str, int], results: Any) -> None:
    torch.set_num_threads(1)
    file = dist.FileStore(store, given.replicas)  # type: ignore[attr-defined]  # missing in torch's stubs
    dist.init_process_group("gloo", store=file, rank=rank, world_size=given.replicas)
    for method, port in ports.items():
        rounds = []
        with exchanges(method, rank, given, port) as take_part:
            for number in range(given.rounds + 1):  # the first one only warms up
                dist.barrier()
                before_s = time.perf_counter(), time.process_time()
                take_part(number)
                rounds.append((time.perf_counter() - before_s[0], time.process_time() - before_s[1]))
        times_s, cpu_s = map(statistics.median, zip(*rounds[1:], strict=True))
        results.put((method, times_s, cpu_s))
    dist.barrier()
    dist.destroy_process_group()
