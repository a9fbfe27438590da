"""What TCP makes of a link, and how many connections are worth having on it."""

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
"""Of a connection that has been silent for longer than a round trip or two: RFC 6928, RFC 5681 section 4.1."""

LARGEST_WINDOW_BYTES = 1 << 22  # in flight over one connection: Linux's largest send buffer by default


@dataclass(frozen=True, kw_only=True)
class Tcp:
    """The connections by which a replica sends.

    Raises:
        ConfigurationError: for a loss that is no share below 1, or without connections.
    """

    # bbr keeps its rate over pauses and losses; cubic and reno start anew after a pause, and take a loss for a full
    # link
    congestion_control: CongestionControl = "bbr"
    loss: float = 0.0  # share of packets that get lost, other than in a full queue
    connections: int = 4  # to all other replicas together

    def __post_init__(self) -> None:
        if self.congestion_control not in CONGESTION_CONTROLS or not 0 <= self.loss < 1 or self.connections < 1:
            raise ConfigurationError(
                f"congestion control {self.congestion_control!r} with a loss of {self.loss:.4g} and {self.connections} "
                f"connections cannot be simulated: it takes {', '.join(CONGESTION_CONTROLS)}, a loss of 0 or more and "
                "below 1, and at least one connection."
            )

    def carried_bits_per_s(self, bandwidth_bits_per_s: Floats, round_trip_s: Floats) -> Floats:
        """What the connections get of a link, ``(..., M)``: what loss leaves of it, and at most a window of each in a
        round trip. Where loss counts as a full link, that is ``sqrt(1.5 / loss)`` segments (Mathis et al., 1997).

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
        """How much longer than at full speed it takes, ``(..., M)``, while connections that start anew double what they
        send with every round trip.

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


KEEPING_THEIR_RATE = ("bbr",)  # congestion control that does not slow down at a lost packet or after a pause
MOST_IN_ALL = 64  # connections to all other hosts, where nobody has chosen their number
NEARLY, UNNOTICED_S = 1.1, 0.01  # a transfer that takes so many times as long, and so much longer, is as good
NEAR_S = 0.002  # over a shorter round trip one connection is as good as many

FEW, MANY = 4, 16
"""Connections to all others together. One that halves its rate at every loss carries little over a long way, and starts
with ten packets after a pause: many together carry more. Where a connection keeps its rate, more of them only fill the
queue on the way, and what is lost there is sent again."""


def streams_to_each(others: int, control: str) -> int:
    """Payload connections to each of ``others`` replicas by default.

    >>> streams_to_each(1, "bbr"), streams_to_each(2, "cubic"), streams_to_each(40, "cubic")
    (4, 8, 1)
    """
    return max(1, round((FEW if control in KEEPING_THEIR_RATE else MANY) / max(1, others)))


def congestion_control() -> str:
    """Congestion control of new connections of this process, such as cubic or bbr; "" if the kernel doesn't tell."""
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
    """The fewest connections to one host that are nearly as fast as any number, where TCP starts anew after a pause and
    takes a loss for a full link.

    Args:
        burst_bytes: that are sent to the host without a pause.
        round_trip_s: without queues.
        loss: share of packets that get lost.
        bandwidth_bits_per_s: to the host, where the way has been filled.
        hosts: to which this one sends.

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
    """What the kernel has counted on a connection since it was made, and its round trips."""

    # that the other side's kernel has: those before the first one lost, and about as many after it as it told of. The
    # former alone stand still at each loss, and jump once it is repaired, which would look like a fast link.
    acknowledged_bytes: int
    sent_segments: int  # with payload
    resent_segments: int
    round_trip_s: float  # of late, with queues on the way
    least_round_trip_s: float  # ever
    paced_bits_per_s: float  # at which congestion control lets it send

    def after(self, before: Counters) -> Counters:
        """These, told later than ``before``: what came out of order was told of in full segments, of which the last one
        may prove to be shorter, and what has come once does not become less."""
        return replace(self, acknowledged_bytes=max(self.acknowledged_bytes, before.acknowledged_bytes))

    @classmethod
    def of(cls, connection: _Asked | None) -> Counters | None:
        """Of a socket; None where the kernel does not tell."""
        if connection is None or sys.platform != "linux" or connection.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        try:
            told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            found = _TCP_INFO.unpack(told)
        except (OSError, struct.error):  # it is closed, or the kernel is older than 4.6
            return None
        words, (paced, _, in_order, _), (_, _, _, least, _, sent) = found[8:32], found[32:36], found[36:42]
        segment_bytes, beyond = words[2], words[5]
        return cls(in_order + beyond * segment_bytes, sent, words[23], words[15] / 1e6, least / 1e6, 8.0 * paced)


class _Asked(Protocol):
    """A socket, or what asyncio shows of one."""

    @property
    def family(self) -> int: ...

    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes: ...


_TCP_INFO = struct.Struct("=8B24I4Q6I")  # the beginning of Linux's ``struct tcp_info``
