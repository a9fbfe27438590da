"""The planner's choice for a link as a method to run on it, which shows whether the prediction holds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from benchmarks.wan.plan import Link, Method, Work
from diloco.algorithm import SyncSchedule, make_codec
from diloco.errors import ConfigurationError
from diloco.plan import Conditions, Exchange, Site, Workload, table
from diloco.transport import CongestionControl
from diloco.transport import Link as EmulatedLink

__all__ = ["congestion_control", "planned", "planner_links"]

MEASURED_STEPS = 80
"""The approximate length of a run."""


def congestion_control(link: Link) -> CongestionControl:
    """Return the link's congestion control, or the default of the machine on which the rows were measured."""
    return "cubic" if link.congestion_control == "cubic" else "bbr"


def planner_links(link: Link) -> list[EmulatedLink]:
    """Return one emulated link per replica, at the rate of its slower direction, because a round needs both."""
    rate = min(link.rate_bits_per_s, link.up_bits_per_s or math.inf)
    return [EmulatedLink(rate, link.rtt_s / 2)] * link.replicas


def planned(link: Link, method: Method, work: Work, step_s: float) -> tuple[Method, Work, dict[str, Any]]:
    """Return the method and the work with the smallest H that reaches the target, and the prediction for it.

    Args:
        method: its option ``target`` is the compute utilisation to reach at p90 round time.
        work: its model, fragments and overlap are used.
        step_s: seconds of an inner step without communication.

    Raises:
        ConfigurationError: no row of the table reaches the target.
    """
    site = Site(
        links=tuple(planner_links(link)),
        step_time_s=(step_s,) * link.replicas,
        conditions=Conditions(congestion_control=congestion_control(link), loss=link.loss_percent / 100),
    )
    model = Workload(parameters=work.values, layers=work.layers, step_time_s=step_s)
    exchange = Exchange(
        schedule=SyncSchedule(
            inner_steps=work.inner_steps, num_fragments=work.num_fragments, overlap_steps=work.overlap_steps
        ),
        fragment_sizes=model.fragment_sizes(work.num_fragments),
        codec=make_codec("fp4"),
    )
    target = method.options["target"]
    rows = [row for row in table(exchange, site) if row.p90_utilization >= target]
    if not rows:
        raise ConfigurationError(f"No H and codec reach {target:.0%} on {link.name}. Name another link.")
    choice = min(rows, key=lambda row: (row.inner_steps, row.sent_bytes_per_step))
    cycles = max(1, round(MEASURED_STEPS / choice.inner_steps))
    prediction = {
        "target": target,
        "codec": choice.codec,
        "compute_utilization": choice.compute_utilization,
        "p90_utilization": choice.p90_utilization,
    }
    options = {"codec": choice.codec, "streaming": True}
    return replace(method, options=options), replace(work, inner_steps=choice.inner_steps, cycles=cycles), prediction
