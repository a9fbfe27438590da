"""``diloco status`` and ``diloco watch``: what a checkpoint holds, and what a run or the peers of a swarm are doing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta
from tyro.conf import Positional, arg

from diloco.config import parse_options
from diloco.errors import CheckpointError, ConfigurationError, DiLoCoError
from diloco.events import to_json
from diloco.units import Duration, columns, facts_table, format_bytes, format_rate
from diloco.waiting import say

if TYPE_CHECKING:
    from diloco.transport import Identity, PeerReport, StatusClient
    from diloco.watch import PageServer


@dataclass(frozen=True, kw_only=True)
class SwarmOptions:
    """The options of the commands that query the peers of a swarm."""

    run: str | None = None
    """With --join: name of the swarm's run."""
    join: tuple[str, ...] = ()
    """Addresses of one or more peers of the swarm, as the peers print them."""
    secret_file: Path | None = None
    """The swarm's secret, if it has one."""

    def __post_init__(self) -> None:
        if (self.run is None) != (not self.join):
            missing = "--join, the address of a peer" if self.run else "--run, the name of the run"
            raise ConfigurationError(f"a swarm needs both --run and --join: {missing}, is missing.")
        if self.secret_file and self.run is None:
            raise ConfigurationError("--secret-file is the secret of a swarm, which needs --run and --join.")

    @contextlib.asynccontextmanager
    async def open_client(self, speaker: Identity | None = None) -> AsyncIterator[StatusClient]:
        """Connect to the peers, as ``speaker`` if there is one, and yield a client that queries them."""
        from diloco.transport import Admission, NodePlace, open_status_client, read_secret

        admission = Admission(str(self.run), read_secret(self.secret_file, "--secret-file"))
        place = NodePlace(join=self.join, listen=(), map_ports=False)
        with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
            async with open_status_client(Path(folder) / "identity.key", place, admission, speaker) as client:
                yield client


@dataclass(frozen=True, kw_only=True)
class StatusOptions(SwarmOptions):
    """Show what a checkpoint holds, or what the peers of a swarm are doing. The command only reads.

    The columns of a swarm: the step; the number of the view, and of its members; tokens/s of the last step;
    pace, the share of the steps that the peer trains (--network.straggler dynamic); link, the highest rate of late at
    which it sent, once it has sent enough to measure it; moved, the bytes of contributions that it has sent and
    received; digest, of the state before its newest round. What is not known yet is empty.

    Examples:
      diloco status runs/streaming-tiny
      diloco status runs/streaming-tiny/checkpoints/step-00000300 --json
      diloco status --run my-run --join /ip4/203.0.113.7/tcp/31330/p2p/QmXoyp...
      diloco status --run my-run --join /ip4/203.0.113.7/tcp/31330/p2p/QmXoyp... --every 5s
    """

    folder: Annotated[Positional[Path | None], arg(metavar="[RUN]")] = None
    """A run folder (its latest checkpoint) or a checkpoint."""
    every: Annotated[Duration | None, Meta(gt=0)] = None
    """Keep the table of a swarm up to date, with this time between two queries. `diloco watch` shows more."""
    json: bool = False
    """Print everything as JSON: the checkpoint's manifest, or the peers' reports."""


def run_status(arguments: Sequence[str]) -> int:
    """Print the status; return 0, or 1 if no peer of the swarm answers."""
    options: StatusOptions = parse_options(StatusOptions, "status", arguments)
    if bool(options.run) == bool(options.folder):
        raise ConfigurationError("give either the folder of a run or checkpoint, or --run and --join of a swarm.")
    if options.every is not None and (options.folder or options.json):
        raise ConfigurationError("--every keeps the table of --run up to date, without --json.")
    if options.folder:
        print(_checkpoint(options.folder, as_json=options.json))
        return 0
    try:
        return asyncio.run(_show_peers(options))
    except KeyboardInterrupt:
        if options.every is None:
            raise
        return 0


def _checkpoint(folder: Path, *, as_json: bool) -> str:
    from diloco.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(folder)
    record = asdict(checkpoint) | {"path": str(checkpoint.path), "size_bytes": checkpoint.size_bytes}
    try:
        return to_json(record, indent=2) if as_json else _contents(record)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{checkpoint.path} describes itself in a way that is not valid: {error!r}. Add --json to see all of it."
        ) from error


