"""What real runs were measured to spend, and how far predictions were off: the outcome of benchmarks/simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diloco.simulate.cluster import Overheads
from diloco.simulate.tcp import CongestionControl, Tcp
from diloco.transport.shaping import streams_to_each

__all__ = [
    "CAREFULLY",
    "FITTED",
    "MERGE_S_PER_VALUE",
    "SEND_S_PER_VALUE",
    "Conditions",
    "Constants",
    "Fitted",
    "Wire",
    "accuracy",
]

Wire = Literal["torch", "hivemind"]
"""What carries payloads: `diloco train --transport`."""

SEND_S_PER_VALUE, MERGE_S_PER_VALUE = 1.07e-8, 0.95e-8
"""Of the training loop of a replica that trains on a CPU, in one thread, fp4. On a GPU nothing was measured."""

AVERAGE_S_PER_VALUE = 0.9e-8
"""Of what a round takes beside the training loop, on a CPU."""


Constants = tuple[float, float, float]
"""Goodput, round trips and queue trips of `Overheads`."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Of one wire: the constants of rounds, and how far off predictions with them are.

    Attributes:
        typical: of rounds as they are: every other one takes longer.
        careful: one in ten takes longer. Plans are made with these.
        rounds: of real processes that were predicted, one by one.
        rounds_error: of their time, the median, as a share.
        runs: whole runs of real processes that were predicted, with the work of sends and merges.
        median_error, largest_error: of the wall-clock time of these runs, as a share.
    """

    typical: Constants
    careful: Constants
    rounds: int = 0
    rounds_error: float = 0.0
    runs: int = 0
    median_error: float = 0.0
    largest_error: float = 0.0


FITTED: dict[Wire, Fitted] = {
    "torch": Fitted(
        typical=(0.7, 0.5, 0.0),
        careful=(0.7, 0.5, 4.0),
        rounds=256,
        rounds_error=0.096,
        runs=27,
        median_error=0.0249,
        largest_error=0.1650,
    ),
    "hivemind": Fitted(
        typical=(0.6, 0.0, 0.0),
        careful=(0.6, 0.0, 5.0),
        rounds=57,
        rounds_error=0.153,
    ),
}
"""Emulated WANs of 30, 100 and 300 ms; see benchmarks/simulator."""

CAREFULLY = "if every round took as long as one in ten does"

CAREFUL_WORK = 1.25
"""How much longer sends and merges may take where a plan is careful."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Under which replicas exchange their contributions.

    Attributes:
        wire: what carries payloads.
        congestion_control: of the senders' TCP.
        loss: share of packets that get lost.
        streams: connections to each other replica; None: the wire's own choice.
        average_s_per_value: time of a round beside the training loop.
        send_s_per_value, merge_s_per_value: time that the training loop stands still.
    """

    wire: Wire = "torch"
    congestion_control: CongestionControl = "cubic"
    loss: float = 0.0
    streams: int | None = None
    average_s_per_value: float = AVERAGE_S_PER_VALUE
    send_s_per_value: float = SEND_S_PER_VALUE
    merge_s_per_value: float = MERGE_S_PER_VALUE

    def overheads(self, others: int, *, careful: bool = False) -> Overheads:
        """What a run spends beside computing and its payload's way.

        Args:
            others: replicas that one sends to.
            careful: what one round in ten exceeds, in place of every other one.
        """
        fitted = FITTED[self.wire]
        own = streams_to_each(others, self.congestion_control) if self.wire == "torch" else 1
        slower = CAREFUL_WORK if careful else 1.0
        goodput, round_trips, queue_trips = fitted.careful if careful else fitted.typical
        return Overheads(
            goodput=goodput,
            round_trips=round_trips,
            queue_trips=queue_trips,
            tcp=Tcp(
                congestion_control=self.congestion_control,
                loss=self.loss,
                connections=max(1, others) * (self.streams or own),
            ),
            average_s_per_value=slower * self.average_s_per_value,
            send_s_per_value=slower * self.send_s_per_value,
            merge_s_per_value=slower * self.merge_s_per_value,
        )


def accuracy(wire: Wire = "torch") -> str:
    """How far predictions were off, in words."""
    fitted = FITTED[wire]
    rounds = f"the times of {fitted.rounds} rounds over {wire} were off by {fitted.rounds_error:.0%} in the median"
    if not fitted.runs:
        return f"{rounds}; whole runs over it were not measured"
    return (
        f"{fitted.runs} real runs, on a CPU, were off by {fitted.median_error:.1%} in the median, "
        f"{fitted.largest_error:.0%} at most; {rounds}"
    )
