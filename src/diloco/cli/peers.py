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
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from diloco.cli.tables import columns
from diloco.config.flags import parse_options
from diloco.errors import ConfigurationError
from diloco.units import format_bytes, format_rate

if TYPE_CHECKING:
    from diloco.transport.hivemind.library import PeerReport

__all__ = ["about_digests", "absence", "run"]

DESCRIPTION = """List the peers of a run: their step, speed, bandwidth, digest and state, as they say themselves.

Examples:
  diloco peers --run my-run --join /ip4/203.0.113.7/tcp/31330/p2p/QmXoyp..."""


@dataclass(frozen=True, kw_only=True)
class PeersOptions:
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
    from diloco.train.fleet.connecting import read_secret
    from diloco.transport.hivemind.library import list_peers
    from diloco.transport.hivemind.place import Admission, NodePlace

    options = parse_options(PeersOptions, "peers", DESCRIPTION, arguments)
    if not options.join:
        raise ConfigurationError("--join needs the address of a peer, any of them. Nothing was done.")
    admission = Admission(options.run, read_secret(options.secret_file))
    with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
        place = NodePlace(join=options.join, listen=(), map_ports=False)
        found = asyncio.run(list_peers(Path(folder) / "identity.key", place, admission))
    if options.json:
        print(json.dumps([dataclasses.asdict(each) for each in found], indent=2))
    else:
        rows = [_row(each, absence(each, found)) for each in found]
        print(
            columns(["peer", "replica", "state", "step", "view", "tokens/s", "pace", "link", "moved", "digest"], rows)
        )
    for each in found:
        if each.problem:
            words = _WORDS[absence(each, found)].format(number=each.number, problem=each.problem.partition("\n")[0])
            print(f"diloco: {each.peer_id}: {words}", file=sys.stderr)
    if words := about_digests(found):
        print(f"diloco: {words}", file=sys.stderr)
    if not found:
        print(
            f"diloco: no peer of run {options.run!r} has been seen within the last half hour. Is that the name that "
            "its replicas were given as --run?",
            file=sys.stderr,
        )
    return 0 if any(each.status for each in found) else 1


_WORDS = {
    "finished": "replica {number} has finished the run, and has ended",
    "gone": "replica {number} takes part no more: it has left, or was lost, and the others went on",
    "no answer": "{problem}",
}


def absence(peer: PeerReport, found: Sequence[PeerReport]) -> str:
    """Why a peer does not answer: "finished"; "gone", if it is a member for none of those that do; or "no answer"."""
    views = [each.status["members"] for each in found if each.status.get("members")]
    if peer.finished:
        return "finished"
    return "gone" if views and not any(peer.number in members for members in views) else "no answer"


def about_digests(found: Sequence[PeerReport]) -> str:
    """Why the peers' digests differ; "" if they don't.

    >>> from diloco.transport.hivemind.library import PeerReport
    >>> about_digests([PeerReport(name, 0, {"step": 8, "digest": "aa"}) for name in ("Qm1", "Qm2")])
    ''
    """
    shown = {each.number: (each.status.get("step"), each.status.get("digest", "-")) for each in found}
    shown = {number: (step, digest) for number, (step, digest) in shown.items() if digest != "-"}
    by_step: dict[Any, set[str]] = {}
    for step, digest in shown.values():
        by_step.setdefault(step, set()).add(digest)
    if any(len(digests) > 1 for digests in by_step.values()):
        return (
            "peers at the same step show different digests. A round may have ended between two answers. If they "
            "still differ when you ask again, the peers disagree, and the next round decides whose state is taken over"
        )
    if len({digest for _, digest in shown.values()}) > 1:
        return (
            "the digests differ because the peers were asked at different steps. A digest is of the state that a peer "
            "last contributed from, and the same for all peers at the same step"
        )
    return ""


def _row(peer: PeerReport, absent: str) -> list[str]:
    peer_id, number, status = peer.peer_id, peer.number, dict(peer.status)
    if not status:
        return [peer_id, str(number), absent, *["-"] * 7]
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
