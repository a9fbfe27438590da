"""The runs of `benchmarks.parity.stacked`, by the question that they answer."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from diloco.model import DecoderSettings

MODELS = {
    "0.13M": DecoderSettings(vocab_size=257, layers=2, width=64, heads=2, ffn_width=176),
    "0.87M": DecoderSettings(vocab_size=257, ffn_width=352),
    "6M": DecoderSettings(vocab_size=257, layers=8, width=256, heads=8, ffn_width=704),
}


@dataclass(frozen=True)
class Run:
    """The settings of one run. The defaults are those of ``tiny-muon`` at 0.13M parameters and 20 tokens for each."""

    algorithm: str = "streaming"  # or data-parallel
    model: str = "0.13M"  # of `MODELS`
    seed: int = 0
    steps: int = 1300
    start: int = 130  # the steps of the shared start
    sequences: int = 16  # of 128 bytes in a step, for all replicas
    bfloat16: bool = False  # products in bfloat16
    optimizer: str = "Muon"
    learning_rate: float = 8e-3
    final_ratio: float = 0.05  # the last rate divided by the highest
    matrix_lr_ratio: float = 2.5
    momentum: float = 0.85
    betas: tuple[float, float] = (0.97, 0.99)
    newton_schulz_steps: int = 5
    inner_steps: int = 10
    overlap_steps: int = 1
    codec: str = "fp4"
    outer_learning_rate: float = 0.8
    outer_momentum: float = 0.6
    average: str = ""  # the codec of the averaged momenta's changes; "": they are not averaged

    def changes(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, as JSON has them."""
        mine, usual = json.loads(json.dumps([asdict(self), asdict(Run())]))
        return {name: value for name, value in mine.items() if value != usual[name]}


Settings = dict[str, Any]
SEEDS = (0, 1, 2)
DATA_PARALLEL: Settings = {"algorithm": "data-parallel"}
AVERAGED = {"average": "fp4"}


def each(*variants: Settings, seeds: tuple[int, ...] = SEEDS) -> list[Run]:
    return [Run(seed=seed, **variant) for seed in seeds for variant in variants]


def outer(learning_rate: float, momentum: float) -> Settings:
    return {"outer_learning_rate": learning_rate, "outer_momentum": momentum}


WAYS: tuple[Settings, ...] = (DATA_PARALLEL, {}, AVERAGED)
ADAMW: Settings = {"optimizer": "AdamW", "betas": (0.9, 0.95)}
QUICK_START: Settings = {"model": "0.87M", "steps": 600, "start": 200}
SIZE: Settings = {"model": "6M", "steps": 900, "start": 90, "sequences": 64, "bfloat16": True}
RATES = (5.6e-3, 8e-3, 1.13e-2, 1.6e-2, 2.26e-2)


def rate(learning_rate: float) -> Settings:
    return {"learning_rate": learning_rate}


GROUPS = {
    "averaged momentum": each(*WAYS),
    "quick start": each(*(QUICK_START | way | rate(r) for r in RATES[:3] for way in WAYS)),
    "rates": each(*(way | rate(r) for r in RATES for way in WAYS)),
    "gains": each(
        *(way | rate(r) | outer(lr, 0.6) for r in RATES[:3] for lr in (0.6, 1.0) for way in ({}, AVERAGED)),
        *(way | outer(lr, mu) for lr, mu in ((0.8, 0.7), (1.0, 0.4)) for way in ({}, AVERAGED)),
    ),
    "momentum": each(*(way | {"momentum": 0.9} for way in WAYS)),
    "AdamW": each(
        *(
            ADAMW | way | rate(r)
            for r in (2e-3, 3e-3, 4e-3, 5.6e-3, 8e-3)
            for way in (DATA_PARALLEL, outer(0.7, 0.8), outer(0.7, 0.6))
        )
    ),
    "size": each(*(SIZE | way | rate(r) for r in (4e-3, 8e-3) for way in WAYS), seeds=(0, 1)),
    "no overlap": each(*(way | {"overlap_steps": 0} for way in ({}, AVERAGED))),
    "iterations": each(*(way | {"newton_schulz_steps": n} for n in (3, 4) for way in WAYS)),
    "constant rate": each(*(way | {"final_ratio": 1.0} for way in WAYS)),
}
