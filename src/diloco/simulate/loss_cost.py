"""The cost of settings in loss relative to data-parallel training, from measurements in papers.

These figures are estimates. Costs are interpolated between the points of the tables in the logarithm of the quantity
and extrapolated beyond them; the source of each `CostPart` states where. Sources:

- 2501.18512 (Streaming DiLoCo), Tables 5 and 6 and the text on overlap and on FP4
- 2503.09799 (Scaling Laws for DiLoCo), the table of losses at H=30
- 2311.08105 (DiLoCo), the table over H
- this project's benchmarks/parity, on a small model, for the cost of codecs
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

__all__ = ["CostPart", "loss_cost"]

STREAMING_SIZES = (35e6, 100e6, 200e6, 300e6, 500e6, 1e9)
DATA_PARALLEL = (3.51, 3.19, 2.97, 2.80, 2.67, 2.49)
H30 = {2: (3.53, 3.21, 2.98, 2.81, 2.67, 2.48), 4: (3.60, 3.25, 3.02, 2.84, 2.70, 2.50)}
H100 = {2: (3.56, 3.22, 3.00, 2.83, 2.69, 2.50), 4: (3.64, 3.29, 3.05, 2.87, 2.73, 2.53)}
"""2501.18512, Table 5 (two replicas) and Table 6 (four): Streaming DiLoCo with FP4 and overlap."""

LAWS_SIZES = (35e6, 90e6, 180e6, 335e6, 550e6, 1.3e9, 2.4e9)
LAWS_DATA_PARALLEL = (3.485, 3.167, 2.950, 2.784, 2.653, 2.460, 2.326)
LAWS = {1: (3.482, 3.162, 2.943, 2.777, 2.645, 2.451, 2.317), 8: (3.621, 3.265, 3.019, 2.841, 2.698, 2.493, 2.351)}
"""2503.09799: DiLoCo at H=30 with one and with eight replicas."""

LONG_WINDOW = 0.0286 / 2.709 / math.log(1000 / 50)
"""2311.08105: H=1000 has 2.9 % more perplexity than H=50, near a loss of 2.709; cost per factor e in H."""

OVERLAP = 0.002 / 10  # 2501.18512: overlaps up to tau=10 cost less than 0.2 % of the loss

CODECS = {"float32": 0.0, "float16": 0.0001, "bfloat16": 0.0001, "int8": 0.0001, "fp4": 0.0004}
"""benchmarks/parity: the largest cost over all seeds; 2501.18512, Fig. 11, shows no change with FP4."""

COARSE_CODECS = {"int2": 0.001, "topk2": 0.049}
"""benchmarks/outer, 20 rounds, with error feedback and outer SGD of learning rate 1, relative to float32. topk2 is
averaged over its senders. int2 cost nothing; 0.1 % is the difference between seeds. 2508.15706 finds no cost of topk2
in runs of hundreds of rounds."""

MEANS = {"bfloat16": 0.0001, "int8": 0.0001, "fp4": 0.0023}
"""benchmarks/means: the largest cost at 4, 8 and 16 replicas. bfloat16 was not measured; it is finer than int8."""


@dataclass(frozen=True)
class CostPart:
    """One part of the cost."""

    what: str  # description of the setting
    cost: float  # relative increase of the loss over data-parallel training
    source: str  # source of the figure


def loss_cost(
    *, parameters: float, num_replicas: int, inner_steps: int, overlap_steps: int, codec: str, means: str = ""
) -> tuple[CostPart, ...]:
    """Return the cost of DiLoCo or Streaming DiLoCo with these settings, as parts that add up.

    Args:
        parameters: the number of parameters of the model.
        num_replicas: M.
        inner_steps: H; 1 means data-parallel training.
        overlap_steps: tau.
        codec: the name of the codec; an unlisted codec counts as the costliest one.
        means: the name of the codec of means, if means are sent encoded.

    >>> parts = loss_cost(parameters=1e9, num_replicas=2, inner_steps=100, overlap_steps=1, codec="fp4")
    >>> [(part.what, f"{part.cost:.2%}") for part in parts]
    [('2 replicas, H = 100', '0.40%'), ('tau = 1', '0.02%'), ('fp4', '0.04%')]
    """
    if inner_steps == 1:
        window = CostPart("gradients at every step", 0.0, "the reference")
    else:
        cost, source = _window(parameters, num_replicas, inner_steps)
        window = CostPart(f"{num_replicas} replicas, H = {inner_steps}", cost, source)
    beyond = ", extrapolated" if overlap_steps > 10 else ""
    overlap = CostPart(f"tau = {overlap_steps}", OVERLAP * overlap_steps, f"2501.18512, ablation of tau{beyond}")
    if codec in COARSE_CODECS:
        lossy = CostPart(f"{codec} with error feedback", COARSE_CODECS[codec], "benchmarks/outer, 20 rounds")
    else:
        lossy = CostPart(codec, CODECS.get(codec, max(CODECS.values())), "benchmarks/parity; 2501.18512, Fig. 11")
    encoded = (
        [CostPart(f"means in {means}", MEANS.get(means, max(MEANS.values())), "benchmarks/means")] if means else []
    )
    return (window, overlap, lossy, *encoded)


@functools.cache  # a plan asks for the same H with every codec and overlap
def _window(parameters: float, num_replicas: int, inner_steps: int) -> tuple[float, str]:
    short = max(0.0, _at_30(parameters, num_replicas))
    if inner_steps <= 30:
        part = math.log(inner_steps) / math.log(30)
        source = "2501.18512, Tables 5 and 6; 2503.09799" + (", interpolated to H = 1" if inner_steps < 30 else "")
        return short * part, source
    by_replicas = [_relative(H100[m], DATA_PARALLEL, STREAMING_SIZES, parameters) for m in (2, 4)]
    at_30 = [_relative(H30[m], DATA_PARALLEL, STREAMING_SIZES, parameters) for m in (2, 4)]
    rise = float(np.interp(math.log(max(2, num_replicas)), np.log([2, 4]), np.subtract(by_replicas, at_30)))
    # the table's value at H = 100 also applies where its loss at H = 30 is below that of data-parallel
    long = _at_30(parameters, num_replicas) + rise if num_replicas > 1 else short + rise
    if inner_steps <= 100:
        part = math.log(inner_steps / 30) / math.log(100 / 30)
        return short + part * max(0.0, long - short), "2501.18512, Tables 5 and 6"
    by_e = max(LONG_WINDOW, rise / math.log(100 / 30))
    return max(short, long) + by_e * math.log(inner_steps / 100), "2501.18512, Tables 5 and 6; 2311.08105, extrapolated"


def _at_30(parameters: float, num_replicas: int) -> float:
    """Return the cost at H=30, interpolated between the measured numbers of replicas."""
    points = {
        1: _relative(LAWS[1], LAWS_DATA_PARALLEL, LAWS_SIZES, parameters),
        2: _relative(H30[2], DATA_PARALLEL, STREAMING_SIZES, parameters),
        4: _relative(H30[4], DATA_PARALLEL, STREAMING_SIZES, parameters),
        8: _relative(LAWS[8], LAWS_DATA_PARALLEL, LAWS_SIZES, parameters),
    }
    inside = float(np.interp(math.log(num_replicas), np.log(list(points)), list(points.values())))
    # beyond eight replicas, which were not measured, each doubling costs as much as from four to eight
    return inside + max(0.0, math.log2(num_replicas / 8)) * max(0.0, points[8] - points[4])


def _relative(losses: tuple[float, ...], reference: tuple[float, ...], sizes: tuple[float, ...], at: float) -> float:
    shares = np.array(losses) / np.array(reference) - 1
    return float(np.interp(math.log(at), np.log(sizes), shares))
