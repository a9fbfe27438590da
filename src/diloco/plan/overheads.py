"""The overheads of real runs: TCP, round trips, and the work of each round.

The fitted constants and the errors of predictions with them are results of benchmarks/simulator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from diloco.errors import ConfigurationError
from diloco.transport import KEEPING_THEIR_RATE, CongestionControl, Tcp, streams_to_each

__all__ = [
    "FITTED",
    "IDEAL",
    "MERGE_S_PER_VALUE",
    "SEND_S_PER_VALUE",
    "Conditions",
    "Constants",
    "Fitted",
    "Overheads",
    "Wire",
    "accuracy",
]


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """The time that a run spends apart from computing and transferring bits at the link's rate.

    The defaults are the ideal of the papers and of the virtual clock: no overhead.
    """

    # share of the connections' throughput that is payload; the rest is headers and retransmissions
    goodput: float = 1.0
    # round trips of a round in addition to the latency of its payload and of a vote, such as for flow control
    round_trips: float = 0.0
    # round trips lost in queues while the payload fills the link; a smaller payload loses a part of them
    queue_trips: float = 0.0
    tcp: Tcp | None = None  # TCP of the connections; None: payload has the full rate from the start
    # time per value that a round takes for decoding, summing and hashing, while training continues
    average_s_per_value: float = 0.0
    # time per value that a send blocks the training loop: pseudo-gradient and encoding
    send_s_per_value: float = 0.0
    # time per value that a merge blocks the training loop: outer step and merge
    merge_s_per_value: float = 0.0

    def __post_init__(self) -> None:
        work = (self.average_s_per_value, self.send_s_per_value, self.merge_s_per_value)
        others = (self.round_trips, self.queue_trips, *work)
        if not 0 < self.goodput <= 1 or not all(0 <= value < math.inf for value in others):
            raise ConfigurationError(
                f"{self} cannot be simulated: the goodput must be above 0 and at most 1, other values at least 0."
            )


IDEAL = Overheads()

Wire = Literal["torch", "hivemind"]  # `diloco train --transport`; the payloads of a swarm use direct streams

SEND_S_PER_VALUE, MERGE_S_PER_VALUE = 1.07e-8, 0.95e-8
"""Time per value of the training loop on a CPU in one thread, with fp4. It was not measured on a GPU."""

AVERAGE_S_PER_VALUE = 0.9e-8  # time per value of a round outside the training loop, on a CPU
P90_WORK = 1.25  # factor for the work of sends and merges at p90

Constants = tuple[float, float, float]  # goodput, round trips and queue trips of `Overheads`


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The fitted constants of rounds over one wire, and the errors of predictions with them."""

    typical: Constants  # half of all rounds take longer
    p90: Constants  # one round in ten takes longer
    rounds: int = 0  # number of rounds of real processes that were predicted
    rounds_error: float = 0.0  # median relative error of their predicted times
    runs: int = 0  # number of whole runs of real processes that were predicted, including the work of sends and merges
    median_error: float = 0.0  # median relative error of their predicted wall-clock times
    largest_error: float = 0.0  # largest relative error of these


FITTED: dict[Wire, Fitted] = {
    "torch": Fitted(
        typical=(0.7, 0.5, 0.0),
        p90=(0.7, 0.5, 4.0),
        rounds=264,
        rounds_error=0.099,
        runs=29,
        median_error=0.0249,
        largest_error=0.1650,
    ),
    "hivemind": Fitted(typical=(0.75, 0.0, 0.0), p90=(0.75, 1.25, 3.5), rounds=152, rounds_error=0.123),
}
"""Fitted on emulated WANs of 30, 100 and 300 ms; see benchmarks/simulator."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions under which replicas exchange contributions."""

    wire: Wire = "torch"  # transport of the payloads
    congestion_control: CongestionControl = "cubic"  # TCP congestion control of the senders
    loss: float = 0.0  # share of packets that are lost
    streams: int | None = None  # connections to each other replica; None: the default of a run
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
        fitted = FITTED[self.wire]
        slower = P90_WORK if p90 else 1.0
        goodput, round_trips, queue_trips = fitted.p90 if p90 else fitted.typical
        return Overheads(
            goodput=goodput,
            round_trips=round_trips,
            queue_trips=queue_trips,
            tcp=Tcp(
                congestion_control=self.congestion_control,
                loss=self.loss,
                connections=max(1, others) * (self.streams or streams_to_each(others, self.congestion_control)),
            ),
            average_s_per_value=slower * self.average_s_per_value,
            send_s_per_value=slower * self.send_s_per_value,
            merge_s_per_value=slower * self.merge_s_per_value,
        )


def accuracy(wire: Wire = "torch") -> str:
    """Return the errors of predictions in words."""
    fitted = FITTED[wire]
    rounds = f"median error {fitted.rounds_error:.0%} in {fitted.rounds} rounds over {wire}"
    if not fitted.runs:
        return f"{rounds}; whole runs were not measured"
    return f"{rounds}, {fitted.median_error:.1%} in {fitted.runs} runs on a CPU (largest {fitted.largest_error:.0%})"
