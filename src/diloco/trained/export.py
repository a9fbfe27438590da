"""Export a trained model: as a folder that ``transformers`` loads, one file with native names, or an adapter."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError

from diloco.algorithm import named_parameters, trainable_parameters
from diloco.checkpoint import new_folder
from diloco.errors import CheckpointError, ConfigurationError
from diloco.model import Transformer
from diloco.trained.load import ORIGIN_FILE, Trained

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Dtype", "export_adapter", "export_huggingface"]

Dtype = Literal["float32", "bfloat16", "float16"]


def export_huggingface(
    trained: Trained,
    folder: Path,
    *,
    dtype: Dtype = "float32",
    overwrite: bool = False,
) -> PreTrainedModel:
    """Write ``folder``: weights, ``config.json``, ``generation_config.json``, tokeniser, and ``diloco.json``.

    The folder declares the sequence length of the training, beyond which a model performs poorly. It is written next to
    its final path and renamed, so it exists completely or not at all. ``overwrite`` replaces an exported model. The
    model is converted in place, and returned as it was written.

    Raises:
        ConfigurationError: the model has no counterpart in ``transformers``, or ``folder`` is not empty.
        CheckpointError: the folder can't be written, or the weights don't fit ``dtype``. No partial export remains.
    """
    folder = Path(os.path.realpath(folder))  # keeps a link
    native = trained.model.settings if isinstance(trained.model, Transformer) else None
    longest = trained.length(None, "") if native else trained.model.max_sequence_length
    _check_place(folder, overwrite, is_export=(folder / ORIGIN_FILE).is_file())
    made = trained.model.to_huggingface()
    _convert(made, dtype)
    tokenizer, ends = trained.tokenizer, trained.tokenizer.eos_id
    config, generation = made.config, made.generation_config
    if native:
        config.max_position_embeddings = longest
    # The token that ends a document also begins the first one. The model's configuration has no padding token, because
    # the embedding of that token would get no gradient.
    config.eos_token_id = ends
    if config.bos_token_id is None or config.bos_token_id >= tokenizer.vocab_size:
        config.bos_token_id = ends
    if generation is not None:
        generation._from_model_config = False
        generation.eos_token_id = generation.pad_token_id = ends
        generation.bos_token_id = config.bos_token_id
    if trained.has_template:
        tokenizer = chat = trained.chat_tokenizer()
        generation.eos_token_id = sorted({chat.eos_id, chat.answer_end})
    with _as_checkpoint_error(folder), new_folder(folder, replaces=overwrite) as partial:
        made.save_pretrained(partial)
        tokenizer.save(partial)
        stored = json.loads((partial / "tokenizer_config.json").read_text("utf-8"))
        added = {"bos_token": stored["eos_token"], "model_max_length": longest, "clean_up_tokenization_spaces": False}
        _write_json(partial / "tokenizer_config.json", added | stored)
        origin = {
            "diloco": metadata.version("diloco"),
            "run": trained.run.name,
            "checkpoint": trained.path.name,
            "step": trained.step,
            "weights": trained.weights,
            "dtype": dtype,
            "sequence_length": trained.sequence_length,
            **({"model": asdict(replace(native, max_sequence_length=longest))} if native else {}),
        }
        _write_json(partial / ORIGIN_FILE, origin)
        for path in partial.iterdir():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
    return made


def export_adapter(trained: Trained, folder: Path, *, overwrite: bool = False) -> None:
    """Write a folder that ``peft`` loads, with the tokeniser of the run.

    Raises:
        ConfigurationError: ``folder`` contains something other than an adapter, or an adapter and ``overwrite`` is
            False.
    """
    from diloco.model import CONFIG_FILE, save_adapter

    _check_place(folder, overwrite, is_export=(folder / CONFIG_FILE).is_file())
    model: Any = trained.model
    save_adapter(folder, model, trainable_parameters(model))
    trained.chat_tokenizer().save(folder)


def _check_place(place: Path, overwrite: bool, *, is_export: bool) -> None:
    """Raise `ConfigurationError` unless the path is free, or is an earlier export that may be overwritten."""
    is_empty = place.is_dir() and not any(place.iterdir())
    if place.exists() and not is_empty and not is_export:
        raise ConfigurationError(f"{place} exists and is not an exported model. Use another path.")
    if is_export and not overwrite:
        raise ConfigurationError(f"{place} already exists. Use --overwrite, or another path.")


def _convert(model: torch.nn.Module, dtype: Dtype) -> None:
    model.to(getattr(torch, dtype))
    for name, parameter in named_parameters(model).items():
        if not bool(parameter.isfinite().all()):
            raise CheckpointError(
                f"{name} holds values that are not finite as {dtype}. Use another --dtype, such as bfloat16, or, if "
                "the checkpoint is damaged, another checkpoint. Nothing was exported."
            )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


@contextmanager
def _as_checkpoint_error(place: Path) -> Iterator[None]:
    """Turn a failure to write into a `CheckpointError` that says nothing has changed."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{place} can't be written: {error}. What was there before is unchanged.") from error
