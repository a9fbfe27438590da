"""A model of TCP's throughput."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CongestionControl = Literal["bbr", "cubic", "reno"]

SEGMENT_BYTES = 1448
FIRST_WINDOW_BYTES = 10 * SEGMENT_BYTES
"""The congestion window of a connection that is new or was idle for longer than a round trip or two (RFC 6928, and
section 4.1 of RFC 5681)."""

LARGEST_WINDOW_BYTES = 1 << 22  # the most in flight over one connection: Linux's default limit on the send buffer


@dataclass(frozen=True, kw_only=True)
class Tcp:
    """The TCP connections over which a replica sends."""

    # bbr keeps its rate across pauses and losses; cubic and reno restart slowly after a pause, and treat a loss as
    # congestion
    congestion_control: CongestionControl = "bbr"
    loss: float = 0.0  # fraction of packets lost for other reasons than a full queue
    connections: int = 4  # number of connections to all other replicas together

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
