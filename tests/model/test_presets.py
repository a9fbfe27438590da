"""Presets: their counts of parameters and lengths."""

import dataclasses

import pytest

from diloco.model import PRESETS, build_model, get_preset


@pytest.mark.parametrize("name", PRESETS)
def test_the_count_is_that_of_the_model(name: str) -> None:
    preset = get_preset(name)
    settings = dataclasses.replace(preset.model, vocab_size=preset.vocab_size)
    model = build_model(settings, seed=0, device="meta")
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert preset.parameters == model.num_parameters()
    assert preset.sequence_length <= preset.model.max_sequence_length
    assert preset.vocab_size == (preset.model.vocab_size or 257)
