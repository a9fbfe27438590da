"""Reading back what a run left: its global parameters, as a model ready to use."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from diloco.algorithm.fragments import trainable_parameters
from diloco.data.tokens import Tokenizer, load_tokenizer
from diloco.errors import CheckpointError, ConfigurationError
from diloco.model.architectures import is_huggingface_folder, native_settings, native_weights
from diloco.model.language_model import LanguageModel
from diloco.model.settings import ModelSettings
from diloco.model.transformer import build_model
from diloco.train.checkpoint import open_checkpoint

__all__ = ["Trained", "load_parameters", "load_trained", "read_weights"]

_SAME = tuple(
    field.name for field in dataclasses.fields(ModelSettings) if field.name not in ("z_loss", "max_sequence_length")
)
"""The settings of a model that decide what its weights mean."""


@dataclass(frozen=True, eq=False)
class Trained:
    """What a run left.

    Attributes:
        model: holds the global parameters, in evaluation mode.
        tokenizer: of the run.
        step: inner steps of the checkpoint; None: of a folder of ``transformers``, which does not say.
        sequence_length: that it was trained with, or that its folder says it serves.
        path: of the checkpoint or folder.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    step: int | None
    sequence_length: int
    path: Path


def load_trained(path: Path, device: torch.device | str = "cpu") -> Trained:
    """The global parameters of a run folder's latest checkpoint, or of the checkpoint at ``path``.

    Also a model in a folder of ``transformers``, such as `diloco.train.export` leaves.

    Raises:
        CheckpointError: if there is none, or it is damaged.
        ConfigurationError: it is of ``transformers``, and the native decoder does not equal it.
    """
    if is_huggingface_folder(path):
        return _load_huggingface(path, device)
    checkpoint = open_checkpoint(path)
    settings = ModelSettings(**checkpoint.about["model"])
    model = build_model(settings, seed=0, device=device)
    load_parameters(model, checkpoint.load("global"))
    tokenizer = load_tokenizer(checkpoint.path.parent.parent)
    sequence_length = int(checkpoint.about["sequence_length"])
    return Trained(model.eval(), tokenizer, checkpoint.step, sequence_length, checkpoint.path)


def _load_huggingface(folder: Path, device: torch.device | str) -> Trained:
    settings = native_settings(folder)
    model = build_model(settings, seed=0, device=device)
    load_parameters(model, native_weights(folder, settings))
    return Trained(model.eval(), load_tokenizer(folder), None, settings.max_sequence_length, folder)


def read_weights(path: Path, model: ModelSettings) -> Mapping[str, Tensor]:
    """Parameter name -> value, from a ``.safetensors`` file, a checkpoint, a run folder, or one of ``transformers``.

    Args:
        path: where they are.
        model: what they are to be put into.

    Raises:
        CheckpointError: if there is nothing of the kind, or it is damaged.
        ConfigurationError: they are of another model, where ``path`` says of which.
    """
    if is_huggingface_folder(path):
        there = native_settings(path)
        if odd := [name for name in _SAME if getattr(model, name) != getattr(there, name)]:
            given = ", ".join(f"model.{name}={getattr(model, name)!r}" for name in odd)
            works = ", ".join(f"{name} {getattr(there, name)!r}" for name in odd)
            raise ConfigurationError(
                f"{given} was given with train.init_from={path}, which holds a model with {works}; without the former "
                "it would work. Nothing was started."
            )
        return native_weights(path, there)
    if path.suffix != ".safetensors":
        weights: Mapping[str, Tensor] = open_checkpoint(path).load("global")
        return weights
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} can't be read as safetensors: {error}. Nothing was started.") from error


def load_parameters(model: LanguageModel, values: Mapping[str, Tensor]) -> None:
    """Set the trainable parameters of ``model`` from ``values``, all of them and no others.

    Raises:
        CheckpointError: if names or shapes differ; it names them.
    """
    parameters = trainable_parameters(model)
    if odd := sorted(parameters.keys() ^ values.keys()):
        raise CheckpointError(
            f"the weights to begin from differ from the model in {', '.join(odd[:5])}. Nothing was started."
        )
    for name, parameter in parameters.items():
        if parameter.shape != values[name].shape:
            raise CheckpointError(
                f"{name} has the shape {tuple(parameter.shape)} in the model and {tuple(values[name].shape)} in the "
                "weights to begin from. Nothing was started."
            )
        parameter.detach().copy_(values[name])
