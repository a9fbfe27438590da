"""``diloco peers``: list the peers of a swarm and what each of them is doing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.live import Live
from rich.text import Text
from tyro.conf import FlagCreatePairsOff, arg

from diloco.cli.tables import columns
from diloco.config import parse_options
from diloco.errors import ConfigurationError, DiLoCoError
from diloco.monitor import VisibleConsole
from diloco.protocol import Faults, faults_seen
from diloco.units import format_bytes, format_rate

if TYPE_CHECKING:
    from diloco.transport import PeerReport, StatusClient

__all__ = ["asking", "run"]

DESCRIPTION = """List the peers of a run.

Each peer reports its own step, speed, bandwidth, digest and state. Its faults are
reported by the other peers: rounds that it spoilt, missed, voted against or delayed.

Examples:
  diloco peers --run my-run --join /ip4/203.0.113.7/tcp/31330/p2p/QmXoyp...
  diloco peers --run my-run --join /ip4/203.0.113.7/tcp/31330/p2p/QmXoyp... --watch"""


@dataclass(frozen=True, kw_only=True)
class PeersOptions:
    """The options of `diloco peers`."""

    run: Annotated[str, arg(metavar="TEXT", help_behavior_hint="")]
    """Name of the run."""
    join: Annotated[tuple[str, ...], arg(metavar="TEXT...", help_behavior_hint="")]
    """Addresses of one or more peers, as the peers print them."""
    secret_file: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """The run's secret, if it has one."""
    json: bool = False
    """Print the reports as JSON."""
    watch: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """Query the peers repeatedly and keep the table up to date. `diloco watch` shows more, on a web page."""
    every_s: float = 2.0
    """With --watch: seconds between two queries."""


def run(arguments: Sequence[str]) -> int:
    """Query every peer; return 0 if at least one answers, 1 if none does. With --watch, run until interrupted."""
    options = parse_options(PeersOptions, "peers", DESCRIPTION, arguments)
    if not options.join:
        raise ConfigurationError("--join needs the address of at least one peer of the run.")
    if options.watch and options.json:
        raise ConfigurationError("--watch shows a table and --json prints one answer. Use only one of them.")
    if not options.every_s > 0:
        raise ConfigurationError(f"--every-s must be positive, got {options.every_s}.")
    if options.watch:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_watch(options))
        return 0
    found = asyncio.run(_ask(options))
    if options.json:
        print(json.dumps([dataclasses.asdict(each) for each in found], indent=2))
    else:
        print(_table(found))
    for words in _remarks(found, options.run):
        print(f"diloco: {words}", file=sys.stderr)
    return 0 if any(each.status for each in found) else 1


@contextlib.asynccontextmanager
async def asking(run: str, join: Sequence[str], secret_file: Path | None) -> AsyncIterator[StatusClient]:
    """Connect to the DHT of a run and yield a client that queries its peers."""
    from diloco.transport import Admission, NodePlace, read_secret
    from diloco.transport.hivemind import status_client

    admission = Admission(run, read_secret(secret_file, "--secret-file"))
    place = NodePlace(join=tuple(join), listen=(), map_ports=False)
    with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
        async with status_client.open_status_client(Path(folder) / "identity.key", place, admission) as asked:
            yield asked


async def _ask(options: PeersOptions) -> Sequence[PeerReport]:
    async with asking(options.run, options.join, options.secret_file) as asked:
        return await asked.ask()


async def _watch(options: PeersOptions) -> None:
    """Print the table repeatedly. On a terminal each table replaces the one before."""
    console = VisibleConsole()
    async with asking(options.run, options.join, options.secret_file) as asked:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                try:
                    shown = _report(await asked.ask(), options.run)
                except (DiLoCoError, OSError) as error:
                    shown = f"The peers could not be queried; trying again: {error}"
                if console.is_terminal:
                    live.update(Text(shown, no_wrap=True, overflow="ellipsis"), refresh=True)
                else:
                    print(shown + "\n", flush=True)
                await asyncio.sleep(options.every_s)


def _report(found: Sequence[PeerReport], run: str) -> str:
    """Return the table with its time above and the remarks below."""
    when = f"run {run!r} at {time.strftime('%H:%M:%S')}; Ctrl-C stops"
    return "\n".join([when, "", _table(found), *(f"\n{words}" for words in _remarks(found, run))])


