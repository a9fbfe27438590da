"""Connecting to a swarm as a founder or a joiner, given the run's name and the address of any peer."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from diloco.errors import RendezvousError
from diloco.membership import BootstrapElection
from diloco.protocol import Registry, Timing
from diloco.transport.connections.backoff import Backoff
from diloco.transport.hivemind.identity import load_identity, number_of
from diloco.transport.hivemind.node import Node
from diloco.transport.hivemind.payload_routes import PayloadRoutes
from diloco.transport.hivemind.peer_config import SwarmPlace
from diloco.transport.hivemind.peer_streams import PeerStreams
from diloco.transport.hivemind.search import Announcer, Search
from diloco.transport.hivemind.swarm import MemberDialer, SwarmService
from diloco.transport.peers.connected import Connected, Table, Wire
from diloco.transport.peers.transport import PeerTransport
from diloco.waiting import waiting_for

__all__ = ["SwarmConnected", "connect_swarm"]

_START_AGAIN_S = 0.5, 4.0  # pauses between two attempts to enter the network
_FAREWELL_S = 10.0  # time limit for a leaving peer to announce that the run has ended


@dataclass(frozen=True, kw_only=True)
class SwarmConnected(Connected):
    """A transport connected to the members of a swarm."""

    node: Node  # this peer
    dialer: MemberDialer
    announcer: Announcer

    def refresh(self) -> None:
        self.transport.connections.call(self._dial_members())

    async def _dial_members(self) -> None:
        entries = self.transport.registry.entries
        for rank in sorted(self.transport.connections.connected & entries.keys()):
            try:
                await self.dialer.dial(await self.dialer.ask(entries[rank].address))
                return
            except OSError:
                continue

    def finish(self) -> None:
        self.announcer.finished = True
        self.transport.connections.call(self.announcer.announce(), _FAREWELL_S)


def connect_swarm(place: SwarmPlace, wire: Wire, *, held_step: int = -1) -> SwarmConnected:
    """Find the members of the run and connect to all of them, or found the swarm if there are none.

    Args:
        place: this peer and its run.
        wire: how the peers exchange contributions.
        held_step: the newest step that this peer could resume from; -1 for none, in which case the peer can't found a
            swarm that replaces an earlier one.

    Raises:
        RendezvousError: if this does not succeed in time, the peers are incompatible, or the swarm is behind this
            peer's checkpoint; nothing stays open.
        TransportError: if the peer can't be started.
    """
    identity = load_identity(place.identity)
    number = number_of(identity.peer_id) if place.replica is None else place.replica
    streams = PeerStreams(identity, place.node, place.admission)
    rules, policies = wire.rules_and_policies(number, 0, 1, others=1)
    timing = Timing(wire.heartbeat_s, wire.silence_s)
    transport = PeerTransport(rules, policies, timing, streams, together=False)
    try:
        _start(transport, place, wire.rendezvous_timeout_s)
        return _connect(transport, streams, place, wire, held_step)
    except BaseException:
        transport.close()
        raise


def _start(transport: PeerTransport, place: SwarmPlace, timeout_s: float) -> None:
    """Start the peer, and retry for up to ``timeout_s`` seconds: the peers it joins through may be starting, too."""
    deadline_s = time.monotonic() + timeout_s
    backoff = Backoff(*_START_AGAIN_S, seed=str(place.replica))
    with waiting_for(lambda: f"an answer from a peer at {', '.join(place.node.join) or 'this machine'}", timeout_s):
        while True:
            try:
                transport.connections.listen()
                return
            except RendezvousError:
                if time.monotonic() >= deadline_s:
                    raise
            time.sleep(backoff.next_s())


def _connect(
    transport: PeerTransport, streams: PeerStreams, place: SwarmPlace, wire: Wire, held_step: int
) -> SwarmConnected:
    connections, number, registry = transport.connections, transport.replica, Registry(0)
    announcer = Announcer(place, streams, registry, number, wire.facts, held_step)
    connections.call(announcer.refresh())
    connections.entries = registry.entries
    dialer = MemberDialer(connections, streams, registry, wire.silence_s)
    routes = PayloadRoutes(connections, streams, transport.mailbox, wire.silence_s, compresses=wire.compress)
    election = BootstrapElection(
        number=number,
        held_step=held_step,
        views=place.views,
        alone=not place.node.join,
        window_s=place.join_window_s,
        policy=transport.policies.quorum,
    )
    search = Search(place, wire, streams, dialer, announcer, election)
    with waiting_for(search.awaited, search.patience_s):
        view, found = connections.call(search.find())
    announcer.swarm = found.swarm if found else place.swarm or secrets.token_hex(8)
    founded_step = found.founded_step if found else max(0, held_step)
    if found is None:
        transport.step = founded_step if place.views else 0  # joining peers receive it
    transport.begin(view, registry, routes.open_link, member=found is None, closed=place.closed)
    if found is None:
        connections.call(announcer.announce())  # before other peers search
    SwarmService(transport, announcer.swarm, founded_step, place.status)
    connections.post(announcer.keep_announcing)
    entries = {**(found.entries if found else {}), number: registry.entries[number]}
    table = Table(entries, found is not None, found.step if found else 0, founded_step)
    return SwarmConnected(
        transport=transport,
        table=table,
        joining=found is not None,
        swarm=announcer.swarm,
        node=streams.node,
        dialer=dialer,
        announcer=announcer,
    )
