"""``diloco watch``: show runs and a swarm on a web page, live or as one file."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from diloco.cli.status import SwarmOptions
from diloco.config import parse_options
from diloco.errors import ConfigurationError
from diloco.units import Duration
from diloco.watch import LOOPBACK, FollowedFolder, FollowedSwarm, PageServer, export_page, page_data, plotly_script


@dataclass(frozen=True, kw_only=True)
class WatchOptions(SwarmOptions):
    """Show runs on a live web page: losses, rounds, peers and alerts. The command only reads.

    Examples:
      diloco watch runs/streaming-tiny
      diloco watch runs/a runs/b runs/c                  compare runs
      diloco watch --run my-run --join /ip4/203.0.113.7/tcp/31330/p2p/QmXoyp...
      diloco watch runs/streaming-tiny --out page.html
    """

    folders: Annotated[Positional[tuple[Path, ...]], arg(metavar="[RUN ...]", help_behavior_hint="")] = ()
    """Folders of running or finished runs."""
    out: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Write the page to this self-contained file and exit."""
    host: Annotated[str, arg(metavar="TEXT")] = "127.0.0.1"
    """Address to listen at. The printed address holds a token, which opens the page in one browser."""
    port: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Port to listen at. Default: 8500, or the next free one."""
    every: Annotated[Duration, arg(metavar="TIME", help_behavior_hint="")] = 2.0
    """Time between two reads of the folders and two queries to the peers. Default: 2s."""


def run(arguments: Sequence[str]) -> int:
    """Serve the page until interrupted, or write it to a file; return 0."""
    options = parse_options(WatchOptions, "watch", arguments)
    if not options.folders and options.run is None:
        raise ConfigurationError("nothing to watch: give the folder of a run, or --run and --join of a swarm.")
    if not options.every:
        raise ConfigurationError("--every must be above 0s.")
    plotly_script()  # raises now if plotly is missing
    runs: list[FollowedFolder | FollowedSwarm] = [FollowedFolder(folder) for folder in options.folders]
    if options.run:
        runs.append(FollowedSwarm(options.run, options.join))
    if options.out is not None:
        asyncio.run(_follow(options, runs, None))
        page = export_page(page_data([each.run for each in runs], time.time(), made_s=round(time.time())))
        try:
            options.out.write_text(page, "utf-8")
        except OSError as error:
            raise ConfigurationError(f"--out {options.out} can't be written: {error}.") from error
        print(f"diloco: wrote {options.out}, a self-contained page for any browser")
        return 0
    with _listening(options) as server, contextlib.suppress(KeyboardInterrupt):
        print(f"diloco: watch at {_address(server)} ({_visibility(options)}; Ctrl-C stops)", flush=True)
        asyncio.run(_follow(options, runs, server))
    return 0


async def _follow(
    options: WatchOptions, runs: Sequence[FollowedFolder | FollowedSwarm], server: PageServer | None
) -> None:
    """Keep the page up to date; without a server, read everything once."""
    async with contextlib.AsyncExitStack() as stack:
        swarm = next((each for each in runs if isinstance(each, FollowedSwarm)), None)
        client = await stack.enter_async_context(options.open_client()) if swarm else None
        while True:
            more = any([each.read() for each in runs if isinstance(each, FollowedFolder)])
            if swarm and client and not more:
                try:
                    swarm.take(await client.ask(swarm.since), time.time())
                except Exception as error:  # also one that a peer's answer reveals; the next query may succeed
                    swarm.run.problems = [f"The swarm could not be queried: {type(error).__name__}: {error}"]
            if server:
                server.show(page_data([each.run for each in runs], time.time()))
            elif not more:
                return
            if not more:
                await asyncio.sleep(options.every)


def _address(server: PageServer) -> str:
    host = server.host
    at = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{at}:{server.port}/?token={server.token}"


def _visibility(options: WatchOptions) -> str:
    if options.host in LOOPBACK:
        return "from this machine only"
    shown = [*(str(folder) for folder in options.folders), *([f"run {options.run!r}"] if options.run else [])]
    return (
        "the first browser that opens it sees losses, settings, text samples, peers and paths of "
        f"{', '.join(shown)}, but can change nothing; the connection is not encrypted"
    )


def _listening(options: WatchOptions) -> PageServer:
    """Return a server that listens at --host and --port, or at the first free port from 8500 on."""

    def tell_next(server: PageServer) -> None:
        print(f"diloco: for another browser: {_address(server)}", flush=True)

    ports = [*range(8500, 8520), 0] if options.port is None else [options.port]
    for port in ports:
        try:
            return PageServer(options.host, port, on_used=tell_next)
        except (OSError, OverflowError) as error:
            failure = error
    raise ConfigurationError(f"can't listen at {options.host}:{ports[0]} ({failure}). Choose another --port or --host.")
