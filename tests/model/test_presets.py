"""Presets: the counts of the papers' tables, computed in three ways; names."""

from __future__ import annotations

import dataclasses

import pytest

from diloco.errors import ConfigurationError
from diloco.model import build_model, count_parameters, get_preset, preset_names

STREAMING_NOMINAL = {  # the companion paper's table, and the tolerance that its digits allow
    "streaming-35m": (35e6, 0.03),
    "streaming-100m": (90e6, 0.03),
    "streaming-200m": (180e6, 0.03),
    "streaming-300m": (335e6, 0.03),
    "streaming-500m": (550e6, 0.03),
    "streaming-1b": (1.3e9, 0.03),
    "streaming-4b": (4e9, 0.05),
}


PARAMETERS = {
    "tiny": 869_760,
    "tiny-muon": 869_760,
    "2m": 262_464,
    "14m": 9_766_528,
    "60m": 102_898_688,
    "150m": 214_983_680,
    "1b": 1_100_048_384,
    "streaming-35m": 35_265_792,
    "streaming-100m": 88_292_736,
    "streaming-200m": 183_790_080,
    "streaming-300m": 335_913_600,
    "streaming-500m": 558_819_072,
    "streaming-1b": 1_273_598_976,
    "streaming-4b": 4_175_396_352,
}


@pytest.mark.parametrize("name", preset_names())
def test_meta_build_formula_and_pinned_count_agree(name: str) -> None:
    preset = get_preset(name)
    settings = dataclasses.replace(preset.model, vocab_size=preset.vocab_size)
    model = build_model(settings, seed=0, device="meta")
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert (
        model.num_parameters()
        == count_parameters(preset.model, preset.vocab_size)
        == preset.parameters
        == PARAMETERS[name]
    )
    assert preset.sequence_length <= preset.model.max_sequence_length


@pytest.mark.parametrize("name", STREAMING_NOMINAL)
def test_streaming_counts_are_near_the_nominal_ones(name: str) -> None:
    nominal, tolerance = STREAMING_NOMINAL[name]
    assert get_preset(name).parameters == pytest.approx(nominal, rel=tolerance)


def test_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'opendiloco-14m'"):
        get_preset("opendilocco-14m")
