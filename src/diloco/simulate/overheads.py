"""What real runs spend beside computing and bits at the link's rate: TCP, round trips, and the work of each round.

The fitted constants, and how far predictions with them are off, are the outcome of benchmarks/simulator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from diloco.errors import ConfigurationError
from diloco.transport.tcp import CongestionControl, Tcp, streams_to_each

__all__ = [
    "CAREFULLY",
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
    """What a run spends beside computing and bits at the link's rate; the neutral values are the papers' ideal."""

    # share of what connections get of a link that is payload; the rest is headers and retransmissions
    goodput: float = 1.0
    # that a round takes beside its payload's way and one vote, such as to hear that there is room
    round_trips: float = 0.0
    queue_trips: float = 0.0  # that it takes for losses in queues while its payload fills the link, or a part of them
    tcp: Tcp | None = None  # what its connections make of a link; None: payload has it from the first moment
    average_s_per_value: float = 0.0  # time of a round for decoding, summing and hashing, per value; training goes on
    # time that the training loop stands still for a send, per value: pseudo-gradient, encoding
    send_s_per_value: float = 0.0
    merge_s_per_value: float = 0.0  # and for a merge: outer step, merge

    def __post_init__(self) -> None:
        work = (self.average_s_per_value, self.send_s_per_value, self.merge_s_per_value)
        others = (self.round_trips, self.queue_trips, *work)
        if not 0 < self.goodput <= 1 or not all(0 <= value < math.inf for value in others):
            raise ConfigurationError(
                f"{self} cannot be simulated: the goodput must be above 0 and at most 1, everything else 0 or more."
            )


IDEAL = Overheads()

Wire = Literal["torch", "hivemind"]  # `diloco train --transport`; a swarm's payloads travel over direct streams

SEND_S_PER_VALUE, MERGE_S_PER_VALUE = 1.07e-8, 0.95e-8
"""Of the training loop of a replica that trains on a CPU, in one thread, fp4. Not measured on a GPU."""

AVERAGE_S_PER_VALUE = 0.9e-8  # of what a round takes beside the training loop, on a CPU
CAREFUL_WORK = 1.25  # how much longer sends and merges may take in a careful plan

CAREFULLY = "if every round took as long as the slowest tenth"

Constants = tuple[float, float, float]  # goodput, round trips and queue trips of `Overheads`


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The constants of rounds over one wire, and how far off predictions with them are."""

    typical: Constants  # every other round takes longer
    careful: Constants  # one round in ten takes longer. Plans are made with these.
    rounds: int = 0  # of real processes, each predicted
    rounds_error: float = 0.0  # of their time, the median, as a share
    runs: int = 0  # whole runs of real processes, predicted with the work of sends and merges
    median_error: float = 0.0  # of the wall-clock time of these runs, as a share
    largest_error: float = 0.0


FITTED: dict[Wire, Fitted] = {
    "torch": Fitted(
        typical=(0.7, 0.5, 0.0),
        careful=(0.7, 0.5, 4.0),
        rounds=264,
        rounds_error=0.099,
        runs=29,
        median_error=0.0249,
        largest_error=0.1650,
    ),
    "hivemind": Fitted(typical=(0.75, 0.0, 0.0), careful=(0.75, 1.25, 3.5), rounds=152, rounds_error=0.123),
}
"""Emulated WANs of 30, 100 and 300 ms; see benchmarks/simulator."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Under which replicas exchange their contributions."""

    wire: Wire = "torch"  # what carries payloads
    congestion_control: CongestionControl = "cubic"  # of the senders' TCP
    loss: float = 0.0  # share of packets that get lost
    streams: int | None = None  # connections to each other replica; None: a run's default. 1 where libp2p carries them.
    average_s_per_value: float = AVERAGE_S_PER_VALUE  # time of a round beside the training loop
    send_s_per_value: float = SEND_S_PER_VALUE  # time that the training loop stands still for a send
    merge_s_per_value: float = MERGE_S_PER_VALUE  # and for a merge

    def overheads(self, others: int, *, careful: bool = False) -> Overheads:
        """What a run spends beside computing and its payload's way.

        Args:
            others: replicas that one sends to.
            careful: what one round in ten exceeds, rather than every other one.
        """
        fitted = FITTED[self.wire]
        slower = CAREFUL_WORK if careful else 1.0
        goodput, round_trips, queue_trips = fitted.careful if careful else fitted.typical
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
    """How far predictions were off, in words."""
    fitted = FITTED[wire]
    rounds = f"the times of {fitted.rounds} rounds over {wire} by {fitted.rounds_error:.0%} in the median"
    if not fitted.runs:
        return f"predictions missed {rounds}; whole runs over {wire} were not measured"
    return (
        f"predictions missed the times of {fitted.runs} runs on a CPU by {fitted.median_error:.1%} in the median and "
        f"{fitted.largest_error:.0%} at most, and {rounds}"
    )
