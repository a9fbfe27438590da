"""``diloco export``: write a trained model for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from diloco.cli.trained_model import TrainedOptions
from diloco.config import parse_options
from diloco.errors import ConfigurationError
from diloco.units import format_bytes, format_count
from diloco.waiting import waiting_for

__all__ = ["run"]

DESCRIPTION = """Write a trained model for other programs.

--to hf writes a folder for transformers' from_pretrained: safetensors,
configuration and tokeniser. --to safetensors writes one file of parameters, which
--init-from accepts. --to adapter writes the adapter that a fine-tuning run has
trained, for peft; --merge merges it into the base model's weights instead.

Examples:
  diloco export runs/streaming-tiny exported
  diloco export runs/streaming-tiny exported --dtype bfloat16 --overwrite
  diloco export runs/streaming-tiny replica-1 --replica 1 --checkpoint 300
  diloco export runs/streaming-tiny weights.safetensors --to safetensors
  diloco export runs/streaming-llama merged --merge"""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(TrainedOptions):
    """The options of `diloco export`."""

    place: Annotated[Positional[Path], arg(metavar="PLACE", help_behavior_hint="")]
    """Folder (hf, adapter) or file (safetensors) to write."""
    to: Literal["hf", "safetensors", "adapter"] = "hf"
    """hf: a transformers folder; safetensors: parameters by their names in diloco; adapter: an adapter for peft."""
    merge: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """hf: merge the adapters of the run into the base model and write a whole model."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the weights."""
    overwrite: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """Replace an earlier export."""


def run(arguments: Sequence[str]) -> int:
    """Load the model, write it, and print what was written."""
    given = parse_options(ExportOptions, "export", DESCRIPTION, arguments)
    with waiting_for(lambda: f"{given.path} to be loaded and written to {given.place}"):
        _export(given)
    return 0


def _export(given: ExportOptions) -> None:
    from diloco.trained import export_adapter, export_huggingface, export_safetensors

    trained = given.load(dequantize=given.merge)
    _check_adapters(given, adapts=bool(trained.model.source_has))
    if given.to == "adapter":
        export_adapter(trained, given.place, overwrite=given.overwrite)
        print(f"{given.place}: adapter for peft, {format_count(trained.model.num_trained())} parameters")
        return
    if given.to == "hf":
        made = export_huggingface(trained, given.place, dtype=given.dtype, overwrite=given.overwrite)
        parameters = sum(parameter.numel() for parameter in made.parameters())
        kind, files = type(made).__name__, list(given.place.iterdir())
    else:
        export_safetensors(trained, given.place, dtype=given.dtype, overwrite=given.overwrite)
        parameters, kind, files = trained.model.num_parameters(), type(trained.model).__name__, [given.place]
    size_bytes = sum(file.stat().st_size for file in files)
    print(f"{given.place}: {kind}, {format_count(parameters)} parameters, {given.dtype}, {format_bytes(size_bytes)}")
    step = "" if trained.step is None else f", step {trained.step}"
    print(f"from {trained.path}{step}, {trained.weights}")


def _check_adapters(given: ExportOptions, *, adapts: bool) -> None:
    """Raise `ConfigurationError` if --merge and --to do not fit a model that has adapters, or one that has none."""
    if adapts and given.to == "hf" and not given.merge:
        raise ConfigurationError(
            f"{given.path} has adapters on top of a base model. Use --merge for a whole model, or --to adapter."
        )
    if not adapts and (given.merge or given.to == "adapter"):
        asked = "--merge" if given.merge else "--to adapter"
        raise ConfigurationError(f"{given.path} has no adapters, so {asked} has no effect. Leave it out.")
    if given.merge and given.to != "hf":
        raise ConfigurationError(f"--merge needs --to hf, not --to {given.to}.")
