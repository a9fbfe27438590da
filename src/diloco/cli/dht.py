"""``diloco dht``: a standing peer that trains nothing, through which the others find each other."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from diloco.config.flags import parse_options

__all__ = ["run"]

DESCRIPTION = """Be a peer that others find each other through. It trains nothing and holds no model.

Examples:
  diloco dht --listen /ip4/0.0.0.0/tcp/31330
  diloco dht --join /ip4/203.0.113.7/tcp/31330/p2p/QmXoyp..."""


@dataclass(frozen=True, kw_only=True)
class DhtOptions:
    """What follows `diloco dht`."""

    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """Multiaddresses to listen at."""
    announce: tuple[str, ...] = ()
    """Multiaddresses to tell others instead of those listened at."""
    join: Annotated[tuple[str, ...], arg(help_behavior_hint="")] = ()
    """Addresses of other peers, if there are any already."""
    identity: Annotated[Path | None, arg(help_behavior_hint="")] = None
    """File of this peer's private key, made where there is none. Default: dht.key in this user's data folder, so that
    its address stays the same."""
    relay: bool = True
    """Pass on the streams of peers that can't reach each other."""
    map_ports: bool = True
    """Ask the router to let others in (UPnP)."""


def run(arguments: Sequence[str]) -> int:
    """Stand until interrupted; returns 0."""
    options = parse_options(DhtOptions, "dht", DESCRIPTION, arguments)
    asyncio.run(_serve(options))
    return 0


async def _serve(options: DhtOptions) -> None:
    from diloco.transport.hivemind.library import run_peer
    from diloco.transport.hivemind.place import NodePlace

    def ready(addresses: tuple[str, ...]) -> None:
        print("diloco: peers of any run find each other with")
        for address in addresses:
            print(f"  --join {address}", flush=True)

    place = NodePlace(
        join=options.join,
        listen=options.listen,
        announce=options.announce,
        map_ports=options.map_ports,
        relay=options.relay,
    )
    identity = options.identity or _data_folder() / "dht.key"
    serving = asyncio.ensure_future(run_peer(identity, place, ready))
    for ending in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(ending, serving.cancel)
    try:
        await serving
    except asyncio.CancelledError:
        print("diloco: left.", flush=True)


def _data_folder() -> Path:
    """The folder of this program's data of this user."""
    home = os.environ.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "diloco"
