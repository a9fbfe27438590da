"""A model from a source in place of a preset's: which keys go with it, and what has to be known of it to plan a run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from diloco.config.keys import Values
from diloco.errors import CheckpointError
from diloco.model.settings import native_keys, native_only_error, parse_source
from diloco.train.settings import RunSettings

__all__ = ["Outline", "absolute_source", "outline_of", "with_source"]


@dataclass(frozen=True)
class Outline:
    """What a plan needs to know of a model.

    Attributes:
        num_layers: its layers.
        max_sequence_length: the longest sequence that it serves.
    """

    num_layers: int
    max_sequence_length: int


def with_source(preset: Values, values: Values) -> tuple[Values, Values]:
    """Both layers, the lower one without its model where ``values``, of file and flags, name another.

    Of a local ``hf:`` folder the tokeniser is taken too, where there is one and nothing else was said. A run that
    begins from the checkpoint of a model from a source (``train.init_from``), and says nothing of a model, has that.

    Raises:
        ConfigurationError: for a size of the native decoder beside a source.
    """
    silent = "preset" not in values and not any(name.startswith("model.") for name in values)
    if silent and values.get("train.init_from") is not None:
        values = values | _model_of_checkpoint(values["train.init_from"])
    source = values.get("model.source")
    if source is None:
        return preset | _model_of_folder(values.get("train.init_from")), values
    parsed = parse_source(source)
    for name in native_keys(source):
        if f"model.{name}" in values:
            raise native_only_error(name, parsed)
    preset = {name: value for name, value in preset.items() if not name.startswith("model.")}
    place = Path(parsed.place).expanduser()
    if parsed.kind == "hf" and (place / "tokenizer.json").is_file() and "data.tokenizer" not in values:
        values = values | {"data.tokenizer": str(place)}
    return preset, values


def absolute_source(source: str | None) -> str | None:
    """The same source from every working directory; names of hub and modules stay."""
    if source is None:
        return None
    parsed = parse_source(source)
    path = Path(parsed.place).expanduser()
    if not path.exists() or (parsed.kind == "module" and path.suffix != ".py"):
        return source
    place = os.path.abspath(path)
    return f"{place}:{parsed.function}" if parsed.function else f"hf:{place}"


def outline_of(settings: RunSettings) -> Outline:
    """What is to be known of the model to plan a run; one from a source is built for it, without memory."""
    model = settings.model
    if model.source is None:
        return Outline(model.layers, model.max_sequence_length)
    from diloco.train.components import outline

    built = outline(settings, 1024)  # the data says the vocabulary; layers and positions do not depend on it
    return Outline(built.num_layers, built.max_sequence_length)


def _model_of_checkpoint(path: Path) -> Values:
    """The ``model.*`` keys of a checkpoint whose model came from a source; none of other checkpoints and files."""
    if path.suffix == ".safetensors" or (path.expanduser() / "config.json").is_file():
        return {}
    from diloco.checkpoint.reading import open_checkpoint

    try:
        described = open_checkpoint(path.expanduser()).about.get("model", {})
    except CheckpointError:
        return {}  # whoever needs the checkpoint itself says what is wrong with it
    if described.get("source") is None:
        return {}
    return {f"model.{name}": value for name, value in described.items() if value is not None}


def _model_of_folder(init_from: Path | None) -> Values:
    """Sizes and tokeniser of the native decoder that begins from a folder of ``transformers``; none of other places."""
    folder = None if init_from is None else init_from.expanduser()
    if folder is None or not (folder / "config.json").is_file():
        return {}
    from diloco.model.architectures import SIZES, native_settings

    model = native_settings(folder)
    sizes: Values = {f"model.{name}": getattr(model, name) for name in (*SIZES, "max_sequence_length")}
    return sizes | ({"data.tokenizer": str(folder)} if (folder / "tokenizer.json").is_file() else {})