def _contents(record: dict[str, Any]) -> str:
    about, parts = record["about"], record["parts"]
    fragments: list[dict[str, Any]] = about.pop("fragments", [])
    definition, in_flight = about.pop("definition", None), about.pop("rounds_in_flight", [])
    about.pop("identity", None)  # all that replicas compare, which only --json shows
    facts = {
        "checkpoint": record["path"],
        "step": f"{record['step']:,}",
        "size": format_bytes(record["size_bytes"]),
        "versions": ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
        "in flight": ", ".join(in_flight) or "none",
        **({"architecture": f"{definition['architecture']}, its configuration in --json"} if definition else {}),
        **{name.replace("_", " "): _value(value) for name, value in about.items()},
    }
    rows = [[str(f["index"]), f"{f['numel']:,}", str(len(f["parameters"])), str(f["outer_step"])] for f in fragments]
    files = [[name, part, f"{of['size_bytes']:,}"] for part, entries in parts.items() for name, of in entries.items()]
    tables = [columns(["fragment", "parameters", "tensors", "outer steps"], rows)] if rows else []
    return "\n\n".join([facts_table(facts), *tables, columns(["file", "part", "bytes"], files)])


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_value(entry)}" for name, entry in value.items() if entry not in (None, {}))
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if is_count else str(value)


async def _show_peers(options: StatusOptions) -> int:
    async with options.open_client() as client:
        while True:
            try:
                reports = await client.ask()
            except (DiLoCoError, OSError) as error:
                if options.every is None:
                    raise
                say(f"the peers could not be queried; trying again: {error}", "warning")
            else:
                as_json = msgspec.json.format(msgspec.json.encode(reports)).decode() if options.json else ""
                print(as_json or _table(reports), flush=True)
                for remark in _remarks(reports, options.run):
                    say(remark, "warning")
                if options.every is None:
                    return 0 if any(report.status for report in reports) else 1
            await asyncio.sleep(options.every)
            print()


def _table(reports: Sequence[PeerReport]) -> str:
    from diloco.transport import absences

    names = ["peer", "replica", "state", "step", "view", "tokens/s", "pace", "link", "moved", "digest"]
    return columns(names, [_row(*each) for each in zip(reports, absences(reports), strict=True)])


def _row(peer: PeerReport, absent: str) -> list[str]:
    status = peer.status
    if status is None:
        return [peer.peer_id, str(peer.number), absent, *[""] * 7]
    state, expected = status.state, status.state_expected_bytes
    if state == "joining" and expected:  # the share of the others' state that it has received
        state += f", {100 * status.state_received_bytes // expected} %"
    return [
        peer.peer_id,
        status.name or str(status.replica),
        state,
        str(status.step),
        f"{status.view} ({len(status.members)})" if status.members else "",
        "" if status.tokens_per_s is None else f"{status.tokens_per_s:,.0f}",
        "" if status.pace is None else f"{status.pace:.0%}",
        "" if status.link_bits_per_s is None else format_rate(status.link_bits_per_s),
        format_bytes(moved) if (moved := status.sent_bytes + status.received_bytes) else "",
        status.digest[:8],
    ]


def _remarks(reports: Sequence[PeerReport], run: str | None) -> Iterator[str]:
    from diloco.transport import absences

    for report, absent in zip(reports, absences(reports), strict=True):
        reasons = {
            "finished": f"replica {report.number} has finished the run and exited",
            "gone": f"replica {report.number} is no longer a member: it left or was lost, and the others continued",
            "joining": f"replica {report.number} is looking for the members to join them, or has ended while it did",
            "refuses": f"it answers, but {report.objection}",
            "no answer": report.problem.partition("\n")[0],
        }
        if absent and report.problem:
            yield f"{report.peer_id}: {reasons[absent]}"
    states = {
        (report.status.round, report.status.digest) for report in reports if report.status and report.status.digest
    }
    if len(states) > len({newest for newest, _ in states}):
        yield (
            "peers show different digests of the state before the same round. If they still do in the next query, "
            "their states differ, and the next round decides which one all of them adopt"
        )
    if not reports:
        yield (
            f"no peer of run {run!r} has been seen within the last half hour. Check that its replicas were started "
            "with this name as --run, and with this --secret-file, or none."
        )


