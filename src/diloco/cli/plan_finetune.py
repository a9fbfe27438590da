"""``diloco plan --finetune``: what fine-tuning a model takes of memory, and what its rounds send, by rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diloco.algorithm.codec import make_codec
from diloco.cli.tables import columns
from diloco.config.configuration import compose
from diloco.config.finetune import finetune_line, with_steps
from diloco.config.flags import CommandLine
from diloco.train.components import outline
from diloco.train.describe import bytes_per_frozen, bytes_per_trained
from diloco.train.resolve import resolve
from diloco.units import format_bytes, format_count

__all__ = ["finetune_memory", "run"]

RANKS = (8, 16, 64, 0)
TYPES = ("float32", "bfloat16")
CODECS = ("float32", "fp4")


def finetune_memory(folder: Path, rank: int, base_dtype: str = "float32") -> dict[str, Any]:
    """What a replica keeps beside activations, and what a round sends, in bytes.

    Args:
        rank: of the adapters; 0: all weights are trained.
    """
    values: dict[str, Any] = {"data.paths": (Path("chat.jsonl"),), "data.tokenizer": "bytes"}
    if rank:
        values |= {"model.lora_rank": rank, "model.base_dtype": base_dtype}
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
        "frozen_bytes": round(bytes_per_frozen(settings.model) * (total - trained)),
        "trained_bytes": bytes_per_trained(settings) * trained,
        "payload_bytes": {name: make_codec(name).payload_bytes(trained) for name in CODECS},
    }


def run(folder: Path, *, as_json: bool) -> int:
    """Print the table."""
    rows = [finetune_memory(folder, rank, dtype) for rank in RANKS for dtype in (TYPES if rank else TYPES[:1])]
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    header = ["trained", "parameters", "frozen weights", "what is trained", *(f"round, {name}" for name in CODECS)]
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
    print(f"{folder}: memory of a replica beside activations, and what it sends in a round")
    print(columns(header, cells))
    return 0
