"""``diloco status``: show what a checkpoint holds, or what the peers of a swarm are doing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import FlagCreatePairsOff, Positional, arg

from diloco.cli.tables import columns, facts_table
from diloco.config import parse_options
from diloco.errors import CheckpointError, ConfigurationError, DiLoCoError
from diloco.units import Duration, format_bytes, format_rate

if TYPE_CHECKING:
    from diloco.checkpoint import Checkpoint
    from diloco.transport import PeerReport, StatusClient

__all__ = ["SwarmOptions", "run"]

DESCRIPTION = """Show what a checkpoint holds, or what the peers of a swarm are doing. The command only reads.

Examples:
  diloco status runs/streaming-tiny
  diloco status runs/streaming-tiny/checkpoints/step-00000300 --json
  diloco status --run my-run --join /ip4/203.0.113.7/tcp/31330/p2p/QmXoyp...
  diloco status --run my-run --join /ip4/203.0.113.7/tcp/31330/p2p/QmXoyp... --every 5s"""


@dataclass(frozen=True, kw_only=True)
class SwarmOptions:
    """The options of the commands that query the peers of a swarm."""

    run: Annotated[str | None, arg(metavar="TEXT", help_behavior_hint="")] = None
    """With --join: name of the swarm's run."""
    join: Annotated[tuple[str, ...], arg(metavar="TEXT...", help_behavior_hint="")] = ()
    """Addresses of one or more peers of the swarm, as the peers print them."""
    secret_file: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """The swarm's secret, if it has one."""

    @contextlib.asynccontextmanager
    async def open_client(self) -> AsyncIterator[StatusClient]:
        """Connect to the peers and yield a client that queries them."""
        from diloco.transport import Admission, NodePlace, open_status_client, read_secret

        admission = Admission(str(self.run), read_secret(self.secret_file, "--secret-file"))
        place = NodePlace(join=self.join, listen=(), map_ports=False)
        with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
            async with open_status_client(Path(folder) / "identity.key", place, admission) as client:
                yield client

    def __post_init__(self) -> None:
        if (self.run is None) != (not self.join):
            missing = "--join, the address of a peer" if self.run else "--run, the name of the run"
            raise ConfigurationError(f"a swarm needs both --run and --join: {missing}, is missing.")
        if self.secret_file and self.run is None:
            raise ConfigurationError("--secret-file is the secret of a swarm, which needs --run and --join.")


@dataclass(frozen=True, kw_only=True)
class StatusOptions(SwarmOptions):
    """The options of `diloco status`."""

    folder: Annotated[Positional[Path | None], arg(metavar="[RUN]", help_behavior_hint="")] = None
    """A run folder (its latest checkpoint) or a checkpoint."""
    every: Annotated[Duration | None, arg(metavar="TIME", help_behavior_hint="")] = None
    """Keep the table of a swarm up to date, with this time between two queries. `diloco watch` shows more."""
    json: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """Print everything as JSON: the checkpoint's manifest, or the peers' reports."""


def run(arguments: Sequence[str]) -> int:
    """Print the status; return 0, or 1 if no peer of the swarm answers."""
    options = parse_options(StatusOptions, "status", DESCRIPTION, arguments)
    if bool(options.run) == bool(options.folder):
        raise ConfigurationError("give either the folder of a run or checkpoint, or --run and --join of a swarm.")
    if options.every is not None and (options.folder or options.json or not options.every):
        raise ConfigurationError("--every (above 0s) keeps the table of --run up to date, without --json.")
    if options.folder:
        print(_checkpoint(options.folder, as_json=options.json))
        return 0
    if options.every:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_watch(options, options.every))
        return 0
    reports = asyncio.run(_query(options))
    if options.json:
        print(json.dumps([dataclasses.asdict(each) for each in reports], indent=2))
    else:
        print(_table(reports))
    for words in _remarks(reports, options.run):
        print(f"diloco: {words}", file=sys.stderr)
    return 0 if any(each.status for each in reports) else 1


def _checkpoint(folder: Path, *, as_json: bool) -> str:
    """Return what the manifest of a checkpoint says."""
    from diloco.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(folder)
    try:
        return json.dumps(_record(checkpoint), indent=2) if as_json else _contents(checkpoint)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{checkpoint.path} describes itself in a way that is not valid: {error!r}. Add --json to see all of it."
        ) from error


def _record(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "path": str(checkpoint.path),
        "step": checkpoint.step,
        "size_bytes": checkpoint.size_bytes,
        "versions": dict(checkpoint.versions),
        "about": dict(checkpoint.about),
        "parts": {
            part: {name: dataclasses.asdict(facts) for name, facts in files.items()}
            for part, files in checkpoint.parts.items()
        },
    }


