"""``diloco watch``: show runs and a swarm on a web page, live or as one file."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from diloco.config import parse_options
from diloco.errors import ConfigurationError, DiLoCoError, from_extra
from diloco.watch import FollowedFolder, FollowedSwarm, Thresholds, export_page, page_data, plotly_script

if TYPE_CHECKING:
    from diloco.transport import StatusClient

__all__ = ["run"]

DESCRIPTION = """Show runs on a live web page: losses, rounds, peers and alerts. The command only reads.

Examples:
  diloco watch runs/streaming-tiny
  diloco watch runs/a runs/b runs/c                  compare runs
  diloco watch --run my-run --join /ip4/203.0.113.7/tcp/31330/p2p/QmXoyp...
  diloco watch runs/streaming-tiny --export page.html"""

_FIRST_PORT = 8500


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """The options of `diloco watch`."""

    folders: Annotated[Positional[tuple[Path, ...]], arg(metavar="[RUN ...]", help_behavior_hint="")] = ()
    """Folders of running or finished runs."""
    run: Annotated[str | None, arg(metavar="TEXT", help_behavior_hint="")] = None
    """With --join: name of the swarm's run."""
    join: Annotated[tuple[str, ...], arg(metavar="TEXT...", help_behavior_hint="")] = ()
    """Addresses of one or more peers of the swarm, as the peers print them."""
    secret_file: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """The swarm's secret, if it has one."""
    export: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """Write the page to this self-contained file and exit."""
    host: str = "127.0.0.1"
    """Address to listen at. The printed address holds a token, which opens the page in one browser."""
    port: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Port to listen at. Default: 8500, or the next free one."""
    every_s: float = 1.0
    """Seconds between two reads of the folders."""
    ask_every_s: float = 3.0
    """Seconds between two queries to the peers of a swarm."""
    alert: Thresholds = field(default_factory=Thresholds)

    def __post_init__(self) -> None:
        if not self.folders and self.run is None and not self.join:
            raise ConfigurationError("nothing to watch: give the folder of a run, or --run and --join of a swarm.")
        if (self.run is None) != (not self.join):
            missing = "--join, the address of a peer" if self.run else "--run, the name of the run"
            raise ConfigurationError(f"a swarm needs both --run and --join: {missing}, is missing.")
        for name in ("every_s", "ask_every_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"--{name.replace('_', '-')} must be positive, got {getattr(self, name)}.")


def run(arguments: Sequence[str]) -> int:
    """Serve the page until interrupted, or write it to a file; return 0."""
    options = parse_options(WatchOptions, "watch", DESCRIPTION, arguments)
    plotly_script()  # raises now if plotly is missing
    folders = [FollowedFolder(folder) for folder in options.folders]
    swarm = FollowedSwarm(options.run, options.join) if options.run else None
    if options.export is not None:
        asyncio.run(_export(options, folders, swarm, options.export))
        return 0
    with from_extra("watch", "A live page needs starlette and uvicorn"):
        import starlette  # noqa: F401  # check for both packages before listening
        import uvicorn  # noqa: F401
    with _listening(options) as listening, contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(options, folders, swarm, listening))
    return 0


async def _export(
    options: WatchOptions, folders: Sequence[FollowedFolder], swarm: FollowedSwarm | None, path: Path
) -> None:
    for folder in folders:
        while _read(folder):
            pass
    if swarm is not None:
        async with _asking(options) as client:
            await _ask(client, swarm)
    watched = [*(folder.run for folder in folders), *([swarm.run] if swarm else [])]
    page = export_page({**page_data(watched, options.alert, time.time()), "made_s": round(time.time())})
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--export {path} can't be written: {error}.") from error
    print(f"diloco: wrote {path}, a self-contained page for any browser")


async def _serve(
    options: WatchOptions, folders: Sequence[FollowedFolder], swarm: FollowedSwarm | None, listening: socket.socket
) -> None:
    import uvicorn

    from diloco.watch import LOOPBACK, Board, make_app

    local, board = options.host in LOOPBACK, Board()
    token, port = secrets.token_urlsafe(16), int(listening.getsockname()[1])

    def tell_next(token: str) -> None:
        print(f"diloco: for another browser: {_address(listening, token)}", flush=True)

    app = make_app(board, hosts=LOOPBACK if local else ("*",), token=token, port=port, on_used=tell_next)
    config = uvicorn.Config(
        app, log_level="warning", use_colors=False, lifespan="off", ws="none", timeout_graceful_shutdown=1
    )
    watched = [*(folder.run for folder in folders), *([swarm.run] if swarm else [])]

    def show() -> None:
        board.show(page_data(watched, options.alert, time.time()))

    async def follow_folders() -> None:
        while True:
            more = [await asyncio.to_thread(_read, folder) for folder in folders]
            show()
            if not any(more):
                await asyncio.sleep(options.every_s)

    async def follow_swarm(followed: FollowedSwarm) -> None:
        async with _asking(options) as client:
            while True:
                await _ask(client, followed)
                await asyncio.sleep(options.ask_every_s)

    tasks = [asyncio.ensure_future(follow_folders())]
    if swarm is not None:
        tasks.append(asyncio.ensure_future(follow_swarm(swarm)))
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve([listening]))
    print(f"diloco: watch at {_address(listening, token)} ({_visibility(options)}; Ctrl-C stops)", flush=True)
    try:
        done, _ = await asyncio.wait([serving, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        server.should_exit = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(serving, *tasks, return_exceptions=True)


def _read(folder: FollowedFolder) -> bool:
    """Read some of a folder; a fault that its records reveal in this program is a problem of this run alone."""
    try:
        return folder.read()
    except Exception as error:
        folder.run.problems = [f"{folder.run.where} can't be read: {type(error).__name__}: {error}"]
        return False


def _address(listening: socket.socket, token: str) -> str:
    host, port = listening.getsockname()[:2]
    at = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{at}:{port}/?token={token}"


def _visibility(options: WatchOptions) -> str:
    from diloco.watch import LOOPBACK

    if options.host in LOOPBACK:
        return "from this machine only"
    shown = [*(str(folder) for folder in options.folders), *([f"run {options.run!r}"] if options.run else [])]
    return (
        "the first browser that opens it sees losses, settings, text samples, peers and paths of "
        f"{', '.join(shown)}, but can change nothing; the connection is not encrypted"
    )


def _asking(options: WatchOptions) -> contextlib.AbstractAsyncContextManager[StatusClient]:
    from diloco.cli.peers import asking

    return asking(str(options.run), options.join, options.secret_file)


async def _ask(client: StatusClient, swarm: FollowedSwarm) -> None:
    from diloco.transport import absence

    try:
        found = await client.ask(swarm.since)
    except (DiLoCoError, OSError, TimeoutError) as error:  # the next query may succeed
        swarm.run.problems = [f"The swarm could not be queried: {error}"]
        return
    states = {each.peer_id: absence(each, found) for each in found if not each.status}
    try:
        swarm.take(found, states, time.time())
    except Exception as error:  # a fault that a peer's answer reveals in this program must not end the page
        swarm.run.problems = [f"An answer could not be read: {type(error).__name__}: {error}"]


def _listening(options: WatchOptions) -> socket.socket:
    """Return a listening socket at --host and --port, or at the first free port from 8500 on."""
    ports = [options.port] if options.port is not None else [*range(_FIRST_PORT, _FIRST_PORT + 20), 0]
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    for port in ports:
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((options.host, port))
            listening.listen()
            return listening
        except (OSError, OverflowError) as error:
            listening.close()
            failure = error
    raise ConfigurationError(f"can't listen at {options.host}:{ports[0]} ({failure}). Choose another --port or --host.")
