"""The parts of Hivemind that this package uses, imported on first use: its DHT, and libp2p's identities and streams.

Hivemind dates records by the clocks of the machines, and refuses peers whose clock is more than 3 s off. This package
makes the DHT use a network time instead: a peer adopts the time of the peers through which it enters the network, once.
So no machine's clock has to be right, no peer can change another one's time later, and setting a clock does nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from diloco.errors import ConfigurationError
from diloco.transport.connections.sockets import stop_listening
from diloco.transport.connections.streams import Stream, within

_IN_A_SESSION = "import os, sys; os.setsid(); os.execv(sys.argv[1], sys.argv[1:])"
# what a peer relays for two others before it ends their connection, which they then open again
_RELAYED = {"relayService": 1, "relayDataLimit": 1 << 40, "relayTimeLimit": "24h"}


@cache
def load_engine() -> Any:
    """Return Hivemind's classes as attributes of one object.

    Raises:
        ConfigurationError: if Hivemind is not installed.
    """
    import torch.multiprocessing as multiprocessing

    strategy = multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]  # torch has no types for it
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its mixture of experts, imported too, uses deprecated torch
            import hivemind.utils.auth
            import hivemind.utils.timed_storage
            from hivemind.dht import node, protocol, routing
            from hivemind.dht.crypto import RSASignatureValidator
            from hivemind.dht.node import DHTNode
            from hivemind.dht.protocol import DHTProtocol
            from hivemind.dht.routing import DHTID
            from hivemind.dht.validation import CompositeValidator, RecordValidatorBase
            from hivemind.p2p import P2P, PeerID
            from hivemind.p2p.p2p_daemon_bindings.utils import (
                P2PDaemonError,
                raise_if_failed,
                read_pbmsg_safe,
                write_pbmsg,
            )
            from hivemind.proto import crypto_pb2, dht_pb2, p2pd_pb2
            from hivemind.utils.crypto import RSAPrivateKey
            from hivemind.utils.multiaddr import Multiaddr
    except ImportError as error:
        remedy = "Install it with pip install 'diloco[swarm]'."
        if sys.platform == "win32":  # its daemon is built for Linux and macOS
            remedy = "It does not run on native Windows: use WSL 2, or --transport tcp."
        raise ConfigurationError(
            f"network.transport='swarm' needs Hivemind, which can't be imported ({error}). {remedy}"
        ) from error
    finally:
        # importing Hivemind changes it for the whole process
        multiprocessing.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]  # as above

    if "HIVEMIND_LOGLEVEL" not in os.environ:  # the errors of this package report what matters
        for name in ("hivemind.p2p", "hivemind.dht"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    clock = NetworkClock()
    for module in (hivemind.utils, hivemind.utils.timed_storage, hivemind.utils.auth, node, protocol, routing):
        module.get_dht_time = clock.now_s
    protocol.MAX_DHT_TIME_DISCREPANCY_SECONDS = math.inf  # peers with another time are accepted and adapt

    class P2PInASession(P2P):  # type: ignore[misc]  # its base has no types
        """A P2P whose daemon runs in its own session, so that signals such as Ctrl-C do not reach the daemon."""

        @staticmethod
        def _make_process_args(*words: Any, **options: Any) -> list[str]:
            return [sys.executable, "-ISc", _IN_A_SESSION, *P2P._make_process_args(*words, **_RELAYED, **options)]

    def p2p_in(folder: Path) -> Any:
        """Return the class of a P2P whose sockets are in ``folder`` instead of in /tmp, where others could use them."""
        return type("P2PInAFolder", (P2PInASession,), {"_UNIX_SOCKET_PREFIX": f"/unix{folder}/"})

    classes = (PeerID, DHTNode, DHTProtocol, DHTID, Multiaddr, P2PDaemonError, RSAPrivateKey)
    functions = (p2p_in, raise_if_failed, read_pbmsg_safe, write_pbmsg)
    validators = (RSASignatureValidator, RecordValidatorBase, CompositeValidator)
    named = {each.__name__: each for each in (*classes, *functions, *validators)}
    return SimpleNamespace(**named, crypto_pb2=crypto_pb2, dht_pb2=dht_pb2, p2pd_pb2=p2pd_pb2, clock=clock)


class NetworkClock:
    """The time that the peers of a network share, in seconds since 1970; it starts from this machine's clock."""

    def __init__(self) -> None:
        self._ahead_s = time.time() - _elapsed_s()

    def now_s(self) -> float:
        return _elapsed_s() + self._ahead_s

    def enter(self, ahead_s: Sequence[float]) -> None:
        """Adopt the time of a network.

        Args:
            ahead_s: how many seconds the clocks of some of its peers are ahead of this one; empty if unknown.

        >>> clock = NetworkClock()
        >>> before_s = clock.now_s()
        >>> clock.enter([3600.0, 3600.5, -50.0, math.inf])
        >>> round(clock.now_s() - before_s)
        3600
        """
        if finite := [each for each in ahead_s if math.isfinite(each)]:
            self._ahead_s += statistics.median_low(finite)


def _elapsed_s() -> float:
    """Return a time that no setting of the clock changes, and that goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


_ENDING_S = 2.0
_ANSWER_S = 60.0  # longer than libp2p takes to notice that a peer does not answer
_MOST_CHARACTERS = 160
_HOST = re.compile(r"^/ip[46]/([^/]+)")
_DAEMON_SAYS = re.compile(r"^Daemon failed to start: ([\d/]+ [\d:]+ )?")
_PLAIN_WORDS = {
    "dial backoff": "it did not answer a moment ago",
    "failed to find any peer": "its address is unknown",
    "no addresses": "its address is unknown",
    "failed to connect to bootstrap peers": "none of them answers",
    "responded to a ping": "none of them answers",
    "connection refused": "connection refused",
    "no route to host": "no route to host",
    "network is unreachable": "the network is unreachable",
    "connection reset": "the connection was reset",
    "stream reset": "the connection was reset",
    "i/o timeout": "no answer in time",
    "deadline exceeded": "no answer in time",
    "not supported": "it is not a diloco of this version, or it is starting or ending",
    "dial to self": "it has the identity of this peer",
    "bytes read on a total of": "the libp2p daemon of this peer has ended",
}
"""Parts of libp2p's messages -> what they mean."""

