"""``diloco simulate``: the compute utilisation that a link allows, and the link that a compute utilisation needs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from diloco.cli.sites import SiteOptions
from diloco.cli.tables import columns
from diloco.config.flags import parse_options
from diloco.errors import ConfigurationError

if TYPE_CHECKING:
    from diloco.simulate.bandwidth import Cell

__all__ = ["SimulateOptions", "run"]

DESCRIPTION = """Compute utilisation of data-parallel training, DiLoCo and Streaming DiLoCo, before anything is rented.

Without --bandwidth: the bandwidth that each target needs. With it: what happens on that link.

Examples:
  diloco simulate --table streaming-diloco
  diloco simulate --parameters 1e9 --layers 24 --step-time 0.1s --method streaming-overlap-fp4
  diloco simulate --preset 1b --step-time 0.8s --bandwidth 500Mbit --latency 80ms --assume trainer
  diloco simulate --preset 1b --step-time 0.8s --plot utilization.svg
  diloco simulate --preset 1b --step-time 0.8s --method streaming-overlap-fp4 --bandwidth 20Mbit --timeline run.html"""


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(SiteOptions):
    """What follows `diloco simulate`."""

    table: Annotated[Literal["streaming-diloco"] | None, arg(help_behavior_hint="")] = None
    """Print a paper's table, the simulated cell beside the published one. Takes no other option but --json."""
    step_time: tuple[str, ...] = ("0.1s",)
    """Compute time of one inner step; one for all replicas, or one for each."""
    dynamic_steps: bool = False
    """A replica slower than the fastest leaves out inner steps, as with --swarm.dynamic-steps, and keeps nobody
    waiting."""
    grace: bool = False
    """A replica that is late leaves out the inner steps for which the others would wait, as with
    --swarm.straggler grace."""
    clipping: bool = False
    """Every payload goes to every replica, as contributions are clipped (outer.max_norm, outer.median_norm_factor) or
    averaged in another way than by their mean (outer.average)."""
    half_duplex: bool = False
    """Sending and receiving take turns."""
    jitter: float = 0.0
    """Standard deviation of a step's time over its mean."""
    seed: int = 0
    """Of the jitter."""
    method: Annotated[tuple[str, ...], arg(metavar="METHOD...", help_behavior_hint="")] = ()
    """data-parallel, diloco, streaming, streaming-overlap, streaming-overlap-fp4. Default: all."""
    inner_steps: int = 100
    """H."""
    fragments: Annotated[int | None, arg(help_behavior_hint="")] = None
    """P of the streaming methods. Default: one per three layers, and one for what is outside them."""
    overlap_steps: Annotated[int | None, arg(help_behavior_hint="")] = None
    """tau of the methods that overlap. Default: 1."""
    codec: Annotated[str | None, arg(help_behavior_hint="")] = None
    """What payloads are sent as. Default: the method's own, fp4 or bfloat16."""
    assume: Literal["paper", "trainer"] = "paper"
    """paper: no costs but the payload, and each layer may leave while the backward pass goes on; trainer: what
    `diloco train` does, with what its runs were measured to spend beside it, by --device, --transport,
    --congestion-control and --loss."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What trains. The work of sends and merges is counted as it was measured on a CPU; with cuda none is, since it was
    not measured there."""
    targets: str = "50,80,90,95,99"
    """Compute utilisations in per cent."""
    json: bool = False
    """Print JSON: `target` in per cent as given, `compute_utilization` from 0 to 1."""
    plot: Annotated[Path | None, arg(help_behavior_hint="")] = None
    """Draw utilisation against bandwidth: .svg, .png or .html."""
    timeline: Annotated[Path | None, arg(help_behavior_hint="")] = None
    """With --bandwidth and one --method: draw who computes, waits, sends and receives when."""


def run(arguments: Sequence[str]) -> int:
    """Simulate, print, draw."""
    options = parse_options(SimulateOptions, "simulate", DESCRIPTION, arguments)
    if options.table:
        return _table(options)
    from diloco.cli import simulate_model

    return simulate_model.run(options)


def _table(options: SimulateOptions) -> int:
    from diloco.simulate.bandwidth import PAPER, paper_cells

    if options != SimulateOptions(table=options.table, json=options.json):
        raise ConfigurationError(
            "--table takes no other option but --json: give --table streaming-diloco alone, or with --json."
        )
    cells = paper_cells()
    if options.json:
        fields = [{**vars(cell), "target": 100 * cell.target} for cell in cells]
        print(json.dumps(fields, indent=2))
        return 0
    targets = sorted({cell.target for cell in cells})
    rows = []
    for first in cells[:: len(targets)]:
        row = [cell for cell in cells if (cell.model, cell.method) == (first.model, first.method)]
        rows.append([f"{first.model} {first.method}", *map(_in_table, row)])
    print(f"{PAPER}\nGbit/s that a compute utilisation needs: simulated (published)\n")
    print(columns(["", *(f"{100 * target:g} %" for target in targets)], rows))
    same = sum(cell.grid_steps == 0 for cell in cells)
    near = sum(abs(cell.grid_steps) <= 1 for cell in cells)
    far = "; farther ones are marked !" if near < len(cells) else ""
    print(f"\n{same} of {len(cells)} cells on the published point of the grid", end="")
    print(f", {near} within one step of it (x1.21){far}")
    return 0


def _in_table(cell: Cell) -> str:
    far = "!" if abs(cell.grid_steps) > 1 else " "
    return f"{cell.simulated_gbit_per_s:.1f} ({cell.published_gbit_per_s:.1f}){far}"
