"""Reading back what a run left: its weights, or a model ready to use."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from diloco.algorithm.fragments import trainable_parameters
from diloco.checkpoint.reading import Checkpoint, list_checkpoints, open_checkpoint
from diloco.checkpoint.shards import SavedValues
from diloco.data.chat_tokenizer import ChatTokenizer, has_template
from diloco.data.tokenizer import Tokenizer
from diloco.data.tokenizer_choice import load_tokenizer
from diloco.devices import choose_device
from diloco.errors import CheckpointError, ConfigurationError
from diloco.model.architectures import SIZES, native_settings, native_weights, why_not_native
from diloco.model.build import build_language_model
from diloco.model.huggingface_folder import is_huggingface_folder, stored_tensors
from diloco.model.language_model import LanguageModel
from diloco.model.settings import ModelSettings

__all__ = [
    "ORIGIN_FILE",
    "REST",
    "Trained",
    "load_parameters",
    "load_trained",
    "read_weights",
    "rest_of_state",
]

REST = "rest"  # the part of a checkpoint that holds what `rest_of_state` gives, where there is anything
ORIGIN_FILE = "diloco.json"  # in every folder that was exported, and in no other: what the weights are

_USUAL_LENGTH = 2048
"""Tokens that a model is shown where nothing says what it was trained with: many promise more than memory holds."""


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained model, ready to use."""

    model: LanguageModel  # in evaluation mode
    tokenizer: Tokenizer  # of the run
    step: int | None  # inner steps of the checkpoint; None: of a folder of ``transformers``, which does not say
    sequence_length: int  # that it was trained with; of a folder that does not say, at most 2048
    path: Path  # of the checkpoint or folder
    weights: str = "global parameters"  # what the model holds, in words: global parameters, or whose

    @property
    def run(self) -> Path:
        """The run folder, of a checkpoint of a run."""
        return self.path.absolute().parent.parent

    @property
    def has_template(self) -> bool:
        """Whether its tokenizer has a chat template."""
        return has_template(self._tokenizer_folder)

    def chat_tokenizer(self) -> ChatTokenizer:
        """Its tokenizer with the chat template.

        Raises:
            ConfigurationError, DataError: as `ChatTokenizer`.
        """
        return ChatTokenizer(str(self._tokenizer_folder))

    @property
    def _tokenizer_folder(self) -> Path:
        return self.path if self.step is None else self.run

    def length(self, asked: int | None, name: str) -> int:
        """Tokens to show the model: as many as were ``asked`` for as ``name``, else as it was trained with.

        Raises:
            ConfigurationError: if the model can't read so many.
        """
        longest = self.model.max_sequence_length
        if asked is None:
            return min(self.sequence_length, longest)
        if not 1 <= asked <= longest:
            raise ConfigurationError(f"{name} {asked} was given; the model reads 1 to {longest} tokens.")
        return asked


def load_trained(path: Path, device: str = "cpu", *, step: int | None = None, replica: int | None = None) -> Trained:
    """The model of a run or a checkpoint, or of a folder of ``transformers``, such as an exported one.

    Args:
        path: run folder, checkpoint, or folder of ``transformers``.
        device: to load it to, as `diloco.devices.choose_device` takes it.
        step: inner steps of the checkpoint of a run; None: the latest.
        replica: whose local parameters to load; None: the global ones.

    Raises:
        CheckpointError: if there is none, or it is damaged.
        ConfigurationError: if the replica or the device is not there, or ``transformers`` is not installed.
    """
    place = choose_device(device)
    if step is None and is_huggingface_folder(path):
        if replica is not None:
            raise ConfigurationError(f"replica {replica} was asked for, but {path} is not a run.")
        return _load_huggingface(path, place)
    checkpoint = open_checkpoint(path) if step is None else _checkpoint_of_step(path, step)
    about = checkpoint.about
    model = build_language_model(
        ModelSettings(**about["model"]),
        seed=int(about.get("seed", 0)),
        device=place,
        definition=about.get("definition"),
    )
    load_parameters(model, read_weights(checkpoint.path) if replica is None else _local(checkpoint, replica, model))
    weights = "global parameters" if replica is None else f"replica {replica}"
    if replica is None and about.get("algorithm") == "none":
        weights = "replica 0 (independent replicas)"
    tokenizer = load_tokenizer(checkpoint.path.parent.parent)
    return Trained(model.eval(), tokenizer, checkpoint.step, int(about["sequence_length"]), checkpoint.path, weights)


def _checkpoint_of_step(run: Path, step: int) -> Checkpoint:
    found = {checkpoint.step: checkpoint for checkpoint in list_checkpoints(run / "checkpoints")}
    if step not in found:
        there = ", ".join(map(str, found)) or "none"
        raise CheckpointError(f"{run} has no checkpoint of step {step}; it has: {there}. Nothing was loaded.")
    return found[step]