Handler = Callable[[str, str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Handles an incoming stream; the arguments are the identity of the peer, its host ("" if unknown), and the stream."""


class Daemon:
    """A running daemon.

    Args:
        p2p: Hivemind's object for the daemon that it has started.
        folder: Holds the sockets of the daemon, over which anyone could act as this peer; removed with it.
        protocol: name of the protocol of the streams.
    """

    def __init__(self, p2p: Any, folder: Path, protocol: str) -> None:
        self.p2p = p2p
        self._protocol = protocol
        self._folder = folder
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Future[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def pid(self) -> int:
        pid: int = self.p2p._child.pid
        return pid

    async def addresses(self) -> tuple[str, ...]:
        engine = load_engine()
        answer = await self._ask_once(self._request("IDENTIFY"))
        me = f"/p2p/{self.p2p.peer_id}"
        return tuple(f"{engine.Multiaddr(each)}{me}" for each in answer.identify.addrs)

    async def connect(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Connect to a peer at these multiaddresses, which must not include its identity."""
        engine = load_engine()
        try:
            places = [engine.Multiaddr(each).to_bytes() for each in addresses]
        except Exception as error:  # the parser raises errors of many types
            raise OSError(f"the addresses of {peer_id} are invalid ({plainly(error)})") from error
        asked = engine.p2pd_pb2.ConnectRequest(peer=_bytes_of(peer_id), addrs=places)
        await self._ask_once(self._request("CONNECT", connect=asked), about=peer_id)

    async def open(self, peer_id: str) -> Stream:
        """Open a stream to another peer."""
        asked = load_engine().p2pd_pb2.StreamOpenRequest(peer=_bytes_of(peer_id), proto=[self._protocol])
        _, reader, writer = await self._ask(self._request("STREAM_OPEN", streamOpen=asked), about=peer_id)
        return reader, writer

    async def handle(self, handler: Handler) -> None:
        engine = load_engine()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                info = engine.p2pd_pb2.StreamInfo()
                await engine.read_pbmsg_safe(reader, info)
                found = _HOST.search(str(engine.Multiaddr(info.addr)))
                await handler(str(engine.PeerID(info.peer)), found[1] if found else "", reader, writer)
            except (OSError, EOFError, ValueError, asyncio.CancelledError):
                writer.close()  # the daemon or the peer is ending

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._writers = {each for each in self._writers if not each.is_closing()} | {writer}
            self._tasks.add(task := asyncio.ensure_future(accept(reader, writer)))
            task.add_done_callback(self._tasks.discard)

        self._server = await asyncio.start_unix_server(accepted, self._folder / "streams")
        listening = engine.Multiaddr(f"/unix{self._folder}/streams").to_bytes()
        asked = engine.p2pd_pb2.StreamHandlerRequest(addr=listening, proto=[self._protocol], balanced=False)
        await self._ask_once(self._request("STREAM_HANDLER", streamHandler=asked))

    async def close(self) -> None:
        """End the daemon and all of its streams."""
        if self._server is not None:
            await stop_listening(self._server)
        for _ in range(4):  # iterations of the event loop, in which connections just accepted reach `accepted`
            await asyncio.sleep(0)
        for task in list(self._tasks):
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()
        ending = {task for task in (self.p2p._listen_task, self.p2p._reader_task) if task is not None} | self._tasks
        try:
            await within(_ENDING_S, self.p2p.shutdown())
        except TimeoutError:
            self.p2p._child.kill()
            await self.p2p._child.wait()
        if ending:
            await asyncio.wait(ending, timeout=_ENDING_S)
        shutil.rmtree(self._folder, ignore_errors=True)

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
                reader, writer = await self.p2p._client.control.daemon_connector.open_connection()
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
                raise OSError(f"{about} can't be reached: {plainly(error)}") from error
            if writer is None and isinstance(error, OSError):  # this does not concern the other peer
                raise OSError("the libp2p daemon of this peer has ended") from error
            raise


def plainly(error: BaseException) -> str:
    """Summarise an error of libp2p or Hivemind; the original may list every address that was tried.

    >>> plainly(OSError("Connect failed. msg=failed to dial: all dials failed * [/ip4/10.0.0.1/tcp/1] dial backoff * "
    ...     "[/ip4/10.0.0.2/tcp/1] dial tcp4 10.0.0.2:1: connect: no route to host"))
    'it did not answer a moment ago, no route to host'
    >>> plainly(OSError("Daemon failed to start: 2026/11/22 06:55:33 failed to connect to bootstrap peers"))
    'none of them answers'
    """
    words = _DAEMON_SAYS.sub("", " ".join(str(error).split()))
    found = [meaning for part, meaning in _PLAIN_WORDS.items() if part in words]
    return ", ".join(dict.fromkeys(found)) or words[:_MOST_CHARACTERS] or type(error).__name__


def _bytes_of(peer_id: str) -> bytes:
    try:
        data: bytes = load_engine().PeerID.from_base58(peer_id).to_bytes()
    except ValueError as error:
        raise OSError(f"{peer_id} is not the identity of a peer ({error})") from error
    return data
