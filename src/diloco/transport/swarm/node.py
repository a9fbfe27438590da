"""One peer of the network: its libp2p daemon, its part of the DHT, and its streams. It runs in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from diloco.errors import ConfigurationError, RendezvousError, TransportError
from diloco.transport.connections.limits import few_at_once
from diloco.transport.connections.sockets import stop_listening
from diloco.transport.connections.streams import Stream, within
from diloco.transport.swarm.door import Door
from diloco.transport.swarm.engine import in_short, load_engine
from diloco.transport.swarm.identity import (
    DAY_S,
    RECORD_S,
    Admission,
    Identity,
    NodePlace,
    PeerRecord,
    load_identity,
    make_validator,
)
from diloco.transport.tcp.doctor import obstacle
from diloco.waiting import elapsed_s, waiting_for

MEMBERS, DOOR = "diloco/2", "diloco/door/1"
"""Protocols of streams: between the peers of a run, and for whoever asks at the door."""

_PING_S = 3.0
_GONE_S = 0.2  # how long a daemon that failed to start takes to end
_ENDING_S = 2.0  # how long the DHT, the daemon, and tasks may take to end
_ANSWER_S = 60.0  # longer than libp2p takes to notice that a peer does not answer
_STARTING_S = 120.0  # how long the daemon may take to start on a busy machine
_PROBE_S = 5.0  # how long a connection to a peer may take
_DAEMON_IDLE_S = 3.0  # how long a daemon outlives its process
_HOST = re.compile(r"^/ip[46]/([^/]+)")
_TCP = re.compile(r"/(?:ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d{1,5})")


Handler = Callable[[str, str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Handles an incoming stream; the arguments are the identity of the peer, its host ("" if unknown), and the stream."""


class LookUpError(TransportError):
    """No node answers, so nothing is known about who is there."""


