"""Invalid values are refused when an object is constructed, not when it is used."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import nn

from diloco import (
    Adam,
    AlphaMerge,
    InProcessTransport,
    Nesterov,
    Sgd,
    SyncSchedule,
    ValueSchedule,
    make_codec,
    partition,
)
from diloco.errors import ConfigurationError, FragmentError
from diloco.protocol import Rules

NAN, INF = math.nan, math.inf


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (SyncSchedule, {"inner_steps": 2.5}),
        (SyncSchedule, {"inner_steps": True}),
        (SyncSchedule, {"inner_steps": "10"}),
        (SyncSchedule, {"inner_steps": 10, "overlap_steps": 1.5}),
        (SyncSchedule, {"inner_steps": 10, "overlap_steps": -1}),
        (SyncSchedule, {"inner_steps": 10, "num_fragments": 2.0}),
        (SyncSchedule, {"inner_steps": 10, "offsets": (0.5,)}),
        (Sgd, {"learning_rate": INF}),
        (Sgd, {"learning_rate": NAN}),
        (Sgd, {"learning_rate": "fast"}),
        (Nesterov, {"learning_rate": INF}),
        (Nesterov, {"momentum": NAN}),
        (Adam, {"learning_rate": -1.0}),
        (Adam, {"epsilon": -1.0}),
        (Adam, {"epsilon": NAN}),
        (Adam, {"epsilon": INF}),
        (Adam, {"epsilon": 0}),
        (Adam, {"betas": (0.9, 1.0)}),
        (Adam, {"betas": (0.9, NAN)}),
        (Adam, {"betas": (0.9,)}),
        (AlphaMerge, {"alpha": NAN}),
        (AlphaMerge, {"alpha": -0.01}),
        (AlphaMerge, {"alpha": 1.01}),
        (AlphaMerge, {"alpha": "half"}),
        (ValueSchedule, {"peak": NAN}),
        (ValueSchedule, {"peak": 1.0, "final_ratio": NAN}),
        (ValueSchedule, {"peak": 1.0, "final_ratio": 2.0}),
        (ValueSchedule, {"peak": 1.0, "total_steps": 1.5}),
        (ValueSchedule, {"peak": 1.0, "warmup_steps": -1}),
        (ValueSchedule, {"peak": 1.0, "kind": "cosin"}),
        (make_codec, {"name": "int8", "block_size": 8.0}),
        (InProcessTransport, {"num_replicas": 0}),
        (InProcessTransport, {"num_replicas": 1.5}),
        (InProcessTransport, {"num_replicas": 2, "min_contributors": 3}),
        (InProcessTransport, {"num_replicas": 1, "round_timeout_s": NAN}),
        (Rules, {"silence_s": NAN}),
        (Rules, {"round_timeout_s": 0}),
        (Rules, {"heartbeat_s": 10.0}),
        (lambda **given: partition(layers(), **given), {"num_fragments": 2.0}),
        (lambda **given: partition(layers(), **given), {"num_fragments": 0}),
        (lambda **given: partition(layers(), **given), {"num_fragments": 1, "strategy": "even"}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_can_not_work_is_refused_at_once(make: Callable[..., object], given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"must be|There is no|(was|were) given") as caught:
        make(**given)
    assert str(next(reversed(given.values()))).strip("(),") in str(caught.value)


def test_numbers_of_numpy_are_numbers() -> None:
    schedule = SyncSchedule(inner_steps=np.int64(4), overlap_steps=np.int32(1))  # type: ignore[arg-type]  # the point
    assert type(schedule.inner_steps) is int
    assert [step for step in range(1, 10) if schedule.actions(step)] == [4, 5, 8, 9]
    assert Nesterov(learning_rate=np.float32(0.5)).learning_rate == 0.5


def test_a_model_without_numbered_layers_is_told_what_works() -> None:
    """torch's RNN is such a model."""
    model = nn.RNN(2, 3)
    with pytest.raises(FragmentError) as caught:
        partition(model, num_fragments=2)
    works = 'partition(model, num_fragments=2, strategy="balanced")'
    assert "A model with no numbered layers can't have 2 strided fragments" in str(caught.value)
    assert f"Use 1 fragment, or fragments={works}" in str(caught.value)
    assert len(eval(works)) == 2


def test_wsd_stays_then_falls_in_a_straight_line() -> None:
    schedule = ValueSchedule(peak=1.0, kind="wsd", total_steps=10, decay_steps=4)
    assert [schedule(step) for step in range(5, 11)] == [1.0, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="warm-up can't be longer than"):
        ValueSchedule(peak=1.0, kind="cosine", total_steps=5, warmup_steps=6)
    with pytest.raises(ConfigurationError, match="1 to 3"):
        ValueSchedule(peak=1.0, kind="wsd", total_steps=5, warmup_steps=2, decay_steps=4)
