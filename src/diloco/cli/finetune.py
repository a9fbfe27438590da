"""``diloco finetune``: `diloco train` with defaults for fine-tuning an existing model on conversations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from diloco.cli.train import run_line, torchrun_values
from diloco.config import SHOWN, CommandLine, Configuration, compose, finetune_line, flatten, parse_flags, with_steps
from diloco.errors import ConfigurationError

__all__ = ["parse_arguments", "run"]

DESCRIPTION = """Fine-tune a transformers model on conversations, with DiLoCo between replicas.

By default only adapters (LoRA, --lora-rank) are trained and exchanged; --full trains
all weights. --help-all shows all flags, which are those of `diloco train`, with the defaults of this command.

Examples:
  diloco finetune llama --data chat.jsonl              on this machine alone
  diloco finetune llama --data chat.jsonl --transport hivemind --run mine
                                                       with others; prints how to join
  diloco finetune llama --data chat.jsonl --full       all weights
  diloco finetune --resume runs/mine                   continue a stopped run

The run's folder gets an adapter for peft. `diloco generate RUN --chat` chats with
the model, and `diloco export RUN --out PATH --merge` writes it as a whole model."""


COMMON = (
    *("data.paths", "epochs", "full", "model.lora_rank", "model.quantization", "optimizer.learning_rate"),
    *("train.steps", "train.batch_size", "train.sequence_length", "train.precision", "data.format"),
    *("network.replicas", "network.transport", "network.run", "network.join", "out", "checkpoint.resume"),
)
"""The settings that --help shows."""


HELPS = {
    "data.paths": "Conversations to train on: .jsonl, .json or .parquet files.",
    "data.format": "chat; or a Jinja file to use instead of the chat template of the model's tokenizer.",
    "model.lora_rank": "Rank of the adapters. 0: train all weights.",
    "optimizer.learning_rate": "Peak learning rate.",
    "train.steps": "Inner steps of the whole run.",
}


@dataclass(frozen=True, kw_only=True)
class Finetuning(Configuration):
    """The settings of a run, and two options from which some of its settings are derived."""

    full: bool = False
    """Train all weights instead of adapters."""
    epochs: float = 3.0
    """Number of passes over all conversations. Use this or --steps."""


def run(arguments: Sequence[str]) -> int:
    """Fine-tune; return 130 if a signal stopped the run and its state was saved."""
    typed, full, epochs = parse_arguments(arguments)
    values = torchrun_values(typed.values) | typed.values
    line = finetune_line(dataclasses.replace(typed, values=values), full=full)
    notes: tuple[str, ...] = ()
    if "checkpoint.resume" not in line.values:
        if epochs is not None and "train.steps" in typed.values:
            raise ConfigurationError(
                f"--epochs {epochs:g} and --steps {typed.values['train.steps']} were both given; use only one of them."
            )
        epochs = Finetuning.epochs if epochs is None else epochs
        if not 0 < epochs < 1e6:
            raise ConfigurationError(f"--epochs must be a positive number, got {epochs:g}.")
        if typed.file is not None and not typed.file.expanduser().is_dir():
            raise ConfigurationError(
                f"there is no folder {str(typed.file)!r} with a transformers model. A model of the Hugging Face hub is "
                "given as --model hf:NAME --tokenizer hf:NAME instead."
            )
        asked = compose(line)
        rows = 0
        if "train.steps" not in typed.values:
            from diloco.data import build_chat_corpus

            rows = len(build_chat_corpus(asked.data, asked.train.sequence_length).train) // asked.train.sequence_length
        line, words = with_steps(line, rows, epochs, asked.network.replicas)
        notes = (words,) if words else ()
    elif full or epochs is not None:
        raise ConfigurationError(
            "--full and --epochs cannot be combined with --resume: a resumed run keeps its settings. Leave them out."
        )
    return run_line(line, ["finetune", *arguments], notes=notes)


def parse_arguments(arguments: Sequence[str]) -> tuple[CommandLine, bool, float | None]:
    """Parse the arguments of `diloco finetune`: the command line of `diloco train`, --full, and --epochs if given."""
    line = parse_flags(
        Finetuning,
        "finetune",
        DESCRIPTION,
        arguments,
        shown=flatten(Finetuning()) | SHOWN,
        place=("MODEL", "Folder of a transformers model."),
        common=COMMON,
        helps=HELPS,
    )
    values = dict(line.values)
    full, epochs = values.pop("full", False), values.pop("epochs", None)
    return dataclasses.replace(line, values=values), full, epochs
