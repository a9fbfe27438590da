"""Run presets: for each model preset, the training settings that belong to it.

A preset is the bottom layer, below a TOML file and flags. Settings that depend on the algorithm (tau, P, codec, merge
rule) are left to `diloco.train.resolve`, so that ``--algorithm diloco`` works with every preset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from diloco.config.keys import Values
from diloco.model import get_preset

__all__ = ["DEFAULT_PRESET", "RUN_PRESETS", "RunPreset", "preset_values"]

DEFAULT_PRESET = "tiny"


@dataclass(frozen=True, kw_only=True)
class RunPreset:
    """The training settings of a preset. Shares are relative to the number of steps."""

    steps: int
    warmup_steps: int  # at most a quarter of the run
    data_parallel_share: float = 0.0
    """Share of the run that is a shared data-parallel start, rounded down to whole steps."""
    values: Mapping[str, Any] = field(default_factory=dict)  # all other keys


TINY = RunPreset(
    # The quick start. A shared start of a third of the run makes such a short comparison fair. H=10 with an outer
    # learning rate of 0.4 came nearest to data-parallel at this size.
    steps=600,
    warmup_steps=50,
    data_parallel_share=1 / 3,
    values={
        "train.batch_size": 4,
        "network.replicas": 4,
        "optimizer.learning_rate": 2e-3,
        "sync.inner_steps": 10,
        "sync.outer_learning_rate": 0.4,
    },
)

TINY_MUON = replace(
    # benchmarks/parity, "Streaming fp4, Muon, AdamW betas .97/.99, momentum .85": 9.8 to 11.7 % below data-parallel
    # AdamW, where TINY is 2.3 to 2.8 % above it. A replica sees a quarter of the batch, so AdamW, which updates all
    # parameters but the hidden matrices, does better with a longer memory of its gradients.
    TINY,
    values={
        **TINY.values,
        "optimizer.name": "Muon",
        "optimizer.learning_rate": 8e-3,  # for AdamW, which updates embedding, head and norms
        "optimizer.arguments": {"matrix_lr_ratio": 2.5, "momentum": 0.85, "betas": (0.97, 0.99)},
        "sync.outer_learning_rate": 0.8,
        "sync.outer_momentum": 0.6,
    },
)

OPEN_DILOCO = {"network.replicas": 8, "train.batch_size": 512, "train.gradient_accumulation": 64}
STREAMING = {"network.replicas": 2, "optimizer.arguments": {"betas": (0.9, 0.99), "weight_decay": 0.1}}

RUN_PRESETS: dict[str, RunPreset] = {
    "tiny": TINY,
    "tiny-muon": TINY_MUON,
    # OpenDiLoCo (2407.07852): 88,000 steps, 8 replicas of 512 sequences, H=500; 1b: 44,000 steps, 4 of 2,048, H=125.
    **{
        name: RunPreset(steps=88_000, warmup_steps=1_000, values={**OPEN_DILOCO, "sync.inner_steps": 500})
        for name in ("2m", "14m", "60m", "150m")
    },
    "1b": RunPreset(
        steps=44_000,
        warmup_steps=1_000,
        values={
            "network.replicas": 4,
            "train.batch_size": 2048,
            "train.gradient_accumulation": 256,
            "sync.inner_steps": 125,
        },
    ),
    # Streaming DiLoCo (2501.18512), Table 2: its token budgets over M=2 replicas, H=100. The paper does not state its
    # batch size. Here the tokens per step grow from 2^18 to 2^20, which its wall-clock times imply at 1B.
    **{
        name: RunPreset(
            steps=tokens // (2 * batch * 1024),
            warmup_steps=1_000,
            values={**STREAMING, "train.batch_size": batch, "train.gradient_accumulation": batch // 8},
        )
        for name, tokens, batch in (
            ("streaming-35m", 700_000_000, 128),
            ("streaming-100m", 1_500_000_000, 128),
            ("streaming-200m", 3_500_000_000, 128),
            ("streaming-300m", 6_000_000_000, 256),
            ("streaming-500m", 11_000_000_000, 256),
            ("streaming-1b", 25_000_000_000, 512),
            ("streaming-4b", 83_000_000_000, 512),
        )
    },
}


def preset_values(name: str, *, steps: int | None = None) -> Values:
    """Return every key that preset ``name`` sets, for a run of ``steps`` steps (default: the preset's own number).

    >>> preset_values("tiny")["train.data_parallel_steps"], preset_values("tiny", steps=30)["optimizer.warmup_steps"]
    (200, 7)

    Raises:
        ConfigurationError: for an unknown name.
    """
    preset = get_preset(name)
    run = RUN_PRESETS[preset.name]
    total = run.steps if steps is None else steps
    values: Values = {
        "preset": preset.name,
        "train.steps": total,
        "train.sequence_length": preset.sequence_length,
        "train.data_parallel_steps": int(total * run.data_parallel_share),
        "optimizer.warmup_steps": min(run.warmup_steps, total // 4),
        "model.arguments": preset.model.arguments(),
    }
    if preset.model.vocab_size is not None:
        values |= {"data.tokenizer": f"bpe:{preset.model.vocab_size}"}
    return values | dict(run.values)
