"""The file that `diloco plan --config` writes, for `diloco train`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from diloco.checkpoint.disk import write_whole
from diloco.config.toml import write_values
from diloco.model.presets import get_preset
from diloco.simulate.planner import Candidate, Site
from diloco.transport.settings import TransportSettings

__all__ = ["planned_values", "write_config"]

MARGIN = 3
"""How many times a round's predicted time the time-out must leave at least."""


def planned_values(preset: str, choice: Candidate, site: Site, steps: int) -> dict[str, Any]:
    """Keys of `diloco train` that make ``choice``, on the links of ``site`` emulated in one process.

    The emulated links carry what payload gets of the real ones, so that the run is as fast as was predicted.
    """
    values: dict[str, Any] = {
        "preset": get_preset(preset).name,
        "algorithm": choice.algorithm,
        "train.steps": steps,
        "codec.name": choice.codec,
        "transport.replicas": len(site.links),
    }
    if choice.algorithm != "data-parallel":
        # a shared start exchanges gradients at every step, which such a link does not carry
        values["train.data_parallel_steps"] = 0
        values["schedule.inner_steps"] = choice.inner_steps
    if choice.algorithm == "streaming":
        values["fragments.num_fragments"] = choice.num_fragments
        values["schedule.overlap_steps"] = choice.overlap_steps
    if choice.longest_round_s > TransportSettings.round_timeout_s / MARGIN:
        values["transport.round_timeout_s"] = float(math.ceil(MARGIN * choice.longest_round_s))
    emulated = {
        "transport.bandwidth_bits_per_s": tuple(
            site.overheads.goodput * link.bandwidth_bits_per_s for link in site.links
        ),
        "transport.latency_s": tuple(link.latency_s for link in site.links),
        "transport.step_time_s": site.step_time_s,
    }
    return values | {name: each[:1] if len(set(each)) == 1 else each for name, each in emulated.items()}


def write_config(path: Path, preset: str, choice: Candidate, site: Site, steps: int) -> None:
    """Write it for `diloco train`, as a whole or not at all."""
    text = (
        f"# Planned: {choice.compute_utilization:.1%} compute utilisation, +{choice.loss_cost:.2%} loss.\n"
        "# It runs in one process, on a virtual clock, with links that carry what payload gets of the real ones.\n"
        "# On machines: --transport torch, without the three lines of emulation at the end of [transport].\n\n"
        f"{write_values(planned_values(preset, choice, site, steps))}"
    )
    write_whole(path, text)
