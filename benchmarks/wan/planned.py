"""A link of the benchmark as the simulator takes it."""

from __future__ import annotations

from benchmarks.wan.plan import Link
from diloco.plan import CongestionControl
from diloco.transport import Link as EmulatedLink

__all__ = ["congestion_control", "planner_links"]


def congestion_control(link: Link) -> CongestionControl:
    """Return the link's congestion control, or the default of the machine on which the rows were measured."""
    return "cubic" if link.congestion_control == "cubic" else "bbr"


def planner_links(link: Link) -> list[EmulatedLink]:
    """Return one emulated link per replica, at the rate of its slower direction, because a round needs both."""
    rate = min(link.rate_bits_per_s, *link.up_bits_per_s)
    return [EmulatedLink(rate, link.rtt_s / 2)] * link.replicas
