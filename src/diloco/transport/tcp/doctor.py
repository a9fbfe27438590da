"""Checks of the network path to a peer: name, port, protocol, latency, and throughput in each direction.

Every replica answers probes at its control port. `diloco doctor --listen` answers them on a machine without one.
"""

from __future__ import annotations

import asyncio
import math
import socket
import statistics
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from diloco.errors import TransportError
from diloco.protocol import WireMessage
from diloco.transport.address import Address, is_private
from diloco.transport.connections.connection_manager import ConnectionManager
from diloco.transport.connections.sockets import Credentials, TcpStreams
from diloco.transport.connections.streams import pack, read_frame, within
from diloco.transport.secret import TurnedAwayError

_CHUNK_BYTES = 1 << 16  # hundreds of strangers may send one at the same time
_PINGS = 10
_HOLD_S = 60.0  # for one chunk, during which others wait


@dataclass(frozen=True)
class Finding:
    problem: str = ""  # what does not work, and what to do about it; "": everything works
    latency_s: float = 0.0  # median of the round trips
    up_bits_per_s: float = 0.0  # throughput to the peer
    down_bits_per_s: float = 0.0  # throughput from the peer


class Probe(WireMessage):
    """The request to answer with so many bytes. Others may follow it."""

    give: Annotated[int, Meta(ge=0, le=_CHUNK_BYTES)] = 0
    data: bytes = b""


class Probed(WireMessage):
    """The answer to a probe."""

    data: bytes


def serve_probes(connections: ConnectionManager) -> None:
    """Answer probes at ``connections``.

    Only one of them moves bytes at a time, so that training keeps its bandwidth.
    """
    busy = asyncio.Lock()

    async def answer(request: Probe, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            async with busy, asyncio.timeout(_HOLD_S):
                writer.write(pack(Probed(bytes(request.give))))
                await writer.drain()
            request = await read_frame(reader, Probe, 2 * _CHUNK_BYTES)

    connections.services[Probe] = answer


async def obstacle(host: str, port: int, timeout_s: float) -> str:
    """Return why no connection to a port can be opened, and what to do about it; "" if one can."""
    from_outside = "; from outside of its private network use a VPN, or in a swarm a `diloco relay` that both --join"
    elsewhere = from_outside if is_private(host) else ""
    try:
        _, writer = await within(timeout_s, asyncio.open_connection(host, port))
    except (socket.gaierror, UnicodeError) as error:  # the second for a name such as "a..b"
        why = getattr(error, "strerror", None) or error
        return f"the name does not resolve: {why}; use a name that this machine's resolver knows, or an IP address"
    except ConnectionRefusedError:
        advice = "start a replica or `diloco doctor --listen` there, or give the address that it has now"
        return f"nothing listens there (connection refused); {advice}"
    except TimeoutError:
        advice = "open the port in the firewalls and routers in between, or use another address of that machine"
        return f"no answer within {timeout_s:g} s; {advice}{elsewhere}"
    except OSError as error:
        return f"{error}; set up a route to that machine{elsewhere}"
    writer.close()
    return ""


async def examine(address: Address, num_bytes: int, timeout_s: float, secret: str = "") -> Finding:
    """Check the network path to the control port of a replica, or to a listening doctor.

    ``num_bytes`` go in each direction, and each step may take ``timeout_s``.
    """
    if problem := await obstacle(address.host, address.port, timeout_s):
        return Finding(problem)
    try:
        stream = await within(timeout_s, TcpStreams(Credentials(secret=secret)).open(address))
        try:
            return Finding("", *await _measure(*stream, num_bytes, timeout_s))
        finally:
            stream[1].transport.abort()
    except TimeoutError:
        advice = "check that the process is not frozen, or transfer less (--size)"
        return Finding(f"it accepted the connection but did not respond for {timeout_s:g} s; {advice}")
    except TurnedAwayError as error:
        return Finding(f"{error}; give both ends the same --secret-file")
    except (OSError, EOFError, TransportError) as error:
        reason = str(error) or "the connection was closed"
        advice = "use the control port of a diloco of the same version"
        return Finding(f"what answers there is not a diloco: {reason}; {advice}")


async def _measure(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, num_bytes: int, timeout_s: float
) -> tuple[float, float, float]:
    """Return the latency in seconds and the rate in each direction in bits per second."""
    loop, size = asyncio.get_running_loop(), min(num_bytes, _CHUNK_BYTES)
    chunks = math.ceil(num_bytes / size)

    async def seconds(number: int, sent: int = 0, given: int = 0) -> float:
        began_s = loop.time()
        async with asyncio.timeout(timeout_s):
            for _ in range(number):
                writer.write(pack(Probe(given, bytes(sent))))
                await writer.drain()
            for _ in range(number):
                await read_frame(reader, Probed, 2 * _CHUNK_BYTES)
        return loop.time() - began_s

    latency_s = statistics.median([await seconds(1) for _ in range(_PINGS)])
    up_s, down_s = await seconds(chunks, sent=size), await seconds(chunks, given=size)
    # one round trip of the time is that of the request and its answer
    up, down = (8 * chunks * size / max(1e-9, each - latency_s) for each in (up_s, down_s))
    return latency_s, up, down
