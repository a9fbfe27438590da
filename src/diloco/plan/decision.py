"""What to do about a link: keep the settings, take others, or know that none will do. Pure functions of predictions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from diloco.plan.prediction import INNER_STEPS, Prediction, codecs_by_size, predict, utilization
from diloco.plan.simulate import Deployment, Traffic

ENOUGH = 0.95
"""The utilisation of a whole run from which a link is good enough."""

LEAST_ROUNDS = 10
"""Rounds of each fragment that a proposed H leaves: with fewer, the outer momentum hardly builds up."""

SHORTEST_START = 10
"""Steps of a shared start below which none is proposed."""

_WIDEST = 1e4  # the largest factor by which more bandwidth is looked for
_DAY_S = 86_400.0


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """What a whole run costs: its shared start, which averages gradients in every step, and the rounds after it."""

    steps: int
    start_steps: int
    start_s: float  # wall time of the shared start
    wall_s: float  # of all steps
    compute_utilization: float
    sent_bytes: float  # mean over replicas
    sent_bytes_per_day: float  # the same, in a day of the rounds after the start


def run_cost(rounds: Prediction, gradients: Prediction, steps: int, start_steps: int) -> RunCost:
    """Return the cost of ``steps`` steps, of which the first ``start_steps`` average gradients."""
    rest = steps - start_steps
    start_s, rest_s = start_steps * gradients.step_s, rest * rounds.step_s
    computed_s = start_s * gradients.compute_utilization + rest_s * rounds.compute_utilization
    return RunCost(
        steps=steps,
        start_steps=start_steps,
        start_s=start_s,
        wall_s=start_s + rest_s,
        compute_utilization=computed_s / (start_s + rest_s),
        sent_bytes=start_steps * gradients.mean_sent_bytes_per_step + rest * rounds.mean_sent_bytes_per_step,
        sent_bytes_per_day=rounds.mean_sent_bytes_per_step / rounds.step_s * _DAY_S,
    )


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do: ``keep`` the settings, ``take`` others, or know that the link is too ``slow`` for all of them."""

    verdict: Literal["keep", "take", "slow"]
    rounds: Prediction  # of the H, codec and overlap to use; too slow: of those that wait least
    run: RunCost  # with them, and with the shared start to use
    needed_bits_per_s: float | None = None  # too slow: the slowest link's bandwidth for the settings as given, if any


def decide(traffic: Traffic, deployment: Deployment, steps: int, start_steps: int) -> Decision:
    """Decide for a run of ``steps`` steps, of which ``start_steps`` are a shared start.

    Settings that keep `ENOUGH` of the time for training are kept. Otherwise a longer overlap is tried, then a coarser
    codec, then a larger H, since in this order they cost the least loss; a shared start that is in the way is
    shortened.
    """
    own, gradients = (
        predict(traffic, deployment),
        predict(Traffic.of_gradients(sum(traffic.fragment_sizes)), deployment),
    )
    run = run_cost(own, gradients, steps, start_steps)
    if run.compute_utilization >= ENOUGH:
        return Decision(verdict="keep", rounds=own, run=run)
    *_, last = _choices(traffic, deployment, steps - start_steps)  # waits least
    if utilization(last, deployment) < ENOUGH:
        best = max(predict(last, deployment), own, key=lambda rounds: round(rounds.compute_utilization, 3))
        run, needed = run_cost(best, gradients, steps, start_steps), _needed_bandwidth(traffic, deployment)
        return Decision(verdict="slow", rounds=best, run=run, needed_bits_per_s=needed)
    chosen = next(
        choice
        for choice in _choices(traffic, deployment, steps - start_steps)
        if utilization(choice, deployment) >= ENOUGH
    )
    rounds = predict(chosen, deployment)
    starts = [run_cost(rounds, gradients, steps, start) for start in (*range(start_steps, SHORTEST_START, -1), 0)]
    run = next(cost for cost in starts if cost.compute_utilization >= ENOUGH)
    return Decision(verdict="take", rounds=rounds, run=run)


def _choices(traffic: Traffic, deployment: Deployment, steps: int) -> Iterator[Traffic]:
    """Yield the traffic, then with a longer overlap, a coarser codec and a larger H, in the order of preference."""
    if traffic.gradients:
        yield traffic
        traffic = replace(traffic, gradients=False)  # the whole model is sent every H steps instead
    own, codec = traffic.schedule, traffic.codec
    most = max(own.inner_steps, steps // LEAST_ROUNDS)
    known = codecs_by_size(with_feedback=False)  # who wants that asks for it
    names = [codec.name for codec in known]
    coarser = known[names.index(codec.name) + 1 :] if codec.name in names else []
    for inner_steps in (own.inner_steps, *(H for H in INNER_STEPS if own.inner_steps < H <= most)):
        for sent_as in (codec, *coarser):
            schedule = replace(own, inner_steps=inner_steps, offsets=None)
            changed = replace(traffic, schedule=own if inner_steps == own.inner_steps else schedule, codec=sent_as)
            yield changed
            overlap = _overlap_of_a_round(changed, deployment)
            if own.num_fragments > 1 and overlap > own.overlap_steps:
                yield replace(changed, schedule=replace(changed.schedule, overlap_steps=overlap))


def _overlap_of_a_round(traffic: Traffic, deployment: Deployment) -> int:
    """Return the number of inner steps in which nine rounds in ten end, and one more; at most a quarter of H."""
    longest_s = max(fragment.p90_round_s for fragment in predict(traffic, deployment).fragments)
    return min(math.ceil(longest_s / min(deployment.step_time_s)) + 1, traffic.schedule.inner_steps // 4)


def _needed_bandwidth(traffic: Traffic, deployment: Deployment) -> float | None:
    """Return the bandwidth of the slowest link, to 5 %, at which the traffic would do if all were faster alike.

    It is None if `_WIDEST` times as much would not do, because of the latency.
    """
    low, high = 1.0, _WIDEST
    if curve(traffic, deployment, [high])[0] < ENOUGH:
        return None
    while high / low > 1.05:
        middle = math.sqrt(low * high)
        if curve(traffic, deployment, [middle])[0] >= ENOUGH:
            high = middle
        else:
            low = middle
    return high * min(link.bandwidth_bits_per_s for link in deployment.links)


def curve(traffic: Traffic, deployment: Deployment, factors: Sequence[float]) -> list[float]:
    """Return the compute utilisation with ``factor`` times the bandwidth of every link, for each factor."""
    return [utilization(traffic, _faster(deployment, factor)) for factor in factors]


def _faster(deployment: Deployment, factor: float) -> Deployment:
    links = [replace(link, bandwidth_bits_per_s=link.bandwidth_bits_per_s * factor) for link in deployment.links]
    return replace(deployment, links=tuple(links))
