"""Reading back what a run left: its global parameters, as a model ready to use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from diloco.algorithm.fragments import trainable_parameters
from diloco.data.tokens import Tokenizer, load_tokenizer
from diloco.errors import CheckpointError
from diloco.model.build import build_language_model
from diloco.model.language_model import LanguageModel
from diloco.model.settings import ModelSettings
from diloco.train.checkpoint import open_checkpoint

__all__ = ["REST", "Trained", "load_parameters", "load_trained", "read_weights", "rest_of_state"]

REST = "rest"
"""The part of a checkpoint that holds what `rest_of_state` gives, where there is anything."""


@dataclass(frozen=True, eq=False)
class Trained:
    """What a run left.

    Attributes:
        model: holds the global parameters, in evaluation mode.
        tokenizer: of the run.
        step: inner steps of the checkpoint.
        sequence_length: that it was trained with.
        path: of the checkpoint.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    step: int
    sequence_length: int
    path: Path


def load_trained(path: Path, device: torch.device | str = "cpu") -> Trained:
    """The global parameters of a run folder's latest checkpoint, or of the checkpoint at ``path``.

    Raises:
        CheckpointError: if there is none, or it is damaged.
    """
    checkpoint = open_checkpoint(path)
    settings = ModelSettings(**checkpoint.about["model"])
    about = checkpoint.about
    model = build_language_model(
        settings, seed=int(about.get("seed", 0)), device=device, definition=about.get("definition")
    )
    load_parameters(model, read_weights(checkpoint.path))
    tokenizer = load_tokenizer(checkpoint.path.parent.parent)
    sequence_length = int(checkpoint.about["sequence_length"])
    return Trained(model.eval(), tokenizer, checkpoint.step, sequence_length, checkpoint.path)


def read_weights(path: Path) -> Mapping[str, Tensor]:
    """Parameter name -> value, from a ``.safetensors`` file, a checkpoint or a run folder.

    Raises:
        CheckpointError: if there is nothing of the kind, or it is damaged.
    """
    if path.suffix != ".safetensors":
        checkpoint = open_checkpoint(path)
        weights: dict[str, Tensor] = checkpoint.load("global")
        return weights | (checkpoint.load(REST) if REST in checkpoint.parts else {})
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} can't be read as safetensors: {error}. Nothing was started.") from error


def load_parameters(model: LanguageModel, values: Mapping[str, Tensor]) -> None:
    """Set the trainable parameters of ``model`` from ``values``, all of them, and what else of its state is in there.

    Of a model that wraps another, the names may be those of the wrapped one, as in files that ``transformers`` wrote.

    Raises:
        CheckpointError: if names or shapes differ; it names them.
    """
    parameters = trainable_parameters(model)
    if hasattr(model, "wrapped") and not any(name.startswith("wrapped.") for name in values):
        values = {f"wrapped.{name}": value for name, value in values.items()}
    state = model.state_dict()
    if odd := sorted((parameters.keys() - values.keys()) | (values.keys() - state.keys())):
        raise CheckpointError(
            f"the weights to begin from differ from the model in {', '.join(odd[:5])}. Nothing was started."
        )
    for name, value in values.items():
        if state[name].shape != value.shape:
            raise CheckpointError(
                f"{name} has the shape {tuple(state[name].shape)} in the model and {tuple(value.shape)} in the "
                "weights to begin from. Nothing was started."
            )
        state[name].copy_(value)


def rest_of_state(model: LanguageModel) -> dict[str, Tensor]:
    """Name -> tensor of what belongs to the model's state and is not trained: frozen parameters and buffers.

    DTensors where the model is sharded; not copied.
    """
    trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in trained}
