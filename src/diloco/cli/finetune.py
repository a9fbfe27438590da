"""``diloco finetune``: `diloco train` with the preset for fine-tuning an existing model on conversations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diloco.cli.train import run_line, with_torchrun
from diloco.config import CommandLine, Configuration, command_text, compose, flatten, parse_flags, preset_values
from diloco.errors import ConfigurationError

DESCRIPTION = """Fine-tune a transformers model on conversations, with DiLoCo between replicas.

By default only adapters (LoRA, --lora-rank) are trained and exchanged; --full trains
all weights. --help-all shows all flags, which are those of `diloco train`, with the defaults of this command.

Examples:
  diloco finetune llama --data chat.jsonl              on this machine alone
  diloco finetune llama --data chat.jsonl --transport swarm --run mine
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

SHOWN = {
    "preset": None,
    "data.tokenizer": "that of the model",
    "optimizer.learning_rate": "0.0002, or 2e-05 with --full",
    "train.steps": "from --epochs and the data",
    "train.sequence_length": "the longest of the model, at most 1024",
    "sync.inner_steps": "a tenth of the steps, at most 20",
    "sync.outer": "nesterov, or sgd with fewer than 50 rounds",
}
"""The defaults that follow from the data and the model, as the help shows them."""

HELPS = {
    "file": "Folder of a transformers model.",
    "data.paths": "Conversations to train on: .jsonl, .json or .parquet files.",
}

FEW_STEPS = 50  # with fewer steps a model hardly learns, whatever the data


@dataclass(frozen=True, kw_only=True)
class Finetuning(Configuration):
    """The settings of a run, and two options from which some of its settings are derived."""

    full: bool = False
    """Train all weights instead of adapters (--lora-rank 0)."""
    epochs: float = 3.0
    """Number of passes over all conversations. Use this or --steps."""


def run(arguments: Sequence[str]) -> int:
    """Fine-tune; return 130 if a signal stopped the run and its state was saved."""
    line, epochs = parse_arguments(arguments)
    folder, line = line.file, dataclasses.replace(line, file=None)
    if folder is not None and not folder.expanduser().is_dir():
        raise ConfigurationError(
            f"there is no folder {str(folder)!r} with a transformers model. A model of the Hugging Face hub is given "
            "as --model hf:NAME --tokenizer hf:NAME instead."
        )
    typed = ["finetune", *arguments]
    if "checkpoint.resume" in line.values:
        return run_line(line, typed)
    notes: list[str] = []
    line = with_torchrun(line)
    asked = compose(line)
    if "train.steps" not in line.values:
        from diloco.data import build_chat_corpus

        length = asked.train.sequence_length
        rows = len(build_chat_corpus(asked.data, length).train) // length
        sequences = asked.train.batch_size * asked.network.replicas
        steps = line.values["train.steps"] = max(1, math.ceil(epochs * rows / sequences))
        inner_steps = compose(line).sync.inner_steps
        steps = math.ceil(steps / inner_steps) * inner_steps  # so that the last round follows the last step
        line.values.update({"train.steps": steps, "sync.inner_steps": inner_steps})
        asked = compose(line)
        if steps < FEW_STEPS:
            notes.append(
                f"{rows} rows, {sequences} per step and read {epochs:g} times, give only {steps} steps. For more "
                "steps, use a smaller --batch-size, shorter rows (--sequence-length) or more --epochs."
            )
    if asked.sync.outer == "sgd" and "sync.outer" not in line.values:
        notes.append(
            f"The run has only {asked.train.steps // asked.sync.inner_steps} rounds, so the outer optimizer has no "
            "momentum and a learning rate of 1: each round ends in the mean of the replicas' parameters."
        )
    return run_line(line, typed, notes=notes)


def parse_arguments(arguments: Sequence[str]) -> tuple[CommandLine, float]:
    """Return the command line of `diloco train` for the arguments of `diloco finetune`, and the number of epochs.

    The file of the line is the folder of the model.
    """
    shown = flatten(Finetuning()) | preset_values("finetune") | SHOWN
    about: Any = {"shown": shown, "common": COMMON, "metavars": {"file": "MODEL"}, "helps": HELPS}
    typed = parse_flags(Finetuning, "finetune", DESCRIPTION, arguments, **about)
    values, folder = dict(typed.values), typed.file
    full, epochs = values.pop("full", False), values.pop("epochs", None)
    resumes = "checkpoint.resume" in values
    for flag, others, both in (
        ("--full", "--lora-rank", full and "model.lora_rank" in values),
        ("--epochs", "--steps", epochs is not None and "train.steps" in values),
        ("--resume", "a model, --full or --epochs", resumes and (folder or full or epochs is not None)),
    ):
        if both:
            raise ConfigurationError(f"{flag} can't be combined with {others}. Leave one of them out.")
    if resumes:
        return typed, 0.0
    epochs = Finetuning.epochs if epochs is None else epochs
    if not 0 < epochs < 1e6:
        raise ConfigurationError(f"--epochs must be a positive number, got {epochs:g}.")
    if folder is not None and folder.suffix == ".toml":
        raise ConfigurationError(
            f"{folder} is a settings file, but diloco finetune needs the folder of a model. For settings, use "
            f"`{command_text('train', folder)}`."
        )
    if "data.paths" not in values or (folder is None and "model.source" not in values):
        raise ConfigurationError(
            "diloco finetune needs a model and conversations: diloco finetune FOLDER --data chat.jsonl, where FOLDER "
            "holds a transformers model."
        )
    values = {"preset": "finetune"} | ({} if folder is None else {"model.source": f"hf:{folder}"}) | values
    return dataclasses.replace(typed, values=values | ({"model.lora_rank": 0} if full else {})), epochs
