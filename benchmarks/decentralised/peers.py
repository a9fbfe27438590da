"""Makes peers of a swarm in the same way as ``diloco train --transport hivemind``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.decentralised.plan import Job
from diloco.membership import NextView
from diloco.transport import (
    Admission,
    Connected,
    NodePlace,
    PeerStreams,
    PeerTransport,
    SwarmPlace,
    Wire,
    connect_swarm,
    join,
)

__all__ = ["addresses_of", "become_member", "key_file", "make_peer", "wait_for_members"]


def make_peer(
    job: Job, number: int, address: str, known: Sequence[str], state_bytes_per_s: float | None = None
) -> Connected:
    """Return a peer that listens at ``address`` and contacts ``known`` peers; without any, it founds the swarm."""
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
    """Return the path of the key of peer ``number``."""
    return Path(job.folder) / f"{number}.key"


def become_member(connected: Connected, timeout_s: float) -> PeerTransport:
    """Join, unless this peer has founded the swarm, and return its transport."""
    if connected.joining:
        join(connected, timeout_s)
    return connected.transport


def addresses_of(transport: PeerTransport) -> list[str]:
    """Return the addresses at which a peer can be reached."""
    streams = transport.connections.streams
    assert isinstance(streams, PeerStreams)
    return list(transport.connections.call(streams.node.addresses()))


def wait_for_members(transport: PeerTransport, number: int, timeout_s: float) -> None:
    """Wait until the view has ``number`` members. Replaces ``transport.on_change`` meanwhile.

    Raises:
        TimeoutError: if that takes longer than ``timeout_s``.
    """
    changed = threading.Condition()
    before: Callable[[NextView], object] = transport.on_change

    def note(following: NextView) -> None:
        before(following)
        with changed:
            changed.notify_all()

    transport.on_change = note
    with changed:
        reached = changed.wait_for(lambda: len(transport.view.members) >= number, timeout_s)
    transport.on_change = before  # type: ignore[assignment]  # an attribute that holds a callable
    if not reached:
        raise TimeoutError(f"The view does not have {number} members after {timeout_s:g} s. It is {transport.view}")
