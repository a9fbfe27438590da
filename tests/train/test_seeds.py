"""Which numbers are seeds."""

from __future__ import annotations

import pytest

from diloco.config import load_configuration
from diloco.errors import ConfigurationError
from diloco.model.build import build_language_model
from diloco.model.settings import ModelSettings
from diloco.train.random_state import RandomState
from diloco.train.settings import RunSettings


@pytest.mark.parametrize("seed", [-1, 2**63, 10**30])
def test_others_are_refused_before_anything_is_built(seed: int) -> None:
    for attempt in (lambda: RunSettings(seed=seed), lambda: load_configuration(["--seed", str(seed)])):
        with pytest.raises(ConfigurationError, match=rf"seed={seed} was given; .* 0 to 2\*\*63 - 1"):
            attempt()


def test_the_largest_works_everywhere() -> None:
    seed = load_configuration(["--seed", str(2**63 - 1)]).seed
    tiny = ModelSettings(layers=1, width=8, heads=2, ffn_width=8, vocab_size=9)
    assert build_language_model(tiny, seed=seed).num_parameters() > 0
    RandomState(seed, 3)
