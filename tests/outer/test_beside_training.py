"""Large fragments are encoded, and their outer steps taken, in threads beside the training: nothing else changes."""

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.algorithm import AlphaMerge, RebaseMerge, SyncSchedule
from diloco.errors import NonFiniteError
from diloco.outer import DiLoCo
from diloco.transport import InProcessTransport, Transport
from tests.replicas import Vectors, apart, quadratic
from tests.transport.wires import Wires, at_once

SCHEDULE = SyncSchedule(inner_steps=4, num_fragments=3, overlap_steps=2)
STEPS = 14


class Replica:
    """A model of two large fragments and a small one, and its training."""

    def __init__(self, transport: Transport, **more: Any) -> None:
        self.model = Vectors()
        for name, numel in (("first", 600_001), ("third", 530_000)):
            self.model.register_parameter(name, torch.nn.Parameter(torch.linspace(-1.0, 1.0, numel)))
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.diloco = DiLoCo(
            self.model,
            self.inner,
            transport=transport,
            schedule=SCHEDULE,
            fragments=apart(self.model),
            codec="fp4",
            **({"error_feedback": True, "merge": RebaseMerge()} | more),
        )

    def train(self, steps: int, number: int = 0) -> None:
        for _ in range(steps):
            quadratic(1)(number, self.diloco.steps, self.model)
            self.inner.step()
            self.diloco.step()

    def values(self) -> list[Tensor]:
        return [*(p.detach().clone() for p in self.model.parameters()), *self.diloco.named_global_params().values()]


def in_turns(**more: Any) -> list[Replica]:
    hub = InProcessTransport(2)
    replicas = [Replica(hub.endpoint(number), **more) for number in range(2)]
    for _ in range(STEPS):
        for number, replica in enumerate(replicas):
            quadratic(1)(number, replica.diloco.steps, replica.model)
            replica.inner.step()
            replica.diloco.begin()
        for replica in replicas:
            replica.diloco.finish()
    return replicas


@pytest.fixture
def wires() -> Iterator[Wires]:
    made = Wires()
    yield made
    made.close()


@pytest.mark.parametrize("more", [{}, {"error_feedback": False, "merge": AlphaMerge(0.5)}])
def test_the_bits_are_those_of_one_thread(more: dict[str, Any], wires: Wires) -> None:
    expected, transports = in_turns(**more), wires.meet(2)

    def live(number: int) -> Replica:
        replica = Replica(transports[number], **more)
        replica.train(STEPS, number)
        return replica

    for replica, other in zip(at_once([lambda m=m: live(m) for m in range(2)]), expected, strict=True):
        assert replica.diloco.rounds_committed == other.diloco.rounds_committed > 5
        assert all(map(torch.equal, replica.values(), other.values()))
        assert replica.diloco.digest() == other.diloco.digest()


def test_stopping_right_after_a_send_is_never_stopping(wires: Wires) -> None:
    replica = Replica(*wires.meet(1))
    replica.train(SCHEDULE.inner_steps)
    assert replica.diloco.in_flight
    saved = copy.deepcopy((replica.diloco.state_dict(), replica.model.state_dict()))
    replica.train(5)
    resumed = Replica(InProcessTransport(1).endpoint(0))
    resumed.model.load_state_dict(saved[1])
    resumed.diloco.load_state_dict(saved[0])
    resumed.train(5)
    assert all(map(torch.equal, replica.values(), resumed.values()))


def test_a_process_that_ends_waits_for_the_threads(wires: Wires, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ends daemon threads inside torch by an abort of the process."""
    begun, start = list[threading.Thread](), threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (begun.append(thread), start(thread)))
    Replica(*wires.meet(1)).train(STEPS)
    daemons = {thread.name: thread.daemon for thread in begun}
    assert [daemons[name] for name in ("room", "encode", "outer-step", "digest")] == [False] * 4


def test_what_is_not_finite_is_not_sent_and_named(wires: Wires) -> None:
    (transport,) = wires.meet(1)
    replica = Replica(transport)
    replica.train(SCHEDULE.inner_steps - 1)
    with torch.no_grad():
        replica.model.first[7] = float("nan")
    with pytest.raises(NonFiniteError, match="fragment 0 is not finite; the local values of first contain"):
        replica.train(SCHEDULE.inner_steps)
    assert transport.sent_bytes == 0
