"""The runs of `benchmarks.parity.stacked`, by the question that they answer."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Run:
    """The settings of one run. The defaults are those of ``tiny-muon`` at 0.13M parameters and 20 tokens for each."""

    algorithm: str = "streaming"  # or data-parallel
    seed: int = 0
    steps: int = 1300
    optimizer: str = "Muon"
    learning_rate: float = 8e-3
    matrix_lr_ratio: float = 2.5
    momentum: float = 0.85
    betas: tuple[float, float] = (0.97, 0.99)
    newton_schulz_steps: int = 5
    inner_steps: int = 10
    overlap_steps: int = 1
    codec: str = "fp4"
    outer_learning_rate: float = 0.8
    outer_momentum: float = 0.6
    average: str = ""  # the codec of the averaged momenta; "": they are not averaged; "reset": they become 0
    average_every: int = 1  # rounds
    average_feedback: float = 0.0  # the share of the momenta's quantisation error that is sent with the next
    average_adamw: bool = False  # whether AdamW's first moments are averaged, too
    average_change: bool = False  # whether the codec encodes the difference from the last average
    decay: bool = False  # whether the difference has decayed by as much as the momentum since it was sent

    def changes(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, as JSON has them."""
        mine, usual = json.loads(json.dumps([asdict(self), asdict(Run())]))
        return {name: value for name, value in mine.items() if value != usual[name]}


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
        *(way | {"learning_rate": rate} for rate in (1.13e-2, 1.6e-2, 5.6e-3) for way in (DATA_PARALLEL, {}, AVERAGED)),
        seeds=(0,),
    ),
    "moments": each(AVERAGED | {"average_adamw": True}),
    "no overlap": each({"overlap_steps": 0, "average": "float32"}, {"overlap_steps": 0}),
    "iterations": each(
        *(way | {"newton_schulz_steps": steps} for steps in (3, 2, 4) for way in (DATA_PARALLEL, {}, AVERAGED)),
        seeds=(0,),
    ),
}
