"""Run presets: the training settings of ``presets.toml``, and what follows from the length of the run and its model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from diloco.config.keys import Values
from diloco.config.toml import read_tables, typed_values
from diloco.model import get_preset, parse_source
from diloco.train import RunSettings

DEFAULT_PRESET = "tiny"
FINETUNE = "finetune"  # has no model of its own

_SHORT_RUN_ROUNDS = 50  # with fewer rounds the outer optimizer has no momentum
_LONGEST = 1024  # maximum sequence length of fine-tuning by default


def preset_values(name: str, asked: Mapping[str, Any] = {}) -> Values:
    """Return every key that preset ``name`` sets.

    Args:
        asked: the values in the layers above, such as the number of steps.

    >>> preset_values("tiny")["train.data_parallel_steps"]
    200
    >>> preset_values("tiny", {"train.steps": 30})["optimizer.warmup_steps"]
    7

    Raises:
        ConfigurationError: for an unknown name.
    """
    preset = None if name == FINETUNE else get_preset(name)
    name = name if preset is None else preset.name
    tables = read_tables(Path(__file__).with_name("presets.toml"))
    values: Values = {"preset": name} | typed_values(tables[name], RunSettings, name)
    if preset is None:
        return values | _finetune_values(asked)
    own = values["train.steps"]
    steps = asked.get("train.steps", own)
    values |= {
        "train.steps": steps,
        "train.sequence_length": preset.sequence_length,
        "train.data_parallel_steps": steps * values.get("train.data_parallel_steps", 0) // own,
        "optimizer.warmup_steps": min(values["optimizer.warmup_steps"], steps // 4),
        "model.arguments": preset.model.arguments(),
    }
    return values if preset.model.vocab_size is None else values | {"data.tokenizer": f"bpe:{preset.model.vocab_size}"}


def _finetune_values(asked: Mapping[str, Any]) -> Values:
    """Return what follows from the number of steps, the model and its adapters.

    Nesterov momentum mu makes the outer step `1 / (1 - mu)` times as long. It takes about that many rounds to build up
    and as many to decay, so a short run overshoots. Without momentum and with a learning rate of 1, the global
    parameters become the mean of the local ones.
    """
    steps = asked.get("train.steps", 10)
    inner_steps = asked.get("sync.inner_steps", min(20, max(1, steps // 10)))
    values: Values = {
        "train.steps": steps,
        "train.sequence_length": _LONGEST,
        "sync.inner_steps": inner_steps,
        "optimizer.warmup_steps": min(100, steps // 20),
    }
    if not any(key.startswith("sync.outer") for key in asked) and "outer" not in asked.get("sync.arguments", {}):
        short = {"sync.outer": "sgd", "sync.outer_learning_rate": 1.0}
        long = {"sync.outer": "nesterov", "sync.outer_learning_rate": 0.7, "sync.outer_momentum": 0.6}
        values |= short if steps < _SHORT_RUN_ROUNDS * inner_steps else long
    if asked.get("model.lora_rank") == 0:  # all weights are trained
        values["optimizer.learning_rate"] = 2e-5
    if asked.get("model.source") is not None:
        source = parse_source(asked["model.source"])
        with suppress(OSError, ValueError, TypeError):
            config = json.loads((Path(source.place).expanduser() / "config.json").read_text("utf-8"))
            longest = config.get("max_position_embeddings") or config.get("n_positions") or _LONGEST
            values["train.sequence_length"] = min(_LONGEST, int(longest))
        if asked.get("network.transport") == "hivemind":
            values["network.run"] = f"finetune-{source.label}"
    return values
