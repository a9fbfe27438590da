"""The runs of `benchmarks.parity.stacked`, by the question that they answer."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from diloco.model import DecoderSettings

MODELS = {
    "0.13M": DecoderSettings(vocab_size=257, layers=2, width=64, heads=2, ffn_width=176),
    "0.23M": DecoderSettings(vocab_size=257, layers=4, width=64, heads=2, ffn_width=176),
    "0.3M": DecoderSettings(vocab_size=257, layers=2, width=96, heads=3, ffn_width=304),
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
    start_codec: str = "float32"  # of its gradients; what it drops is sent with the next
    start_replicas: int = 0  # the first ones train the shared start, and the others get their result; 0: all
    opening: int = 0  # the first steps of the outer loop, with the settings below in place of the others
    opening_inner_steps: int = 10
    opening_codec: str = "fp4"
    opening_feedback: float = 0.0  # as `error_feedback`
    opening_rate: float = 1.0  # the outer learning rate; without momentum and overlap
    sequences: int = 16  # of 128 bytes in a step, for all replicas
    replicas: int = 4  # M
    bfloat16: bool = False  # products in bfloat16
    optimizer: str = "Muon"
    learning_rate: float = 8e-3
    final_ratio: float = 0.05  # the last rate divided by the highest
    matrix_lr_ratio: float = 2.5
    momentum: float = 0.85
    momentum_weight: float = 0.0  # 2510.05361: of the momentum beside the gradient in Muon's update; 0: `momentum`
    betas: tuple[float, float] = (0.97, 0.99)
    newton_schulz_steps: int = 5
    noise_gamma: float = 0.0  # 2601.14603: Muon's update is divided by sqrt(update^2 + gamma * variance of gradients)
    row_norms: bool = False  # 2510.05491: after orthogonalisation, rows are divided by their remembered norms
    inner_steps: int = 10
    overlap_steps: int = 1
    overlaps: tuple[int, ...] = ()  # the overlap steps of each replica, if they differ
    fragments: int = 0  # 0: as many as `diloco train` has for this model
    strategy: Literal["strided", "sequential", "balanced"] = "strided"
    row_halves: bool = False  # two fragments, the even and the odd rows of each tensor
    uneven_windows: bool = False  # windows of H / 2 and 3 H / 2 steps, in turn
    window_power: str = ""  # 2609.36662: outer momentum mu^p and rate in proportion; p: "steps" / H, or inner "rates"
    codec: str = "fp4"
    error_feedback: float = 0.0  # the part of what the codec dropped that is sent later
    encoded_gradients: bool = False  # data-parallel replicas encode their gradients in each step after the start
    votes: bool = False  # 2605.16311: data-parallel replicas send the signs of Muon's updates; most decide
    own_factors: bool = False  # data-parallel replicas orthogonalise their own momenta, and average the results
    senders: bool = False  # a value is averaged over the replicas that sent it
    outer_learning_rate: float = 0.8
    outer_momentum: float = 0.6
    others_outer_rate: float = 1.0  # of parameters that are no hidden matrix, times the outer learning rate
    singular_power: float = 1.0  # to which the singular values of the mean of a matrix are raised; its norm stays
    isotropic: bool = False  # the mean of a matrix gets about equal singular values, as in `diloco.algorithm.isotropic`
    outer_schedule: str = ""  # of the outer learning rate: "linear" or "cosine", as `sync.arguments.outer.schedule`
    outer_final_ratio: float = 0.0  # the last outer rate divided by the first
    momentum_warmup: int = 0  # rounds of a fragment in which the outer momentum rises
    evaluated_momentum: float = -1.0  # 2512.17131: of the average that is evaluated, if it is not the outer momentum
    finish: int = 0  # the last steps, whose means move the global parameters by a rate of 1 without momentum
    finish_decay: bool = False  # rate and momentum go there in a straight line over these steps
    finish_overlap: bool = True  # off: a mean of these steps is merged in the step in which it is sent
    finish_codec: str = ""  # of these steps, if it is another
    average: str = ""  # the codec of the averaged momenta's changes; "": they are not averaged
    control: bool = False  # the mean minus the own momentum is added to Muon's updates until the next, in place of that
    orthogonal_mean: float = 0.0  # steps of the window in which the mean of the momenta would have been orthogonalised

    def changes(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, as JSON has them."""
        mine, usual = json.loads(json.dumps([asdict(self), asdict(type(self)())]))
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


