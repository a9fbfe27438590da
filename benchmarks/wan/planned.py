"""What the planner chooses for a link, as a method to be run on it: does a plan keep its promise?"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from benchmarks.wan.plan import Link, Method, Work
from diloco.errors import ConfigurationError
from diloco.simulate.overheads import Conditions
from diloco.simulate.planner import Site, candidates, plan
from diloco.simulate.traffic import Workload
from diloco.transport.links import Link as EmulatedLink
from diloco.transport.tcp import CongestionControl

__all__ = ["congestion_control", "planned", "ways"]

MEASURED_STEPS = 80
"""About how many."""


def congestion_control(link: Link) -> CongestionControl:
    """What the link asks for, or the default of the machine that the rows are from."""
    return "cubic" if link.congestion_control == "cubic" else "bbr"


def ways(link: Link) -> list[EmulatedLink]:
    """As the planner has them: a round needs both directions, so the slower one counts."""
    rate = min(link.rate_bits_per_s, link.up_bits_per_s or math.inf)
    return [EmulatedLink(rate, link.rtt_s / 2)] * link.replicas


def planned(link: Link, method: Method, work: Work, step_s: float) -> tuple[Method, Work, dict[str, Any]]:
    """The method and the work that the planner chooses for ``link``, and what it promises.

    Args:
        method: its option ``target`` is the compute utilisation to reach.
        work: of which the model counts.
        step_s: an inner step without communication.

    Raises:
        ConfigurationError: if it chooses nothing, or what this benchmark does not run.
    """
    site = Site(
        workload=Workload(parameters=work.values, layers=work.layers, step_time_s=step_s),
        links=tuple(ways(link)),
        step_time_s=(step_s,) * link.replicas,
        conditions=Conditions(congestion_control=congestion_control(link), loss=link.loss_percent / 100),
    )
    choice = plan(site, method.options["target"], candidates(site)).choice
    if choice is None or choice.algorithm == "data-parallel":
        raise ConfigurationError(
            f"the planner chose {choice and choice.algorithm} for {link.name}; a link for which it chooses DiLoCo "
            "would work. The benchmark stops here; finished runs are kept."
        )
    chosen = replace(
        work,
        inner_steps=choice.inner_steps,
        num_fragments=choice.num_fragments,
        overlap_steps=choice.overlap_steps,
        cycles=max(1, round(MEASURED_STEPS / choice.inner_steps)),
    )
    options = {"codec": choice.codec, "streaming": choice.algorithm == "streaming"}
    promise = {
        "target": method.options["target"],
        "codec": choice.codec,
        "compute_utilization": choice.compute_utilization,
        "sure_utilization": choice.sure_utilization,
    }
    return replace(method, options=options), chosen, promise
