"""A model of TCP's throughput, the number of connections that a link justifies, and TCP counters of the kernel."""

from __future__ import annotations

import math
import socket
import struct
import sys
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from diloco.errors import ConfigurationError

__all__ = [
    "CongestionControl",
    "Counters",
    "Tcp",
    "congestion_control",
    "connections_worth_having",
    "streams_to_each",
]

Floats = NDArray[np.float64]

CongestionControl = Literal["bbr", "cubic", "reno"]
CONGESTION_CONTROLS: tuple[CongestionControl, ...] = ("bbr", "cubic", "reno")

SEGMENT_BYTES = 1448
FIRST_WINDOW_BYTES = 10 * SEGMENT_BYTES
"""The congestion window of a connection that is new or was idle for longer than a round trip or two (RFC 6928, and
section 4.1 of RFC 5681)."""

LARGEST_WINDOW_BYTES = 1 << 22  # the most in flight over one connection: Linux's default limit on the send buffer


@dataclass(frozen=True, kw_only=True)
class Tcp:
    """The TCP connections over which a replica sends.

    Raises:
        ConfigurationError: if the congestion control is unknown, ``loss`` is not in [0, 1), or there is no connection.
    """

    # bbr keeps its rate across pauses and losses; cubic and reno restart slowly after a pause, and treat a loss as
    # congestion
    congestion_control: CongestionControl = "bbr"
    loss: float = 0.0  # fraction of packets lost for other reasons than a full queue
    connections: int = 4  # number of connections to all other replicas together

    def __post_init__(self) -> None:
        if self.congestion_control not in CONGESTION_CONTROLS or not 0 <= self.loss < 1 or self.connections < 1:
            raise ConfigurationError(
                f"congestion control {self.congestion_control!r} with a loss of {self.loss:.4g} and {self.connections} "
                f"connections cannot be simulated: use {', '.join(CONGESTION_CONTROLS)}, a loss of at least 0 and "
                "less than 1, and at least one connection."
            )

    def carried_bits_per_s(self, bandwidth_bits_per_s: Floats, round_trip_s: Floats) -> Floats:
        """Return the throughput of the connections on a link, ``(..., M)``.

        It is the share of the bandwidth that loss leaves, but at most one window per connection and round trip. Where
        loss counts as congestion, a window is ``sqrt(1.5 / loss)`` segments (Mathis et al., 1997).

        >>> Tcp(congestion_control="cubic", loss=0.005, connections=2).carried_bits_per_s(np.array(3e8), np.array(0.08))
        np.float64(5016019.1...)
        """
        window_bytes = float(LARGEST_WINDOW_BYTES)
        if self.congestion_control != "bbr" and self.loss > 0:
            window_bytes = min(window_bytes, SEGMENT_BYTES * math.sqrt(1.5 / self.loss))
        with np.errstate(divide="ignore"):
            most_bits_per_s = 8 * self.connections * window_bytes / round_trip_s
        carried: Floats = np.minimum((1 - self.loss) * bandwidth_bits_per_s, most_bits_per_s)
        return carried

    def start_s(self, sent_bytes: Floats, carried_bits_per_s: Floats, round_trip_s: Floats) -> Floats:
        """Return how many seconds slow start adds to a transfer at full speed, ``(..., M)``.

        Connections in slow start double what they send with every round trip.

        >>> Tcp(congestion_control="cubic").start_s(np.array([1e4, 1e7]), np.array(2e8), np.array(0.5)).round(2)
        array([0.08, 3.06])
        """
        shape = np.broadcast_shapes(sent_bytes.shape, carried_bits_per_s.shape, round_trip_s.shape)
        if self.congestion_control == "bbr":
            return np.zeros(shape)
        window = self.connections * FIRST_WINDOW_BYTES
        full = np.maximum(window, carried_bits_per_s * round_trip_s / 8)  # in flight at full speed
        # sent at window / rtt * 2 ** (t / rtt): this much until t, or until the speed of the link is reached
        trips = np.log2(np.minimum(full, sent_bytes * math.log(2) + window) / window)
        slow_bytes = window * (2**trips - 1) / math.log(2)
        lost: Floats = trips * round_trip_s - 8 * slow_bytes / carried_bits_per_s
        return np.maximum(0.0, lost)


KEEPING_THEIR_RATE = ("bbr",)  # congestion controls that do not slow down at a lost packet or after a pause
MOST_IN_ALL = 64  # the most connections to all other hosts together, unless the user has chosen their number
NEARLY, UNNOTICED_S = 1.1, 0.01  # a transfer up to this factor plus this many seconds slower counts as equally fast
NEAR_S = 0.002  # with a shorter round trip, one connection is as good as many