TOPK2: Settings = {"codec": "topk2", "error_feedback": 0.95, "senders": True}
SPARSE = TOPK2 | outer(1.0, 0.0)
SUM = outer(2.0, 0.0)
FLATTER = {"singular_power": 0.5}
ISOTROPIC: Settings = {"isotropic": True}
SIGN: Settings = {"codec": "sign", "error_feedback": 1.0}
ENCODED: Settings = DATA_PARALLEL | SIGN | {"encoded_gradients": True}
OFTEN: Settings = {"inner_steps": 2, "overlap_steps": 0} | SUM
GAIN: Settings = outer(1.0, 0.6)
FINISH: Settings = GAIN | {"finish": 60}
ONE: Settings = {"replicas": 1}
EIGHT: Settings = ADAMW | rate(3e-3) | {"replicas": 8}
BATCHES = {8: (5.6e-3, 8e-3), 32: (1.13e-2, 1.6e-2)}  # sequences in a step: rates


def batch(sequences: int) -> Settings:
    """Return the settings of runs on as many tokens with another number of sequences in a step."""
    return {"sequences": sequences, "steps": 20_800 // sequences, "start": 2_080 // sequences}


TINY: Settings = ADAMW | rate(2e-3) | outer(0.4, 0.9) | {"steps": 600}
TINY_MUON: Settings = {"steps": 600}
PLAIN: Settings = {"start": 0, "opening": 200}  # means without momentum in the place of the shared start
PLAIN_SIGN: Settings = PLAIN | {"opening_codec": "sign", "opening_feedback": 1.0}


def rising(rounds: int, learning_rate: float, momentum: float) -> Settings:
    """Return the settings of runs without a shared start, in whose first rounds the outer momentum rises."""
    return {"start": 0, "momentum_warmup": rounds} | outer(learning_rate, momentum)


STARTS: tuple[Settings, ...] = (
    *({"start": 200} | way for way in ({}, {"start_codec": "sign"}, {"start_replicas": 1}, outer(0.7, 0.8))),
    *({"start": 0} | way for way in ({}, outer(1.0, 0.6), outer(1.0, 0.0))),
    *(PLAIN | way for way in ({}, {"opening_inner_steps": 5}, {"opening_rate": 1.6}, outer(0.7, 0.8))),
    PLAIN_SIGN | {"opening_inner_steps": 2, "opening_rate": 2.0},
    *(rising(rounds, 1.0, mu) for rounds, mu in ((20, 0.8), (40, 0.8), (60, 0.8), (40, 0.9), (60, 0.9))),
)


def remembering(momentum: float, weight: float) -> Settings:
    """Return the settings of Muon's update from the gradient and ``weight`` times a momentum of any length."""
    return {"momentum": momentum, "momentum_weight": weight}


SHORT: Settings = {"steps": 600, "start": 200}  # half of the tokens
FAST: Settings = SHORT | rate(1.6e-2)  # the best rate of such runs, for both
LONG: tuple[Settings, ...] = (remembering(0.95, 0.2), remembering(0.98, 0.08))
VOTES: Settings = DATA_PARALLEL | SIGN | {"votes": True}
OWN: Settings = DATA_PARALLEL | {"own_factors": True}
EVERY: Settings = OFTEN | {"inner_steps": 1}
UNEVEN: Settings = FAST | {"uneven_windows": True}
FEWER: Settings = {"steps": 300, "start": 100, "sequences": 32}  # larger batches, as many tokens as `SHORT`
ALONE: Settings = {"inner_steps": 10_000}  # no communication after the shared start

GROUPS = {
    "half length": each(
        *(SHORT | DATA_PARALLEL | rate(r) for r in (1.6e-2, 2.26e-2)),
        *(SHORT | way for way in ({}, rate(1.13e-2) | GAIN, rate(2.26e-2), rate(2.26e-2) | outer(1.0, 0.0))),
        *(FAST | outer(*step) for step in ((1.0, 0.6), (0.6, 0.6), (1.0, 0.0))),
        seeds=(0,),
    ),
    "divided work": [
        *each(*(FAST | way for way in (DATA_PARALLEL, OWN, {}, SIGN | EVERY, SIGN | OFTEN, ONE))),
        *each(*(FAST | way for way in (ONE | outer(1.0, 0.0), SIGN | OFTEN | outer(1.0, 0.0))), seeds=(0,)),
        *each(*(FAST | {"replicas": number} for number in (2, 8))),
        *each(FAST | OWN | {"matrix_lr_ratio": 5.0}, seeds=(0,)),
        *each(OWN | rate(1.6e-2), OWN | rate(2.26e-2)),
        *each(*(SIGN | EVERY | rate(r) for r in (8e-3, 1.13e-2, 1.6e-2)), seeds=(0,)),
    ],
    "shared momentum": each(*(SHORT | AVERAGED | way for way in LONG), SHORT | AVERAGED, FAST | AVERAGED, seeds=(0,)),
    "orthogonal means": each(*(way | AVERAGED | {"orthogonal_mean": 5.0} for way in (SHORT, FAST)), seeds=(0,)),
    "control variates": each(FAST | AVERAGED | {"control": True}, seeds=(0,)),
    "larger batches": each(
        *(FEWER | {"inner_steps": 5} | way | r for r in ({}, rate(1.6e-2)) for way in ({}, AVERAGED)),
        FEWER | DATA_PARALLEL | rate(1.6e-2),
        seeds=(0,),
    ),
    "window powers": each(SHORT | {"window_power": "rates"}, UNEVEN, UNEVEN | {"window_power": "steps"}, seeds=(0,)),
    "half rows": each(*(SHORT | SIGN | OFTEN | way for way in ({"row_halves": True}, {})), seeds=(0,)),
    "votes": each(FAST | VOTES, FAST | ENCODED, SHORT | VOTES, seeds=(0,)),
    "other parameters": each(*(FAST | {"others_outer_rate": part} for part in (0.6, 2.0)), seeds=(0,)),
    "outer schedules": each(FAST | GAIN | {"outer_schedule": "linear", "outer_final_ratio": 0.4}, seeds=(0,)),
    "unknown end": each(*(FAST | {"final_ratio": 1.0} | way for way in (DATA_PARALLEL, {})), seeds=(0,)),
    "fragment sizes": each(*(FAST | {"fragments": number} for number in (1, 3)), seeds=(0,)),
    "unequal overlaps": each(FAST | {"overlaps": (1, 2, 3, 5)}, seeds=(0,)),
    "fragments": each(
        *(
            rate(1.6e-2) | {"model": "0.23M", "steps": 200, "start": 60, "strategy": way}
            for way in ("strided", "sequential")
        ),
        seeds=(0,),
    ),
    "no communication": each(ADAMW | QUICK_START | rate(2e-3) | ALONE, seeds=(0,)),
    "starts": [
        *each(*(TINY | way for way in STARTS), seeds=(0,)),
        *each(*(TINY_MUON | way for way in ({"start": 200}, rising(40, 1.0, 0.6), rising(40, 1.0, 0.8))), seeds=(0,)),
        *each(TINY | {"start": 200}, TINY | rising(40, 1.0, 0.8), seeds=(1, 2)),
    ],
    "starts, 0.87M": [
        *each(*(TINY | QUICK_START | way for way in ({}, rising(40, 1.0, 0.8)))),
        *each(*(QUICK_START | way for way in ({}, rising(40, 1.0, 0.6)))),
        *each(*(TINY | QUICK_START | ISOTROPIC | way for way in (outer(1.2, 0.8), rising(40, 1.2, 0.8)))),
    ],
    "averaged momentum": each(*WAYS),
    "quick start": each(*(QUICK_START | way | rate(r) for r in RATES[1:4] for way in WAYS[:2])),
    "quick start, AdamW": each(
        *(ADAMW | QUICK_START | way | rate(r) for r in (1.4e-3, 2.8e-3) for way in (DATA_PARALLEL, outer(0.4, 0.9))),
        seeds=(0,),
    ),
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
    "batches": each(
        *(batch(number) | way | rate(r) for number, rates in BATCHES.items() for r in rates for way in WAYS[:2]),
        seeds=(0,),
    ),
    "windows": each(
        *({"inner_steps": 5} | way for way in ({}, *(rate(r) | outer(0.6, 0.6) for r in (1.13e-2, 1.6e-2)))),
        *(OFTEN | way for way in ({}, rate(1.13e-2) | outer(1.4, 0.0), TOPK2)),
        {"inner_steps": 1, "overlap_steps": 0} | SUM,
        seeds=(0,),
    ),
    "iterations": each(*(way | {"newton_schulz_steps": 3} for way in WAYS[:2])),
    "noise": each(
        *(way | each for each in ({"noise_gamma": 1.0}, {"noise_gamma": 8.0}, {"row_norms": True}) for way in WAYS[:2]),
        seeds=(0,),
    ),
    "singular values": each(*(ADAMW | rate(3e-3) | outer(0.7, 0.8) | {"singular_power": p} for p in (0.0, 0.5, 1.0))),
    "singular values, other steps": each(
        *(ADAMW | rate(3e-3) | outer(*step) | FLATTER for step in ((2.0, 0.0), (3.0, 0.0), (0.7, 0.6), (1.0, 0.6))),
        ADAMW | rate(3e-3) | outer(2.0, 0.0),
        ADAMW | rate(4e-3) | outer(0.7, 0.8) | FLATTER,
        seeds=(0,),
    ),
    "isotropic": each(*(ADAMW | rate(3e-3) | ISOTROPIC | outer(lr, 0.8) for lr in (0.7, 1.2))),
    "isotropic, quick start": each(ADAMW | QUICK_START | rate(2e-3) | ISOTROPIC | outer(1.2, 0.8)),
    "isotropic, other steps": each(
        *(
            ADAMW | rate(3e-3) | ISOTROPIC | outer(*step)
            for step in ((0.7, 0.6), (1.0, 0.6), (1.0, 0.7), (0.9, 0.8), (1.6, 0.8), (0.7, 0.9), (0.9, 0.9))
        ),
        *(ADAMW | rate(r) | ISOTROPIC | outer(1.2, 0.8) for r in (2e-3, 4e-3)),
        ADAMW | rate(4e-3) | ISOTROPIC | outer(0.7, 0.8),
        *(ADAMW | rate(3e-3) | outer(lr, 0.8) for lr in (0.9, 1.2)),
        *(ADAMW | QUICK_START | rate(2e-3) | ISOTROPIC | outer(*step) for step in ((0.4, 0.9), (0.7, 0.8), (2.0, 0.8))),
        *(ADAMW | QUICK_START | rate(2e-3) | outer(*step) for step in ((0.4, 0.9), (1.2, 0.8))),
        seeds=(0,),
    ),
    "isotropic, one replica": each(
        *(ADAMW | rate(3e-3) | outer(0.7, 0.8) | ONE | way for way in ({}, ISOTROPIC)),
        ADAMW | QUICK_START | rate(2e-3) | outer(1.2, 0.8) | ONE | ISOTROPIC,
        seeds=(0,),
    ),
    "isotropic, eight replicas": each(
        *(EIGHT | outer(1.2, 0.8) | {"inner_steps": 30} | way for way in ({}, ISOTROPIC)), seeds=(0,)
    ),
    "sharper": each(*(outer(1.0, 0.6) | {"singular_power": p} for p in (1.5, 2.0)), seeds=(0,)),
    "sign": each(
        SIGN,
        SIGN | {"inner_steps": 5},
        *(way | OFTEN for way in ({}, SIGN)),
        {"inner_steps": 30},
        ADAMW | rate(3e-3) | outer(0.7, 0.8) | SIGN,
        QUICK_START | SIGN | OFTEN,
    ),
    "sign, other steps": [
        *each(SIGN | OFTEN | rate(1.13e-2)),
        *each(SIGN | OFTEN | outer(2.5, 0.0), seeds=(1, 2)),
        *each(QUICK_START | SIGN, seeds=(0,)),
        *each(ADAMW | rate(3e-3) | outer(1.2, 0.8) | ISOTROPIC | SIGN, seeds=(2,)),
    ],
    "isotropic, Muon": each(ISOTROPIC | outer(1.2, 0.6), ISOTROPIC | rate(4e-3) | outer(1.0, 0.8), seeds=(0,)),
    "encoded gradients": each(
        *(ENCODED | batch(number) | rate(r) for number in (16, 32) for r in (8e-3, 1.6e-2, 2.26e-2)),
        ENCODED | batch(64) | rate(1.6e-2),
        *(ENCODED | {"codec": "topk2"} | rate(r) for r in (5.6e-3, 8e-3, 1.6e-2, 2.26e-2)),
        ENCODED | {"codec": "topk2"} | batch(32) | rate(1.6e-2),
        ENCODED | {"codec": "topk2", "error_feedback": 0.95} | rate(1.6e-2),
        seeds=(0,),
    ),
    "size, quick start": each(
        QUICK_START | {"model": "6M"},
        *(QUICK_START | {"model": "6M"} | DATA_PARALLEL | rate(r) for r in (8e-3, 1.6e-2)),
        seeds=(0,),
    ),
    "finish": [
        *each(FINISH | {"finish_overlap": False}, seeds=(0,)),
        *each(GAIN, FINISH, DATA_PARALLEL | rate(1.6e-2)),
        *each(
            *(FINISH | {"finish": steps, "finish_decay": True} for steps in (60, 120, 240)),
            *(FINISH | {"finish": steps} for steps in (20, 120)),
            FINISH | {"finish_codec": "float32"},
            SIGN | OFTEN | {"finish": 60},
            seeds=(0,),
        ),
        *each(QUICK_START | {"finish": 60}),
        *each(SIGN | OFTEN | {"finish": 60}, seeds=(1, 2)),
        *each(FINISH | {"finish": 120, "finish_decay": True}, seeds=(1, 2)),
        *each(ADAMW | rate(3e-3) | outer(0.7, 0.8) | {"finish": 60}),
    ],
    "finish, other numbers of replicas": each(
        *({"replicas": number} | way for number in (2, 8) for way in (GAIN, FINISH)), seeds=(0,)
    ),
    "finish, ten pairs": each(GAIN, FINISH, DATA_PARALLEL | rate(1.6e-2), seeds=(3, 4, 5, 6, 7, 8, 9)),
    "primal": each({"evaluated_momentum": 0.8}, {"evaluated_momentum": 0.9} | outer(3.0 * (1 - 0.8), 0.8), seeds=(0,)),
    "half a bit": each(
        *(EIGHT | {"inner_steps": h} | way for h in (5, 15) for way in (outer(0.7, 0.8), outer(1.0, 0.0), SPARSE)),
        seeds=(0,),
    ),
    "half a bit, seeds": each(EIGHT | {"inner_steps": 5} | outer(0.7, 0.8), EIGHT | {"inner_steps": 5} | SPARSE),
    "constant rate": each(*(way | {"final_ratio": 1.0} for way in WAYS)),
}


# settings in which runs of one stack may differ
NUMBERS = {"algorithm", "seed", "learning_rate", "final_ratio", "matrix_lr_ratio", "momentum"}
NUMBERS |= {"outer_learning_rate", "outer_momentum"}


def stacks(runs: list[Run], most: int) -> Iterator[list[Run]]:
    """Divide runs into lists of at most ``most`` that can be trained together, data-parallel runs first."""
    alike: dict[Any, list[Run]] = {}
    for run in runs:
        kept = {name: value for name, value in vars(run).items() if name not in NUMBERS}
        kept["average"] = run.average or "fp4"
        alike.setdefault(tuple(kept.values()), []).append(run)
    for some in alike.values():
        for start in range(0, len(some), most):
            yield sorted(some[start : start + most], key=lambda run: run.algorithm != "data-parallel")
