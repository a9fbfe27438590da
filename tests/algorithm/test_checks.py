"""Components by name, and values that can't work: refused when an object is constructed, not when it is used."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import nn

from diloco import AlphaMerge, InProcessTransport, Nesterov, Sgd, SyncSchedule, ValueSchedule
from diloco.algorithm import AVERAGES, CODECS, MERGE_RULES, OUTER_OPTIMIZERS, SendersMean, make_codec
from diloco.algorithm import partition as divide
from diloco.errors import ConfigurationError
from diloco.protocol import Rules

NAN, INF = math.nan, math.inf


def partition(**arguments: Any) -> object:
    return divide(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), **arguments)


REFUSED: tuple[tuple[Callable[..., object], dict[str, Any]], ...] = (
    *((SyncSchedule, {"inner_steps": value}) for value in (2.5, True, "10", 0)),
    *((SyncSchedule, {"inner_steps": 4, "overlap_steps": value}) for value in (1.5, -1, 5)),
    *((SyncSchedule, {"inner_steps": 4, "num_fragments": value}) for value in (2.0, 0, 5)),
    *((SyncSchedule, {"inner_steps": 4, "offsets": value}) for value in ((0.5,), (4,), (0, 1))),
    *((Sgd, {"learning_rate": value}) for value in (INF, NAN, "fast")),
    *((Nesterov, {"momentum": value}) for value in (NAN, 1.5)),
    *((AlphaMerge, {"alpha": value}) for value in (NAN, -0.01, 1.01, "half")),
    *((ValueSchedule, {"peak": 1.0, "final_ratio": value}) for value in (NAN, 2.0)),
    *((ValueSchedule, {"peak": 1.0} | value) for value in ({"total_steps": 1.5}, {"warmup_steps": -1})),
    *((ValueSchedule, value) for value in ({"peak": NAN}, {"peak": 1.0, "kind": "cosin"})),
    *((make_codec, {"name": name, "block_size": n}) for name in ("int8", "fp4") for n in (0, -2, 1, 7, 65538, 8.0)),
    *((InProcessTransport, {"num_replicas": value}) for value in (0, 1.5)),
    (InProcessTransport, {"num_replicas": 2, "min_contributors": 3}),
    (InProcessTransport, {"num_replicas": 1, "round_timeout_s": NAN}),
    *((Rules, value) for value in ({"silence_s": NAN}, {"round_timeout_s": 0}, {"heartbeat_s": 10.0})),
    *((partition, {"num_fragments": value}) for value in (2.0, 0)),
    (partition, {"num_fragments": 1, "strategy": "even"}),
)


@pytest.mark.parametrize(("make", "arguments"), REFUSED, ids=lambda value: getattr(value, "__name__", str(value)))
def test_what_can_not_work_is_refused_at_once(make: Callable[..., object], arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"must be|is unknown|(was|were) given") as caught:
        make(**arguments)
    assert str(next(reversed(arguments.values()))).strip("(),") in str(caught.value)


def test_numbers_of_numpy_are_numbers() -> None:
    schedule = SyncSchedule(inner_steps=np.int64(4), overlap_steps=np.int32(1))  # type: ignore[arg-type]  # the point
    assert type(schedule.inner_steps) is int
    assert [step for step in range(1, 10) if schedule.actions(step)] == [4, 5, 8, 9]
    assert Nesterov(learning_rate=np.float32(0.5)).learning_rate == 0.5


def test_components_take_what_is_offered_and_fits_and_all_of_their_arguments() -> None:
    for registry in (AVERAGES, MERGE_RULES, OUTER_OPTIMIZERS):
        assert all(registry.make(name) or name == "mean" for name in registry.names)
    for name in CODECS.names:
        codec = make_codec(name)
        assert codec.name == name
        assert dict(make_codec(name, **codec.parameters()).parameters()) == dict(codec.parameters())
    assert make_codec("fp4", block_size=64).parameters() == {"block_size": 64}
    outer = OUTER_OPTIMIZERS.make("nesterov", learning_rate=0.5, momentum=0.3, betas=(0, 0))
    assert outer == Nesterov(learning_rate=0.5, momentum=0.3)
    assert MERGE_RULES.make("alpha", {"alpha": 0.5}) == MERGE_RULES.make("alpha", alpha=0.5) == AlphaMerge(0.5)
    assert (AVERAGES.make("mean"), AVERAGES.make("senders")) == (None, SendersMean())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: make_codec("bfloat"), r"no codec 'bfloat'; did you mean 'bfloat16'\?"),
        (lambda: make_codec("fp4", blok_size=64), r"no parameter 'blok_size'; did you mean 'block_size'\?"),
        (lambda: make_codec("float16", block_size=64), "'float16' has no parameter 'block_size'; it has none"),
        (lambda: OUTER_OPTIMIZERS.make("sgd", {"momentum": 0.9}), "outer optimizer 'sgd' has no parameter 'momentum'"),
        (lambda: MERGE_RULES.make("alpha", {"alpha": 0.5}, alpha=0.25), "no parameter 'alpha'; set sync.merge_alpha"),
        (lambda: MERGE_RULES.check("rebased"), "'rebased'; did you mean 'rebase'.* as module:Class or FILE"),
    ],
)
def test_names_and_arguments_that_do_not_fit_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()
