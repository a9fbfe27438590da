"""Presets: the counts of the papers' tables, computed in three ways; names."""

from __future__ import annotations

import dataclasses

import pytest

from diloco.errors import ConfigurationError
from diloco.model import ModelSettings, build_model, count_parameters, get_preset, preset_names

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
    assert model.num_parameters() == count_parameters(settings) == preset.parameters == PARAMETERS[name]
    assert preset.sequence_length <= preset.model.max_sequence_length


def test_open_diloco_1b_is_tiny_llama() -> None:
    assert get_preset("1b").model.kv_heads == 4


@pytest.mark.parametrize("name", STREAMING_NOMINAL)
def test_streaming_counts_are_near_the_nominal_ones(name: str) -> None:
    nominal, tolerance = STREAMING_NOMINAL[name]
    assert get_preset(name).parameters == pytest.approx(nominal, rel=tolerance)


def test_every_streaming_preset_has_a_nominal_count_here() -> None:
    assert {name for name in preset_names() if name.startswith("streaming-")} == set(STREAMING_NOMINAL)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"tie_embeddings": True}, -20 * 16),
        ({"qk_norm": True}, 3 * 2 * 4),
        ({"kv_heads": 1}, -3 * 2 * (16 - 4) * 16),
        ({"ffn": "gelu"}, -3 * 16 * 24),
    ],
)
def test_formula_follows_every_setting(change: dict[str, object], difference: int) -> None:
    base = ModelSettings(layers=3, width=16, ffn_width=24, heads=4, vocab_size=20)
    changed = dataclasses.replace(base, **change)  # type: ignore[arg-type]  # a table of differently typed settings
    assert count_parameters(changed) - count_parameters(base) == difference
    assert count_parameters(changed) == build_model(changed, seed=0).num_parameters()


def test_aliases() -> None:
    aliases = {preset.alias: preset for preset in map(get_preset, preset_names()) if preset.alias}
    assert all(get_preset(alias) is preset for alias, preset in aliases.items())
    assert not aliases.keys() & set(preset_names())
    assert get_preset("opendiloco-1b").name == "1b"
    assert get_preset("4b").name == "streaming-4b"


def test_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'opendiloco-14m'"):
        get_preset("opendilocco-14m")


def test_counting_needs_a_vocabulary() -> None:
    with pytest.raises(ConfigurationError, match="vocab_size is required"):
        count_parameters(ModelSettings())