@dataclass(frozen=True, kw_only=True)
class WatchOptions(SwarmOptions):
    """Show runs on a live web page: losses, rounds, peers and alerts. The command only reads.

    Examples:
      diloco watch runs/streaming-tiny
      diloco watch runs/a runs/b runs/c                  compare runs
      diloco watch --run my-run --join /ip4/203.0.113.7/tcp/31330/p2p/QmXoyp...
      diloco watch runs/streaming-tiny --out page.html
    """

    folders: Annotated[Positional[tuple[Path, ...]], arg(metavar="[RUN ...]")] = ()
    """Folders of running or finished runs."""
    out: Path | None = None
    """Write the page to this self-contained file and exit."""
    host: str = "127.0.0.1"
    """Address to listen at. The printed address holds a token, without which nothing is shown."""
    port: int | None = None
    """Port to listen at. Default: 8500, or the next free one."""
    every: Annotated[Duration, Meta(gt=0)] = 2.0
    """Time between two reads of the folders and two queries to the peers. Default: 2s."""


def run_watch(arguments: Sequence[str]) -> int:
    """Serve the page until interrupted, or write it to a file; return 0."""
    from diloco.watch import FollowedFolder, FollowedSwarm, export_page, page_data

    options: WatchOptions = parse_options(WatchOptions, "watch", arguments)
    if not options.folders and options.run is None:
        raise ConfigurationError("nothing to watch: give the folder of a run, or --run and --join of a swarm.")
    folders = [FollowedFolder(folder) for folder in options.folders]
    swarm = FollowedSwarm(options.run, options.join) if options.run else None

    def data(**more: float) -> bytes:
        return page_data([followed.run for followed in (*folders, swarm) if followed], time.time(), **more)

    async def follow(server: PageServer | None) -> None:
        """Keep the page up to date; without a server, read everything once."""
        async with options.open_client() if swarm else contextlib.nullcontext() as client:
            while True:
                more = any([folder.read() for folder in folders])
                if swarm and client and not more:
                    try:
                        swarm.take(await client.ask(swarm.since), time.time())
                    except Exception as error:  # also one that a peer's answer reveals; the next query may succeed
                        swarm.run.problems = [f"The swarm could not be queried: {type(error).__name__}: {error}"]
                if server:
                    server.show(data())
                elif not more:
                    return
                if not more:
                    await asyncio.sleep(options.every)

    if options.out is not None:
        asyncio.run(follow(None))
        try:
            options.out.write_text(export_page(data(made_s=round(time.time()))), "utf-8")
        except OSError as error:
            raise ConfigurationError(f"--out {options.out} can't be written: {error}.") from error
        print(f"diloco: wrote {options.out}, a self-contained page for any browser")
        return 0
    with _listening(options.host, options.port) as server, contextlib.suppress(KeyboardInterrupt):
        seen = "who has it sees losses, settings, samples, peers and paths, but can change nothing; it is not encrypted"
        seen = "from this machine only" if server.is_local else seen
        host = f"[{server.host}]" if ":" in server.host else server.host
        host = socket.gethostname() if server.host in ("0.0.0.0", "::") else host
        at = f"http://{host}:{server.port}/?token={server.token}"
        print(f"diloco: watch at {at} ({seen}; Ctrl-C stops)", flush=True)
        asyncio.run(follow(server))
    return 0


def _listening(host: str, port: int | None) -> PageServer:
    """Return a server that listens at the port, or at the first free one from 8500 on."""
    from diloco.watch import PageServer

    ports = [*range(8500, 8520), 0] if port is None else [port]
    for candidate in ports:
        try:
            return PageServer(host, candidate)
        except (OSError, OverflowError) as error:
            failure = error
    raise ConfigurationError(f"can't listen at {host}:{ports[0]} ({failure}). Choose another --port or --host.")
