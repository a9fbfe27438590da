"""The defaults of `diloco finetune`: a layer between the presets and the command line."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from diloco.config.configuration import filled_tables, overlay
from diloco.config.flags import CommandLine
from diloco.config.keys import Values
from diloco.errors import ConfigurationError
from diloco.model.settings import parse_source

__all__ = ["finetune_line", "outer_values", "with_steps"]

SHORT_RUN_ROUNDS = 50  # with fewer rounds the outer optimizer has no momentum
FEW_STEPS = 50  # with fewer a model hardly learns, whatever the data

_LONGEST = 1024
_ROUNDS, _LONGEST_WINDOW = 10, 20
_STEPS = 10  # until the data says how many


def finetune_line(line: CommandLine, *, full: bool) -> CommandLine:
    """The same request as a command line of `diloco train`.

    Args:
        line: as typed; its file is the folder of the model.

    Raises:
        ConfigurationError: no model, or no data, or both --full and a rank.
    """
    given = line.values
    if "checkpoint.resume" in given:
        if line.file is not None:
            raise ConfigurationError(
                f"{line.file} was given together with --resume {given['checkpoint.resume']}, whose model goes on. "
                "Leave it out."
            )
        return line
    source = given.get("model.source") if line.file is None else f"hf:{line.file}"
    if source is None or "data.paths" not in given:
        missing = "a model" if source is None else "conversations"
        raise ConfigurationError(
            f"diloco finetune needs {missing}: diloco finetune FOLDER --data chat.jsonl, where FOLDER is a model of "
            "transformers."
        )
    if line.file is not None and line.file.suffix == ".toml":
        raise ConfigurationError(
            f"{line.file} holds the settings of a run, and diloco finetune takes the folder of a model: use diloco "
            f"train {line.file}."
        )
    if full and "model.lora_rank" in given:
        raise ConfigurationError(
            f"--full trains all weights, and --lora.rank {given['model.lora_rank']} adapters beside them. Use one of "
            "them."
        )
    transport = given.get("transport.name")
    values: Values = {
        "model.source": source,
        "model.lora_rank": 0 if full else 16,
        "data.format": "chat",
        "train.steps": _STEPS,
        "train.sequence_length": _sequence_length(source),
        "train.data_parallel_steps": 0,
        "train.batch_size": 8,
        "inner.learning_rate": 2e-5 if full else 2e-4,
        "inner.arguments": {"betas": (0.9, 0.999), "weight_decay": 0.0},
        "fragments.strategy": "balanced",
        "fragments.num_fragments": 1,
        "transport.replicas": 1,
        "evaluation.sample_tokens": 0,
    }
    if transport == "hivemind" or (transport is None and {"swarm.run", "swarm.join"} & given.keys()):
        values |= {"transport.name": "hivemind", "swarm.run": f"finetune-{parse_source(source).label}"}
    return replace(line, file=None, values=overlay(values, given) | filled_tables(values, given))


def with_steps(line: CommandLine, rows: int, epochs: float, replicas: int) -> tuple[CommandLine, str]:
    """The line with its lengths: steps, windows, warm-up, and the outer optimizer that fits their number.

    Args:
        rows: sequences of the training data; 0: the line says how many steps.
        epochs: how often they are learned from.

    Returns:
        The line, and what to know of it in words: how the outer optimizer was chosen, where it was not given, and
        that there are few steps, where their number was not given.
    """
    given = line.values
    sequences = int(given["train.batch_size"]) * replicas
    steps = int(given["train.steps"])
    if rows:
        steps = max(1, math.ceil(epochs * rows / sequences))
    window = int(given.get("schedule.inner_steps", min(_LONGEST_WINDOW, max(1, steps // _ROUNDS))))
    if rows:  # whole windows: the last round is after the last step
        steps = math.ceil(steps / window) * window
    derived = {
        "train.steps": steps,
        "schedule.inner_steps": window,
        "inner.warmup_steps": min(100, steps // 20),
    }
    chosen, words = outer_values(steps // window)
    if any(name.startswith("outer.") for name in given):
        chosen, words = {}, ""
    if rows and steps < FEW_STEPS:
        words += (
            f" {rows} rows, {sequences} in a step and read {epochs:g} times, make {steps} steps, which are few to "
            "learn in: a smaller --train.batch-size, shorter rows (--train.sequence-length) or more --epochs make more."
        )
    values = derived | chosen | given | {"train.steps": steps}
    return replace(line, file=None, values=values), words.strip()


def outer_values(rounds: int) -> tuple[Values, str]:
    """The outer optimizer for a run of so many rounds, and why, in words.

    Nesterov momentum mu makes the outer step `1 / (1 - mu)` times as long, which takes about that many rounds to build
    up and as many to die away: in a short run it overshoots. Without momentum and with a learning rate of 1 the global
    parameters become the mean of the local ones.

    >>> outer_values(12)[0]["outer.name"], outer_values(500)[0]["outer.momentum"]
    ('sgd', 0.6)
    """
    if rounds < SHORT_RUN_ROUNDS:
        return (
            {"outer.name": "sgd", "outer.learning_rate": 1.0},
            f"{rounds} rounds are few: the outer optimizer has no momentum and a learning rate of 1, so that replicas "
            "go on from the mean of what they hold.",
        )
    return (
        {"outer.name": "nesterov", "outer.learning_rate": 0.7, "outer.momentum": 0.6},
        f"{rounds} rounds: the outer optimizer has Nesterov momentum 0.6 and a learning rate of 0.7.",
    )


def _sequence_length(source: str) -> int:
    """As many tokens as the model reads, and no more than is usual for conversations."""
    parsed = parse_source(source)
    with suppress(OSError, ValueError, TypeError):
        config = json.loads((Path(parsed.place).expanduser() / "config.json").read_text("utf-8"))
        return min(_LONGEST, int(config.get("max_position_embeddings") or config.get("n_positions") or _LONGEST))
    return _LONGEST
