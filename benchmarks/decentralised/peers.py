"""Peers of this package's swarm, made as ``diloco train --transport hivemind`` makes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.decentralised.plan import Job
from diloco.membership.reports import NextView
from diloco.transport.hivemind.connect import connect_swarm
from diloco.transport.hivemind.peer_config import Admission, NodePlace, SwarmPlace
from diloco.transport.hivemind.peer_streams import PeerStreams
from diloco.transport.peers.connected import Connected, Wire, join
from diloco.transport.peers.transport import PeerTransport

__all__ = ["addresses_of", "become_member", "key_file", "make_peer", "wait_for_members"]


def make_peer(
    job: Job, number: int, address: str, known: Sequence[str], state_bytes_per_s: float | None = None
) -> Connected:
    """A peer that listens at ``address`` and knows peers at ``known``; without any it founds the swarm."""
    place = SwarmPlace(
        identity=key_file(job, number),
        admission=Admission("benchmark"),
        node=NodePlace(join=tuple(known), listen=(f"/ip4/{address}/tcp/0",), map_ports=False),
        replica=number,
    )
    wire = Wire(
        round_timeout_s=job.timeout_s,
        rendezvous_timeout_s=job.timeout_s,
        continue_without_lost=True,
        state_bytes_per_s=state_bytes_per_s,
    )
    return connect_swarm(place, wire)


def key_file(job: Job, number: int) -> Path:
    """Where peer ``number`` has its key."""
    return Path(job.folder) / f"{number}.key"


def become_member(connected: Connected, timeout_s: float) -> PeerTransport:
    """Join unless this peer has founded the swarm."""
    if connected.joining:
        join(connected, timeout_s)
    return connected.transport


def addresses_of(transport: PeerTransport) -> list[str]:
    """Where a peer can be reached."""
    streams = transport.connections.streams
    assert isinstance(streams, PeerStreams)
    return list(transport.connections.call(streams.node.addresses()))


def wait_for_members(transport: PeerTransport, number: int, timeout_s: float) -> None:
    """Until the view has so many members; takes ``on_change`` for its own and gives it back."""
    changed = threading.Condition()
    before: Callable[[NextView], object] = transport.on_change

    def note(following: NextView) -> None:
        before(following)
        with changed:
            changed.notify_all()

    transport.on_change = note
    with changed:
        there = changed.wait_for(lambda: len(transport.view.members) >= number, timeout_s)
    transport.on_change = before  # type: ignore[assignment] # as it was
    if not there:
        raise TimeoutError(f"{number} members were awaited, and the view is {transport.view}")
