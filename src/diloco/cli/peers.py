"""``diloco peers``: who takes part in a run, and what each of them does."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import arg

from diloco.cli.tables import columns
from diloco.errors import ConfigurationError
from diloco.units import format_bytes, format_rate

__all__ = ["run"]

DESCRIPTION = """List the peers of a run: their step, speed, bandwidth, digest and state, as they say themselves.

Examples:
  diloco peers --run my-run --join /ip4/203.0.113.7/tcp/31330/p2p/QmXoyp..."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What follows `diloco peers`."""

    run: Annotated[str, arg(help_behavior_hint="")]
    """Name of the run."""
    join: Annotated[tuple[str, ...], arg(help_behavior_hint="")]
    """Addresses of any peers, as they print them."""
    secret_file: Annotated[Path | None, arg(help_behavior_hint="")] = None
    """The run's secret, if it has one."""
    json: bool = False
    """Print what they say as JSON."""


def run(arguments: Sequence[str]) -> int:
    """Ask every peer; returns 0 if at least one answers, 1 if none does."""
    from diloco.train.wires import read_secret
    from diloco.transport.hivemind.gate import Gate
    from diloco.transport.hivemind.lookout import look
    from diloco.transport.hivemind.node import NodePlace

    options = tyro.cli(Options, prog="diloco peers", description=DESCRIPTION, args=list(arguments))
    if not options.join:
        raise ConfigurationError("no --join was given; the address of any peer would work. Nothing was done.")
    gate = Gate(options.run, read_secret(options.secret_file))
    with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
        place = NodePlace(join=options.join, listen=(), map_ports=False)
        found = asyncio.run(look(Path(folder) / "identity.key", place, gate))
    if options.json:
        print(json.dumps([dataclasses.asdict(each) for each in found], indent=2))
    else:
        rows = [_row(each.peer_id, each.number, dict(each.status)) for each in found]
        print(
            columns(["peer", "replica", "state", "step", "view", "tokens/s", "pace", "link", "moved", "digest"], rows)
        )
    for each in found:
        if each.problem:
            print(f"diloco: {each.peer_id}: {each.problem}", file=sys.stderr)
    if not found:
        print(
            f"diloco: no peer of run {options.run!r} has been there within the last half hour; the name that its "
            "replicas were given as --run would work.",
            file=sys.stderr,
        )
    return 0 if any(each.status for each in found) else 1


def _row(peer_id: str, number: int, status: dict[str, Any]) -> list[str]:
    if not status:
        return [peer_id, str(number), "no answer", *["-"] * 7]
    speed, pace, rate = status.get("tokens_per_s"), status.get("pace"), status.get("link_bits_per_s")
    moved = int(status.get("sent_bytes", 0)) + int(status.get("received_bytes", 0))
    return [
        peer_id,
        str(status.get("replica", number)),
        str(status.get("state", "?")),
        str(status.get("step", "?")),
        f"{status.get('view', '?')} of {len(status.get('members', []))}",
        "-" if speed is None else f"{float(speed):,.0f}",
        "-" if pace is None else f"{100 * float(pace):.0f} %",
        "-" if rate is None else format_rate(float(rate)),
        format_bytes(moved),
        str(status.get("digest", "-"))[:8],
    ]
