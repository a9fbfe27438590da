"""One peer of the network: its libp2p daemon, its part of the DHT, and its streams. It runs in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from diloco.errors import RendezvousError, TransportError
from diloco.transport.connections.streams import Stream, within
from diloco.transport.swarm.engine import Daemon, Handler, load_engine, plainly
from diloco.transport.swarm.identity import (
    Admission,
    Identity,
    NodePlace,
    PeerRecord,
    load_identity,
    make_subkey,
    make_validator,
)
from diloco.transport.tcp.doctor import obstacle
from diloco.waiting import waiting_for

_PROTOCOL = "diloco/2"
_RECORD_S = 1800.0  # lifetime of a record, after which a peer that has ended is forgotten
_PING_S = 3.0
_MOST_RECORDS = 4096  # the most records of a run that are examined
_GONE_S = 0.2  # how long a daemon that failed to start takes to end
_ENDING_S = 2.0  # how long the DHT may take to shut down
_STARTING_S = 120.0  # how long the daemon may take to start on a busy machine
_PROBE_S = 5.0  # how long a connection to a peer may take
_DAEMON_IDLE_S = 3.0  # how long a daemon outlives its process


_TCP = re.compile(r"/(?:ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d{1,5})")


class Node:
    """A running peer, created by `start`."""

    def __init__(self, identity: Identity, daemon: Daemon, dht: Any, place: NodePlace) -> None:
        self.peer_id = identity.peer_id
        self._daemon = daemon
        self._dht = dht
        self._subkey = make_subkey(identity)
        self._place = place

    @classmethod
    async def start(cls, identity: Identity, place: NodePlace) -> Node:
        """Start the daemon and enter the DHT.

        Raises:
            RendezvousError: if no peer of ``place.join`` answers; it says why not, for each.
            TransportError: if the daemon can't be started in time, or can't listen at the given addresses.
        """
        engine = load_engine()
        entrance = list(place.join) if place.insists else []
        # libp2p would find out for itself only if other public hosts told it
        reach = "public" if place.public or place.announce else None if place.listen else "private"
        folder = Path(tempfile.mkdtemp(prefix="diloco-", dir="/tmp"))  # short, as the paths of sockets must be
        try:
            with waiting_for(lambda: "the libp2p daemon to start", _STARTING_S):
                p2p = await engine.p2p_in(folder).create(
                    startup_timeout=_STARTING_S,
                    initial_peers=entrance or None,
                    announce_maddrs=list(place.announce) or None,
                    host_maddrs=list(place.listen) or None,
                    no_listen=not place.listen,
                    identity_path=str(identity.path),
                    idle_timeout=_DAEMON_IDLE_S,
                    nat_port_map=place.map_ports and bool(place.listen),
                    use_relay=True,
                    use_auto_relay=reach != "public",
                    force_reachability=reach,
                    check_if_identity_free=False,
                )
        except (engine.P2PDaemonError, OSError, ValueError) as error:
            await asyncio.sleep(_GONE_S)
            shutil.rmtree(folder, ignore_errors=True)
            why = plainly(error)
            if "failed to start in" in str(error):
                raise TransportError(
                    f"the libp2p daemon was not ready within {_STARTING_S:g} s: this machine is too busy, or can't run "
                    "it. HIVEMIND_LOGLEVEL=DEBUG shows its log."
                ) from error
            if entrance:
                raise RendezvousError(await _no_entrance(entrance, why)) from error
            raise TransportError(
                f"the libp2p daemon can't be started for {', '.join(place.listen)}: {why}. Change network.listen."
            ) from error
        daemon = Daemon(p2p, folder, _PROTOCOL)
        try:
            engine.clock.enter(await _clocks_ahead_s(p2p, [_peer_of(address) for address in entrance]))
            dht = await engine.DHTNode.create(
                p2p=p2p,
                # Hivemind draws it from `random`, which programs of one run often seed alike
                node_id=engine.DHTID.generate(source=str(p2p.peer_id).encode()),
                initial_peers=entrance or None,
                client_mode=not place.listen,
                cache_size=10_000,
                record_validator=make_validator(identity.private_key),
            )
        except Exception as error:  # Hivemind raises plain RuntimeErrors and errors of libp2p
            await daemon.close()
            raise RendezvousError(await _no_entrance(entrance, plainly(error))) from error
        return cls(identity, daemon, dht, place)

    async def enter(self) -> None:
        """Try to reach the peers of `NodePlace.join` that the DHT does not know, as the network may be up again."""
        protocol = self._dht.protocol
        known = {str(peer) for peer in protocol.routing_table.uid_to_peer_id.values()}

        async def reach(address: str) -> None:
            peer_id = _peer_of(address)
            with contextlib.suppress(OSError, TimeoutError, load_engine().P2PDaemonError):
                await within(_PING_S, self._daemon.connect(peer_id, [_bare(address)]))
                await within(_PING_S, protocol.call_ping(load_engine().PeerID.from_base58(peer_id), validate=False))

        asked = [address for address in self._place.join if _peer_of(address) not in known | {self.peer_id}]
        await asyncio.gather(*map(reach, asked))

    async def addresses(self) -> tuple[str, ...]:
        return await self._daemon.addresses()

    @property
    def daemon_pid(self) -> int:
        return self._daemon.pid

    async def handle(self, handler: Handler) -> None:
        await self._daemon.handle(handler)

    async def open(self, peer_id: str, addresses: Sequence[str] = ()) -> Stream:
        """Open a stream to another peer, and try ``addresses`` if the network does not find it by itself.

        Raises:
            OSError: if the peer can't be reached.
        """
        try:
            return await self._daemon.open(peer_id)
        except OSError:
            if not addresses:
                raise
        await self._daemon.connect(peer_id, [_bare(each) for each in addresses])
        return await self._daemon.open(peer_id)

    async def announce(self, admission: Admission, record: PeerRecord) -> None:
        expires_s, data = load_engine().clock.now_s() + _RECORD_S, record.to_bytes(self._subkey, admission)
        await self._dht.store(admission.dht_key, data, expires_s, subkey=self._subkey)

    async def find(self, admission: Admission) -> list[PeerRecord]:
        """Return the records of the other peers of a run, whose authors know the run's secret."""
        answer = await self._dht.get(admission.dht_key, latest=True)
        stored = answer.value if answer and isinstance(answer.value, dict) else {}
        records, stored_until_s = list[PeerRecord](), load_engine().clock.now_s() + _RECORD_S
        for subkey, entry in itertools.islice(stored.items(), _MOST_RECORDS):
            if isinstance(subkey, bytes) and isinstance(entry.value, bytes):
                with contextlib.suppress(ValueError):
                    record = PeerRecord.from_bytes(subkey, entry.value, admission)
                    records.append(replace(record, age_s=stored_until_s - entry.expiration_time))
        return sorted((each for each in records if each.peer_id != self.peer_id), key=lambda each: each.peer_id)

    async def close(self) -> None:
        """Leave the network and end the daemon, even if the daemon no longer answers."""
        with contextlib.suppress(TimeoutError, load_engine().P2PDaemonError, OSError):
            await within(_ENDING_S, self._dht.shutdown())
        await self._daemon.close()


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


