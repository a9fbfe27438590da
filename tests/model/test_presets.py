"""Presets: the counts of the papers' tables, and names."""

import dataclasses

import pytest

from diloco.model import PRESETS, build_model, get_preset

NOMINAL = {  # the companion paper's table, and the tolerance that its digits allow
    "streaming-35m": (35e6, 0.03),
    "streaming-100m": (90e6, 0.03),
    "streaming-200m": (180e6, 0.03),
    "streaming-300m": (335e6, 0.03),
    "streaming-500m": (550e6, 0.03),
    "streaming-1b": (1.3e9, 0.03),
    "streaming-4b": (4e9, 0.05),
}


@pytest.mark.parametrize("name", PRESETS)
def test_the_count_is_that_of_the_model_and_near_the_papers(name: str) -> None:
    preset = get_preset(name)
    settings = dataclasses.replace(preset.model, vocab_size=preset.vocab_size)
    model = build_model(settings, seed=0, device="meta")
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert preset.parameters == model.num_parameters()
    nominal, tolerance = NOMINAL.get(name, (preset.parameters, 0.0))
    assert preset.parameters == pytest.approx(nominal, rel=tolerance)
    assert preset.sequence_length <= preset.model.max_sequence_length
    assert preset.vocab_size == (preset.model.vocab_size or 257)
