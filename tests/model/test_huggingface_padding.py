"""Padding tokens in models that are trained without padding, and weights that are not finite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diloco.errors import CheckpointError, ConfigurationError
from diloco.model import ModelSettings, build_language_model
from diloco.trained import load_parameters
from tests.huggingface import config_of, write_config
from tests.lazy import Lazy

transformers = Lazy("transformers")

PAD = 7


def test_the_token_that_others_pad_with_learns_like_any_other(tmp_path: Path) -> None:
    """In many models the padding token is the end-of-document token."""
    place = write_config(tmp_path, "Llama", pad_token_id=PAD, eos_token_id=PAD)
    model = build_language_model(ModelSettings(source=f"hf:{place}"), seed=0)
    tokens = torch.tensor([[3, PAD, 5, PAD, 3, 9]])
    model.loss(tokens[:, :-1], tokens[:, 1:]).loss.backward()
    gradient = model.wrapped.get_input_embeddings().weight.grad  # type: ignore[operator, union-attr]  # transformers'
    assert gradient.any(1).nonzero().flatten().tolist() == [3, 5, PAD]
    assert model.definition()["config"]["pad_token_id"] == PAD, "the configuration must still name it"


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    wrapped = transformers.AutoModelForCausalLM.from_config(config_of("Llama"))
    broken = "model.layers.1.mlp.up_proj.weight"
    with torch.no_grad():
        wrapped.get_parameter(broken)[0, 0] = torch.nan
    wrapped.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="logits that are not finite: its weights are damaged"):
        build_language_model(ModelSettings(source=f"hf:{tmp_path}"), seed=0)
    model = build_language_model(ModelSettings(source=f"hf:{tmp_path}", weights="fresh"), seed=0)
    with pytest.raises(CheckpointError, match=rf"{broken} holds values that are not finite in the initial weights"):
        load_parameters(model, dict(wrapped.named_parameters()))
