"""``diloco plan``: find the settings with which replicas reach a compute utilisation on given links."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from diloco.cli.sites import SiteOptions
from diloco.cli.tables import columns
from diloco.config import CommandLine, compose, finetune_line, parse_options, with_steps
from diloco.errors import ConfigurationError
from diloco.train import resolve
from diloco.units import format_bytes, format_count, parse_share

__all__ = ["PlanOptions", "finetune_memory", "run"]

RANKS = (8, 16, 64, 0)
TYPES = ("float32", "bfloat16")
CODECS = ("float32", "fp4")

DESCRIPTION = """Find the settings (method, H, P, tau and codec) with which replicas synchronise most often
and still reach a compute utilisation on given links.

Examples:
  diloco plan --preset 1b --replicas 4 --bandwidth 500Mbit --latency 80ms --step-time 0.8s --device cuda
  diloco plan --preset 35m --measure --peers 10.0.0.2:29400 --config run.toml
  diloco plan --preset 1b --bandwidth 1Gbit --step-time 0.8s --device cuda --price-per-hour 24 --json
  diloco plan --finetune llama

The loss is not predicted. Everything else stays as the preset has it, and what differs
from the preset is listed. If no setting reaches the target, the exit code is 1 and the
command prints what would reach it."""


_DEVICE = (
    "Device of the replicas. With --measure: the device to time, cpu, cuda, cuda:N or auto. Without --measure, the "
    "work of sends and merges is what was measured on a CPU; with cuda it is not counted, since it was not measured "
    "there."
)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(SiteOptions):
    """The options of `diloco plan`."""

    replicas: int = 4
    """Number of replicas (M)."""
    step_time: Annotated[tuple[str, ...], arg(metavar="TEXT...", help_behavior_hint="")] = ()
    """Compute time of one inner step, such as 0.8s; one value for all replicas, or one for each."""
    measure: bool = False
    """Measure what is not given: the preset's inner step on this machine, and the links to --peers."""
    peers: Annotated[tuple[str, ...], arg(metavar="HOST:PORT...", help_behavior_hint="")] = ()
    """With --measure: replicas, or machines that run `diloco doctor --listen`. The plan is for the slowest link."""
    device: Annotated[str, arg(help=_DEVICE)] = "auto"
    target_utilization: str = "95%"
    """Compute utilisation to reach, in per cent."""
    steps: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Inner steps of the run. Default: those of the preset, or 10,000 without a preset."""
    price_per_hour: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Price of one hour of one replica, in any currency."""
    price_per_gb: float = 0.0
    """Price of sending 10^9 bytes."""
    config: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Write the settings to this file, for `diloco train FILE` in one process with emulated links."""
    finetune: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="")] = None
    """Instead of a plan, print memory and payloads of fine-tuning the transformers model in FOLDER, by LoRA rank."""
    json: bool = False
    """Print JSON."""


def run(arguments: Sequence[str]) -> int:
    """Make the plan and print it; return 1 if no setting reaches the target."""
    options = parse_options(PlanOptions, "plan", DESCRIPTION, arguments)
    if options.finetune is not None:
        if options != PlanOptions(finetune=options.finetune, json=options.json):
            raise ConfigurationError("--finetune FOLDER can be combined only with --json.")
        return _plan_finetune(options.finetune, as_json=options.json)
    target = parse_share(options.target_utilization, "--target-utilization")
    _check(options, target)
    from diloco.cli import plan_model

    return plan_model.run(options, target)


def _check(options: PlanOptions, target: float) -> None:
    """Raise `ConfigurationError` for options that can be rejected before anything is measured."""
    if not 0 < target < 1:
        raise ConfigurationError(
            f"--target-utilization must be above 0 and below 100 %, got {options.target_utilization}."
        )
    if options.config is not None and options.preset is None:
        raise ConfigurationError("--config needs --preset NAME: --parameters and --layers are not enough to train.")
    if options.config is not None and not options.config.absolute().parent.is_dir():
        raise ConfigurationError(f"--config {options.config}: there is no folder {options.config.absolute().parent}.")
    if options.measure and options.preset is None and not options.step_time:
        raise ConfigurationError(
            "--measure needs --preset NAME or --step-time: --parameters and --layers are not enough to time a step."
        )
    if options.steps is not None and options.steps < 1:
        raise ConfigurationError(f"--steps must be at least 1, got {options.steps}.")
    if not all(0 <= price < math.inf for price in (options.price_per_hour or 0.0, options.price_per_gb)):
        raise ConfigurationError(
            f"--price-per-hour and --price-per-gb must be numbers of at least 0, got {options.price_per_hour} and "
            f"{options.price_per_gb}."
        )
    if options.device.partition(":")[0] not in ("auto", "cpu", "cuda"):
        raise ConfigurationError(f"--device must be cpu, cuda, cuda:N or auto, got {options.device!r}.")
    if options.peers and (options.bandwidth or not options.measure):
        raise ConfigurationError("--peers has an effect only with --measure, and without --bandwidth.")
    if options.measure and options.step_time and not options.peers:
        raise ConfigurationError(
            "--measure has nothing to measure: leave out --step-time to time a step, or --bandwidth and give --peers."
        )
    if not options.step_time and not options.measure:
        raise ConfigurationError("the time of an inner step is required: give --step-time 0.8s or --measure.")
    if not options.bandwidth and not (options.measure and options.peers):
        raise ConfigurationError(
            "the bandwidth of the links is required: give --bandwidth 500Mbit or --measure --peers HOST:PORT."
        )


def finetune_memory(folder: Path, rank: int, base_dtype: str = "float32") -> dict[str, Any]:
    """Return the memory of a replica without activations, and the payload of a round, in bytes.

    Args:
        rank: the rank of the adapters; 0: all weights are trained.
    """
    from diloco.algorithm import make_codec
    from diloco.train import bytes_per_frozen, bytes_per_trained, outline

    values: dict[str, Any] = {"data.paths": (Path("chat.jsonl"),), "data.tokenizer": "bytes"}
    if rank:
        values |= {"model.lora_rank": rank, "model.arguments.base_dtype": base_dtype}
    typed = CommandLine(file=folder, print_config=False, values=values)
    line, _ = with_steps(finetune_line(typed, full=not rank), rows=1, epochs=1, replicas=1)
    asked = compose(line)
    model = outline(asked, 1)
    settings = resolve(asked, num_layers=model.num_layers, max_sequence_length=model.max_sequence_length)
    trained, total = model.num_trained(), model.num_parameters()
    return {
        "rank": rank,
        "frozen_weights": base_dtype if rank else None,
        "trained": trained,
        "frozen_bytes": round(bytes_per_frozen(settings.model.settings) * (total - trained)),
        "trained_bytes": bytes_per_trained(settings) * trained,
        "payload_bytes": {name: make_codec(name).payload_bytes(trained) for name in CODECS},
    }


def _plan_finetune(folder: Path, *, as_json: bool) -> int:
    """Print the memory that fine-tuning a model needs and the payload of its rounds, by rank."""
    rows = [finetune_memory(folder, rank, dtype) for rank in RANKS for dtype in (TYPES if rank else TYPES[:1])]
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    header = ["trained", "parameters", "frozen weights", "training state", *(f"round, {name}" for name in CODECS)]
    cells = []
    for row in rows:
        frozen = f"{format_bytes(row['frozen_bytes'])} ({row['frozen_weights']})" if row["rank"] else "-"
        cells.append(
            [
                f"LoRA {row['rank']}" if row["rank"] else "all weights",
                format_count(row["trained"]),
                frozen,
                format_bytes(row["trained_bytes"]),
                *(format_bytes(row["payload_bytes"][name]) for name in CODECS),
            ]
        )
    print(f"{folder}: memory of a replica without activations, and the payload that it sends in a round")
    print(columns(header, cells))
    return 0
