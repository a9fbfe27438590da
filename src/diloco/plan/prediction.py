"""What a run costs on its links: utilisation, bytes and waiting of its settings, and of others in their place."""

import math
from dataclasses import dataclass, replace

from diloco.algorithm import CODECS, Codec, make_codec
from diloco.plan.simulate import IDEAL, Deployment, Parcel, Simulated, Traffic, simulate

INNER_STEPS = (10, 20, 50, 100, 200, 500, 1000)  # the values of H in a table, up to the largest in the papers


@dataclass(frozen=True, kw_only=True)
class FragmentCost:
    """The rounds of one fragment."""

    fragment: int  # p
    values: int
    first_step: int  # inner step after which it is first sent
    sent_bytes: float  # per round, of the replica that sends most
    received_bytes: float  # per round, of the replica that receives most
    round_s: float  # time from sending to the average, of the slowest replica
    p90_round_s: float
    waited_s: float  # time per round for which training stands still, mean over replicas


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The cost of traffic in the steady state."""

    inner_steps: int  # H; 1 for data-parallel steps
    num_fragments: int  # P
    overlap_steps: int  # tau
    codec: str
    compute_utilization: float  # mean over replicas
    p90_utilization: float  # the same if every round took as long as one in ten takes
    ideal_utilization: float  # the same without overheads, as on emulated links
    step_s: float  # wall time of an inner step of the slowest replica
    sent_bytes_per_step: float  # of the replica that sends most
    mean_sent_bytes_per_step: float  # over replicas
    longest_wait_s: float
    fragments: tuple[FragmentCost, ...]


def predict(traffic: Traffic, deployment: Deployment) -> Prediction:
    """Simulate a cycle of H steps under the conditions of ``deployment``, under those at p90, and without overheads."""
    schedule = traffic.schedule
    parcels, typical = _simulated(traffic, deployment)
    _, p90 = _simulated(traffic, replace(deployment, conditions=deployment.conditions.at_p90()))
    _, ideal = _simulated(traffic, replace(deployment, conditions=IDEAL))
    rounds, slow = ({merged.fragment: merged for merged in run.merged} for run in (typical, p90))
    return Prediction(
        inner_steps=schedule.inner_steps,
        num_fragments=schedule.num_fragments,
        overlap_steps=schedule.overlap_steps,
        codec=traffic.codec.name,
        compute_utilization=typical.compute_utilization,
        p90_utilization=min(p90.compute_utilization, typical.compute_utilization),  # guard against round-off
        ideal_utilization=ideal.compute_utilization,
        step_s=typical.wall_s / typical.steps,
        sent_bytes_per_step=float(typical.sent_bytes.max()) / typical.steps,
        mean_sent_bytes_per_step=float(typical.sent_bytes.mean()) / typical.steps,
        longest_wait_s=max(float(merged.waited_s.max()) for merged in typical.merged),
        fragments=tuple(
            FragmentCost(
                fragment=fragment,
                values=parcel.numel,
                first_step=schedule.inner_steps + schedule.fragment_offsets[fragment],
                sent_bytes=float(parcel.sent_bytes.max()),
                received_bytes=float(parcel.received_bytes.max()),
                round_s=float(rounds[fragment].took_s.max()),
                p90_round_s=float(slow[fragment].took_s.max()),
                waited_s=float(rounds[fragment].waited_s.mean()),
            )
            for fragment, parcel in enumerate(parcels)
        ),
    )


def utilization(traffic: Traffic, deployment: Deployment) -> float:
    """Return the compute utilisation alone, typical, in a third of the time."""
    return _simulated(traffic, deployment)[1].compute_utilization


def _simulated(traffic: Traffic, deployment: Deployment) -> tuple[tuple[Parcel, ...], Simulated]:
    schedule, conditions = traffic.schedule, deployment.conditions
    here = replace(deployment, conditions=conditions.scaled(0.0) if traffic.gradients else conditions)
    parcels = traffic.parcels(len(deployment.links), here.uplinks(schedule.transfer_steps))
    begin, dynamic = 3 * schedule.inner_steps, traffic.dynamic_steps  # every fragment has had two rounds
    steps = begin + schedule.inner_steps
    return parcels, simulate(schedule, parcels, here, steps=steps, measure_from=begin, dynamic=dynamic)


def codecs_by_size(*, with_feedback: bool = True) -> list[Codec]:
    """Return the codecs of this package, from precise to coarse; of equally large ones the last.

    Args:
        with_feedback: whether also those that need error feedback.

    >>> [codec.name for codec in codecs_by_size()]
    ['float32', 'bfloat16', 'int8', 'fp4', 'sign', 'topk2']
    """
    by_size = {}
    for codec in map(make_codec, CODECS.names):
        if with_feedback or not codec.needs_error_feedback:
            by_size[codec.payload_bytes(1 << 20)] = codec
    return [codec for _, codec in sorted(by_size.items(), reverse=True)]


def table(traffic: Traffic, deployment: Deployment, most_steps: float = math.inf) -> tuple[Prediction, ...]:
    """Predict ``traffic`` with every H and codec in place of its own, and with its own.

    In place of gradients, it is the whole model that is sent every H steps. An H above ``most_steps`` is left out, and
    so is one below the number of fragments or of overlapped steps.

    Returns:
        The predictions, the highest utilisation (to 0.1 %) first, then the fewest bytes.
    """
    own = traffic.schedule
    least = max(own.num_fragments, own.overlap_steps)
    schedules = {H: replace(own, inner_steps=H, offsets=None) for H in INNER_STEPS if least <= H <= most_steps}
    named = {codec.name: codec for codec in codecs_by_size()}
    if not traffic.gradients:
        schedules[own.inner_steps], named[traffic.codec.name] = own, traffic.codec
    rows = [
        predict(replace(traffic, schedule=schedule, codec=codec, gradients=False), deployment)
        for schedule in schedules.values()
        for codec in named.values()
    ]
    return tuple(sorted(rows, key=lambda row: (-round(row.compute_utilization, 3), row.sent_bytes_per_step)))
