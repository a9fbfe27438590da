"""The overheads of real runs: TCP, queues, and the work of each round.

The constants and the errors of predictions with them are results of benchmarks/simulator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from diloco.errors import ConfigurationError
from diloco.plan.tcp import KEEPING_THEIR_RATE, CongestionControl, Tcp
from diloco.transport import streams_to_each

__all__ = ["ACCURACY", "IDEAL", "Conditions", "Overheads"]

SEND_S_PER_VALUE, MERGE_S_PER_VALUE = 2.5e-9, 1.9e-9  # time of the training loop on a CPU, with the compiled kernels
AVERAGE_S_PER_VALUE = 1.5e-9  # time of a round outside the training loop, on a CPU

P90_QUEUE_TRIPS = 4.0  # about one round in ten loses more round trips in queues
P90_WORK = 1.25  # factor for the work at p90

ACCURACY = (
    "median error 4% of the time of a round (largest 94%) and 0.1% of the whole time (largest 14%), in 26 runs on a CPU"
)
"""The errors of predictions, in words."""


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """The time that a run spends apart from computing and transferring bits at the link's rate.

    The defaults are the ideal of the papers and of the virtual clock: no overhead.
    """

    tcp: Tcp | None = None  # TCP of the connections; None: payload has the full rate from the start
    # round trips lost in queues while the payload fills the link; a smaller payload loses a part of them
    queue_trips: float = 0.0
    # time per value that a round takes for decoding, summing and hashing, while training continues
    average_s_per_value: float = 0.0
    # time per value that a send blocks the training loop: pseudo-gradient and encoding
    send_s_per_value: float = 0.0
    # time per value that a merge blocks the training loop: outer step and merge
    merge_s_per_value: float = 0.0

    def __post_init__(self) -> None:
        work = (self.average_s_per_value, self.send_s_per_value, self.merge_s_per_value)
        if not all(0 <= value < math.inf for value in (self.queue_trips, *work)):
            raise ConfigurationError(f"{self} cannot be simulated: the values must be at least 0.")


IDEAL = Overheads()


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions under which replicas exchange contributions."""

    congestion_control: CongestionControl = "cubic"  # TCP congestion control of the senders
    loss: float = 0.0  # share of packets that are lost
    average_s_per_value: float = AVERAGE_S_PER_VALUE  # these three as in `Overheads`
    send_s_per_value: float = SEND_S_PER_VALUE
    merge_s_per_value: float = MERGE_S_PER_VALUE

    @property
    def measures_uplinks(self) -> bool:
        """Whether replicas learn how fast they can send, so that slow ones sum less."""
        return self.congestion_control in KEEPING_THEIR_RATE

    def overheads(self, others: int, *, p90: bool = False) -> Overheads:
        """Return the overheads of a run under these conditions.

        Args:
            others: number of replicas to which a replica sends.
            p90: return values that one round in ten exceeds, instead of every other round.
        """
        slower = P90_WORK if p90 else 1.0
        return Overheads(
            tcp=Tcp(
                congestion_control=self.congestion_control,
                loss=self.loss,
                connections=max(1, others) * streams_to_each(others),
            ),
            queue_trips=P90_QUEUE_TRIPS if p90 else 0.0,
            average_s_per_value=slower * self.average_s_per_value,
            send_s_per_value=slower * self.send_s_per_value,
            merge_s_per_value=slower * self.merge_s_per_value,
        )
