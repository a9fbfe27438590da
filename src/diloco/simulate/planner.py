"""A search for the settings with which replicas synchronise most often and still reach a compute utilisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from diloco.algorithm import MeanEncoding, SyncSchedule, make_codec
from diloco.simulate.bandwidth import bandwidth_needed
from diloco.simulate.cluster import Cluster
from diloco.simulate.overheads import Conditions, Overheads
from diloco.simulate.traffic import Traffic, Workload
from diloco.simulate.utilization import Simulated, simulate_cycles
from diloco.transport import Link

__all__ = ["INNER_STEPS", "OVERLAPS", "Candidate", "Plan", "Site", "candidates", "clipped_bytes", "plan", "predict"]

INNER_STEPS = (5, 10, 15, 20, 25, 30, 40, 50, 60, 75, 100, 125, 150, 200, 250, 300, 400, 500, 750, 1000)
"""The values of H to try, up to the largest in the papers."""

OVERLAPS = (0, 1, 2, 3, 5, 7, 10, 15, 20)  # the values of tau to try, up to the largest in the paper

CODECS = ("float32", "bfloat16", "int8", "fp4")  # topk2 also needs error feedback and another average
GRADIENT_CODECS = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Site:
    """The model, replicas and links of the run to plan."""

    workload: Workload  # the model; its step time is not used
    links: tuple[Link, ...]  # one for each replica
    step_time_s: tuple[float, ...]  # compute time of an inner step, one for each replica
    conditions: Conditions = field(default_factory=Conditions)  # conditions of the exchange of contributions
    mean_codec: str = "auto"  # name of the codec of means

    @property
    def overheads(self) -> Overheads:
        """The typical overheads of a run."""
        return self.conditions.overheads(len(self.links) - 1)

    @property
    def careful(self) -> Overheads:
        """Overheads that one round in ten exceeds. A plan has to reach its target with them."""
        return self.conditions.overheads(len(self.links) - 1, careful=True)

    @property
    def positions(self) -> tuple[int, ...]:
        """The replicas to simulate: all of them, or two if all are alike."""
        alike = len(set(self.links)) == len(set(self.step_time_s)) == 1
        return tuple(range(min(2, len(self.links)) if alike else len(self.links)))

    def cluster(self, overheads: Overheads) -> Cluster:
        chosen = self.positions
        return Cluster.of(
            [self.links[position] for position in chosen],
            [self.step_time_s[position] for position in chosen],
            overheads=overheads,
        )


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Settings and the predictions for them."""

    algorithm: str  # data-parallel, diloco or streaming
    inner_steps: int  # H; 1 for data-parallel
    num_fragments: int  # P
    overlap_steps: int  # tau
    codec: str  # name of the codec
    compute_utilization: float  # predicted mean over replicas
    sure_utilization: float  # the same with `Site.careful` overheads
    step_s: float  # predicted wall time of an inner step of the slowest replica
    sent_bytes_per_step: float  # of the replica that sends most
    longest_round_s: float  # upper bound of the time from sending to receiving the average


@dataclass(frozen=True)
class Plan:
    """The result of the search."""

    target: float  # compute utilisation to reach
    choice: (
        Candidate | None
    )  # of the settings that reach the target, the first in the order of `_order`; None if none do
    others: tuple[tuple[Candidate, str], ...]  # the next best settings, and why they were not chosen
    nearest: Candidate  # ``choice``, or the settings with the highest utilisation
    # bandwidth with which ``nearest`` would reach the target; None if it already does, or if no bandwidth suffices
    bandwidth_needed_bits_per_s: float | None
    searched: int  # number of settings that were compared


def candidates(
    site: Site,
    *,
    inner_steps: Sequence[int] = INNER_STEPS,
    overlaps: Sequence[int] = OVERLAPS,
    codecs: Sequence[str] = CODECS,
) -> tuple[Candidate, ...]:
    """Simulate every combination for data-parallel training, DiLoCo (one fragment, no overlap) and Streaming DiLoCo."""
    found = [
        *_simulated(site, "data-parallel", SyncSchedule(inner_steps=1), [c for c in GRADIENT_CODECS if c in codecs])
    ]
    for steps in inner_steps:
        found += _simulated(site, "diloco", SyncSchedule(inner_steps=steps), codecs)
        fragments = min(site.workload.default_fragments, steps)
        for overlap in overlaps:
            if overlap < steps:
                schedule = SyncSchedule(inner_steps=steps, num_fragments=fragments, overlap_steps=overlap)
                found += _simulated(site, "streaming", schedule, codecs)
    return tuple(found)


def predict(site: Site, candidate: Candidate, overheads: Overheads) -> float:
    """Return the compute utilisation of ``candidate`` with other overheads."""
    traffic = _traffic(site, _schedule(candidate), [candidate.codec])
    result = _steady(site, candidate.algorithm, traffic, overheads)
    return float(np.sum(result.compute_utilization))


def clipped_bytes(site: Site, candidate: Candidate) -> float:
    """Return ``sent_bytes_per_step`` as if contributions were clipped, so that each is sent to every replica."""
    if candidate.algorithm == "data-parallel":
        return candidate.sent_bytes_per_step
    parcels = _traffic(site, _schedule(candidate), [candidate.codec], clipping=True).parcels
    return sum(float(parcel.sent_bytes.max()) for parcel in parcels) / candidate.inner_steps


