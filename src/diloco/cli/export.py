"""``diloco export``: a trained model for other programs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from diloco.config.flags import parse_options
from diloco.errors import ConfigurationError

__all__ = ["run"]

DESCRIPTION = """Write a trained model for other programs.

hf: a folder for transformers' from_pretrained: safetensors, configuration,
tokeniser. safetensors: one file of parameters, which --init-from takes.

Examples:
  diloco export runs/streaming-tiny --to hf exported
  diloco export runs/streaming-tiny --to hf exported --dtype bfloat16 --overwrite
  diloco export runs/streaming-tiny --replica 1 --checkpoint 300 --to hf replica-1
  diloco export runs/streaming-tiny --to safetensors weights.safetensors"""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What follows `diloco export`."""

    run: Annotated[Positional[Path], arg(metavar="RUN", help_behavior_hint="")]
    """Run folder (its latest checkpoint) or checkpoint."""
    place: Annotated[Positional[Path], arg(metavar="PLACE", help_behavior_hint="")]
    """Folder (hf) or file (safetensors) to write."""
    to: Literal["hf", "safetensors"] = "hf"
    """For transformers, or parameters by their names here."""
    checkpoint: Annotated[int | None, arg(metavar="STEP", help_behavior_hint="")] = None
    """Inner steps of the checkpoint to take. Default: the latest."""
    replica: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Take this replica's own parameters. Default: the global ones."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the weights."""
    max_length: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """hf: the longest sequence that the model says it serves. Default: what it was trained with."""
    max_shard_size: Annotated[str | None, arg(metavar="TEXT", help_behavior_hint="")] = None
    """hf: largest file of weights, such as 500MB (KB, MB, GB or TB). Default: 5GB."""
    overwrite: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """Replace an earlier export."""


def run(arguments: Sequence[str]) -> int:
    """Load, write, and say what was written."""
    given = parse_options(ExportOptions, "export", DESCRIPTION, arguments)
    if given.to == "safetensors":
        for flag, value in (("--max-length", given.max_length), ("--max-shard-size", given.max_shard_size)):
            if value is not None:
                raise ConfigurationError(
                    f"{flag} needs --to hf: --to safetensors writes one file of nothing but parameters. Nothing was "
                    "exported."
                )
    largest = "5GB" if given.max_shard_size is None else given.max_shard_size
    if not re.fullmatch(r"\d+(\.\d+)?\s*[KMGT]B", largest, re.IGNORECASE):
        raise ConfigurationError(
            f"--max-shard-size {largest} must be a number of KB, MB, GB or TB, such as 500MB. Nothing was exported."
        )

    from diloco.trained.export import export_huggingface, export_safetensors
    from diloco.trained.load import load_trained
    from diloco.units import format_bytes, format_count

    trained = load_trained(given.run, step=given.checkpoint, replica=given.replica)
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
        kind, files = type(made).__name__, list(given.place.iterdir())
    else:
        export_safetensors(trained, given.place, dtype=given.dtype, overwrite=given.overwrite)
        kind, files = type(trained.model).__name__, [given.place]
    size_bytes = sum(file.stat().st_size for file in files)
    print(f"{given.place}: {kind}, {format_count(parameters)} parameters, {given.dtype}, {format_bytes(size_bytes)}")
    step = "" if trained.step is None else f", step {trained.step}"
    print(f"from {trained.path}{step}, {trained.weights}")
    return 0
