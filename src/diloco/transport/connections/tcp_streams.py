"""Connections over TCP, optionally authenticated by a shared secret."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

from diloco.errors import TransportError
from diloco.protocol import Entry
from diloco.transport.address import Address, address_of_interface, parse_address
from diloco.transport.connections.streams import ASKS, Accept, Stream, within
from diloco.transport.secret import PROOF_BYTES, TurnedAwayError, check_secret, is_proof, proof

__all__ = ["NONCE_BYTES", "TcpStreams", "dial", "stop_listening"]

NONCE_BYTES = 16
PROOF_S = 4.0  # less than the time that a peer waits for its answer
_LOW_DELAY = 0x10  # in the type-of-service byte: routers that support it let these packets overtake payloads


async def stop_listening(server: asyncio.Server) -> None:
    """Close a server once every accepted connection is known to its protocol.

    If a server closes between accepting a connection and creating its transport, asyncio loses the connection and
    leaves it open.
    """
    for listening in server.sockets:
        asyncio.get_running_loop().remove_reader(listening)
    for _ in range(2):
        await asyncio.sleep(0)
    server.close()


async def dial(address: Address, **options: Any) -> Stream:
    """Open a TCP connection; the options are those of `asyncio.open_connection`. Any failure is an `OSError`."""
    try:
        return await asyncio.open_connection(address.host, address.port, **options)
    except UnicodeError as error:  # a peer may announce a name that no resolver takes
        raise OSError(f"{address} is no valid address: {error}") from error


class TcpStreams:
    """One listening port, and connections to those of other processes.

    With a secret, the two ends of a connection prove to each other that they know it, using fresh nonces. Later data is
    neither encrypted nor signed. ::

        20 bytes  b"DLC?" and a nonce     from the side that listens
        48 bytes  a nonce and a proof     from the side that opened the connection
        32 bytes  a proof                 from the side that listens

    Args:
        kept: A socket that already listens, from `keep`. It is closed with these streams.
        secret: The shared secret, see `diloco.transport.secret`; "": connections are not authenticated.
    """

    def __init__(self, kept: socket.socket | None = None, secret: str = "") -> None:
        self._server: asyncio.Server | None = None
        self._payload_server: asyncio.Server | None = None
        self._accept: Accept | None = None
        self._kept = kept
        self._secret = check_secret(secret)

    def keep(self) -> socket.socket:
        """Return the listening socket, for streams that replace these. Its port refuses no connection meanwhile.

        A peer whose connection is refused would take this process for terminated. If these streams have already ended
        because of an internal error, that was right, and the port is opened again.

        Raises:
            OSError: Another process has taken the port since.
        """
        assert self._server is not None, "listen comes first"
        if self._server.sockets:
            return self._server.sockets[0].dup()
        family, place = self._listened
        return socket.create_server(place, family=family)

    async def listen(self, accept: Accept, host: str, ports: range, advertised: str) -> Address:
        """Accept connections on the first free port of ``ports``.

        Args:
            accept: Called with each connection, which it takes over.
            host: An address of this machine; "": all of them.
            ports: The ports to try.
            advertised: The host that others are given.

        Raises:
            TransportError: No port is free, or the host is not an address of this machine.
        """
        self._accept = accept
        if self._kept is not None:
            self._server = await asyncio.start_server(accept, sock=self._kept)
            return self._address(self._server, advertised)
        for port in ports:
            try:
                self._server = await asyncio.start_server(accept, host or None, port)
                break
            except OSError as error:
                if port == ports[-1]:
                    tried = f"port {port}" if len(ports) == 1 else f"any port from {ports[0]} to {port}"
                    raise TransportError(
                        f"can't listen on {host or 'this machine'} at {tried}: {error}. Choose another port "
                        "or an address of this machine (network.listen)."
                    ) from error
        assert self._server is not None
        return self._address(self._server, advertised)

    def _address(self, server: asyncio.Server, advertised: str) -> Address:
        """Remember where the server listens, and return its address."""
        place = server.sockets[0].getsockname()
        self._listened = server.sockets[0].family, place[:2]
        return Address(advertised, place[1])

    async def listen_for_payloads(self, interface: str) -> Address:
        """Also accept connections at another interface of this machine, on a port that the system chooses.

        Raises:
            TransportError: There is no such interface, or it has no address.
        """
        assert self._accept is not None, "listen comes first"
        host = address_of_interface(interface)
        self._payload_server = await asyncio.start_server(self._accept, host)
        return Address(host, self._payload_server.sockets[0].getsockname()[1])

    async def open(self, address: Address) -> Stream:
        reader, writer = await dial(address)
        if not self._secret:
            return reader, writer
        try:
            await within(PROOF_S, self._prove(address, reader, writer))
        except BaseException as error:
            writer.close()
            if isinstance(error, EOFError | TimeoutError | ConnectionError):
                raise TurnedAwayError(f"{address} has a different secret or none, or has just ended") from error
            raise
        return reader, writer

    async def _prove(self, address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked, mine = await reader.readexactly(len(ASKS) + NONCE_BYTES), os.urandom(NONCE_BYTES)
        ends = f"opens {mine.hex()}", f"listens {asked[len(ASKS) :].hex()}"
        writer.write(mine + proof("tcp", self._secret, *ends))
        answer = await reader.readexactly(PROOF_BYTES)
        if asked[: len(ASKS)] != ASKS or not is_proof(answer, "tcp", self._secret, *reversed(ends)):
            raise TurnedAwayError(f"{address} has a different secret or none")

    async def admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if not self._secret:
            return True
        mine = os.urandom(NONCE_BYTES)
        writer.write(ASKS + mine)
        answer = await reader.readexactly(NONCE_BYTES + PROOF_BYTES)
        ends = f"opens {answer[:NONCE_BYTES].hex()}", f"listens {mine.hex()}"
        if not is_proof(answer[NONCE_BYTES:], "tcp", self._secret, *ends):
            return False
        writer.write(proof("tcp", self._secret, *reversed(ends)))
        return True

    def address(self, text: str) -> Address:
        return parse_address(text)

    def payload_address(self, entry: Entry) -> Address:
        return parse_address(entry.places[0] if entry.places else entry.address)

    def calls_back_at(self, entry: Entry) -> None:
        """Return None: a peer connects itself if it has something to send."""

    def tune(self, writer: asyncio.StreamWriter, silence_s: float) -> None:
        """Send small packets at once, and let the kernel detect a dead path too."""
        connection = writer.get_extra_info("socket")
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, _LOW_DELAY)
        elif connection.family == socket.AF_INET6:
            connection.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, _LOW_DELAY)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * silence_s))

    def identity(self, writer: asyncio.StreamWriter) -> str:
        """Return "", as TCP proves no identity."""
        return ""

    def origins(self, writer: asyncio.StreamWriter) -> tuple[str, ...]:
        place = writer.get_extra_info("peername")
        return (str(place[0]),) if place else ()

    async def refuse(self) -> None:
        for server in filter(None, (self._server, self._payload_server)):
            await stop_listening(server)

    async def close(self) -> None:
        """Do nothing, as `refuse` has closed the servers."""