class Node:
    """A running peer, created by `start`."""

    def __init__(self, identity: Identity, place: NodePlace, p2p: Any, folder: Path) -> None:
        self.peer_id = identity.peer_id
        self._place = place
        self._p2p = p2p  # Hivemind's object for the daemon that it has started
        self._folder = folder  # of the daemon's sockets, over which anyone could act as this peer
        self._dht: Any = None
        self._runs: dict[bytes, Admission] = {}  # place in the DHT -> the run whose records it holds
        self._versions: dict[str, tuple[float, float]] = {}  # peer -> its last record, and since when it is known
        # under which only this peer can store records
        self._subkey: bytes = load_engine().RSASignatureValidator(identity.private_key).local_public_key
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Future[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @classmethod
    async def start(cls, identity: Identity, place: NodePlace) -> Node:
        """Start the daemon and enter the DHT.

        Raises:
            ConfigurationError: if an address in ``place.join`` has another form than those that peers print.
            RendezvousError: if no peer of ``place.join`` answers; it says why not, for each.
            TransportError: if the daemon can't be started in time, or can't listen at the given addresses.
        """
        engine = load_engine()
        entrance = list(place.join) if place.insists else []
        for address in entrance:
            _check_entrance(address)
        # libp2p would find out for itself only if other public hosts told it
        reach = None if place.listen else "private"
        if place.public or place.announce:
            reach = "public"
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
        except BaseException as error:  # also if it is cancelled
            if isinstance(error, Exception):
                await asyncio.sleep(_GONE_S)
            shutil.rmtree(folder, ignore_errors=True)
            if not isinstance(error, engine.P2PDaemonError | OSError | ValueError):
                raise
            why = in_short(error)
            if "failed to start in" in str(error):
                raise TransportError(
                    f"the libp2p daemon was not ready within {_STARTING_S:g} s: this machine is too busy, or can't run "
                    "it. HIVEMIND_LOGLEVEL=DEBUG shows its log."
                ) from error
            if entrance:
                raise RendezvousError(await _no_entrance(entrance, why, identity.peer_id)) from error
            raise TransportError(
                f"the libp2p daemon can't be started for {', '.join(place.listen)}: {why}. Change network.listen."
            ) from error
        node = cls(identity, place, p2p, folder)
        try:
            _check_clocks(entrance, await _clocks_ahead_s(p2p, [peer_of(address) for address in entrance]))
            node._dht = await engine.DHTNode.create(
                p2p=p2p,
                # Hivemind draws it from `random`, which programs of one run often seed alike
                node_id=engine.DHTID.generate(source=str(p2p.peer_id).encode()),
                initial_peers=entrance or None,
                client_mode=not place.listen,
                cache_locally=False,
                cache_nearest=0,
                reuse_get_requests=False,
                record_validator=make_validator(identity.private_key, node._runs),
            )
        except BaseException as error:
            await node.close()
            if not isinstance(error, Exception) or isinstance(error, TransportError):
                raise
            # Hivemind raises plain RuntimeErrors and errors of libp2p
            raise RendezvousError(await _no_entrance(entrance, in_short(error), identity.peer_id)) from error
        return node

    async def enter(self) -> None:
        """Try to reach the peers of `NodePlace.join` that the DHT does not know, as the network may be up again."""
        protocol = self._dht.protocol
        known = {str(peer) for peer in protocol.routing_table.uid_to_peer_id.values()}

        async def reach(address: str) -> None:
            peer_id = peer_of(address)
            with contextlib.suppress(OSError, TimeoutError, load_engine().P2PDaemonError):
                await within(_PING_S, self._connect(peer_id, [address]))
                await within(_PING_S, protocol.call_ping(load_engine().PeerID.from_base58(peer_id), validate=False))

        asked = [address for address in self._place.join if peer_of(address) not in known | {self.peer_id}]
        await few_at_once(reach, asked)  # each takes a descriptor

    async def addresses(self) -> tuple[str, ...]:
        answer = await self._ask_once(self._request("IDENTIFY"))
        return tuple(f"{load_engine().Multiaddr(each)}/p2p/{self.peer_id}" for each in answer.identify.addrs)

    @property
    def daemon_pid(self) -> int:
        return int(self._p2p.daemon_pid)

    async def open(self, peer_id: str, addresses: Sequence[str] = (), protocol: str = MEMBERS) -> Stream:
        """Open a stream to another peer, and try ``addresses`` if the network does not find it by itself.

        Raises:
            OSError: if the peer can't be reached.
        """
        asked = load_engine().p2pd_pb2.StreamOpenRequest(peer=_bytes_of(peer_id), proto=[protocol])
        request = self._request("STREAM_OPEN", streamOpen=asked)
        try:
            _, reader, writer = await self._ask(request, about=peer_id)
        except OSError:
            if not addresses:
                raise
            await self._connect(peer_id, addresses)
            _, reader, writer = await self._ask(request, about=peer_id)
        return reader, writer

    async def handle(self, handlers: Mapping[str, Handler]) -> None:
        """Handle incoming streams, by their protocol."""
        engine = load_engine()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                info = engine.p2pd_pb2.StreamInfo()
                await engine.read_pbmsg_safe(reader, info)
                found = _HOST.search(str(engine.Multiaddr(info.addr)))
                await handlers[info.proto](str(engine.PeerID(info.peer)), found[1] if found else "", reader, writer)
            except (OSError, EOFError, ValueError, TransportError, asyncio.CancelledError):
                writer.close()  # the daemon or the peer is ending, or what it says isn't a message

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._writers = {each for each in self._writers if not each.is_closing()} | {writer}
            self._tasks.add(task := asyncio.ensure_future(accept(reader, writer)))
            task.add_done_callback(self._tasks.discard)

        self._server = await asyncio.start_unix_server(accepted, self._folder / "streams")
        listening = engine.Multiaddr(f"/unix{self._folder}/streams").to_bytes()
        asked = engine.p2pd_pb2.StreamHandlerRequest(addr=listening, proto=list(handlers), balanced=False)
        await self._ask_once(self._request("STREAM_HANDLER", streamHandler=asked))

    async def announce(self, admission: Admission, record: PeerRecord) -> None:
        expires_s, data = load_engine().clock.now_s() + RECORD_S, record.to_bytes(self._subkey, admission)
        self._keep_only_records_of(admission)
        await self._dht.store(admission.dht_key, data, expires_s, subkey=self._subkey)

    async def find(self, admission: Admission) -> list[PeerRecord]:
        """Return the records of the other peers of a run, whose authors know the run's secret.

        Raises:
            LookUpError: no other node answers, although this peer was told of some.
        """
        engine, now_s = load_engine(), elapsed_s()
        self._keep_only_records_of(admission)
        token = engine.TALLY.set(tally := engine.Tally())
        try:
            answer = await self._dht.get(admission.dht_key, latest=True)
        finally:
            engine.TALLY.reset(token)
        if self._place.join and self._place.insists and not tally.answered:
            words = "no node of the network answers" if tally.asked else "no node of the network is known"
            raise LookUpError(f"{words}, so it is not known who takes part in run {admission.run!r}")
        records, versions = list[PeerRecord](), dict[str, tuple[float, float]]()
        for subkey, entry in (answer.value if answer else {}).items():
            try:
                record = PeerRecord.from_bytes(subkey, entry.value, admission)
            except ValueError:  # stored here before this peer knew the run
                continue
            version, since_s = self._versions.get(record.peer_id, (0.0, now_s))
            versions[record.peer_id] = entry.expiration_time, since_s if version == entry.expiration_time else now_s
            records.append(replace(record, age_s=now_s - versions[record.peer_id][1]))
        self._versions = versions
        return sorted((each for each in records if each.peer_id != self.peer_id), key=lambda each: each.peer_id)

    def _keep_only_records_of(self, admission: Admission) -> None:
        """From now on, take records at a run's place in the DHT only from those who know its secret."""
        self._runs[load_engine().DHTID.generate(source=admission.dht_key).to_bytes()] = admission

    async def close(self) -> None:
        """Leave the network and end the daemon with all of its streams, even if it no longer answers."""
        if self._dht is not None:
            with contextlib.suppress(TimeoutError, load_engine().P2PDaemonError, OSError):
                await within(_ENDING_S, self._dht.shutdown())
        if self._server is not None:
            await stop_listening(self._server)
        for _ in range(4):  # iterations of the event loop, in which connections just accepted reach `accepted`
            await asyncio.sleep(0)
        for task in list(self._tasks):
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()
        if ending := self._tasks | await self._p2p.end(_ENDING_S):
            await asyncio.wait(ending, timeout=_ENDING_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    # Requests to the daemon.

    async def _connect(self, peer_id: str, addresses: Sequence[str]) -> None:
        engine = load_engine()
        try:
            bare = [re.sub(r"/p2p/[^/]*\Z", "", each) for each in addresses]  # the daemon gets the identity separately
            places = [engine.Multiaddr(each).to_bytes() for each in bare]
        except Exception as error:  # the parser raises errors of many types
            raise OSError(f"the addresses of {peer_id} are invalid ({in_short(error)})") from error
        asked = engine.p2pd_pb2.ConnectRequest(peer=_bytes_of(peer_id), addrs=places)
        await self._ask_once(self._request("CONNECT", connect=asked), about=peer_id)

    def _request(self, kind: str, **fields: Any) -> Any:
        request = load_engine().p2pd_pb2.Request
        return request(type=getattr(request, kind), **fields)

    async def _ask_once(self, request: Any, about: str = "the daemon") -> Any:
        answer, _, writer = await self._ask(request, about)
        writer.close()
        return answer

    async def _ask(self, request: Any, about: str) -> tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]:
        engine, writer = load_engine(), None
        try:
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await self._p2p.open_control()
                await engine.write_pbmsg(writer, request)
                answer = engine.p2pd_pb2.Response()
                await engine.read_pbmsg_safe(reader, answer)
                engine.raise_if_failed(answer)
                return answer, reader, writer
        except BaseException as error:
            if writer is not None:
                writer.close()
            if isinstance(error, TimeoutError):
                raise OSError(f"{about} can't be reached: the libp2p daemon of this peer does not answer") from error
            if isinstance(error, engine.P2PDaemonError | EOFError):
                raise OSError(f"{about} can't be reached: {in_short(error)}") from error
            if writer is None and isinstance(error, OSError):  # this does not concern the other peer
                raise OSError("the libp2p daemon of this peer has ended") from error
            raise


async def run_peer(identity: Path, place: NodePlace, ready: Callable[[tuple[str, ...]], None]) -> None:
    """Run a peer that does not train, through which others find each other, until cancelled.

    ``ready`` is called with its addresses once it can be reached. Errors are those of `Node.start`.
    """
    node = await Node.start(load_identity(identity), place)
    try:
        await node.handle({DOOR: Door(lambda: None).answer})
        ready(await node.addresses())
        await asyncio.Event().wait()
    finally:
        await node.close()


async def _clocks_ahead_s(p2p: Any, peers: Sequence[str]) -> list[float | None]:
    """Return how many seconds the clock of each peer is ahead of this one; None if it does not answer."""
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
    return [each if isinstance(each, float) else None for each in found]


def _check_clocks(addresses: Sequence[str], ahead_s: Sequence[float | None]) -> None:
    """Refuse entrances whose clock differs by more than a day: records of a network with that time are not taken here.

    Raises:
        TransportError: that of all that tell their time does.
    """
    told = [(address, each) for address, each in zip(addresses, ahead_s, strict=True) if each is not None]
    wrong = [address for address, each in told if not abs(each) <= DAY_S]
    if not wrong:
        return
    words = f"the clock of {', '.join(wrong)} differs from this machine's by more than a day"
    if len(wrong) == len(told):
        raise TransportError(f"{words}. Set the clock that is wrong, or give another address with --join.")
    logging.getLogger(__name__).warning("%s. That of other peers does not.", words)


def _check_entrance(address: str) -> None:
    engine = load_engine()
    try:
        engine.Multiaddr(address)
        engine.PeerID.from_base58(peer_of(address))
    except Exception as error:  # the parsers raise errors of many types
        raise ConfigurationError(
            f"{address!r} is not the address of a peer. Give --join an address as the peer has printed it, such as "
            f"/ip4/203.0.113.7/tcp/31330/p2p/Qm... ({in_short(error)})."
        ) from error


async def _no_entrance(addresses: Sequence[str], why: str, me: str) -> str:
    """Return why the peer ``me`` can't enter the network through any of ``addresses``, as connections to them tell."""

    async def examine(address: str) -> str:
        if not (place := _TCP.match(address)):
            return f"{address} has no host and TCP port. Give an address as the peer printed it"
        problem = await obstacle(place[1], int(place[2]), _PROBE_S)
        another = f"it is not the peer {peer_of(address)}; copy the whole address that it printed"
        if peer_of(address) == me:
            another = "the peer there has this one's identity. Was identity.key copied? Each replica needs its own"
        return f"{place[1]}:{place[2]}: {problem or another}"

    found = dict.fromkeys(await asyncio.gather(*map(examine, addresses)))
    return f"the network can't be entered through {', '.join(addresses)} ({why}). {'. '.join(found)}."


def peer_of(address: str) -> str:
    return address.rpartition("/p2p/")[2]


def _bytes_of(peer_id: str) -> bytes:
    try:
        data: bytes = load_engine().PeerID.from_base58(peer_id).to_bytes()
    except ValueError as error:
        raise OSError(f"{peer_id} is not the identity of a peer ({error})") from error
    return data
