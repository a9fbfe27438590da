"""The facts printed before a run agree with the components of the run."""

import itertools
from typing import Any

import pytest

from diloco.algorithm import SyncSettings, at
from diloco.config import build
from diloco.model import DecoderSettings, Transformer, build_model
from diloco.train import RunSettings, identity, outer_components, resolve
from diloco.units import diff
from tests.command_lines import dotted

MODEL = DecoderSettings(layers=4, width=16, ffn_width=32, heads=2, vocab_size=257)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return build_model(MODEL, seed=0, device="meta")


def test_what_two_runs_do_not_have_in_common_is_named(model: Transformer) -> None:
    def identity_of(data: str = "data", **values: Any) -> dict[str, str]:
        return identity(resolve(build(RunSettings, dotted(values)), num_layers=4), model, data)

    base = identity_of()
    assert base == identity_of()
    for other, name in (
        (identity_of(sync__codec="int8"), "codec"),
        (identity_of(sync__inner_steps=7), "schedule"),
        (identity_of(algorithm="diloco"), "algorithm"),
        (identity_of(train__steps=7, optimizer__warmup_steps=0), "steps"),
        (identity_of(seed=7), "seed"),
        (identity_of("others"), "data"),
    ):
        assert diff(base, other, "this", "that").startswith(f"this has {name} = ")


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("name", ["sgd", "nesterov"])
def test_the_learning_rate_falls_over_the_outer_steps_of_the_run(name: str, kind: str) -> None:
    """Over ten rounds of a fragment, the rate starts at the peak and is half-way to its end value at five."""
    arguments = {"outer": {"schedule": kind, "final_ratio": 0.25}}
    settings = SyncSettings(outer=name, outer_learning_rate=0.8, arguments=arguments)
    outer = outer_components(settings, 10)["outer_optimizer"]
    rates = [at(outer.learning_rate, step) for step in range(13)]
    assert rates[0] == 0.8
    assert rates[5] == pytest.approx(0.5)
    assert rates[10:] == pytest.approx([0.2] * 3)
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates))
