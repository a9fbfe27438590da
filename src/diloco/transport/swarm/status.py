"""The status and recent events that a peer reports to observers, which do not take part in its swarm."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any, cast

import xxhash
from msgspec import Meta

from diloco.events import Event, json_ready, to_record
from diloco.membership import Count
from diloco.protocol import Refused, WireMessage
from diloco.transport.peers.directory import Directory, question, say
from diloco.transport.peers.transport import PeerTransport
from diloco.units import visible

__all__ = ["PeerStatus", "StatusAnswer", "StatusAsked", "serve_status"]

KEPT = {
    "RunStarted": 1,
    "StepFinished": 256,
    "RoundSent": 128,
    "RoundCommitted": 128,
    "RoundVoid": 128,
    "ViewChanged": 32,
    "StateFetched": 16,
    "Evaluated": 64,
    "SampleGenerated": 4,
    "CheckpointSaved": 1,
    "RunFinished": 1,
}
"""The number of events kept of each kind. Notes are not reported, because they contain addresses and paths."""

_KEPT_PRIVATE = ("facts", "details", "resumed_from", "path", "summary", "peers")  # they describe this machine

_MOST_REPORTED = 600
_LONGEST_TEXT = 2_000


class PeerStatus:
    """The reported facts and events; the training thread adds them, and other threads read them.

    >>> from diloco.events import Note, RoundVoid
    >>> status = PeerStatus()
    >>> for outer_step in (4, 5):
    ...     status.add(RoundVoid(step=7, replica=1, fragment=0, outer_step=outer_step, reason="late"))
    >>> told = status.since(1)
    >>> told["next_event"], [record["outer_step"] for record in told["events"]]
    (2, [5])
    """

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"state": "joining"}  # further reported facts, by name
        self._started_s = time.monotonic()
        self._kept: dict[str, deque[tuple[int, dict[str, Any]]]] = {
            kind: deque(maxlen=most) for kind, most in KEPT.items()
        }
        self._next = 0
        self._lock = threading.Lock()

    def add(self, event: Event) -> None:
        """Keep ``event`` for a while, if its kind is reported."""
        kept = self._kept.get(type(event).__name__)
        if kept is None:
            return
        fields = {name: value for name, value in to_record(event).items() if name not in _KEPT_PRIVATE}
        short = {name: value[:_LONGEST_TEXT] if isinstance(value, str) else value for name, value in fields.items()}
        with self._lock:
            kept.append((self._next, {**short, "time_s": round(time.time(), 3)}))
            self._next += 1

    def message(self, transport: PeerTransport, swarm: str, codec: str, since: int | None) -> Mapping[str, Any]:
        """Return the status as JSON, with the events from number ``since`` on, or without events if it is None."""
        view, moved, digests = transport.view, transport.last_transfer, sorted(transport.digests.items())
        said = {
            "kind": "status",
            "replica": transport.replica,
            "swarm": swarm,
            "step": transport.step,
            "view": view.id,
            "members": list(view.members),
            "sent_bytes": transport.sent_bytes,
            "received_bytes": transport.received_bytes,
            "uptime_s": round(time.monotonic() - self._started_s, 1),
            "digest": xxhash.xxh3_64_hexdigest(str(digests).encode()) if digests else "-",
            "link_bits_per_s": 8 * moved[0] / max(1e-9, moved[1]) if moved else None,
            "codec": codec,
            **self.seen,
            **({} if since is None else self.since(since)),
        }
        return cast(Mapping[str, Any], json_ready(said))  # a loss may be NaN

    def since(self, number: int) -> dict[str, Any]:
        """Return as JSON ``events`` from ``number`` on, oldest first, and the ``next_event`` to ask for later."""
        with self._lock:
            found = [each for kept in self._kept.values() for each in kept if each[0] >= number]
            events = [record for _, record in sorted(found, key=lambda each: each[0])]
            return {"events": events[-_MOST_REPORTED:], "next_event": self._next}


class StatusAsked(WireMessage):
    """An observer asks for the status of a peer."""

    since: Count | None = None  # the number of the first event to report; None: none
    of: Annotated[str, Meta(max_length=200)] | None = None  # another peer, which the asked one is to ask


class StatusAnswer(WireMessage):
    """The status of a peer as JSON, as it holds the records of events."""

    text: Annotated[bytes, Meta(max_length=1 << 20)]


def serve_status(directory: Directory, status: PeerStatus) -> None:
    """Answer observers with the status of this peer, or forward the question to a member that they can't reach."""
    transport, connections, entries = directory.transport, directory.connections, directory.registry.entries

    async def answer(asked: StatusAsked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        others = {*directory.members} - {transport.replica}
        other = next((each for rank, each in entries.items() if rank in others and each.address == asked.of), None)
        reply: WireMessage
        if asked.of is None:
            codec = entries[transport.replica].facts.get("codec", "")
            text = json.dumps(status.message(transport, directory.swarm, codec, asked.since))
            reply = StatusAnswer(text.encode())
        elif other is not None:
            address = connections.streams.locate(other)
            reply = await question(connections.open, address, StatusAsked(asked.since), StatusAnswer)
        else:
            reply = Refused(f"{visible(asked.of, 80)} is not another member of this swarm")
        await say(reply, reader, writer)

    connections.services[StatusAsked] = answer
