"""One peer of the network: its libp2p daemon, its part of the DHT, and streams to others. Runs in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Sequence
from typing import Any

from diloco.errors import RendezvousError, TransportError
from diloco.transport.connections.streams import Stream, within
from diloco.transport.hivemind.daemon import Daemon, Handler, plainly
from diloco.transport.hivemind.engine import load_engine
from diloco.transport.hivemind.identity import Identity, PeerRecord, make_subkey, make_validator, owner_of
from diloco.transport.hivemind.place import Admission, NodePlace

__all__ = ["Node"]

_PROTOCOL = "diloco/1"
_RECORD_S = 1800.0  # how long a record stays: a peer that has ended is forgotten then
_PING_S = 3.0
KEEP_UP_EVERY_S = 30.0  # how often a peer compares its time with that of others
_KEY = "diloco/1/"  # of the records of a run in the DHT, before its name
_MOST_RECORDS = 4096  # of a run that are looked at
_MOST_CLOCKS = 8  # peers that are asked for their time
_GONE_S = 0.2  # until a daemon that did not start is gone
_ENDING_S = 2.0  # for a DHT that is told to end to answer
_DAEMON_IDLE_S = 3.0  # a daemon without its process ends after that


class Node:
    """A running peer. Made by `start`."""

    def __init__(self, identity: Identity, daemon: Daemon, dht: Any, place: NodePlace) -> None:
        self.peer_id = identity.peer_id
        self._daemon = daemon
        self._dht = dht
        self._subkey = make_subkey(identity)
        self._place = place
        self._keeping_up = asyncio.ensure_future(self._keep_up())

    @classmethod
    async def start(cls, identity: Identity, place: NodePlace) -> Node:
        """Start the daemon and enter the DHT.

        Raises:
            RendezvousError: if nobody of ``place.join`` answers.
            TransportError: if the daemon can't be started, or not listen where it should.
        """
        engine = load_engine()
        entrance = list(place.join) if place.insists else []
        try:
            p2p = await engine.P2P.create(
                initial_peers=entrance or None,
                announce_maddrs=list(place.announce) or None,
                host_maddrs=list(place.listen) or None,
                no_listen=not place.listen,
                identity_path=str(identity.path),
                idle_timeout=_DAEMON_IDLE_S,
                nat_port_map=place.map_ports and bool(place.listen),
                use_relay=place.relay,
                use_auto_relay=place.relay,
                check_if_identity_free=False,
            )
        except (engine.P2PDaemonError, OSError, ValueError) as error:
            await asyncio.sleep(_GONE_S)
            why = plainly(error)
            if entrance:
                raise RendezvousError(
                    f"the network can't be entered through {', '.join(place.join)}: {why}. Give the address of a peer "
                    "that can be reached, as it printed it."
                ) from error
            raise TransportError(
                f"the libp2p daemon can't be started for {', '.join(place.listen)}: {why}. Choose another swarm.listen."
            ) from error
        daemon = Daemon(p2p, _PROTOCOL)
        try:
            engine.clock.enter(await _clocks_ahead_s(p2p, [_peer_of(address) for address in entrance]))
            dht = await engine.DHTNode.create(
                p2p=p2p,
                initial_peers=entrance or None,
                client_mode=not place.listen,
                cache_size=10_000,
                record_validator=make_validator(identity.private_key),
            )
        except Exception as error:  # it raises plain RuntimeErrors, and those of libp2p
            await daemon.close()
            raise RendezvousError(
                f"nobody at {', '.join(place.join)} answers as a peer: {plainly(error)}. Give the address of a peer "
                "that can be reached, as it printed it."
            ) from error
        return cls(identity, daemon, dht, place)

    async def enter(self) -> None:
        """Try to reach those of `NodePlace.join` that the DHT does not know: the network may be back."""
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
        """Multiaddresses at which this peer can be reached, ``/p2p/`` and its identity included; maybe none."""
        return await self._daemon.addresses()

    @property
    def daemon_pid(self) -> int:
        """Process id of the libp2p daemon."""
        return self._daemon.pid

    @property
    def clock_off_s(self) -> float:
        """Seconds by which the clock of this machine is ahead of the network's; negative: behind."""
        ahead_s: float = load_engine().clock.off_s()
        return ahead_s

    async def handle(self, handler: Handler) -> None:
        """Hand over every stream that is opened to this peer."""
        await self._daemon.handle(handler)

    async def open(self, peer_id: str, addresses: Sequence[str] = ()) -> Stream:
        """A stream to another peer, which may be at ``addresses`` where the network does not find it by itself.

        Raises:
            OSError: if it can't be reached.
        """
        try:
            return await self._daemon.open(peer_id)
        except OSError:
            if not addresses:
                raise
        await self._daemon.connect(peer_id, [_bare(each) for each in addresses])
        return await self._daemon.open(peer_id)

    async def announce(self, admission: Admission, record: PeerRecord) -> None:
        """Store the record of this peer in the DHT."""
        expires_s = load_engine().clock.now_s() + _RECORD_S
        await self._dht.store(f"{_KEY}{admission.run}", record.to_bytes(admission), expires_s, subkey=self._subkey)

    async def find(self, admission: Admission) -> list[PeerRecord]:
        """The records of the other peers of a run; invalid ones are left out.

        Only those whose makers know its secret, unless there is none of these: then this peer may have the wrong one,
        which the others tell it.
        """
        found = await self._dht.get(f"{_KEY}{admission.run}", latest=True)
        records: list[PeerRecord] = []
        held = found.value if found and isinstance(found.value, dict) else {}
        for subkey, entry in itertools.islice(held.items(), _MOST_RECORDS):
            if not isinstance(subkey, bytes) or not isinstance(entry.value, bytes):
                continue
            with contextlib.suppress(ValueError):
                record = PeerRecord.from_bytes(owner_of(subkey), entry.value, admission)
                if record.peer_id != self.peer_id:
                    records.append(record)
        proven = [record for record in records if record.proven]
        return sorted(proven or records, key=lambda record: record.peer_id)

    async def close(self) -> None:
        """Leave the network and end the daemon, even if it does not answer any more."""
        self._keeping_up.cancel()
        with contextlib.suppress(TimeoutError, load_engine().P2PDaemonError, OSError):
            await within(_ENDING_S, self._dht.shutdown())
        await self._daemon.close()

    async def _keep_up(self) -> None:
        """Two networks with different times may have become one, and this machine may have slept."""
        while True:
            await asyncio.sleep(KEEP_UP_EVERY_S)
            known = [str(peer) for peer in self._dht.protocol.routing_table.uid_to_peer_id.values()]
            try:
                load_engine().clock.keep_up(await _clocks_ahead_s(self._daemon.p2p, known[:_MOST_CLOCKS]))
            except Exception:  # of libp2p; a later time will do
                logging.getLogger(__name__).debug("asking for the time failed", exc_info=True)


async def _clocks_ahead_s(p2p: Any, peers: Sequence[str]) -> list[float]:
    """Seconds by which the clocks of the peers that answer are ahead of this one's, to half a round trip."""
    engine = load_engine()
    mere_asker = await engine.DHTProtocol.create(
        p2p,
        engine.DHTID.generate(),
        bucket_size=1,
        depth_modulo=1,
        num_replicas=1,
        wait_timeout=_PING_S,
        client_mode=True,
    )

    async def ask(peer: str) -> float:
        asked_s = engine.clock.now_s()
        stub = mere_asker.get_stub(engine.PeerID.from_base58(peer))
        answer = await stub.rpc_ping(engine.dht_pb2.PingRequest(), timeout=_PING_S)
        ahead_s: float = answer.dht_time - (asked_s + engine.clock.now_s()) / 2
        return ahead_s

    found = await asyncio.gather(*map(ask, peers), return_exceptions=True)
    return [each for each in found if isinstance(each, float)]


def _peer_of(address: str) -> str:
    return address.rpartition("/p2p/")[2]


def _bare(address: str) -> str:
    """Without the identity at its end, which the daemon is told separately."""
    head, marker, tail = address.rpartition("/p2p/")
    return head if marker and "/" not in tail else address