FEW, MANY = 4, 16
"""Connections to all other replicas together. A connection that slows down at every loss carries little over a long
path, and sends only ten packets at first after a pause, so many connections carry more together. If a connection keeps
its rate, more connections only fill the queue on the path, and the packets that it drops have to be resent."""


def streams_to_each(others: int, control: str) -> int:
    """Return the default number of payload connections to each of ``others`` replicas.

    >>> streams_to_each(1, "bbr"), streams_to_each(2, "cubic"), streams_to_each(40, "cubic")
    (4, 8, 1)
    """
    return max(1, round((FEW if control in KEEPING_THEIR_RATE else MANY) / max(1, others)))


def congestion_control() -> str:
    """Return the congestion control of this process's new connections, such as "cubic" or "bbr"; "" if unknown."""
    option = getattr(socket, "TCP_CONGESTION", None)
    if option is None:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        return connection.getsockopt(socket.IPPROTO_TCP, option, 16).rstrip(b"\0").decode("ascii")


def connections_worth_having(
    burst_bytes: float,
    round_trip_s: float,
    loss: float,
    bandwidth_bits_per_s: float = math.inf,
    hosts: int = 1,
) -> int:
    """Return the smallest number of connections to one host that is nearly as fast as any other number.

    This is for congestion controls that restart slowly after a pause and treat a loss as congestion (cubic).

    Args:
        burst_bytes: number of bytes that are sent to the host without a pause.
        round_trip_s: round trip without queueing, in seconds.
        loss: fraction of packets that get lost.
        bandwidth_bits_per_s: bandwidth to the host, if the path has been full; else infinite.
        hosts: number of hosts to which this host sends.

    >>> connections_worth_having(3e6, 0.08, 0.005), connections_worth_having(3e6, 0.08, 0.005, hosts=4)
    (64, 16)
    >>> connections_worth_having(3e6, 0.08, 0.0, 1e8), connections_worth_having(3e6, 0.0005, 0.0)
    (32, 1)
    """
    numbers = [1]
    while 2 * numbers[-1] * hosts <= MOST_IN_ALL:
        numbers.append(2 * numbers[-1])
    took_s = [_burst_s(number, burst_bytes, round_trip_s, loss, bandwidth_bits_per_s) for number in numbers]
    enough_s = NEARLY * min(took_s) + UNNOTICED_S
    return next(number for number, each_s in zip(numbers, took_s, strict=True) if each_s <= enough_s)


def _burst_s(connections: int, sent_bytes: float, trip_s: float, loss: float, bandwidth_bits_per_s: float) -> float:
    tcp, trip = Tcp(congestion_control="cubic", loss=loss, connections=connections), np.array(trip_s)
    carried = tcp.carried_bits_per_s(np.array(bandwidth_bits_per_s), trip)
    slow_start_s, sending_s = tcp.start_s(np.array(sent_bytes), carried, trip), 8 * sent_bytes / carried
    return trip_s + float(slow_start_s) + float(sending_s)


@dataclass(frozen=True)
class Counters:
    """The kernel's counters of one TCP connection since it was opened, and its round trips."""

    # Bytes that the other side's kernel has received: those before the first lost segment, and roughly those after it
    # that it reported (SACK). The former alone stall at each loss and jump once it is repaired, which would look like a
    # fast link.
    acknowledged_bytes: int
    sent_segments: int  # segments sent with payload
    resent_segments: int  # segments sent again
    round_trip_s: float  # recent round trip, queueing included
    least_round_trip_s: float  # the shortest round trip so far
    paced_bits_per_s: float  # the rate at which congestion control allows sending

    def after(self, before: Counters) -> Counters:
        """Return these counters with ``acknowledged_bytes`` no lower than in ``before``, which was read earlier.

        Bytes received out of order are estimated in full segments. The last of them may turn out to be shorter, which
        would make the count decrease.
        """
        return replace(self, acknowledged_bytes=max(self.acknowledged_bytes, before.acknowledged_bytes))

    @classmethod
    def of(cls, connection: _HasOptions | None) -> Counters | None:
        """Return the counters of a socket, or None if the kernel does not report them."""
        if connection is None or sys.platform != "linux" or connection.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        try:
            data = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            found = _TCP_INFO.unpack(data)
        except (OSError, struct.error):  # the socket is closed, or the kernel is older than 4.6
            return None
        words, (paced, _, in_order, _), (_, _, _, least, _, sent) = found[8:32], found[32:36], found[36:42]
        segment_bytes, beyond = words[2], words[5]
        return cls(in_order + beyond * segment_bytes, sent, words[23], words[15] / 1e6, least / 1e6, 8.0 * paced)


class _HasOptions(Protocol):
    """A socket, or asyncio's wrapper of one."""

    @property
    def family(self) -> int: ...

    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes: ...


_TCP_INFO = struct.Struct("=8B24I4Q6I")  # the first fields of Linux's ``struct tcp_info``
