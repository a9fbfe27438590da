"""``diloco export``: write a trained model for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import FlagCreatePairsOff, arg

from diloco.cli.trained_model import TrainedOptions
from diloco.config import parse_options
from diloco.errors import ConfigurationError
from diloco.units import format_bytes, format_count
from diloco.waiting import waiting_for

if TYPE_CHECKING:
    from torch import nn

DESCRIPTION = """Write a trained model for other programs.

A folder for transformers' from_pretrained (--to hf), one file of parameters for --init-from
(--to safetensors), or the adapter that a fine-tuning run has trained, for peft (--to adapter),
which --merge merges into the weights of the base model instead.

Examples:
  diloco export runs/streaming-tiny --out exported
  diloco export runs/streaming-tiny --out exported --dtype bfloat16 --overwrite
  diloco export runs/streaming-tiny --out replica-1 --replica 1 --checkpoint 300
  diloco export runs/streaming-tiny --out weights.safetensors --to safetensors
  diloco export runs/streaming-llama --out merged --merge"""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(TrainedOptions):
    """The options of `diloco export`."""

    out: Annotated[Path, arg(metavar="PATH", help_behavior_hint="")]
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
    options = parse_options(ExportOptions, "export", DESCRIPTION, arguments)
    with waiting_for(lambda: f"{options.path} to be loaded and written to {options.out}"):
        _export(options)
    return 0


def _export(options: ExportOptions) -> None:
    from diloco.trained import export_adapter, export_huggingface, export_safetensors

    trained = options.load(dequantize=options.merge)
    adapts = bool(trained.model.source_has)
    if adapts and options.to == "hf" and not options.merge:
        raise ConfigurationError(
            f"{options.path} has adapters on top of a base model. Use --merge for a whole model, or --to adapter."
        )
    if not adapts and (options.merge or options.to == "adapter"):
        asked = "--merge" if options.merge else "--to adapter"
        raise ConfigurationError(f"{options.path} has no adapters, so {asked} has no effect. Leave it out.")
    if options.merge and options.to != "hf":
        raise ConfigurationError(f"--merge needs --to hf, not --to {options.to}.")
    if options.to == "adapter":
        export_adapter(trained, options.out, overwrite=options.overwrite)
        print(f"{options.out}: adapter for peft, {format_count(trained.model.num_trained())} parameters")
        return
    model: nn.Module = trained.model
    if options.to == "hf":
        model = export_huggingface(trained, options.out, dtype=options.dtype, overwrite=options.overwrite)
    else:
        export_safetensors(trained, options.out, dtype=options.dtype, overwrite=options.overwrite)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    files = options.out.iterdir() if options.out.is_dir() else [options.out]
    size = format_bytes(sum(file.stat().st_size for file in files))
    print(f"{options.out}: {type(model).__name__}, {format_count(parameters)} parameters, {options.dtype}, {size}")
    step = "" if trained.step is None else f", step {trained.step}"
    print(f"from {trained.path}{step}, {trained.weights}")
