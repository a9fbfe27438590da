"""The replicas and links of a run, and what real runs spend besides computing and transferring: TCP, queues and work.

The constants and the errors of predictions with them are results of benchmarks/simulator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from diloco.algorithm import Uplink
from diloco.plan.exchange import Floats
from diloco.transport import Link

CongestionControl = Literal["bbr", "cubic", "reno"]

SEGMENT_BYTES = 1448
FIRST_WINDOW_BYTES = 10 * SEGMENT_BYTES
"""The congestion window of a connection that is new or was idle for longer than a round trip or two (RFC 6928, and
section 4.1 of RFC 5681)."""

LARGEST_WINDOW_BYTES = 1 << 22  # the most in flight over one connection: Linux's default limit on the send buffer
P90_QUEUE_TRIPS = 4.0  # about one round in ten loses more round trips in queues
P90_WORK = 1.25  # factor for the work at p90

ACCURACY = (
    "median error 4% of the time of a round (largest 53%) and 0.1% of the whole time (largest 14%), in 26 runs on a CPU"
)
"""The errors of predictions, in words."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions under which replicas exchange contributions. The defaults are measured on a CPU."""

    # TCP congestion control of the senders: bbr keeps its rate across pauses and losses; cubic and reno restart slowly
    # after a pause, and treat a loss as congestion; None: payload has the full rate from the start
    congestion_control: CongestionControl | None = "cubic"
    loss: float = 0.0  # fraction of packets lost for other reasons than a full queue
    # time per value that a round takes for decoding, summing and hashing, while training continues
    average_s_per_value: float = 1.5e-9
    # time per value that a send blocks the training loop: pseudo-gradient and encoding
    send_s_per_value: float = 2.5e-9
    # time per value that a merge blocks the training loop: outer step and merge
    merge_s_per_value: float = 1.9e-9
    # round trips lost in queues while the payload fills the link; a smaller payload loses a part of them
    queue_trips: float = 0.0

    def scaled(self, work: float) -> Conditions:
        """Return the conditions with ``work`` times the work."""
        return replace(
            self,
            average_s_per_value=work * self.average_s_per_value,
            send_s_per_value=work * self.send_s_per_value,
            merge_s_per_value=work * self.merge_s_per_value,
        )

    def at_p90(self) -> Conditions:
        """Return conditions that one round in ten exceeds, instead of every other round."""
        return replace(self.scaled(P90_WORK), queue_trips=P90_QUEUE_TRIPS)

    def carried_bits_per_s(self, bandwidth_bits_per_s: Floats, round_trip_s: Floats, connections: int) -> Floats:
        """Return the throughput on a link of the connections to all other replicas together, ``(M,)``.

        It is the share of the bandwidth that loss leaves, but at most one window per connection and round trip. Where
        loss counts as congestion, a window is ``sqrt(1.5 / loss)`` segments (Mathis et al., 1997).

        >>> Conditions(loss=0.005).carried_bits_per_s(np.array(3e8), np.array(0.08), 2)
        np.float64(5016019.1...)
        """
        if self.congestion_control is None:
            return bandwidth_bits_per_s
        window_bytes = float(LARGEST_WINDOW_BYTES)
        if self.congestion_control != "bbr" and self.loss > 0:
            window_bytes = min(window_bytes, SEGMENT_BYTES * math.sqrt(1.5 / self.loss))
        with np.errstate(divide="ignore"):
            most_bits_per_s = 8 * connections * window_bytes / round_trip_s
        carried: Floats = np.minimum((1 - self.loss) * bandwidth_bits_per_s, most_bits_per_s)
        return carried

    def start_s(self, sent_bytes: Floats, carried_bits_per_s: Floats, round_trip_s: float, connections: int) -> Floats:
        """Return how many seconds slow start adds to a transfer at full speed, ``(M,)``.

        Connections in slow start double what they send with every round trip.

        >>> Conditions().start_s(np.array([1e4, 1e7]), np.array(2e8), 0.5, 4).round(2)
        array([0.08, 3.06])
        """
        if self.congestion_control in ("bbr", None):
            return np.zeros_like(sent_bytes)
        window = connections * FIRST_WINDOW_BYTES
        full = np.maximum(window, carried_bits_per_s * round_trip_s / 8)  # in flight at full speed
        # sent at window / rtt * 2 ** (t / rtt): this much until t, or until the speed of the link is reached
        trips = np.log2(np.minimum(full, sent_bytes * math.log(2) + window) / window)
        slow_bytes = window * (2**trips - 1) / math.log(2)
        lost: Floats = trips * round_trip_s - 8 * slow_bytes / carried_bits_per_s
        return np.maximum(0.0, lost)


IDEAL = Conditions(congestion_control=None).scaled(0.0)
"""No overhead: the ideal of the papers and of the virtual clock."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """The replicas and links of a run."""

    links: tuple[Link, ...]  # one for each replica
    step_time_s: tuple[float, ...]  # compute time of an inner step, one for each replica
    conditions: Conditions = Conditions()

    def uplinks(self, transfer_steps: float) -> tuple[Uplink, ...]:
        """Return what the replicas learn of their uplinks; see `SyncSchedule.transfer_steps`.

        Slow ones sum less where losses don't slow them all.
        """
        full = self.conditions.congestion_control in ("bbr", None)
        return tuple(
            replace(link.uplink, full=full, window_s=transfer_steps * step_s)
            for link, step_s in zip(self.links, self.step_time_s, strict=True)
        )
