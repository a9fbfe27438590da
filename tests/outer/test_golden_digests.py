"""Small runs end with the bits that version 0.5 computed, in one process and over sockets.

Gradients and inner steps are elementwise, so that the digests do not depend on how a processor multiplies matrices.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from diloco import AlphaMerge, DiLoCo, InProcessTransport, Nesterov, SyncSchedule, connect_replica, partition
from tests.processes import free_port
from tests.replicas import quadratic

STREAMING = SyncSchedule(inner_steps=6, num_fragments=3, overlap_steps=1)
FEEDBACK = {"error_feedback": 1.0}

CASES: dict[str, tuple[int, SyncSchedule, dict[str, Any], str]] = {
    "diloco": (2, SyncSchedule(inner_steps=5), {}, "f1c157409ff43cde"),
    "streaming fp4, one step of overlap": (2, STREAMING, {"codec": "fp4"}, "ef40df061a6a4bfe"),
    "alpha merge": (3, STREAMING, {"codec": "fp4", "merge": AlphaMerge(0.5)}, "4a6116a84ae62c9c"),
    "int8 with error feedback": (2, STREAMING, {"codec": "int8", **FEEDBACK}, "a8dcc99c2886b7da"),
    "topk2": (2, STREAMING, {"codec": "topk2", **FEEDBACK}, "4a4dd28a97fa0b9a"),
    "bfloat16": (3, STREAMING, {"codec": "bfloat16"}, "d7851e08e9a587ed"),
    "eight replicas with encoded means": (8, SyncSchedule(inner_steps=5), {"codec": "fp4"}, "ae141d2a52e32645"),
    "a whole round late": (2, SyncSchedule(inner_steps=4, num_fragments=2, overlap_steps=4), {}, "9409e2307f815f55"),
}
STEPS, STOP = 30, 14


class Model(nn.Module):
    """Three tensors of odd sizes, each longer than a block of any codec."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        shapes = {"first": (1301,), "second": (7, 301), "third": (2, 3, 501)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))


class Replica:
    """One replica and its inner optimizer."""

    def __init__(self, number: int, transport: Any, schedule: SyncSchedule, arguments: dict[str, Any]) -> None:
        self.number, self.model = number, Model()
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.diloco = DiLoCo(
            self.model,
            self.inner,
            transport=transport,
            schedule=schedule,
            fragments=partition(self.model, num_fragments=schedule.num_fragments, strategy="balanced"),
            outer_optimizer=Nesterov(learning_rate=0.4),
            weight=1.0 + number % 3,
            **arguments,
        )

    def train(self) -> None:
        quadratic(2)(self.number, self.diloco.steps, self.model)
        self.inner.step()
        self.inner.zero_grad()

    def digest(self) -> str:
        """Return the digest of the global and the local parameters, in the model's order."""
        values = self.diloco.outer_loop.named_global_params()
        digest = hashlib.sha256()
        for name, parameter in self.model.named_parameters():
            digest.update(values[name].numpy().tobytes() + parameter.detach().numpy().tobytes())
        return digest.hexdigest()[:16]


def advance(replicas: Sequence[Replica], steps: int) -> None:
    for _ in range(steps):
        for replica in replicas:
            replica.train()
            replica.diloco.begin()
        for replica in replicas:
            replica.diloco.finish()


def in_process(num_replicas: int, schedule: SyncSchedule, arguments: dict[str, Any]) -> str:
    transport = InProcessTransport(num_replicas)
    replicas = [Replica(m, transport.endpoint(m), schedule, arguments) for m in range(num_replicas)]
    advance(replicas, STEPS)
    return replicas[0].digest()


def resumed(num_replicas: int, schedule: SyncSchedule, arguments: dict[str, Any]) -> str:
    """Stop after step `STOP`, with a fragment in flight if steps overlap, and continue in new objects."""
    first = InProcessTransport(num_replicas)
    replicas = [Replica(m, first.endpoint(m), schedule, arguments) for m in range(num_replicas)]
    advance(replicas, STOP)
    second = InProcessTransport(num_replicas)
    second.load_state_dict(first.state_dict())
    others = [Replica(m, second.endpoint(m), schedule, arguments) for m in range(num_replicas)]
    for replica, other in zip(replicas, others, strict=True):
        other.model.load_state_dict(replica.model.state_dict())
        other.diloco.load_state_dict(copy.deepcopy(replica.diloco.state_dict()))
    advance(others, STEPS - STOP)
    return others[0].digest()


def over_sockets(num_replicas: int, schedule: SyncSchedule, arguments: dict[str, Any]) -> str:
    digests: dict[int, str] = {}
    address = f"127.0.0.1:{free_port()}"

    def live(number: int) -> None:
        with connect_replica(replica=number, num_replicas=num_replicas, rendezvous=address) as transport:
            replica = Replica(number, transport, schedule, arguments)
            with replica.diloco:
                for _ in range(STEPS):
                    replica.train()
                    replica.diloco.step()
                digests[number] = replica.digest()

    threads = [threading.Thread(target=live, args=(number,)) for number in range(num_replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return digests[0]


@pytest.mark.parametrize("run", [in_process, resumed, over_sockets])
@pytest.mark.parametrize("case", CASES)
def test_digests_are_those_of_version_0_5(case: str, run: Callable[..., str]) -> None:
    num_replicas, schedule, arguments, digest = CASES[case]
    assert run(num_replicas, schedule, arguments) == digest
