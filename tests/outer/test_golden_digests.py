"""Small runs end with the bits that version 0.5 computed, on every transport.

Gradients and inner steps are elementwise, inner rates are powers of two, and values are `drawn`, so that the digests do
not depend on how a processor multiplies matrices, fuses a product with a sum, or computes a logarithm.
Muon multiplies matrices, so its digest is compared with that of the same run elsewhere, not with a number.
"""

import copy
import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from diloco import AlphaMerge, DiLoCo, InProcessTransport, Nesterov, SyncSchedule, connect_tcp, muon, partition
from diloco.algorithm import local_shard, set_whole_
from tests.processes import Processes, free_port
from tests.replicas import drawn, quadratic
from tests.transport.wires import at_once

STEPS, STOP = 30, 14
PARTS = ((STEPS,), (STOP, STEPS - STOP))
STREAMING = SyncSchedule(inner_steps=6, num_fragments=3, overlap_steps=1)
BLOCKS = {"first": (1301,), "second": (7, 301), "third": (2, 3, 501)}
"""Shapes of odd sizes, each longer than a block of any codec."""
MATRICES = {"wide": (2, 3), "tall": (4, 2), "square": (2, 2), "bias": (5,)}


@dataclass(frozen=True)
class Case:
    """What is trained, and the digests of its parameters: of any transport, and of two ranks with half of each."""

    digest: str
    num_replicas: int = 2
    schedule: SyncSchedule = STREAMING
    arguments: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=lambda: BLOCKS)
    inner: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.SGD(model.parameters(), lr=0.125)
    digest_of_shards: str = ""


CASES = {
    "diloco": Case("6a5c9f14f477fa99", schedule=SyncSchedule(inner_steps=5)),
    "streaming fp4, one step of overlap": Case(
        "938e3e4bac20c0d1", arguments={"codec": "fp4"}, digest_of_shards="87ce2fc70d703d6a"
    ),
    "alpha merge": Case("e48ed7b97dbde4d7", 3, arguments={"codec": "fp4", "merge": AlphaMerge(0.5)}),
    "int8 with error feedback": Case(
        "a4e1f784b2fb0768", arguments={"codec": "int8", "error_feedback": 1.0}, digest_of_shards="d95d59d0d18fa38e"
    ),
    "sign": Case("86fab170647c7f38", 3, arguments={"codec": "sign", "error_feedback": 1.0}),
    "topk2": Case("adbd180b7d044261", arguments={"codec": "topk2", "error_feedback": 1.0}),
    "bfloat16": Case("01a7b538c1179808", 3, arguments={"codec": "bfloat16"}),
    "eight replicas with encoded means": Case(
        "f020e92655ec54dd", 8, SyncSchedule(inner_steps=5), arguments={"codec": "fp4"}
    ),
    "a whole round late": Case(
        "5f9a58cf4dba33a2", schedule=SyncSchedule(inner_steps=4, num_fragments=2, overlap_steps=4)
    ),
    "isotropic means": Case(
        "4e926a019bfb157c", arguments={"isotropic": True}, shapes=MATRICES, digest_of_shards="4e926a019bfb157c"
    ),
}
MUON = Case("", shapes=MATRICES, inner=lambda model: muon(model, lr=0.01))


