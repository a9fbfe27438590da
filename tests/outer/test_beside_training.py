"""Large fragments are encoded, and their outer steps taken, in threads beside the training: nothing else changes."""

import copy
import threading
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from diloco.algorithm import AlphaMerge, Nesterov, RebaseMerge
from diloco.errors import NonFiniteError
from diloco.transport import InProcessTransport
from tests.replicas import STREAMING, Gradient, Swarm, Vectors, apart, quadratic
from tests.transport.wires import Wires, at_once

STEPS = 14


class Large(Vectors):
    """A model of two large fragments and a small one."""

    def __init__(self) -> None:
        super().__init__()
        for name, numel in (("first", 600_001), ("third", 530_000)):
            self.register_parameter(name, nn.Parameter(torch.linspace(-1.0, 1.0, numel)))


def large(transport: Any, num_replicas: int = 1, **more: Any) -> Swarm:
    """Return large replicas that take turns, by default one alone over ``transport``."""
    return Swarm(
        num_replicas,
        STREAMING,
        make_model=Large,
        transport=transport if num_replicas > 1 else SimpleNamespace(endpoint=lambda _: transport),
        outer=Nesterov(learning_rate=0.4),
        codec="fp4",
        fragments=apart(Large()),
        **{"error_feedback": True, "merge": RebaseMerge(), **more},
    )


def of(number: int) -> Gradient:
    return lambda _, step, model: quadratic(1)(number, step, model)


@pytest.fixture
def wires() -> Iterator[Wires]:
    with closing(Wires()) as made:
        yield made


@pytest.mark.parametrize("more", [{}, {"error_feedback": False, "merge": AlphaMerge(0.5)}])
def test_the_bits_are_those_of_one_thread(more: dict[str, Any], wires: Wires) -> None:
    expected, transports = large(InProcessTransport(2), 2, **more), wires.meet(2)
    expected.run(STEPS, quadratic(1))

    def live(number: int) -> Swarm:
        alone = large(transports[number], **more)
        alone.run(STEPS, of(number))
        return alone

    for number, alone in enumerate(at_once([lambda m=m: live(m) for m in range(2)])):
        assert alone.replicas[0].rounds_committed == expected.replicas[number].rounds_committed > 5
        assert torch.equal(alone.local(0), expected.local(number))
        assert alone.replicas[0].digest() == expected.replicas[number].digest()


def test_a_run_stopped_right_after_a_send_ends_as_if_it_had_not_stopped(wires: Wires) -> None:
    whole, resumed = large(*wires.meet(1)), large(InProcessTransport(1).endpoint(0))
    whole.run(STREAMING.inner_steps, of(0))
    assert whole.replicas[0].in_flight
    resumed.models[0].load_state_dict(whole.models[0].state_dict())
    resumed.replicas[0].load_state_dict(copy.deepcopy(whole.replicas[0].state_dict()))
    for each in (whole, resumed):
        each.run(5, of(0))
    assert torch.equal(whole.local(0), resumed.local(0))
    assert whole.replicas[0].digest() == resumed.replicas[0].digest()


def test_a_process_that_ends_waits_for_the_threads(wires: Wires, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ends daemon threads inside torch by an abort of the process."""
    begun, start = list[threading.Thread](), threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (begun.append(thread), start(thread)))
    large(*wires.meet(1)).run(STEPS, of(0))
    daemons = {thread.name: thread.daemon for thread in begun}
    assert [daemons[name] for name in ("room", "encode", "outer-step", "digest")] == [False] * 4


def test_what_is_not_finite_is_not_sent_and_named(wires: Wires) -> None:
    (transport,) = wires.meet(1)
    alone = large(transport)
    alone.run(STREAMING.inner_steps - 1, of(0))
    with torch.no_grad():
        alone.models[0].get_parameter("first")[7] = float("nan")
    with pytest.raises(NonFiniteError, match="fragment 0 is not finite; the local values of first contain"):
        alone.run(STREAMING.inner_steps, of(0))
    assert transport.sent_bytes == 0
