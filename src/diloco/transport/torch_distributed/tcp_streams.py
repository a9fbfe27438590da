"""Control connections over plain TCP, IPv4 or IPv6."""

from __future__ import annotations

import asyncio
import socket

from diloco.errors import TransportError
from diloco.transport.address import Address, parse_address
from diloco.transport.peers.streams import Accept, stop_listening

__all__ = ["TcpStreams"]

_LOW_DELAY = 0x10  # of the type-of-service byte: routers that know it let these packets pass payloads


class TcpStreams:
    """One listening port, and connections to those of others.

    Args:
        kept: a socket that listens already, as `keep` gave it; it is closed with these streams.
    """

    def __init__(self, kept: socket.socket | None = None) -> None:
        self._server: asyncio.Server | None = None
        self._kept = kept

    def keep(self) -> socket.socket:
        """The listening socket, for streams that take the place of these ones: its port refuses nobody meanwhile.

        Who is refused takes this process for one that has ended.
        """
        assert self._server is not None, "listen comes first"
        return self._server.sockets[0].dup()

    async def listen(self, accept: Accept, host: str, ports: range, advertised: str) -> Address:
        """Accept connections on the first free port of ``ports``.

        Args:
            accept: takes them over.
            host: an address of this machine; "": all of them.
            ports: to try.
            advertised: the host that others are told.

        Raises:
            TransportError: if none is free, or the host is not one of this machine's.
        """
        if self._kept is not None:
            self._server = await asyncio.start_server(accept, sock=self._kept)
            return Address(advertised, self._server.sockets[0].getsockname()[1])
        for port in ports:
            try:
                self._server = await asyncio.start_server(accept, host or None, port)
                break
            except OSError as error:
                if port == ports[-1]:
                    tried = f"port {port}" if len(ports) == 1 else f"any port from {ports[0]} to {port}"
                    raise TransportError(
                        f"{host or 'this machine'} can't be listened on at {tried}: {error}. Another port "
                        "(transport.ports), or an address of this machine (transport.host), would work. "
                        "Nothing was started."
                    ) from error
        assert self._server is not None
        return Address(advertised, self._server.sockets[0].getsockname()[1])

    async def open(self, address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(address.host, address.port)

    def address(self, text: str) -> Address:
        return parse_address(text)

    def tune(self, writer: asyncio.StreamWriter, silence_s: float) -> None:
        """Small packets at once, and a dead way noticed by the kernel too."""
        connection = writer.get_extra_info("socket")
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, _LOW_DELAY)
        elif connection.family == socket.AF_INET6:
            connection.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, _LOW_DELAY)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * silence_s))

    def identity(self, writer: asyncio.StreamWriter) -> str:
        """TCP proves nothing."""
        return ""

    async def refuse(self) -> None:
        if self._server is not None:
            await stop_listening(self._server)

    async def close(self) -> None:
        """Nothing is left."""
