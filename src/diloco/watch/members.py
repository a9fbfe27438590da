"""The rows of the page's table of peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco.protocol import faults_seen
from diloco.watch.history import ProcessHistory, RunHistory
from diloco.watch.records import Record, finite, first, number, text, whole

__all__ = ["GONE", "Seen", "fetched", "member_rows"]

GONE = ("gone", "finished")  # states in which a peer is not expected to answer


@dataclass(frozen=True)
class Seen:
    """A peer of a swarm, as last seen."""

    process: str  # its name in `RunHistory.processes`
    replica: int  # its replica number
    peer_id: str  # its identity
    state: str  # the state that it reports, or "no answer", "gone" or "finished"
    heard_s: float | None = None  # when it last answered, by the clock of this machine; None if it never did
    route: str = ""  # how it is reached: "direct", "relayed", or the peer in between
    round_trip_s: float | None = None  # how long it took to answer
    status: Mapping[str, Any] = field(default_factory=dict)  # its last status; untrusted, so it may contain anything


def member_rows(run: RunHistory, seen: Sequence[Seen], now_s: float) -> dict[str, dict[str, Any]]:
    """Return replica number as text -> its row on the page. Unknown values are None or "".

    A peer with the number of another one has a row of its own, under its identity.

    Args:
        run: the history of the run.
        seen: the peers of a swarm; empty for a folder.
        now_s: the current time in seconds since 1970, by the clock of `Seen.heard_s`.
    """
    rows = {}
    by_replica = {each.replica: each for each in seen if each.process == f"replica {each.replica}"}
    statuses = {replica: each.status for replica, each in by_replica.items()}
    numbers = (*run.expected, *run.grid.parts, *by_replica)
    listed = [(str(number), number, by_replica.get(number), f"replica {number}") for number in sorted({*numbers})]
    listed += [(each.peer_id, each.replica, each, each.process) for each in seen if each not in by_replica.values()]
    differ = {replica for cell in run.newest_cells() for replica in cell.minority()}
    agree = {replica for cell in run.newest_cells() for replica, digest in cell.sent.items() if digest} - differ
    for key, replica, peer, name in listed:
        process = run.processes.get(name)
        part = run.grid.parts.get(replica) if key == str(replica) else None
        status: Mapping[str, Any] = peer.status if peer else {}
        last = process.last if process else {}
        rows[key] = {
            "replica": replica,
            "peer": peer.peer_id if peer else "",
            "state": peer.state if peer else _state(run, replica, process),
            "step": first(whole(status, "step"), process.step if process and process.last else None),
            "fetched": fetched(process.fetched) if process else None,
            "heard_s": None if peer is None or peer.heard_s is None else round(max(0.0, now_s - peer.heard_s), 1),
            "way": peer.route if peer else "",
            "round_trip_s": finite(peer.round_trip_s if peer else None),
            "sent_bytes": first(whole(status, "sent_bytes"), whole(last, "sent_bytes")),
            "received_bytes": first(whole(status, "received_bytes"), whole(last, "received_bytes")),
            "link_bits_per_s": finite(number(status, "link_bits_per_s")),
            "steps_per_s": finite(1 / process.step_s) if process and process.step_s else None,
            "pace": finite(number(status, "pace")),
            "weight": finite(part.weight) if part else None,
            "wait_s": finite(part.wait_s) if part else None,
            "late_s": finite(part.late_s) if part else None,
            "sent_rounds": part.sent if part else None,
            "counted_rounds": part.counted if part else None,
            "missed": part.missed if part else None,
            "faults": "" if (faults := faults_seen(replica, statuses)) is None else str(faults),
            "codec": text(status, "codec") or _codec(run),
            "digest": "" if part is None else "differs" if replica in differ else "agrees" if replica in agree else "",
        }
    return rows


def fetched(record: Record) -> dict[str, int] | None:
    """Return the byte counts and the fragment of a ``StateFetched`` record, or None if one is missing."""
    names = ("received_bytes", "expected_bytes", "fragment", "fragment_received_bytes", "fragment_expected_bytes")
    values = {name: value for name in names if (value := whole(record, name)) is not None}
    return values if len(values) == len(names) else None


def _state(run: RunHistory, replica: int, process: ProcessHistory | None) -> str:
    """Return the state of a replica whose process is not a peer that can be queried."""
    if replica not in run.expected:
        return "gone"
    source = process or run.first
    if source.interrupted:
        return "interrupted"
    return "finished" if source.over else "joining" if source.fetched else "running"


def _codec(run: RunHistory) -> str:
    details = run.first.started.get("details")
    return text(details, "codec") if isinstance(details, dict) else ""
