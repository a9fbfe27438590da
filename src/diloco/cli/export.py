"""``diloco export``: write a trained model for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from diloco.config import parse_options
from diloco.errors import ConfigurationError
from diloco.units import format_bytes, format_count, parse_bytes
from diloco.waiting import waiting_for

__all__ = ["run"]

DESCRIPTION = """Write a trained model for other programs.

--to hf writes a folder for transformers' from_pretrained: safetensors,
configuration and tokeniser. --to safetensors writes one file of parameters, which
--init-from accepts. --to adapter writes the adapter that a fine-tuning run has
trained, for peft; --merge merges it into the base model's weights instead.

Examples:
  diloco export runs/streaming-tiny --to hf exported
  diloco export runs/streaming-tiny --to hf exported --dtype bfloat16 --overwrite
  diloco export runs/streaming-tiny --replica 1 --checkpoint 300 --to hf replica-1
  diloco export runs/streaming-tiny --to safetensors weights.safetensors
  diloco export runs/streaming-llama merged --merge
  diloco export runs/streaming-llama adapter --to adapter --checkpoint 300"""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options of `diloco export`."""

    run: Annotated[Positional[Path], arg(metavar="RUN", help_behavior_hint="")]
    """Run folder (its latest checkpoint) or checkpoint."""
    place: Annotated[Positional[Path], arg(metavar="PLACE", help_behavior_hint="")]
    """Folder (hf) or file (safetensors) to write."""
    to: Literal["hf", "safetensors", "adapter"] = "hf"
    """hf: a transformers folder; safetensors: parameters by their names in diloco; adapter: an adapter for peft."""
    merge: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """hf: merge the adapters of the run into the base model and write a whole model."""
    model: Annotated[str | None, arg(metavar="MODULE:FUNCTION", help_behavior_hint="")] = None
    """For a run with a model of your own: the function that builds it, as in training."""
    checkpoint: Annotated[int | None, arg(metavar="STEP", help_behavior_hint="")] = None
    """Inner step of the checkpoint to load. Default: the latest."""
    replica: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Export the local parameters of this replica. Default: the global parameters."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the weights."""
    max_length: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """hf: maximum sequence length to state in the configuration. Default: the length used in training."""
    max_shard_size: Annotated[str | None, arg(metavar="TEXT", help_behavior_hint="")] = None
    """hf: maximum size of a weights file, such as 500MB (KB, MB, GB or TB). Default: 5GB."""
    overwrite: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """Replace an earlier export."""


def run(arguments: Sequence[str]) -> int:
    """Load the model, write it, and print what was written."""
    given = parse_options(ExportOptions, "export", DESCRIPTION, arguments)
    if given.to == "safetensors":
        for flag, value in (("--max-length", given.max_length), ("--max-shard-size", given.max_shard_size)):
            if value is not None:
                raise ConfigurationError(
                    f"{flag} needs --to hf: --to safetensors writes a single file with parameters only."
                )
    largest = "5GB" if given.max_shard_size is None else given.max_shard_size
    parse_bytes(largest, "--max-shard-size")

    with waiting_for(lambda: f"{given.run} to be loaded and written to {given.place}"):
        _export(given, largest)
    return 0


def _export(given: ExportOptions, largest: str) -> None:
    from diloco.trained import export_adapter, export_huggingface, export_safetensors, load_trained

    trained = load_trained(
        given.run, step=given.checkpoint, replica=given.replica, source=given.model, dequantize=given.merge
    )
    _check_adapters(given, adapts=bool(trained.model.source_has))
    if given.to == "adapter":
        export_adapter(trained, given.place, overwrite=given.overwrite)
        print(f"{given.place}: adapter for peft, {format_count(trained.model.num_trained())} parameters")
        return
    parameters = trained.model.num_parameters()
    if given.to == "hf":
        made = export_huggingface(
            trained,
            given.place,
            dtype=given.dtype,
            max_length=given.max_length,
            max_shard_size=largest,
            overwrite=given.overwrite,
        )
        parameters = sum(parameter.numel() for parameter in made.parameters())
        kind, files = type(made).__name__, list(given.place.iterdir())
    else:
        export_safetensors(trained, given.place, dtype=given.dtype, overwrite=given.overwrite)
        kind, files = type(trained.model).__name__, [given.place]
    size_bytes = sum(file.stat().st_size for file in files)
    print(f"{given.place}: {kind}, {format_count(parameters)} parameters, {given.dtype}, {format_bytes(size_bytes)}")
    step = "" if trained.step is None else f", step {trained.step}"
    print(f"from {trained.path}{step}, {trained.weights}")


def _check_adapters(given: ExportOptions, *, adapts: bool) -> None:
    """Raise `ConfigurationError` if --merge and --to do not fit a model that has adapters, or one that has none."""
    if adapts and given.to == "hf" and not given.merge:
        raise ConfigurationError(
            f"{given.run} has adapters on top of a base model. Use --merge for a whole model, or --to adapter."
        )
    asked = "--merge" if given.merge else "--to adapter"
    if not adapts and (given.merge or given.to == "adapter"):
        raise ConfigurationError(f"{given.run} has no adapters, so {asked} has no effect. Leave it out.")
    if given.merge and given.to != "hf":
        raise ConfigurationError(f"--merge needs --to hf, not --to {given.to}.")
