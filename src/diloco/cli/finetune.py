"""``diloco finetune``: `diloco train` with what suits a model that is there already, and conversations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from diloco.cli.train import for_torchrun, run_line
from diloco.config.configuration import Configuration, compose
from diloco.config.finetune import finetune_line, with_steps
from diloco.config.flags import CommandLine, parse_flags
from diloco.config.keys import flatten
from diloco.config.presets import DEFAULT_PRESET, preset_values
from diloco.errors import ConfigurationError

__all__ = ["parse_arguments", "run"]

DESCRIPTION = """Adapt a model of transformers to conversations, with DiLoCo between replicas.

Trained are adapters (LoRA, --lora.rank), which are all that travels, or with
--full all weights. All flags but --full and --epochs are those of train.

Examples:
  diloco finetune llama --data chat.jsonl              this machine alone
  diloco finetune llama --data chat.jsonl --run mine   others join: it prints how
  diloco finetune llama --data chat.jsonl --full       all weights
  diloco finetune --resume runs/mine                   go on with a stopped run

Leaves an adapter for peft in the run's folder. `diloco generate RUN --chat`
talks to it; `diloco export RUN PLACE --merge` writes a whole model."""


@dataclass(frozen=True, kw_only=True)
class Finetuning(Configuration):
    """A run, and what is asked for of it that its settings follow from."""

    full: bool = False
    """Train all weights instead of adapters."""
    epochs: float = 3.0
    """How often all conversations are learned from, unless --steps is given."""


def run(arguments: Sequence[str]) -> int:
    """Fine-tune; returns 130 when a signal stopped the run and its state was saved."""
    typed, full, epochs = parse_arguments(arguments)
    line = finetune_line(for_torchrun(typed), full=full)
    notes: tuple[str, ...] = ()
    if "checkpoint.resume" not in line.values:
        if epochs is not None and "train.steps" in typed.values:
            raise ConfigurationError(
                f"--epochs {epochs:g} and --steps {typed.values['train.steps']} were both given; use one."
            )
        epochs = Finetuning.epochs if epochs is None else epochs
        if not 0 < epochs < 1e6:
            raise ConfigurationError(f"--epochs {epochs:g} must be a positive number.")
        asked = compose(line)
        swarm = asked.transport.name == "hivemind"
        replicas = asked.swarm.start_replicas if swarm else asked.transport.replicas
        rows = 0
        if "train.steps" not in typed.values:
            from diloco.data.chat import build_chat_corpus

            rows = len(build_chat_corpus(asked.data, asked.train.sequence_length).train) // asked.train.sequence_length
        line, words = with_steps(line, rows, epochs, replicas)
        notes = (words,) if words else ()
    elif full or epochs is not None:
        raise ConfigurationError("--full and --epochs do not go with --resume.")
    return run_line(line, ["finetune", *arguments], notes=notes)


def parse_arguments(arguments: Sequence[str]) -> tuple[CommandLine, bool, float | None]:
    """What was typed after `diloco finetune`: as for `diloco train`, whether --full, and --epochs."""
    shown = flatten(Finetuning()) | preset_values(DEFAULT_PRESET)
    line = parse_flags(Finetuning, "finetune", DESCRIPTION, arguments, shown=shown)
    values = dict(line.values)
    full, epochs = values.pop("full", False), values.pop("epochs", None)
    return dataclasses.replace(line, values=values), full, epochs
