"""Averaging of gradients has the same bits everywhere; gradients that are not finite, and lost contributions."""

import gc
import math
import weakref
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch import Tensor

from diloco.algorithm import CODECS, Contribution, RoundId, ValueSchedule, make_codec
from diloco.errors import ReplicaLostError, RoundVoidError
from diloco.events import Event, Note
from diloco.model import DecoderSettings, build_model
from diloco.train import (
    GradientAverager,
    InnerLoop,
    MetSession,
    OptimizerSettings,
    ParallelModel,
    average_gradients,
    make_inner_optimizer,
)
from diloco.transport import ReplicaGroup
from tests.faults import Fault, FaultyTransport

MODEL = DecoderSettings(layers=1, width=16, ffn_width=32, heads=2, vocab_size=17, max_sequence_length=16)


@pytest.mark.parametrize(
    ("algorithm", "steps", "words"),
    [
        ("diloco", 50, "the replicas are in their shared start; others join after step 200, in about 2m30s"),
        ("streaming", 0, "the replicas are in their shared start; others join after step 200"),
        (
            "data-parallel",
            50,
            "the replicas average gradients at every step, and only DiLoCo and Streaming DiLoCo can be",
        ),
    ],
)
def test_who_asks_to_join_while_gradients_are_averaged_is_told_until_when(
    algorithm: str, steps: int, words: str
) -> None:
    totals = SimpleNamespace(steps=steps, compute_s=40.0, exchange_s=10.0, sequences=0, missed_sequences=0)
    settings = SimpleNamespace(algorithm=algorithm, train=SimpleNamespace(data_parallel_steps=200))
    session = mock.Mock(averages_gradients=True, totals=totals, settings=settings)
    MetSession.open_to_joiners(session)
    ((told,), _) = session.fleet.close_to_joiners.call_args
    assert told.startswith(words)
    session.averages_gradients = False
    MetSession.open_to_joiners(session)
    session.fleet.close_to_joiners.assert_called_with("", for_good=mock.ANY)


def batch(seed: int, size: int = 2) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 17, (size, 9), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


class Replicas:
    """M replicas that average gradients at every step, like `Session`."""

    def __init__(
        self,
        num_replicas: int,
        codec: str = "float32",
        precision: Literal["float32", "bfloat16", "float16"] = "float32",
        **transport: Any,
    ) -> None:
        self.hub = FaultyTransport(num_replicas, **transport)
        self.loops, self.averagers = [], []
        self.events: list[Event] = []
        for m in range(num_replicas):
            model = build_model(MODEL, seed=0)
            optimizer = make_inner_optimizer(OptimizerSettings(), model)
            rate = ValueSchedule(peak=1e-2)
            loop = InnerLoop(ParallelModel(model), optimizer, learning_rate=rate, precision=precision)
            self.loops.append(loop)
            self.averagers.append(GradientAverager(model, self.hub.endpoint(m), make_codec(codec), ReplicaGroup()))

    def compute(self, step: int, spoilt: int | None = None, odd: float = math.inf) -> None:
        for m, loop in enumerate(self.loops):
            loop.accumulate_gradients(*batch(10 * step + m))
            if m == spoilt:
                loop.model.get_parameter("model.norm.weight").grad[0] = odd  # type: ignore[index]
            loop.unscale()

    def average(self, step: int, *, may_skip: bool = False) -> bool:
        for averager in self.averagers:
            averager.begin(step)
        return average_gradients(self.averagers, self.events.append, may_skip=may_skip)

    def step(self, step: int, spoilt: int | None = None) -> list[bool]:
        self.compute(step, spoilt)
        done = self.average(step, may_skip=self.loops[0].scaler.is_enabled())
        return [not loop.apply(step, skip=not done).skipped for loop in self.loops]

    def weights(self) -> list[Tensor]:
        return [torch.cat([p.detach().flatten().clone() for p in loop.model.parameters()]) for loop in self.loops]


