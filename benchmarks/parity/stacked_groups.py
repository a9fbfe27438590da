"""The runs of `benchmarks.parity.stacked`, by the question that they answer."""

from __future__ import annotations

from typing import Any

from benchmarks.parity.stacked import Run

SEEDS = (0, 1, 2)
DATA_PARALLEL = {"algorithm": "data-parallel"}
AVERAGED = {"average": "fp4", "average_change": True}
"""What `sync.arguments.average.momentum` does."""


def each(*variants: dict[str, Any], seeds: tuple[int, ...] = SEEDS) -> list[Run]:
    return [Run(seed=seed, **variant) for seed in seeds for variant in variants]


def outer(learning_rate: float, momentum: float) -> dict[str, float]:
    return {"outer_learning_rate": learning_rate, "outer_momentum": momentum}


GROUPS = {
    "averaged momentum": each(DATA_PARALLEL, {}, AVERAGED, {"average": "float32", "decay": True}),
    "outer": each(
        AVERAGED | outer(1.0, 0.6), AVERAGED | outer(0.8, 0.7), AVERAGED | outer(1.0, 0.4), outer(1.0, 0.6), seeds=(0,)
    ),
    "ways": each(
        {"average": "reset", "decay": True},
        {"average": "float32", "overlap_steps": 0},
        {"overlap_steps": 0},
        {"average": "float32", "decay": True, "average_every": 3},
        AVERAGED | {"average_adamw": True},
        {"average": "fp4", "average_feedback": 1.0},
        {"average": "int8", "average_change": True},
        {"average": "float32"},
        seeds=(0,),
    ),
    "rates": each(
        *(
            way | {"learning_rate": rate}
            for rate in (5.6e-3, 1.13e-2, 4e-3, 1.6e-2)
            for way in (DATA_PARALLEL, {}, AVERAGED)
        ),
        seeds=(0,),
    ),
    "iterations": each(
        *(way | {"newton_schulz_steps": steps} for steps in (3, 2, 4) for way in (DATA_PARALLEL, AVERAGED)), seeds=(0,)
    ),
}