async def _clocks_ahead_s(p2p: Any, peers: Sequence[str]) -> list[float]:
    """Return how many seconds the clocks of the peers that answer are ahead of this one, to half a round trip."""
    engine = load_engine()
    client = await engine.DHTProtocol.create(
        p2p,
        engine.DHTID.generate(source=os.urandom(32)),
        bucket_size=1,
        depth_modulo=1,
        num_replicas=1,
        wait_timeout=_PING_S,
        client_mode=True,
    )

    async def ask(peer: str) -> float:
        asked_s = engine.clock.now_s()
        stub = client.get_stub(engine.PeerID.from_base58(peer))
        answer = await stub.rpc_ping(engine.dht_pb2.PingRequest(), timeout=_PING_S)
        ahead_s: float = answer.dht_time - (asked_s + engine.clock.now_s()) / 2
        return ahead_s

    found = await asyncio.gather(*map(ask, peers), return_exceptions=True)
    return [each for each in found if isinstance(each, float)]


async def _no_entrance(addresses: Sequence[str], why: str) -> str:
    """Return why this peer can't enter the network through any of ``addresses``, as a connection to each tells."""

    async def examine(address: str) -> str:
        if not (place := _TCP.match(address)):
            return f"{address} has no host and TCP port. Give an address as the peer printed it"
        problem, advice = await obstacle(place[1], int(place[2]), _PROBE_S)
        if not problem:
            problem, advice = f"it is not the peer {_peer_of(address)}", "copy the whole address that it printed"
        return f"{place[1]}:{place[2]}: {problem}; {advice}"

    found = dict.fromkeys(await asyncio.gather(*map(examine, addresses)))
    return f"the network can't be entered through {', '.join(addresses)} ({why}). {'. '.join(found)}."


def _peer_of(address: str) -> str:
    return address.rpartition("/p2p/")[2]


def _bare(address: str) -> str:
    """Return a multiaddress without the identity at its end, which the daemon gets separately."""
    head, marker, tail = address.rpartition("/p2p/")
    return head if marker and "/" not in tail else address
