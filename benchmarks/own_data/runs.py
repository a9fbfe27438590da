"""The runs of `benchmarks.own_data`, by the question that they answer."""

from dataclasses import dataclass

from benchmarks.parity.stacked_runs import ISOTROPIC, OFTEN, SEEDS, SIGN, Run, Settings, outer


@dataclass(frozen=True)
class SiteRun(Run):
    """A run whose replicas are sites, each with its own text. By default AdamW trains all parameters."""

    algorithm: str = "streaming"  # or data-parallel, or alone: no site communicates
    steps: int = 800
    start: int = 80
    optimizer: str = "AdamW"
    betas: tuple[float, float] = (0.9, 0.95)
    learning_rate: float = 3e-3
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.8
    texts: str = "formats"  # of `benchmarks.own_data.text.KINDS`
    difference: float = 1.0  # of a site's text this part is of its own kind, and the rest of all four kinds
    pooled: bool = False  # each site draws from the text of all
    proximal: float = 0.0  # 1812.06127: each step moves parameters this part, times the rate, towards the global ones
    correction: float = 0.0  # 1910.06378: this part of the last mean minus the own contribution is added over a window
    at_home: str = ""  # parameters with this in their names are not synchronised
    steps_at_home: int = 0  # the last steps, without synchronisation
    joins_at: int = 0  # a step at which another replica takes the last one's place, with its text; 0: none
    joins_with: str = "initial"  # its parameters at home: the initial ones, or the first replica's (donor)
    warmup_at_home: int = 0  # the steps after that in which it trains these alone


POOLED: Settings = {"pooled": True, "difference": 0.0}
CENTRAL: Settings = POOLED | {"algorithm": "data-parallel", "learning_rate": 5.6e-3}
ALONE: Settings = {"algorithm": "alone", "start": 0}
PROJECTS: Settings = {"texts": "projects"}
LONG: Settings = {"inner_steps": 30}
LONGER: Settings = {"inner_steps": 100}
FLAT: Settings = ISOTROPIC | outer(1.2, 0.8)
MUON: Settings = {"optimizer": "Muon", "betas": (0.97, 0.99), "learning_rate": 8e-3} | outer(1.0, 0.6)
HEAD_AT_HOME: Settings = {"at_home": "lm_head"}
EQUAL: Settings = {"difference": 0.0}
WITHOUT_START: Settings = {"start": 0, "momentum_warmup": 53}  # as the package begins over links


def each(*variants: Settings, seeds: tuple[int, ...] = SEEDS) -> list[SiteRun]:
    return [SiteRun(seed=seed, **variant) for seed in seeds for variant in variants]


GROUPS = {
    "answer": each(CENTRAL, EQUAL, {}, ALONE),
    "windows": each(*(length | way for length in (LONGER, LONG) for way in (EQUAL, {})), seeds=(0,)),
    "projects": each(*(PROJECTS | way for way in (CENTRAL, {}, ALONE))),
    "at home": each({"steps_at_home": 50}, {"at_home": "norm"}, HEAD_AT_HOME, seeds=(0,)),
    "head at home": [*each(HEAD_AT_HOME, seeds=(1, 2)), *each(PROJECTS | HEAD_AT_HOME)],
    "who joins at step 400": each(
        *(
            HEAD_AT_HOME | {"joins_at": 400} | way
            for way in ({"warmup_at_home": 10}, {"joins_with": "donor"}, {"warmup_at_home": 40}, {})
        ),
        seeds=(0,),
    ),
    "without a shared start": each(WITHOUT_START, WITHOUT_START | HEAD_AT_HOME),
    "isotropic": each(FLAT, FLAT | EQUAL, seeds=(0,)),
    "drift": each(*(LONGER | way for way in ({"proximal": 1.0}, {"correction": 0.5})), seeds=(0,)),
    "half": each({"difference": 0.5}, ALONE | {"difference": 0.5}, seeds=(0,)),
    "other settings": each(
        SIGN,
        {"overlap_steps": 5},
        MUON,
        MUON | EQUAL,
        OFTEN,
        outer(1.0, 0.0),
        SIGN | EQUAL,
        {"overlap_steps": 5} | EQUAL,
        seeds=(0,),
    ),
    "alone, four times the computing": each(ALONE | {"sequences": 64}, seeds=(0,)),
}