class Model(nn.Module):
    """Random parameters of the given shapes."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(drawn(shape, generator)))


class Replica:
    """One replica, or the rank of one that has half of each parameter, and its inner optimizer."""

    def __init__(self, number: int, transport: Any, case: Case, *, sharded: bool = False) -> None:
        self.number, self.case = number, case
        self.model = Model(case.shapes)
        if sharded:
            fully_shard(self.model)
        self.inner = case.inner(self.model)
        fragments = case.schedule.num_fragments
        self.diloco = DiLoCo(
            self.model,
            self.inner,
            transport=transport,
            schedule=case.schedule,
            fragments=partition(self.model, num_fragments=fragments, strategy="balanced"),
            outer_optimizer=Nesterov(learning_rate=0.4),
            weight=1.0 + number % 3,
            **case.arguments,
        )

    def train(self) -> None:
        """Take an inner step. Gradients are elementwise, so a rank needs no other part of the values than its own."""
        whole = Model(self.case.shapes)
        for name, parameter in self.model.named_parameters():
            own_part(whole.get_parameter(name).detach(), parameter).copy_(local_shard(parameter))
        quadratic(2)(self.number, self.diloco.steps, whole)
        for name, parameter in self.model.named_parameters():
            gradient = whole.get_parameter(name).grad
            assert gradient is not None
            parameter.grad = torch.empty_like(parameter)
            set_whole_(parameter.grad, gradient)
        self.inner.step()
        self.inner.zero_grad()

    def train_alone(self, steps: int) -> None:
        for _ in range(steps):
            self.train()
            self.diloco.step()

    def digest(self) -> str:
        """Return the digest of the global and the local parameters, in the model's order."""
        digest = hashlib.sha256()
        with self.diloco.global_model():
            global_params = {name: full(p.detach()).clone() for name, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            digest.update(global_params[name].numpy().tobytes() + full(parameter.detach()).numpy().tobytes())
        return digest.hexdigest()[:16]

    def state(self) -> dict[str, Any]:
        return {name: copy.deepcopy(getattr(self, name).state_dict()) for name in ("model", "inner", "diloco")}

    def load(self, state: dict[str, Any]) -> None:
        for name, of_one in state.items():
            getattr(self, name).load_state_dict(of_one)


def own_part(whole: Tensor, like: Any) -> Tensor:
    """Return the part of a tensor that a rank with the shard ``like`` holds."""
    mesh = getattr(like, "device_mesh", None)
    return whole if mesh is None else whole.chunk(mesh.size())[mesh.get_local_rank()]


def full(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def in_process(case: Case, parts: Sequence[int]) -> str:
    """Train replicas that take turns. After each part but the last, continue in new objects."""
    counted, states = InProcessTransport(case.num_replicas).state_dict(), [dict[str, Any]()] * case.num_replicas
    for steps in parts:
        transport = InProcessTransport(case.num_replicas)
        replicas = [Replica(m, transport.endpoint(m), case) for m in range(case.num_replicas)]
        transport.load_state_dict(counted)
        for replica, state in zip(replicas, states, strict=True):
            replica.load(state)
        for _ in range(steps):
            for replica in replicas:
                replica.train()
                replica.diloco.begin()
            for replica in replicas:
                replica.diloco.finish()
        if steps == STOP:
            assert bool(replicas[0].diloco.in_flight) == (case.schedule.overlap_steps > 0)
        counted, states = transport.state_dict(), [replica.state() for replica in replicas]
    return replicas[0].digest()


def train_in_parts(
    number: int, case: Case, parts: Sequence[int], transports: Iterable[AbstractContextManager[Any]], **more: Any
) -> str:
    """Train one replica, each part in new objects over the next transport, and return the digest at the end."""
    state: dict[str, Any] = {}
    for connected, steps in zip(transports, parts, strict=True):
        with connected as transport:
            replica = Replica(number, transport, case, **more)
            with replica.diloco:
                replica.load(state)
                replica.train_alone(steps)
                state, digest = replica.state(), replica.digest()
    return digest


def over_sockets(case: Case, parts: Sequence[int]) -> str:
    addresses = [f"127.0.0.1:{free_port()}" for _ in parts]

    def live(number: int) -> str:
        arguments = {"replica": number, "num_replicas": case.num_replicas}
        return train_in_parts(number, case, parts, (connect_tcp(**arguments, rendezvous=each) for each in addresses))

    return at_once([lambda m=m: live(m) for m in range(case.num_replicas)])[0]


@pytest.mark.parametrize("name", CASES)
def test_digests_are_those_of_version_0_5(name: str) -> None:
    """Over a swarm: `tests/train/test_golden_runs.py`."""
    assert [in_process(CASES[name], parts) for parts in PARTS] == [CASES[name].digest] * 2


@pytest.mark.parametrize("name", ["alpha merge", "int8 with error feedback", "a whole round late"])
def test_digests_over_sockets_are_those_in_one_process(name: str) -> None:
    """The others differ by what every transport is given alike; eight replicas: `test_process_group`."""
    assert over_sockets(CASES[name], PARTS[1]) == CASES[name].digest


def test_muon_ends_alike_stopped_and_resumed_and_over_sockets() -> None:
    digest = in_process(MUON, PARTS[0])
    assert [in_process(MUON, PARTS[1]), over_sockets(MUON, PARTS[1])] == [digest] * 2


OF_RANKS = ("streaming fp4, one step of overlap", "isotropic means")
"""Error feedback: `tests/transport/test_process_group.py`."""


def rank_of_two(rank: int, names: Sequence[str], folder: Path) -> dict[str, str]:
    """Train each case with a stop, as one of the two ranks of one of two replicas."""
    replica, position = divmod(rank, 2)
    store = dist.FileStore(str(folder / f"store-{replica}"), 2)
    dist.init_process_group("gloo", store=store, rank=position, world_size=2)
    meetings = dist.FileStore(str(folder / "meetings"), 4)

    def connected(name: str) -> AbstractContextManager[Any]:
        if rank == 0:
            meetings.set(name, f"127.0.0.1:{free_port()}")
        address = meetings.get(name).decode()
        return connect_tcp(replica=replica, num_replicas=2, rendezvous=address, ranks="sharded")

    digests = {}
    for name in names:
        transports = (connected(f"{name} {steps}") for steps in PARTS[1])
        digests[name] = train_in_parts(replica, CASES[name], PARTS[1], transports, sharded=True)
    dist.destroy_process_group()
    return digests


def test_digests_of_two_ranks_with_half_of_each_parameter(tmp_path: Path) -> None:
    digests = {name: CASES[name].digest_of_shards for name in OF_RANKS}
    with Processes() as processes:
        processes.start(4, rank_of_two, list(digests), tmp_path)
        assert processes.results(timeout_s=180)[0] == digests