def plan(site: Site, target: float, found: Sequence[Candidate]) -> Plan:
    """Choose the best of ``found``.

    Args:
        site: the site for which ``found`` was simulated.
        target: the compute utilisation, from 0 to 1, to reach with the careful overheads of ``site``.
        found: the result of `candidates`.
    """
    reaching = sorted((c for c in found if c.sure_utilization >= target), key=_order)
    nearest = reaching[0] if reaching else max(found, key=lambda c: (c.sure_utilization, -c.sent_bytes_per_step))
    needed = None
    if not reaching:
        traffic = _traffic(site, _schedule(nearest), [nearest.codec])
        (answer,) = bandwidth_needed(traffic, site.cluster(site.careful), [target])
        needed = answer.bandwidth_bits_per_s
    choice = reaching[0] if reaching else None
    others = tuple(_others(found, target, choice)) if choice else ()
    return Plan(target, choice, others, nearest, needed, len(found))


def _order(candidate: Candidate) -> tuple[float, ...]:
    """Return a sort key: the smallest H, then the smallest tau, the fewest bytes and the highest utilisation."""
    sent, sure = candidate.sent_bytes_per_step, candidate.sure_utilization
    return (candidate.inner_steps, candidate.overlap_steps, sent, -sure)


def _others(found: Sequence[Candidate], target: float, choice: Candidate) -> list[tuple[Candidate, str]]:
    """Return the best candidate of each other algorithm and codec: those that reach the target, the fewest bytes first,
    then the others, the highest utilisation first."""
    kinds: dict[tuple[str, str], list[Candidate]] = {}
    for candidate in found:
        kinds.setdefault((candidate.algorithm, candidate.codec), []).append(candidate)
    reaching, missing = list[Candidate](), list[Candidate]()
    for members in kinds.values():
        enough = [c for c in members if c.sure_utilization >= target and c != choice]
        if enough:
            reaching.append(min(enough, key=_order))
        elif choice not in members:
            missing.append(max(members, key=lambda c: c.sure_utilization))
    return [
        *((c, _why_not(c, choice)) for c in sorted(reaching, key=lambda c: c.sent_bytes_per_step)),
        *((c, f"reaches {c.sure_utilization:.1%} at most") for c in sorted(missing, key=lambda c: -c.sure_utilization)),
    ]


def _why_not(candidate: Candidate, choice: Candidate) -> str:
    if candidate.inner_steps != choice.inner_steps:
        return f"synchronises every {candidate.inner_steps} steps instead of {choice.inner_steps}"
    if candidate.overlap_steps != choice.overlap_steps:
        return f"merges after {candidate.overlap_steps} steps instead of {choice.overlap_steps}"
    ratio = candidate.sent_bytes_per_step / max(1.0, choice.sent_bytes_per_step)
    return f"sends {ratio:.1f} times as many bytes" if ratio >= 1.05 else "computes no more of the time"


def _schedule(candidate: Candidate) -> SyncSchedule:
    return SyncSchedule(
        inner_steps=candidate.inner_steps,
        num_fragments=candidate.num_fragments,
        overlap_steps=candidate.overlap_steps,
    )


def _traffic(site: Site, schedule: SyncSchedule, codecs: Sequence[str], *, clipping: bool = False) -> Traffic:
    encoders, mean = [make_codec(name) for name in codecs], MeanEncoding.of(site.mean_codec)
    uplinks = [link.uplink for link in site.links] if site.conditions.measures_uplinks else ()
    return site.workload.traffic(
        schedule, encoders, len(site.links), positions=site.positions, clipping=clipping, mean=mean, uplinks=uplinks
    )


def _steady(site: Site, algorithm: str, traffic: Traffic, overheads: Overheads) -> Simulated:
    """Simulate one cycle with all codecs at once. For data-parallel, the best case: all work is hidden."""
    if algorithm == "data-parallel":
        overheads = replace(overheads, average_s_per_value=0.0, send_s_per_value=0.0, merge_s_per_value=0.0)
    return simulate_cycles(traffic, site.cluster(overheads), cycles=1)


def _simulated(site: Site, algorithm: str, schedule: SyncSchedule, codecs: Sequence[str]) -> list[Candidate]:
    """Simulate one schedule with all codecs at once, as scenarios."""
    if not codecs:
        return []
    traffic = _traffic(site, schedule, codecs)
    result, careful = (_steady(site, algorithm, traffic, overheads) for overheads in (site.overheads, site.careful))
    reached, sure = (np.broadcast_to(each.compute_utilization, len(codecs)) for each in (result, careful))
    walls = np.broadcast_to(result.wall_s, len(codecs))
    sent = np.broadcast_to(result.sent_bytes.max(-1), len(codecs))
    # a round for which no replica waited ended within the overlap
    longest = np.broadcast_to(careful.longest_wait_s.max(-1), len(codecs))
    overlapped_s = schedule.overlap_steps * max(site.step_time_s)
    return [
        Candidate(
            algorithm=algorithm,
            inner_steps=schedule.inner_steps,
            num_fragments=schedule.num_fragments,
            overlap_steps=schedule.overlap_steps,
            codec=codec,
            compute_utilization=float(reached[index]),
            sure_utilization=min(float(sure[index]), float(reached[index])),  # guard against round-off
            step_s=float(walls[index]) / result.steps,
            sent_bytes_per_step=float(sent[index]) / result.steps,
            longest_round_s=float(longest[index]) + overlapped_s,
        )
        for index, codec in enumerate(codecs)
    ]