def test_gradients_in_flight_to_lost_replicas_are_dropped() -> None:
    """Regression: the last ones of a shared start took as much memory as the model to the end of the run."""
    replicas, payloads = Replicas(1), list[weakref.ref[Tensor]]()
    (averager,) = replicas.averagers
    replicas.compute(0)

    def lose(contribution: Contribution) -> mock.Mock:
        payloads.append(weakref.ref(contribution.payload))
        return mock.Mock(wait=mock.Mock(side_effect=ReplicaLostError("gone")))

    averager.transport = SimpleNamespace(replica=0, average=lose, tick=lambda: None)
    averager.begin(0)
    assert payloads[0]() is not None
    assert not average_gradients([averager], replicas.events.append, may_skip=False, may_lose=True)
    gc.collect()
    assert payloads[0]() is None


@pytest.mark.parametrize("codec", CODECS.names)
def test_every_replica_holds_the_same_bits_after_every_step(codec: str) -> None:
    """This holds on different data and for every codec of the gradients."""
    replicas = Replicas(3, codec)
    start = replicas.weights()[0]
    for step in range(5):
        assert replicas.step(step) == [True] * 3
        first, *others = replicas.weights()
        assert all(torch.equal(first, each) for each in others)
    assert not torch.equal(first, start)


@pytest.mark.parametrize(("spoilt", "odd"), [(0, -math.inf), (2, math.nan)])
@pytest.mark.parametrize("codec", ["float32", "fp4"])
def test_without_a_scaler_a_gradient_that_is_no_number_is_an_error_that_names_the_replica(
    spoilt: int, odd: float, codec: str
) -> None:
    """This includes a codec that saturates and would hide it."""
    replicas = Replicas(3, codec)
    replicas.step(0)
    held = replicas.weights()
    replicas.compute(1, spoilt, odd)
    words = f"step 1, attempt 3 is void: .* replica {spoilt} was refused: gradients that are not finite"
    with pytest.raises(RoundVoidError, match=words):
        replicas.average(1)
    assert all(torch.equal(a, b) for a, b in zip(replicas.weights(), held, strict=True))


@pytest.mark.parametrize("who", ["a replica", "any", "all"])
def test_with_a_scaler_all_skip_and_stay_alike(who: str) -> None:
    """Parameters stay, loss scales are halved, and all take the next step; also if another rank of a replica skips,
    which has a round of its own for its shard."""

    class Other(ReplicaGroup):
        def any(self, flag: bool) -> bool:
            return flag or who == "any"

        def all(self, flag: bool) -> bool:
            return flag and who != "all"

    replicas = Replicas(3, precision="float16")
    replicas.step(0)
    held, scale = replicas.weights()[0], replicas.loops[0].scaler.get_scale()
    for averager in replicas.averagers:
        averager.group = Other()
    assert replicas.step(1, spoilt=1 if who == "a replica" else None) == [False] * 3
    assert all(torch.equal(each, held) for each in replicas.weights())
    assert [loop.scaler.get_scale() for loop in replicas.loops] == [scale / 2] * 3
    for averager in replicas.averagers:
        averager.group = ReplicaGroup()
    assert replicas.step(2) == [True] * 3
    first, *others = replicas.weights()
    assert all(torch.equal(first, each) for each in others)
    assert not torch.equal(first, held)
    states = [loop.scaler.state_dict() for loop in replicas.loops]
    assert states[0] == states[1] == states[2]


@pytest.mark.parametrize("lost", [1, 2])
def test_what_a_lost_contribution_makes_void_is_tried_again_and_nothing_is_lost(lost: int) -> None:
    faults = [Fault(kind="drop", replica=1, round=RoundId(-attempt, 0)) for attempt in range(1, lost + 1)]
    replicas, undisturbed = Replicas(2, faults=faults), Replicas(2)
    for each in (replicas, undisturbed):
        assert [each.step(step) for step in range(2)] == [[True] * 2] * 2
    assert all(torch.equal(a, b) for a, b in zip(replicas.weights(), undisturbed.weights(), strict=True))
    assert [type(event) for event in replicas.events] == [Note] * lost
    last = str(replicas.events[-1])
    assert "replica 1 sent nothing" in last
    assert "The round is tried again." in last
    assert replicas.hub.endpoint(0).sent_bytes == (1 + lost / 2) * undisturbed.hub.endpoint(0).sent_bytes
