"""What a run costs on its links: utilisation, bytes and waiting of its settings, and of others in their place.

What its steps and synchronisations cost on this machine is measured.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from diloco.algorithm import SyncSchedule, make_codec
from diloco.devices import use_device
from diloco.errors import ConfigurationError
from diloco.model import build_language_model
from diloco.outer import DiLoCo
from diloco.plan.simulate import IDEAL, Conditions, Exchange, Parcel, Simulated, Site, simulate
from diloco.train import InnerLoop, ParallelModel, RunSettings, inner_learning_rate, make_inner_optimizer, prepare_model

INNER_STEPS = (10, 20, 50, 100, 200, 500, 1000)  # the values of H in a table, up to the largest in the papers
CODECS = ("float32", "bfloat16", "int8", "fp4")


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
    """The cost of an exchange in the steady state."""

    inner_steps: int  # H; 1 for data-parallel steps
    num_fragments: int  # P
    overlap_steps: int  # tau
    codec: str
    compute_utilization: float  # mean over replicas
    p90_utilization: float  # the same if every round took as long as one in ten takes
    ideal_utilization: float  # the same without overheads, as on emulated links
    step_s: float  # wall time of an inner step of the slowest replica
    sent_bytes_per_step: float  # of the replica that sends most
    longest_wait_s: float
    fragments: tuple[FragmentCost, ...]


def predict(exchange: Exchange, site: Site) -> Prediction:
    """Simulate a cycle of H steps under the conditions of ``site``, under those at p90, and without overheads."""
    schedule = exchange.schedule

    def simulated(conditions: Conditions) -> tuple[tuple[Parcel, ...], Simulated]:
        place = replace(site, conditions=conditions.scaled(0.0) if exchange.gradients else conditions)
        uplinks = [link.uplink for link in site.links] if conditions.measures_uplinks else ()
        parcels = exchange.parcels(len(site.links), uplinks)
        begin, dynamic = 3 * schedule.inner_steps, exchange.dynamic_steps  # every fragment has had two rounds
        steps = begin + schedule.inner_steps
        return parcels, simulate(schedule, parcels, place, steps=steps, measure_from=begin, dynamic=dynamic)

    parcels, typical = simulated(site.conditions)
    (_, p90), (_, ideal) = simulated(site.conditions.at_p90()), simulated(IDEAL)
    rounds, slow = ({each.fragment: each for each in run.merged} for run in (typical, p90))
    return Prediction(
        inner_steps=schedule.inner_steps,
        num_fragments=schedule.num_fragments,
        overlap_steps=schedule.overlap_steps,
        codec=exchange.codec.name,
        compute_utilization=typical.compute_utilization,
        p90_utilization=min(p90.compute_utilization, typical.compute_utilization),  # guard against round-off
        ideal_utilization=ideal.compute_utilization,
        step_s=typical.wall_s / typical.steps,
        sent_bytes_per_step=float(typical.sent_bytes.max()) / typical.steps,
        longest_wait_s=max(float(each.waited_s.max()) for each in typical.merged),
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


def table(
    exchange: Exchange,
    site: Site,
    *,
    inner_steps: Sequence[int] = INNER_STEPS,
    codecs: Sequence[str] = CODECS,
    most_steps: float = math.inf,
) -> tuple[Prediction, ...]:
    """Predict ``exchange`` with every H and codec in place of its own, and with its own.

    In place of gradients, it is the whole model that is sent every H steps.

    Args:
        most_steps: an H above this is left out, and so is one below the number of fragments or of overlapped steps.

    Returns:
        The predictions, the highest utilisation (to 0.1 %) first, then the fewest bytes.
    """
    own = exchange.schedule
    least = max(own.num_fragments, own.overlap_steps)
    schedules = {H: replace(own, inner_steps=H, offsets=None) for H in inner_steps if least <= H <= most_steps}
    named = {codec.name: codec for codec in map(make_codec, codecs)}
    if not exchange.gradients:
        schedules[own.inner_steps], named[exchange.codec.name] = own, exchange.codec
    rows = [
        predict(replace(exchange, schedule=schedule, codec=codec, gradients=False), site)
        for schedule in schedules.values()
        for codec in named.values()
    ]
    return tuple(sorted(rows, key=lambda row: (-round(row.compute_utilization, 3), row.sent_bytes_per_step)))


_STEPS, _AT_MOST_S = 5, 60.0  # number of inner steps to time, and the time after which no further one starts
_ROUNDS = 5  # number of sends and merges


def measure_step(settings: RunSettings) -> tuple[float, float, float]:
    """Time inner steps of the model of ``settings`` on random tokens, and sends and merges of the whole model.

    A step is forward and backward pass, clipping and optimizer. With gradient accumulation, one piece of the batch is
    timed and multiplied by the number of pieces. The first step is a warm-up. At least one step is timed; after that,
    no step starts once a minute has passed.

    Args:
        settings: resolved settings with a known vocabulary size.

    Returns:
        The median time of a step, and the times per value of a send (pseudo-gradient and its encoding in fp4) and of a
        merge (mean of one payload, outer step and merge), in seconds.

    Raises:
        ConfigurationError: if the model does not fit on the device.
    """
    train, device = settings.train, use_device(settings.train.device)
    rows = train.batch_size // train.gradient_accumulation
    taken_s: list[float] = []
    try:
        model = build_language_model(settings.model, seed=0, device=device)
        prepare_model(model, train)
        shape = rows, train.sequence_length + 1
        tokens = torch.randint(model.vocab_size, shape, dtype=torch.int64, device=device)
        inner = InnerLoop(
            ParallelModel(model),
            make_inner_optimizer(settings.optimizer, model),
            learning_rate=inner_learning_rate(settings.optimizer, train.steps),
            clip_norm=settings.optimizer.clip_norm,
            precision=train.precision,
        )
        began_s = time.perf_counter()
        while len(taken_s) <= _STEPS and (len(taken_s) < 2 or time.perf_counter() - began_s < _AT_MOST_S):
            piece_s = _timed(lambda: float(inner.accumulate_gradients(tokens[:, :-1], tokens[:, 1:])), device)
            apply_s = _timed(inner.unscale, device) + _timed(lambda: inner.apply(len(taken_s)), device)
            taken_s.append(train.gradient_accumulation * piece_s + apply_s)
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"the model with {rows} sequences at once does not fit in the memory of {device}: "
            f"{str(error).splitlines()[0]} Use more gradient accumulation or a smaller model."
        ) from error
    diloco = DiLoCo(model, inner.optimizer, schedule=SyncSchedule(inner_steps=1), codec="fp4")
    rounds = [(_timed(diloco.begin, device), _timed(diloco.finish, device)) for _ in range(_ROUNDS)]
    send_s, merge_s = map(statistics.median, zip(*rounds, strict=True))
    values = model.num_trained()
    return statistics.median(taken_s[1:]), send_s / values, merge_s / values


def _timed(action: Callable[[], object], device: torch.device) -> float:
    """Return how many seconds ``action`` keeps the device busy."""
    started_s = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started_s
