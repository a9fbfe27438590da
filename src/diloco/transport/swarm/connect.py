"""Connecting to a swarm, given its name and the address of any peer: a replica, a loop of your own, or a mere node."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from diloco.algorithm import check_whole
from diloco.errors import ConfigurationError, RendezvousError
from diloco.membership import MOST_RANK, BootstrapElection
from diloco.protocol import Registry, Rules
from diloco.transport.connections.limits import Backoff
from diloco.transport.peers.connected import Connected, connect_all, join
from diloco.transport.peers.transport import PeerTransport
from diloco.transport.swarm.identity import load_identity, number_of
from diloco.transport.swarm.node import Node
from diloco.transport.swarm.payload_routes import SwarmLinks
from diloco.transport.swarm.peer_config import Admission, NodePlace, SwarmPlace
from diloco.transport.swarm.peer_streams import PeerStreams
from diloco.transport.swarm.search import SwarmDirectory
from diloco.transport.swarm.status import serve_status
from diloco.waiting import waiting_for

_START_AGAIN_S = 0.5, 4.0  # pauses between two attempts to enter the network


def enter_swarm(place: SwarmPlace, rules: Rules, *, held_step: int = -1) -> Connected:
    """Find the members of the run and connect to all of them, or found the swarm if there are none.

    Args:
        place: this peer and its run.
        rules: the rules of the run.
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
    transport = PeerTransport(dataclasses.replace(rules, rank=number, together=False), streams, SwarmLinks)
    try:
        _start(transport, place, rules.rendezvous_timeout_s)
        return _connect(transport, place, rules, held_step)
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


def _connect(transport: PeerTransport, place: SwarmPlace, rules: Rules, held_step: int) -> Connected:
    election = BootstrapElection(
        number=transport.replica,
        held_step=held_step,
        views=place.views,
        alone=not place.node.join,
        window_s=place.join_window_s,
        policy=rules.policy,
    )
    directory, connections = SwarmDirectory(transport, Registry(0), election, place), transport.connections
    connections.call(directory.announce())
    connected = connect_all(directory, place.closed)
    if not connected.joining:
        connections.call(directory.announce())  # before other peers search
    serve_status(directory, place.status)
    connections.post(directory.keep_announcing)
    return connected


_CHECK_S = 0.1


@contextmanager
def connect_swarm(
    *,
    run: str,
    num_replicas: int,
    identity: str | Path,
    join_at: Sequence[str] = (),
    replica: int | None = None,
    secret: str = "",
    allow: Sequence[str] = (),
    on_address: Callable[[str], None] = print,
    node: NodePlace | None = None,
    **rules: Any,
) -> Iterator[PeerTransport]:
    """Find the other replicas of ``run``, connect to them over libp2p, and yield the transport.

    All replicas begin together, as soon as ``num_replicas`` are connected. No replica can join later, because your
    training loop can't be moved to the step of the others (``diloco train --transport swarm`` can do that). A
    replica that is lost later stays lost, and the others continue without it. At the end of the ``with`` block this
    replica leaves, and the others continue.

    Args:
        run: name of the run, the same for all replicas.
        num_replicas: number of replicas M with which training begins.
        identity: file of this peer's private key, created if it does not exist.
        join_at: addresses of any peers of the run, as passed to ``on_address``; empty for the first peer.
        replica: number m of this replica. None derives a number from the identity, which can't serve as an index into
            shards of the data.
        secret: the text of a file that ``diloco secret`` has written, or ``passphrase:`` and words of your own, the
            same for all peers; peers without it are rejected. "" means no secret.
        allow: identities of the peers that may take part; empty means all.
        on_address: called with each address at which others can join, before waiting for them.
        node: where to listen, if not at every address of this machine.
        rules: any field of `diloco.protocol.Rules`, such as ``round_timeout_s=60`` or ``facts=...``.

    Raises:
        RendezvousError: if the others do not join in time or are incompatible, or the run has already begun.
        ConfigurationError: if an argument can't work, Hivemind is not installed, or the key or the secret can't be
            used.
    """
    check_whole("num_replicas", num_replicas, 1)
    if replica is not None and check_whole("replica", replica, 0) > MOST_RANK:
        raise ConfigurationError(f"replica must be at most {MOST_RANK}, got {replica}.")
    exchange = Rules.of(rules, continue_without_lost=True)
    place = SwarmPlace(
        identity=Path(identity),
        admission=Admission(run, secret, frozenset(allow)),
        node=dataclasses.replace(node or NodePlace(), join=tuple(join_at)),
        replica=replica,
    )
    connected = enter_swarm(place, exchange)
    transport = connected.transport
    streams = cast(PeerStreams, transport.connections.streams)
    try:
        if connected.joining and connected.step > 0:
            raise connected.already_running()
        for address in transport.connections.call(streams.node.addresses()):
            on_address(address)
        with waiting_for(lambda: f"the members of run {run!r} to let this peer in", exchange.rendezvous_timeout_s):
            if connected.joining and join(connected, exchange.rendezvous_timeout_s) > 0:
                raise connected.already_running()
        _wait_for(connected, num_replicas, exchange.rendezvous_timeout_s)
        place.status.seen["state"] = "training"
        transport.on_report = place.status.add
        transport.close_to_joiners("its replicas run a training loop that no other replica can join")
        yield transport
        connected.finish()
        transport.leave()
    finally:
        transport.close()


def _wait_for(connected: Connected, num_replicas: int, timeout_s: float) -> None:
    transport, deadline_s = connected.transport, time.monotonic() + timeout_s
    with waiting_for(
        lambda: f"{num_replicas} replicas, {len(transport.view.members)} of which have joined,", timeout_s
    ):
        while len(transport.view.members) < num_replicas:
            if transport.failure is not None:
                raise transport.failure
            if time.monotonic() > deadline_s:
                raise RendezvousError(
                    f"{len(transport.view.members)} of {num_replicas} replicas joined within {timeout_s:g} s. Start "
                    "the missing ones, or choose a longer rendezvous_timeout_s."
                )
            time.sleep(_CHECK_S)


async def run_peer(identity: Path, place: NodePlace, ready: Callable[[tuple[str, ...]], None]) -> None:
    """Run a peer that does not train, through which others find each other, until cancelled.

    Args:
        identity: file of the peer's private key.
        place: where the peer listens, and the peers that it knows.
        ready: called with the peer's addresses once it can be reached.

    Raises:
        RendezvousError, TransportError: if the peer can't be started.
    """
    node = await Node.start(load_identity(identity), place)
    try:
        ready(await node.addresses())
        await asyncio.Event().wait()
    finally:
        await node.close()
