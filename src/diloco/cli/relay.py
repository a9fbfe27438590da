"""``diloco relay``: run a bootstrap node for a swarm."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from diloco.config import parse_options
from diloco.transport import multiaddress

DESCRIPTION = """Run a bootstrap node, through which the peers of any run find each other. It trains nothing.

Examples:
  diloco relay --listen 0.0.0.0:31330
  diloco relay --join /ip4/203.0.113.7/tcp/31330/p2p/QmXoyp..."""


@dataclass(frozen=True, kw_only=True)
class RelayOptions:
    """The options of `diloco relay`."""

    listen: Annotated[str, arg(metavar="HOST:PORT")] = "0.0.0.0:0"
    """Address to listen at; port 0 is any free one."""
    announce: Annotated[tuple[str, ...], arg(metavar="HOST:PORT...", help_behavior_hint="")] = ()
    """Addresses to announce to other peers instead of --listen."""
    join: Annotated[tuple[str, ...], arg(metavar="TEXT...", help_behavior_hint="")] = ()
    """Addresses of peers that are already running, if there are any."""
    identity: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Private key file, created if missing; it fixes the node's identity. Default: dht.key in your data folder."""


def run(arguments: Sequence[str]) -> int:
    """Run the node until it is interrupted; return 0."""
    asyncio.run(_serve(parse_options(RelayOptions, "relay", DESCRIPTION, arguments)))
    return 0


async def _serve(options: RelayOptions) -> None:
    from diloco.transport import NodePlace, run_peer

    def ready(addresses: tuple[str, ...]) -> None:
        print("diloco: peers of any run can find each other through this node with")
        for address in addresses:
            print(f"  --join {address}", flush=True)

    announced = tuple(multiaddress(address, "--announce") for address in options.announce)
    place = NodePlace(join=options.join, listen=(multiaddress(options.listen, "--listen"),), announce=announced)
    home = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    serving = asyncio.ensure_future(run_peer(options.identity or home / "diloco" / "dht.key", place, ready))
    for ending in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(ending, serving.cancel)
    try:
        await serving
    except asyncio.CancelledError:
        print("diloco: stopped.", flush=True)
