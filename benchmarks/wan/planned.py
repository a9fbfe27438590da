"""The planner's choice for a link as a method to run on it, which shows whether the prediction holds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from benchmarks.wan.plan import Link, Method, Work
from diloco.errors import ConfigurationError
from diloco.simulate import Conditions, Site, Workload, candidates, plan
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
    """Return the method and the work that the planner chooses for ``link``, and its prediction.

    Args:
        method: its option ``target`` is the compute utilisation to reach.
        work: only its model is used.
        step_s: seconds of an inner step without communication.

    Raises:
        ConfigurationError: if the planner finds no settings, or chooses data-parallel training.
    """
    site = Site(
        workload=Workload(parameters=work.values, layers=work.layers, step_time_s=step_s),
        links=tuple(planner_links(link)),
        step_time_s=(step_s,) * link.replicas,
        conditions=Conditions(congestion_control=congestion_control(link), loss=link.loss_percent / 100),
    )
    choice = plan(site, method.options["target"], candidates(site)).choice
    if choice is None or choice.algorithm == "data-parallel":
        raise ConfigurationError(
            f"The planner chose {choice.algorithm if choice else 'nothing'} for {link.name}. Name a link for which it "
            "chooses DiLoCo. The benchmark stops here; finished runs are kept."
        )
    chosen = replace(
        work,
        inner_steps=choice.inner_steps,
        num_fragments=choice.num_fragments,
        overlap_steps=choice.overlap_steps,
        cycles=max(1, round(MEASURED_STEPS / choice.inner_steps)),
    )
    options = {"codec": choice.codec, "streaming": choice.algorithm == "streaming"}
    prediction = {
        "target": method.options["target"],
        "codec": choice.codec,
        "compute_utilization": choice.compute_utilization,
        "sure_utilization": choice.sure_utilization,
    }
    return replace(method, options=options), chosen, prediction
