"""Checks of the network path to a peer: name, port, protocol, latency, and throughput in each direction.

Every replica answers probes at its control port. `diloco doctor --listen` answers them on a machine without one.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from diloco.errors import TransportError
from diloco.protocol import WireMessage
from diloco.transport.address import Address
from diloco.transport.connections.connection_manager import ConnectionManager
from diloco.transport.connections.sockets import TcpStreams
from diloco.transport.connections.streams import pack, read_frame, within
from diloco.transport.secret import TurnedAwayError

MOST_BYTES = 64_000_000  # the most bytes that one probe transfers

_CHUNK_BYTES = 1 << 20
_PINGS = 10
_HOLD_S = 60.0  # for one transfer, during which others wait


@dataclass(frozen=True)
class Finding:
    address: str  # the address as given
    resolved: tuple[str, ...] = ()  # the IP addresses that the name resolves to
    ok: bool = False  # whether everything works
    latency_s: float | None = None  # median of the round trips, or None
    up_bits_per_s: float | None = None  # throughput to the peer
    down_bits_per_s: float | None = None  # throughput from the peer
    problem: str = ""  # what does not work, or ""
    advice: str = ""  # what to do about it, or ""


class Probe(WireMessage):
    """The request to answer, or to take or give so many bytes."""

    ask: Literal["ping", "take", "give"]
    bytes: Annotated[int, Meta(ge=0, le=MOST_BYTES)] = 0


class Probed(WireMessage):
    """The answer to a probe."""


class ProbeData(WireMessage):
    """Bytes that follow."""


def serve_probes(connections: ConnectionManager) -> None:
    """Answer probes at ``connections``.

    Only one probe transfers bytes at a time, so that training keeps its bandwidth.
    """
    busy = asyncio.Lock()

    async def answer(asked: Probe, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            if asked.ask == "ping":
                writer.write(pack(Probed()))
            else:
                async with busy, asyncio.timeout(_HOLD_S):
                    if asked.ask == "give":
                        await _give(writer, asked.bytes)
                    else:
                        await _take(reader, asked.bytes)
                        writer.write(pack(Probed()))
            await writer.drain()
            asked, _ = await read_frame(reader, Probe)

    connections.services[Probe] = answer


async def examine(address: Address, num_bytes: int, timeout_s: float, secret: str = "") -> Finding:
    """Check the network path to ``address``.

    Args:
        address: address of the control port of a replica, or of a listening doctor.
        num_bytes: number of bytes to transfer in each direction; at most `MOST_BYTES`.
        timeout_s: time limit of each step of the check, in seconds.
        secret: secret of the peer's run; "" if it has none.
    """
    resolved: tuple[str, ...] = ()

    def bad(problem: str, advice: str) -> Finding:
        return Finding(str(address), resolved, problem=problem, advice=advice)

    try:
        places = await asyncio.get_running_loop().getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        advice = "use a name that this machine's resolver knows, or an IP address"
        return bad(f"the name does not resolve: {error.strerror or error}", advice)
    resolved = tuple(dict.fromkeys(str(place[4][0]) for place in places))
    try:
        _, plain = await within(timeout_s, asyncio.open_connection(address.host, address.port))
        plain.close()
    except ConnectionRefusedError:
        advice = "start a replica or `diloco doctor --listen` there, or choose another port"
        return bad("nothing listens there (connection refused)", advice)
    except TimeoutError:
        advice = "open the port in the firewalls between the machines, or use another address of that machine"
        return bad(f"no answer within {timeout_s:g} s", advice)
    except OSError as error:
        return bad(str(error), "set up a route to that machine")
    try:
        stream = await within(timeout_s, TcpStreams(secret).open(address))
        try:
            return Finding(str(address), resolved, True, *await _measure(*stream, num_bytes, timeout_s))
        finally:
            stream[1].transport.abort()
    except TimeoutError:
        advice = "check that the process is not frozen, or transfer less (--size)"
        return bad(f"it accepted the connection but did not respond for {timeout_s:g} s", advice)
    except TurnedAwayError as error:
        return bad(str(error), "give both ends the same --secret-file")
    except (OSError, EOFError, TransportError) as error:
        reason = str(error) or "the connection was closed"
        return bad(
            f"what answers there is not a diloco: {reason}", "use the control port of a diloco of the same version"
        )


async def _measure(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, num_bytes: int, timeout_s: float
) -> tuple[float, float, float]:
    loop, trips = asyncio.get_running_loop(), []
    for _ in range(_PINGS):
        started_s = loop.time()
        writer.write(pack(Probe("ping")))
        await within(timeout_s, read_frame(reader, Probed))
        trips.append(loop.time() - started_s)
    latency_s = statistics.median(trips)

    async def send() -> None:
        writer.write(pack(Probe("take", num_bytes)))
        await _give(writer, num_bytes)
        await read_frame(reader, Probed)

    async def receive() -> None:
        writer.write(pack(Probe("give", num_bytes)))
        await _take(reader, num_bytes)

    rates = []
    for move in (send, receive):
        started_s = loop.time()
        await within(timeout_s, move())
        # one round trip of the time is that of the request and its answer
        rates.append(8 * num_bytes / max(1e-9, loop.time() - started_s - latency_s))
    return latency_s, rates[0], rates[1]


async def _give(writer: asyncio.StreamWriter, num_bytes: int) -> None:
    chunk = bytes(_CHUNK_BYTES)
    for start in range(0, num_bytes, _CHUNK_BYTES):
        writer.write(pack(ProbeData(), chunk[: num_bytes - start]))
        await writer.drain()


async def _take(reader: asyncio.StreamReader, num_bytes: int) -> None:
    while num_bytes > 0:
        _, chunk = await read_frame(reader, ProbeData, most_blob_bytes=_CHUNK_BYTES)
        num_bytes -= len(chunk)
