"""``diloco simulate``: predict the compute utilisation on a link, or the bandwidth that a utilisation needs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from diloco.cli.sites import SiteOptions
from diloco.cli.tables import columns
from diloco.config import parse_options
from diloco.errors import ConfigurationError

if TYPE_CHECKING:
    from diloco.simulate import Cell

__all__ = ["SimulateOptions", "run"]

DESCRIPTION = """Predict the compute utilisation of data-parallel training, DiLoCo and Streaming DiLoCo.

Without --bandwidth, the command prints the bandwidth that each target needs. With
--bandwidth, it prints utilisation, stalls and traffic on that link.

Examples:
  diloco simulate --table streaming-diloco
  diloco simulate --parameters 1e9 --layers 24 --step-time 0.1s --method streaming-overlap-fp4
  diloco simulate --preset 1b --step-time 0.8s --bandwidth 500Mbit --latency 80ms --assume trainer
  diloco simulate --preset 1b --step-time 0.8s --plot utilization.svg
  diloco simulate --preset 1b --step-time 0.8s --method streaming-overlap-fp4 --bandwidth 20Mbit --timeline run.html"""


_CLIPPING = (
    "Send every payload to every replica, as when contributions are clipped (sync.arguments.average.max_norm) "
    "or sync.average is not the mean."
)
_ASSUME = (
    "paper: nothing costs time except payload, and each layer may be sent during the backward pass; trainer: the "
    "behaviour of `diloco train`, with overheads as measured in its runs, by --device, --transport, "
    "--congestion-control and --loss."
)
_DEVICE = (
    "Device of the replicas. The work of sends and merges is what was measured on a CPU; with cuda it is not counted, "
    "since it was not measured there."
)


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(SiteOptions):
    """The options of `diloco simulate`."""

    table: Annotated[Literal["streaming-diloco"] | None, arg(help_behavior_hint="")] = None
    """Print a paper's table, with simulated and published cells. --json is the only other option allowed."""
    step_time: Annotated[tuple[str, ...], arg(metavar="TEXT...")] = ("0.1s",)
    """Compute time of one inner step; one value for all replicas, or one for each."""
    dynamic_steps: bool = False
    """Replicas slower than the fastest skip inner steps instead of delaying the others (--swarm.dynamic-steps)."""
    grace: bool = False
    """Late replicas skip the inner steps for which the others would wait (--network.straggler grace)."""
    clipping: Annotated[bool, arg(help=_CLIPPING)] = False
    half_duplex: bool = False
    """A link sends or receives, but not both at once."""
    jitter: float = 0.0
    """Standard deviation of the time of a step, relative to its mean."""
    seed: int = 0
    """Random seed of the jitter."""
    method: Annotated[tuple[str, ...], arg(metavar="METHOD...", help_behavior_hint="")] = ()
    """data-parallel, diloco, streaming, streaming-overlap, streaming-overlap-fp4. Default: all."""
    inner_steps: int = 100
    """Inner steps between two rounds of a fragment (H)."""
    fragments: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Fragments of the streaming methods (P). Default: one per three layers, and one for the rest of the model."""
    overlap_steps: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Overlap of the methods that overlap (tau). Default: 1."""
    codec: Annotated[str | None, arg(metavar="TEXT", help_behavior_hint="")] = None
    """Codec of the payloads. Default: the method's own, fp4 or bfloat16."""
    assume: Annotated[Literal["paper", "trainer"], arg(help=_ASSUME)] = "paper"
    device: Annotated[Literal["cpu", "cuda"], arg(help=_DEVICE)] = "cpu"
    targets: str = "50,80,90,95,99"
    """Target compute utilisations in per cent, separated by commas."""
    json: bool = False
    """Print JSON, with `target` in per cent as given and `compute_utilization` from 0 to 1."""
    plot: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Plot utilisation against bandwidth to this file: .svg, .png or .html."""
    timeline: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """With --bandwidth and one --method: draw when each replica computes, waits, sends and receives to this file."""


def run(arguments: Sequence[str]) -> int:
    """Simulate, print the figures, and draw the pictures that were asked for."""
    options = parse_options(SimulateOptions, "simulate", DESCRIPTION, arguments)
    if options.table:
        return _table(options)
    from diloco.cli import simulate_model

    return simulate_model.run(options)


def _table(options: SimulateOptions) -> int:
    from diloco.simulate import PAPER, paper_cells

    if options != SimulateOptions(table=options.table, json=options.json):
        raise ConfigurationError(
            "--table can be combined only with --json: give --table streaming-diloco alone, or with --json."
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
    print(f"{PAPER}\nBandwidth in Gbit/s that each compute utilisation needs: simulated (published)\n")
    print(columns(["", *(f"{100 * target:g} %" for target in targets)], rows))
    same = sum(cell.grid_steps == 0 for cell in cells)
    near = sum(abs(cell.grid_steps) <= 1 for cell in cells)
    far = "; cells that are further away are marked !" if near < len(cells) else ""
    print(f"\n{same} of {len(cells)} cells on the published point of the grid", end="")
    print(f", {near} within one step of it (x1.21){far}")
    return 0


def _in_table(cell: Cell) -> str:
    far = "!" if abs(cell.grid_steps) > 1 else " "
    return f"{cell.simulated_gbit_per_s:.1f} ({cell.published_gbit_per_s:.1f}){far}"