def _local(checkpoint: Checkpoint, replica: int, model: LanguageModel) -> Mapping[str, Tensor]:
    """The parameters of ``replica`` itself; where replicas are processes, each has a folder of checkpoints."""
    part = f"replica-{replica}"
    beside = checkpoint.path.parent.parent / part / "checkpoints" / checkpoint.path.name
    if beside.is_dir():
        checkpoint = open_checkpoint(beside)
    if f"{part}-shard-0" in checkpoint.parts:
        state = model.saved_state()
        SavedValues(checkpoint, part).load_into({f"model/{name}": value for name, value in state.items()})
        return state
    if part not in checkpoint.parts:
        there = sorted(name for name in checkpoint.parts if re.fullmatch(r"replica-\d+", name))
        raise CheckpointError(
            f"{checkpoint.path} does not hold {part}; it holds {', '.join(there)}, and the global parameters. "
            "Nothing was loaded."
        )
    values: Mapping[str, Tensor] = checkpoint.load(part)["model"]
    return values


def _load_huggingface(folder: Path, device: torch.device) -> Trained:
    foreign = why_not_native(folder)
    settings = ModelSettings(source=f"hf:{folder}", weights="stored") if foreign else native_settings(folder)
    model = build_language_model(settings, seed=0, device=device)
    if not foreign:
        load_parameters(model, native_weights(folder, settings))
    length, weights = _USUAL_LENGTH, "as stored"
    with suppress(OSError, ValueError, KeyError, TypeError):  # a folder of others has no such file, or another
        origin = json.loads((folder / ORIGIN_FILE).read_text("utf-8"))
        length, weights = int(origin["sequence_length"]), str(origin["weights"])
    length = min(length, model.max_sequence_length)
    return Trained(model.eval(), load_tokenizer(folder), None, length, folder, weights)


def read_weights(path: Path, model: ModelSettings | None = None) -> Mapping[str, Tensor]:
    """Parameter name -> value, from a ``.safetensors`` file, a checkpoint, a run folder, or one of ``transformers``.

    Args:
        model: what they are to be put into; None: anything.

    Raises:
        CheckpointError: if there is nothing of the kind, or it is damaged.
        ConfigurationError: they are of another model, where ``path`` says of which.
    """
    if is_huggingface_folder(path):
        if model is not None and model.source is not None:
            return dict(stored_tensors(path))
        there = native_settings(path)
        if model is not None:
            _check_same(model, there, path)
        return native_weights(path, there)
    if path.suffix != ".safetensors":
        checkpoint = open_checkpoint(path)
        weights: dict[str, Tensor] = checkpoint.load("global")
        return weights | (checkpoint.load(REST) if REST in checkpoint.parts else {})
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} can't be read as safetensors: {error}.") from error


def _check_same(model: ModelSettings, there: ModelSettings, path: Path) -> None:
    one_way = dataclasses.replace(model, kv_heads=None if model.kv_heads == model.heads else model.kv_heads)
    if odd := [name for name in SIZES if getattr(one_way, name) != getattr(there, name)]:
        given = ", ".join(f"model.{name}={getattr(model, name)!r}" for name in odd)
        held = ", ".join(f"{name} {getattr(there, name)!r}" for name in odd)
        raise ConfigurationError(
            f"{given} was given with train.init_from={path}, but the model there has {held}. Leave out the former."
        )


def load_parameters(model: LanguageModel, values: Mapping[str, Tensor]) -> None:
    """Set the trainable parameters of ``model`` from ``values``, all of them, and what else of its state is in there.

    Of a model that wraps another, the names may be those of the wrapped one, as in files that ``transformers`` wrote.

    Raises:
        CheckpointError: if names or shapes differ, or a parameter is not finite; it names them.
    """
    parameters = trainable_parameters(model)
    if hasattr(model, "wrapped") and not any(name.startswith("wrapped.") for name in values):
        values = {f"wrapped.{name}": value for name, value in values.items()}
    state = model.state_dict()
    if odd := sorted((parameters.keys() - values.keys()) | (values.keys() - state.keys())):
        raise CheckpointError(f"the weights to begin from differ from the model in {', '.join(odd[:5])}.")
    for name, value in values.items():
        if state[name].shape != value.shape:
            raise CheckpointError(
                f"{name} has the shape {tuple(state[name].shape)} in the model and {tuple(value.shape)} in the "
                "weights to begin from."
            )
        if name in parameters and not bool(value.isfinite().all()):
            raise CheckpointError(
                f"{name} holds values that are not finite in the weights to begin from, which are damaged. Use another "
                "copy, or an earlier checkpoint."
            )
        state[name].copy_(value)


def rest_of_state(model: LanguageModel) -> dict[str, Tensor]:
    """Name -> tensor of what belongs to the model's state and is not trained: frozen parameters and buffers.

    DTensors where the model is sharded; not copied.
    """
    trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    return {name: tensor for name, tensor in model.saved_state().items() if name not in trained}