def _contents(checkpoint: Checkpoint) -> str:
    about = dict(checkpoint.about)
    fragments: list[dict[str, Any]] = about.pop("fragments", [])
    definition: dict[str, Any] = about.pop("definition", None) or {}
    in_flight: list[str] = about.pop("rounds_in_flight", [])
    facts = {
        "checkpoint": str(checkpoint.path),
        "step": f"{checkpoint.step:,}",
        "size": format_bytes(checkpoint.size_bytes),
        "versions": ", ".join(f"{name} {version}" for name, version in checkpoint.versions.items()),
        "in flight": ", ".join(in_flight) or "none",
        **({"architecture": f"{definition['architecture']}, its configuration in --json"} if definition else {}),
        **{name.replace("_", " "): _value(value) for name, value in about.items()},
    }
    blocks = [facts_table(facts, indent="")]
    if fragments:
        rows = [
            [str(f["index"]), f"{f['numel']:,}", str(len(f["parameters"])), str(f["outer_step"])] for f in fragments
        ]
        blocks.append(columns(["fragment", "parameters", "tensors", "outer steps"], rows))
    parts = checkpoint.parts.items()
    files = [[name, part, f"{entry.size_bytes:,}"] for part, entries in parts for name, entry in entries.items()]
    blocks.append(columns(["file", "part", "bytes"], files))
    return "\n\n".join(blocks)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_value(entry)}" for name, entry in value.items() if entry not in (None, {}))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


async def _query(options: StatusOptions) -> Sequence[PeerReport]:
    async with options.open_client() as client:
        return await client.ask()


async def _watch(options: StatusOptions, every_s: float) -> None:
    """Print the table repeatedly. On a terminal each table replaces the one before."""
    from rich.live import Live
    from rich.text import Text

    from diloco.monitor import VisibleConsole

    console = VisibleConsole()
    async with options.open_client() as client:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                try:
                    reports = await client.ask()
                    when = f"run {options.run!r} at {time.strftime('%H:%M:%S')}; Ctrl-C stops"
                    shown = "\n\n".join([when, _table(reports), *_remarks(reports, options.run)])
                except (DiLoCoError, OSError) as error:
                    shown = f"The peers could not be queried; trying again: {error}"
                if console.is_terminal:
                    live.update(Text(shown, no_wrap=True, overflow="ellipsis"), refresh=True)
                else:
                    print(shown + "\n", flush=True)
                await asyncio.sleep(every_s)


def _table(reports: Sequence[PeerReport]) -> str:
    from diloco.transport import absences

    names = ["peer", "replica", "state", "step", "view", "tokens/s", "pace", "link", "moved", "digest"]
    return columns(names, [_row(*each) for each in zip(reports, absences(reports), strict=True)])


def _row(peer: PeerReport, absent: str) -> list[str]:
    status = peer.status
    if not status:
        return [peer.peer_id, str(peer.number), absent, *["-"] * 7]
    units: list[tuple[str, Callable[[float], str]]] = [
        ("tokens_per_s", "{:,.0f}".format),
        ("pace", "{:.0%}".format),
        ("link_bits_per_s", format_rate),
    ]
    return [
        peer.peer_id,
        str(status.get("name") or status.get("replica", peer.number)),
        _state(status),
        str(status.get("step", "?")),
        f"{status.get('view', '?')} of {len(status.get('members', []))}",
        *("-" if status.get(key) is None else form(float(status[key])) for key, form in units),
        format_bytes(int(status.get("sent_bytes") or 0) + int(status.get("received_bytes") or 0)),
        str(status.get("digest", "-"))[:8],
    ]


def _state(status: Mapping[str, Any]) -> str:
    """Return the state of a peer, with the share of the others' state that a joiner has received."""
    state, expected = str(status.get("state", "?")), int(status.get("state_expected_bytes") or 0)
    share = f", {100 * int(status.get('state_received_bytes') or 0) // expected} %" if expected > 0 else ""
    return f"{state}{share}" if state == "joining" else state


def _remarks(reports: Sequence[PeerReport], run: str | None) -> Iterator[str]:
    """Explain why peers do not answer, why digests differ, or why there are no peers."""
    from diloco.transport import absences

    reasons = {
        "finished": "replica {number} has finished the run and exited",
        "gone": "replica {number} is no longer a member: it left or was lost, and the others continued",
        "no answer": "{problem}",
    }
    for each, absent in zip(reports, absences(reports), strict=True):
        if absent and each.problem:
            reason = reasons[absent]
            yield f"{each.peer_id}: {reason.format(number=each.number, problem=each.problem.partition(chr(10))[0])}"
    statuses = [each.status for each in reports if each.status.get("digest", "-") != "-"]
    states = {(status.get("step"), status["digest"]) for status in statuses}
    if len(states) > len({step for step, _ in states}):
        yield (
            "peers at the same step show different digests. If they still do in the next query, their states differ, "
            "and the next round decides which one all of them adopt"
        )
    elif len({digest for _, digest in states}) > 1:
        yield "the digests differ because the peers answered at different steps"
    if not reports:
        yield (
            f"no peer of run {run!r} has been seen within the last half hour. Check that its replicas were started "
            "with this name as --run."
        )
