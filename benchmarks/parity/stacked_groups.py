"""The runs of `benchmarks.parity.stacked`, by the question that they answer."""

from __future__ import annotations

from typing import Any

from benchmarks.parity.stacked import Run

SEEDS = (0, 1, 2)


def each(*variants: dict[str, Any], seeds: tuple[int, ...] = SEEDS) -> list[Run]:
    return [Run(seed=seed, **variant) for seed in seeds for variant in variants]


KEY = {"average": "fp4", "average_change": True}

GROUPS = {
    "averaged momentum": each(
        {"algorithm": "data-parallel"}, {}, {"average": "float32", "decay": True}, KEY, seeds=(0,)
    )
    + each({"algorithm": "data-parallel"}, {}, KEY, seeds=(1, 2))
    + each({"average": "float32", "decay": True}, seeds=(1, 2)),
}