def _table(found: Sequence[PeerReport]) -> str:
    from diloco.transport import absence

    statuses = {each.number: each.status for each in found}
    rows = [[*row(each, absence(each, found)), _faults(faults_seen(each.number, statuses))] for each in found]
    names = ["peer", "replica", "state", "step", "view", "tokens/s", "pace", "link", "moved", "digest", "faults"]
    return columns(names, rows)


def _faults(seen: Faults | None) -> str:
    """Return the cell for the faults that the other peers have counted.

    >>> _faults(None), _faults(Faults()), _faults(Faults(missed=2))
    ('no data', 'none', '2 missed')
    """
    return "no data" if seen is None else str(seen)


def _remarks(found: Sequence[PeerReport], run: str) -> Iterator[str]:
    """Explain why peers do not answer, why digests differ, or why there are no peers."""
    from diloco.transport import absence

    for each in found:
        if each.problem:
            words = _WORDS[absence(each, found)].format(number=each.number, problem=each.problem.partition("\n")[0])
            yield f"{each.peer_id}: {words}"
    if words := _about_digests(found):
        yield words
    if not found:
        yield (
            f"no peer of run {run!r} has been seen within the last half hour. Check that its replicas were started "
            "with this name as --run."
        )


_WORDS = {
    "finished": "replica {number} has finished the run and exited",
    "gone": "replica {number} is no longer a member: it left or was lost, and the others continued",
    "no answer": "{problem}",
}


def _about_digests(found: Sequence[PeerReport]) -> str:
    """Explain why the peers' digests differ, or return "" if they don't.

    >>> from diloco.transport.hivemind.status_client import PeerReport
    >>> _about_digests([PeerReport(name, 0, {"step": 8, "digest": "aa"}) for name in ("Qm1", "Qm2")])
    ''
    """
    shown = {each.peer_id: (each.status.get("step"), each.status.get("digest", "-")) for each in found}
    shown = {peer: (step, digest) for peer, (step, digest) in shown.items() if digest != "-"}
    by_step: dict[Any, set[str]] = {}
    for step, digest in shown.values():
        by_step.setdefault(step, set()).add(digest)
    if any(len(digests) > 1 for digests in by_step.values()):
        return (
            "peers at the same step show different digests. A round may have ended between two answers. If the digests "
            "still differ in the next query, the states of the peers differ, and the next round decides which one all "
            "of them adopt"
        )
    if len({digest for _, digest in shown.values()}) > 1:
        return (
            "the digests differ because the peers answered at different steps. A digest covers the state from which a "
            "peer last contributed, and is the same for all peers at the same step"
        )
    return ""


def _state(status: Mapping[str, Any]) -> str:
    """Return the state of a peer, with the share of the others' state that a joiner has received.

    >>> _state({"state": "joining", "state_received_bytes": 999, "state_expected_bytes": 1000})
    'joining, 99 %'
    """
    state, expected = str(status.get("state", "?")), int(status.get("state_expected_bytes") or 0)
    if state != "joining" or expected <= 0:
        return state
    return f"{state}, {100 * int(status.get('state_received_bytes') or 0) // expected} %"


def row(peer: PeerReport, absent: str) -> list[str]:
    """Return the cells of a peer in the table, except for its faults."""
    peer_id, number, status = peer.peer_id, peer.number, dict(peer.status)
    if not status:
        return [peer_id, str(number), absent, *["-"] * 7]
    speed, pace, rate = status.get("tokens_per_s"), status.get("pace"), status.get("link_bits_per_s")
    moved = int(status.get("sent_bytes") or 0) + int(status.get("received_bytes") or 0)
    return [
        peer_id,
        str(status.get("replica", number)),
        _state(status),
        str(status.get("step", "?")),
        f"{status.get('view', '?')} of {len(status.get('members', []))}",
        "-" if speed is None else f"{float(speed):,.0f}",
        "-" if pace is None else f"{100 * float(pace):.0f} %",
        "-" if rate is None else format_rate(float(rate)),
        format_bytes(moved),
        str(status.get("digest", "-"))[:8],
    ]
