"""What TCP makes of a link: loss holds some connections back, and after a pause some get up to speed again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from diloco.errors import ConfigurationError

__all__ = ["CONGESTION_CONTROLS", "CongestionControl", "Tcp"]

CongestionControl = Literal["bbr", "cubic", "reno"]
CONGESTION_CONTROLS: tuple[CongestionControl, ...] = ("bbr", "cubic", "reno")

Floats = NDArray[np.float64]

SEGMENT_BYTES = 1448
FIRST_WINDOW_BYTES = 10 * SEGMENT_BYTES
"""Of a connection that has been silent for longer than a round trip or two: RFC 6928, RFC 5681 section 4.1."""

LARGEST_WINDOW_BYTES = 1 << 22
"""On the way at once over one connection: Linux's largest send buffer, as it is by default."""


@dataclass(frozen=True, kw_only=True)
class Tcp:
    """The connections by which a replica sends.

    Attributes:
        congestion_control: bbr keeps to a rate, over pauses and whatever is lost; cubic and reno begin anew after a
            pause, and take loss for a link that is full.
        loss: share of packets that get lost, other than by a queue that is full.
        connections: to all other replicas together.

    Raises:
        ConfigurationError: for a share that is none, or without connections.
    """

    congestion_control: CongestionControl = "bbr"
    loss: float = 0.0
    connections: int = 4

    def __post_init__(self) -> None:
        if self.congestion_control not in CONGESTION_CONTROLS or not 0 <= self.loss < 1 or self.connections < 1:
            raise ConfigurationError(
                f"congestion control {self.congestion_control!r}, a loss of {self.loss:.4g} and {self.connections} "
                f"connections were given; {', '.join(CONGESTION_CONTROLS)}, a loss of 0 or more and below 1, and at "
                "least one connection, would work. Nothing was computed."
            )

    def carried_bits_per_s(self, bandwidth_bits_per_s: Floats, round_trip_s: Floats) -> Floats:
        """What the connections get of a link, ``(..., M)``: what loss leaves of it, and at most a window of each in a
        round trip; by Mathis et al. (1997) that is ``sqrt(1.5 / loss)`` segments where loss counts as a full link.

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
        """How much longer it takes than at full speed, ``(..., M)``, where connections begin anew and double what they
        send with every round trip.

        >>> Tcp(congestion_control="cubic").start_s(np.array([1e4, 1e7]), np.array(2e8), np.array(0.5)).round(2)
        array([0.08, 3.06])
        """
        shape = np.broadcast_shapes(sent_bytes.shape, carried_bits_per_s.shape, round_trip_s.shape)
        if self.congestion_control == "bbr":
            return np.zeros(shape)
        window = self.connections * FIRST_WINDOW_BYTES
        full = np.maximum(window, carried_bits_per_s * round_trip_s / 8)  # on the way at full speed
        # sent at window / rtt * 2 ** (t / rtt): so much until t, or until the speed of the link is reached
        trips = np.log2(np.minimum(full, sent_bytes * math.log(2) + window) / window)
        slow_bytes = window * (2**trips - 1) / math.log(2)
        lost: Floats = trips * round_trip_s - 8 * slow_bytes / carried_bits_per_s
        return np.maximum(0.0, lost)
