"""The defaults of `diloco finetune`: a layer between the presets and the command line."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from diloco.config.configuration import overlay
from diloco.config.flags import CommandLine, command_text
from diloco.config.keys import Values
from diloco.errors import ConfigurationError
from diloco.model import parse_source

__all__ = ["SHOWN", "finetune_line", "outer_values", "with_steps"]

SHORT_RUN_ROUNDS = 50  # with fewer rounds the outer optimizer has no momentum
FEW_STEPS = 50  # with fewer steps a model hardly learns, whatever the data

_LONGEST = 1024  # maximum sequence length by default
_ROUNDS, _LONGEST_WINDOW = 10, 20  # H is a tenth of the steps by default, and at most 20
_STEPS = 10  # a placeholder until the number of steps follows from the data


def finetune_line(line: CommandLine, *, full: bool) -> CommandLine:
    """Return the command line of `diloco train` for a command line of `diloco finetune`.

    Args:
        line: the command line as typed; its file is the folder of the model.

    Raises:
        ConfigurationError: if there is no model or no data, or if --full and a rank are both given.
    """
    given = line.values
    if "checkpoint.resume" in given:
        if line.file is not None:
            raise ConfigurationError(
                f"{line.file} cannot be combined with --resume {given['checkpoint.resume']}, which resumes the run "
                "with its own model. Leave the folder out."
            )
        return line
    source = given.get("model.source") if line.file is None else f"hf:{line.file}"
    if source is None or "data.paths" not in given:
        missing = "a model" if source is None else "conversations"
        raise ConfigurationError(
            f"diloco finetune needs {missing}: diloco finetune FOLDER --data chat.jsonl, where FOLDER holds a "
            "transformers model."
        )
    if line.file is not None and line.file.suffix == ".toml":
        raise ConfigurationError(
            f"{line.file} is a settings file, but diloco finetune needs the folder of a model. For settings, use "
            f"`{command_text('train', line.file)}`."
        )
    if full and "model.lora_rank" in given:
        raise ConfigurationError(
            f"--full trains all weights and --lora-rank {given['model.lora_rank']} trains adapters instead. Use only "
            "one of them."
        )
    values: Values = {
        **usual_values(full=full),
        "model.source": source,
        "train.steps": _STEPS,
        "train.sequence_length": _sequence_length(source),
    }
    if given.get("network.transport") == "hivemind":
        values |= {"network.run": f"finetune-{parse_source(source).label}"}
    return replace(line, file=None, values=overlay(values, given))


def usual_values(*, full: bool) -> Values:
    """Return the defaults that do not depend on the model and the data."""
    return {
        "model.lora_rank": 0 if full else 16,
        "data.format": "chat",
        "train.data_parallel_steps": 0,
        "train.batch_size": 8,
        "optimizer.learning_rate": 2e-5 if full else 2e-4,
        "optimizer.arguments": {"betas": (0.9, 0.999), "weight_decay": 0.0},
        "sync.fragment_strategy": "balanced",
        "sync.num_fragments": 1,
        "network.replicas": 1,
        "evaluation.sample_prompts": (),
    }


SHOWN: Values = {
    **usual_values(full=False),
    "preset": None,
    "model.lora_rank": "16, or 0 with --full",
    "optimizer.learning_rate": "0.0002, or 2e-05 with --full",
    "data.tokenizer": "that of the model",
    "train.steps": "from --epochs and the data",
    "train.sequence_length": f"the longest of the model, at most {_LONGEST}",
    "sync.inner_steps": f"a tenth of the steps, at most {_LONGEST_WINDOW}",
    "optimizer.warmup_steps": "a twentieth of the steps, at most 100",
    "sync.outer_learning_rate": f"0.7, or 1 with fewer than {SHORT_RUN_ROUNDS} rounds",
    "sync.outer_momentum": 0.6,
    "sync.outer": f"nesterov, or sgd with fewer than {SHORT_RUN_ROUNDS} rounds",
}
"""The defaults as the help shows them."""


def with_steps(line: CommandLine, rows: int, epochs: float, replicas: int) -> tuple[CommandLine, str]:
    """Return the line with its steps, H, warm-up, and an outer optimizer that suits the number of rounds.

    Args:
        rows: number of training sequences; 0: the line gives the number of steps.
        epochs: number of passes over the rows.

    Returns:
        The line, and a note for the user: which outer optimizer was chosen, if none was given, and a warning if the
        data gives few steps.
    """
    given = line.values
    sequences = int(given["train.batch_size"]) * replicas
    steps = int(given["train.steps"])
    if rows:
        steps = max(1, math.ceil(epochs * rows / sequences))
    window = int(given.get("sync.inner_steps", min(_LONGEST_WINDOW, max(1, steps // _ROUNDS))))
    if rows:  # round up to whole windows, so that the last round follows the last step
        steps = math.ceil(steps / window) * window
    derived = {
        "train.steps": steps,
        "sync.inner_steps": window,
        "optimizer.warmup_steps": min(100, steps // 20),
    }
    chosen, words = outer_values(steps // window)
    if any(name.startswith("sync.outer") for name in given) or "outer" in given.get("sync.arguments", {}):
        chosen, words = {}, ""
    if rows and steps < FEW_STEPS:
        words += (
            f" {rows} rows, {sequences} per step and read {epochs:g} times, give only {steps} steps. For more steps, "
            "use a smaller --batch-size, shorter rows (--sequence-length) or more --epochs."
        )
    values = derived | chosen | given | {"train.steps": steps}
    return replace(line, file=None, values=values), words.strip()


def outer_values(rounds: int) -> tuple[Values, str]:
    """Return the outer optimizer for a run of ``rounds`` rounds, and a sentence that explains the choice.

    Nesterov momentum mu makes the outer step `1 / (1 - mu)` times as long. It takes about that many rounds to build up
    and as many to decay, so a short run overshoots. Without momentum and with a learning rate of 1, the global
    parameters become the mean of the local ones.

    >>> outer_values(12)[0]["sync.outer"], outer_values(500)[0]["sync.outer_momentum"]
    ('sgd', 0.6)
    """
    if rounds < SHORT_RUN_ROUNDS:
        return (
            {"sync.outer": "sgd", "sync.outer_learning_rate": 1.0},
            f"The run has only {rounds} rounds, so the outer optimizer has no momentum and a learning rate of 1: after "
            "each round the replicas continue from the mean of their parameters.",
        )
    return (
        {"sync.outer": "nesterov", "sync.outer_learning_rate": 0.7, "sync.outer_momentum": 0.6},
        f"The run has {rounds} rounds; the outer optimizer has Nesterov momentum 0.6 and a learning rate of 0.7.",
    )


def _sequence_length(source: str) -> int:
    """Return the maximum context of the model, at most 1024 tokens."""
    parsed = parse_source(source)
    with suppress(OSError, ValueError, TypeError):
        config = json.loads((Path(parsed.place).expanduser() / "config.json").read_text("utf-8"))
        return min(_LONGEST, int(config.get("max_position_embeddings") or config.get("n_positions") or _LONGEST))
    return _LONGEST
