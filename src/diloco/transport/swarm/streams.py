"""Streams between the peers of a run: over TCP if one can reach the other, and over libp2p.

Inside the streams of libp2p is TLS as over TCP, in which each peer shows the key from which its identity follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import msgspec

from diloco.errors import ConfigurationError, TransportError
from diloco.protocol import Entry, Store
from diloco.transport.address import Address, is_private, parse_address
from diloco.transport.connections.connection_manager import ConnectionManager
from diloco.transport.connections.limits import origin_of
from diloco.transport.connections.links import PeerLinks
from diloco.transport.connections.peer import Peer
from diloco.transport.connections.sockets import Credentials, TcpStreams
from diloco.transport.connections.streams import Accept, Stream
from diloco.transport.secret import TurnedAwayError
from diloco.transport.swarm.door import Door, Visit, knock
from diloco.transport.swarm.identity import (
    Admission,
    Identity,
    NodePlace,
    PeerRecord,
    identity_of,
    number_of,
    same_port,
)
from diloco.transport.swarm.node import DOOR, MEMBERS, LookUpError, Node, peer_of

_HANDSHAKE_S = 10.0
_READY = b"?"  # from the side that accepts a stream of libp2p; what came before would be lost to TLS
_MOST_KNOWN = 4096  # anyone may store records in the DHT, under a new identity each time
_PORT = re.compile(r"/tcp/([0-9]{1,5})")
_HOST = re.compile(r"/(?:ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/")


def is_loopback(address: str) -> bool:
    return address.startswith(("/ip4/127.", "/ip6/::1/"))


@dataclass(frozen=True)
class PeerAddress(Address):
    """The identity of a peer, which is all that others need to reach it.

    >>> str(PeerAddress("12D3KooW"))
    '12D3KooW'
    """

    port: int = 0

    def __str__(self) -> str:
        return self.host


class PeerStreams(TcpStreams):
    def __init__(self, identity: Identity, place: NodePlace, admission: Admission) -> None:
        self._identity = identity
        self.admit_by(admission)
        super().__init__(self.credentials)
        self.place = place
        self.port = 0  # at which this peer accepts connections over TCP; 0: none
        # peer -> its multiaddresses, and its other addresses, for streams over TCP
        self._known: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self.look_up_failure = ""  # why the last look-up in the DHT has failed; "": it has not
        self._relays: set[str] = set()  # peers of ``place.join`` that train nothing
        # writer -> the identity and the host of the other end of a stream of libp2p, as the daemon says
        self._over_libp2p: WeakKeyDictionary[asyncio.StreamWriter, tuple[str, str]] = WeakKeyDictionary()
        self._accept: Accept | None = None
        self._node: Node | None = None

    def admit_by(self, admission: Admission) -> None:
        """Apply these rules, with the secret in them, to all later connections."""
        self.admission = admission
        self.credentials = Credentials(f"swarm {admission.run}", admission.secret, self._identity.tls_key)

    def keep(self) -> None:
        """Return nothing, as the daemon ends: `place` says where to listen again."""

    @property
    def node(self) -> Node:
        """The running peer, once `listen` has started it."""
        assert self._node is not None, "listen must be called first"
        return self._node

    def know(self, peer_id: str, addresses: tuple[str, ...]) -> None:
        """Remember addresses of a peer, in case the network does not find it by itself; of the last 4096 peers."""
        before, direct = self._known.pop(peer_id, ((), ())), tuple(each for each in addresses if each[:1] != "/")
        others = tuple(each for each in addresses if each not in direct)
        self._known[peer_id] = others or before[0], direct or before[1]
        if len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]

    def _known_of(self, peer_id: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self._known.get(peer_id, ((), ()))

    async def listen(self, accept: Accept, *where: Any) -> PeerAddress:
        self._node = await Node.start(self._identity, self.place)
        # loopback last: a router may forward another port to the others
        listened = sorted(await self._node.addresses(), key=is_loopback)
        self.place = replace(self.place, listen=same_port(self.place.listen, tuple(listened)))
        self._accept = accept
        for host in hosts_in(self.place.listen):
            port = self.port or self.place.direct_port
            self.port = (await super().listen(accept, host, range(port, port + 1), host)).port
        await self._node.handle({MEMBERS: self._take, DOOR: Door(lambda: self.admission).answer})
        return PeerAddress(self._node.peer_id)

    async def open(self, address: Address) -> Stream:
        peer_id = address.host
        if not self.admits(peer_id):
            raise OSError(f"{peer_id} may not take part: it was ejected, or is not listed in network.allow")
        multiaddresses, direct = self._known_of(peer_id)
        try:
            reader, writer = await self.node.open(peer_id, multiaddresses)
        except OSError as error:  # libp2p lets longer and longer pauses pass before it dials again who was away
            if not (places := self.places_of(direct)):
                raise
            try:
                return await self.open_directly(peer_id, places)
            except OSError as other:
                raise OSError(f"{error}; {other}") from error
        self._over_libp2p[writer] = peer_id, ""
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                await reader.readexactly(len(_READY))
                await self._introduce(reader, writer)
        except (OSError, EOFError) as error:
            writer.close()
            raise TurnedAwayError(
                f"{peer_id} rejected this peer: it belongs to another run, has another secret, does not list this peer "
                "in network.allow, or has just ended; or this peer was ejected"
            ) from error
        except BaseException:
            writer.close()
            raise
        return self._checked(peer_id, (reader, writer))

    async def visit(self, peer_id: str) -> Visit:
        """Ask at the door of a peer whether this one can join there.

        Raises:
            OSError, EOFError, TransportError: it does not answer there.
        """
        stream = await self.node.open(peer_id, self._known_of(peer_id)[0], DOOR)
        visit = await knock(stream, self.admission, self.me)
        if visit.is_relay:
            self._relays.add(peer_id)
        return visit

    async def seen_at(self) -> str:
        """Return the host from which a peer of `NodePlace.join` sees this one come; "" if none says so soon."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HANDSHAKE_S):
                for peer_id in self.given:
                    with contextlib.suppress(OSError, EOFError, TransportError):
                        if host := (await self.visit(peer_id)).seen_at:
                            return host
        return ""

    async def find(self) -> list[PeerRecord]:
        """Return the records of the other peers of the run, and one for each peer of `NodePlace.join` that has none.

        Relays are left out.
        """
        try:
            records = {each.peer_id: each for each in await self.node.find(self.admission)}
            self.look_up_failure = ""
        except LookUpError as error:
            records, self.look_up_failure = {}, str(error)
        for peer_id, addresses in self.given.items():
            if peer_id not in self._relays:
                unheard = PeerRecord(number_of(peer_id), addresses=addresses, peer_id=peer_id, age_s=math.inf)
                known = records.setdefault(peer_id, unheard)
                records[peer_id] = msgspec.structs.replace(known, addresses=(*addresses, *known.addresses))
        for record in records.values():
            self.know(record.peer_id, record.addresses)
        return list(records.values())

    @property
    def given(self) -> dict[str, tuple[str, ...]]:
        """The other peers of `NodePlace.join`, with their addresses."""
        given = dict[str, tuple[str, ...]]()
        for address in self.place.join:
            if (peer_id := peer_of(address)) != self.me:
                given[peer_id] = (*given.get(peer_id, ()), address)
        return given

    def relays(self) -> tuple[str, ...]:
        """Return the addresses of `NodePlace.join` that are known to be those of relays."""
        return tuple(each for peer_id, places in self.given.items() if peer_id in self._relays for each in places)

    async def open_directly(self, peer_id: str, places: Sequence[Address]) -> Stream:
        """Open a stream to a peer over TCP, at the first of these addresses that answers.

        Raises:
            OSError: if no address can be reached, or another process listens there.
        """
        dialing = [asyncio.ensure_future(super(PeerStreams, self).open(each)) for each in places]
        why: BaseException | str = f"no answer within {_HANDSHAKE_S:g} s"
        kept: asyncio.StreamWriter | None = None
        try:
            for each in asyncio.as_completed(dialing, timeout=_HANDSHAKE_S):
                try:
                    stream = self._checked(peer_id, await each)
                    kept = stream[1]
                    return stream
                except TimeoutError:
                    continue
                except (OSError, EOFError, TransportError) as error:
                    why = error
        finally:
            for task in dialing:
                task.cancel()
                if task.done() and not task.cancelled() and task.exception() is None:
                    _, writer = task.result()
                    if writer is not kept:
                        writer.transport.abort()
        raise OSError(f"no direct connection to {', '.join(map(str, places)) or 'it'}: {why}")

    def _checked(self, peer_id: str, stream: Stream) -> Stream:
        if self.identity(stream[1]) == peer_id:
            return stream
        stream[1].transport.abort()
        raise OSError(f"another process answers in place of {peer_id}")

    async def admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if writer in self._over_libp2p:
            writer.write(_READY)
        return await super().admit(reader, writer)

    def admits(self, identity: str) -> bool:
        return self.admission.admits(identity)

    def owns(self, identity: str, rank: int) -> bool:
        return number_of(identity) == rank

    def identity_of(self, key: bytes) -> str:
        return identity_of(key)

    def places_for_payloads(self, addresses: Sequence[str]) -> tuple[str, ...]:
        """Return where others can open streams over TCP to this peer, whose multiaddresses these are."""
        return tuple(str(Address(host, self.port)) for host in hosts_in(addresses)) if self.port else ()

    def places_of(self, texts: Sequence[str]) -> list[Address]:
        """Return where streams over TCP to a peer can be opened, as it says. What isn't an address is left out."""
        places = []
        for each in texts:
            with contextlib.suppress(ConfigurationError):  # such as a multiaddress
                places.append(parse_address(each))
        return places

    def address(self, text: str, writer: asyncio.StreamWriter) -> PeerAddress:
        return PeerAddress(self.identity(writer))

    def locate(self, entry: Entry) -> PeerAddress:
        self.know(entry.key, entry.places)
        return PeerAddress(entry.key)

    def origins(self, writer: asyncio.StreamWriter) -> tuple[str, ...]:
        return tuple(filter(None, self._over_libp2p.get(writer, ()))) or super().origins(writer)

    async def refuse(self) -> None:
        self._accept = None
        await super().refuse()

    async def close(self) -> None:
        if self._node is not None:
            await self._node.close()

    async def _take(self, peer_id: str, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._over_libp2p[writer] = peer_id, origin_of(host)
        if self._accept is None:
            writer.close()
        else:
            await self._accept(reader, writer)


def hosts_in(addresses: Sequence[str]) -> list[str]:
    """Return the hosts in multiaddresses that reach a peer without a relay; loopback addresses come last.

    >>> hosts_in(["/ip4/127.0.0.1/tcp/4/p2p/Qm", "/ip4/10.0.0.7/tcp/4/p2p/Qm", "/ip4/9.9.9.9/tcp/1/p2p/Q/p2p-circuit"])
    ['10.0.0.7', '127.0.0.1']
    """
    hosts = [match[1] for each in addresses if "/p2p-circuit" not in each and (match := _HOST.match(each))]
    return sorted(dict.fromkeys(hosts), key=lambda host: host.startswith("127.") or host == "::1")


def port_in(addresses: Sequence[str]) -> int:
    """Return the TCP port in the first multiaddress that has one; 0: none has.

    >>> port_in(["/ip4/9.9.9.9/tcp/31330/p2p/Qm"])
    31330
    """
    ports = [int(match[1]) for each in addresses if (match := _PORT.search(each))]
    return ports[0] if ports else 0


def limits_of_reach(hosts: Sequence[str], port: int, seen_at: str) -> str:
    """Return why others may not reach a peer at the hosts where it listens, and what to do; "": nothing is known.

    >>> limits_of_reach(["192.168.1.2", "127.0.0.1"], 31330, "9.9.9.9").partition(". ")[0]
    "others can't reach this address from outside: they see this peer at 9.9.9.9, behind a router"
    >>> limits_of_reach(["192.168.1.2"], 31330, "").partition(". ")[0]
    "others can't reach this address from outside: 192.168.1.2 is an address of a private network"
    >>> "--network.announce [2001:db8::9]:31330," in limits_of_reach(["fd00::2"], 31330, "2001:db8::9")
    True
    >>> limits_of_reach(["10.0.0.1", "127.0.0.1"], 31330, "10.0.0.1"), limits_of_reach(["9.9.9.9"], 31330, "")
    ('', '')
    """
    elsewhere = [each for each in hosts if not _is_here(each)]
    if not elsewhere or (seen_at in hosts and seen_at):
        return ""
    if seen_at and not _is_here(seen_at):
        why, place = f"they see this peer at {seen_at}, behind a router", str(Address(seen_at, port))
    elif all(map(is_private, elsewhere)):
        why, place = f"{elsewhere[0]} is an address of a private network", f"HOST:{port}"
    else:
        return ""
    return (
        f"others can't reach this address from outside: {why}. For them, forward TCP port {port} of the router to this "
        f"machine and add --network.announce {place}, or add --join with the address of a `diloco relay`."
    )


def _is_here(host: str) -> bool:
    """Return whether a host is this machine, or none."""
    return not host or host.startswith("127.") or host in ("::1", "localhost")


def told_addresses(addresses: Sequence[str], seen_at: str, relays: Sequence[str]) -> tuple[str, ...]:
    """Return the multiaddresses with which others are told to join a peer that listens at ``addresses``.

    They are those at which others see it, else those of the relays through which others reach it.

    >>> own, relay = ["/ip4/192.168.1.2/tcp/4/p2p/Qm", "/ip4/127.0.0.1/tcp/4/p2p/Qm"], ["/ip4/5.5.5.5/tcp/7/p2p/QmR"]
    >>> told_addresses(own, "9.9.9.9", relay) == told_addresses([], "9.9.9.9", relay) == tuple(relay)
    True
    >>> told_addresses(own, "192.168.1.2", relay), told_addresses(own, "9.9.9.9", []) == tuple(own)
    (('/ip4/192.168.1.2/tcp/4/p2p/Qm',), True)
    """
    reached_at = [each for each in addresses if f"/{seen_at}/" in each and not is_loopback(each)]
    if not reached_at and (not addresses or limits_of_reach(hosts_in(addresses), port_in(addresses), seen_at)):
        return tuple(relays or addresses)
    return tuple(reached_at or addresses)


_TURN = "your turn to dial"


class SwarmLinks(PeerLinks):
    """Links of which each uses the first route that works.

    The end that opened the control stream tries to reach the other one over TCP. If it can't, it is the other's turn,
    which uses libp2p if it can't either.
    """

    def __init__(self, connections: ConnectionManager) -> None:
        super().__init__(connections)
        connections.receivers[_TURN] = self._take_turn

    @property
    def _streams(self) -> PeerStreams:
        return cast(PeerStreams, self.connections.streams)

    def _take_turn(self, rank: int, content: bytes) -> None:
        """Dial from now on, as the end that opened the control stream can't."""
        peer = self.connections.peers.get(rank)
        if peer is not None and not peer.opened and not peer.link.dials:
            peer.link.dials = True
            if peer.link.wanted:
                self.keep_at_least(peer, 1)

    async def open_stripe(self, peer: Peer) -> Stream:
        streams = self._streams
        if not peer.link.single:
            entry = self.connections.entries.get(peer.rank)
            places = streams.places_of(entry.places if entry else ())
            try:
                return self.connections.keep(await streams.open_directly(peer.address.host, places))
            except OSError:
                if peer.link.uses:  # it could be reached before
                    raise
                if streams.port and peer.opened:
                    peer.link.dials = False
                    self.connections.send(peer.rank, Store(_TURN, b""))
                    raise
                peer.link.single = True
        return await super().open_stripe(peer)
