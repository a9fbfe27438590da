"""Emulated links on a virtual clock: what a round would have waited, without anybody waiting.

Each replica has one link with a bandwidth each way (full duplex) and a one-way latency to the middle of the network.
Payloads of one replica leave in the order in which they were sent, one after the other; so do those that arrive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco.errors import ConfigurationError

__all__ = ["Link", "LinkState", "Transfer", "VirtualNetwork", "transfer_times"]


@dataclass(frozen=True)
class Link:
    """One replica's way to the others.

    Attributes:
        bandwidth_bits_per_s: each way; infinite by default.
        latency_s: one way, from this replica to any other half-way; a message from a to b takes the mean of both.
    """

    bandwidth_bits_per_s: float = math.inf
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth_bits_per_s > 0 or not 0 <= self.latency_s < math.inf:
            raise ConfigurationError(
                f"a link of {self.bandwidth_bits_per_s} bit/s and {self.latency_s} s was given; a positive bandwidth "
                "and a latency of 0 or more would work. Nothing was started."
            )


@dataclass(frozen=True)
class LinkState:
    """Until when a link is taken, each way, in virtual seconds."""

    up_free_s: float = 0.0
    down_free_s: float = 0.0


@dataclass(frozen=True)
class Transfer:
    """One replica's part in a round: when it sent, how much it sends, and how much it receives."""

    sent_at_s: float
    sent_bytes: int
    received_bytes: int


def transfer_times(
    transfers: Mapping[int, Transfer], links: Sequence[Link], states: Sequence[LinkState]
) -> tuple[float, tuple[LinkState, ...]]:
    """When a round is committed, and the links' states afterwards.

    The upload of m starts when m has sent and its link is free, and takes ``8 * sent_bytes / bandwidth``. The download
    of m streams from the others as they upload: it starts with the first of them, takes at least
    ``8 * received_bytes / bandwidth``, and ends no earlier than the last of them plus the latency. A vote, one latency
    long, follows the last download; then the round is committed for all.

    Args:
        transfers: replica -> its part; those that take no part are missing.
        links: of all replicas.
        states: of all links, before.

    >>> links = [Link(8e6, 0.1), Link(8e6, 0.1)]    # 1 MB/s and 0.1 s between them
    >>> both = {replica: Transfer(0.0, 1_000_000, 1_000_000) for replica in (0, 1)}
    >>> round(transfer_times(both, links, [LinkState()] * 2)[0], 3)
    1.2
    """
    after = list(states)
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for replica, transfer in transfers.items():
        starts[replica] = max(transfer.sent_at_s, states[replica].up_free_s)
        ends[replica] = starts[replica] + 8 * transfer.sent_bytes / links[replica].bandwidth_bits_per_s
        after[replica] = LinkState(ends[replica], states[replica].down_free_s)

    def latency_s(a: int, b: int) -> float:
        return (links[a].latency_s + links[b].latency_s) / 2

    arrived: dict[int, float] = {}
    for replica, transfer in transfers.items():
        others = [other for other in transfers if other != replica]
        first = min((starts[other] + latency_s(other, replica) for other in others), default=transfer.sent_at_s)
        last = max((ends[other] + latency_s(other, replica) for other in others), default=transfer.sent_at_s)
        begin = max(first, states[replica].down_free_s) if others else first
        duration = 8 * transfer.received_bytes / links[replica].bandwidth_bits_per_s
        arrived[replica] = max(begin + duration, last)
        after[replica] = LinkState(after[replica].up_free_s, max(states[replica].down_free_s, arrived[replica]))
    votes = [arrived[a] + latency_s(a, b) for a in transfers for b in transfers if a != b] or list(arrived.values())
    return max(votes), tuple(after)


class VirtualNetwork:
    """The links and clocks of all replicas. Time passes only by `tick` (compute) and `wait_until` (waiting).

    Args:
        links: one per replica.
        step_time_s: compute time of one inner step, one per replica.
    """

    def __init__(self, links: Sequence[Link], step_time_s: Sequence[float]) -> None:
        if len(links) != len(step_time_s) or any(not time_s >= 0 for time_s in step_time_s):
            raise ConfigurationError(
                f"{len(links)} links and step times {tuple(step_time_s)} were given; one of each per replica, 0 or "
                "more seconds, would work. Nothing was started."
            )
        self.links = tuple(links)
        self.step_time_s = tuple(step_time_s)
        self.now_s = [0.0] * len(links)
        self.wait_s = [0.0] * len(links)
        self.states: tuple[LinkState, ...] = (LinkState(),) * len(links)

    def tick(self, replica: int) -> None:
        """``replica`` has computed one inner step."""
        self.now_s[replica] += self.step_time_s[replica]

    def commit_time_s(self, transfers: Mapping[int, Transfer]) -> float:
        """When a round with these transfers is committed; its bytes take their place on the links."""
        committed, self.states = transfer_times(transfers, self.links, self.states)
        return committed

    def wait_until(self, replica: int, time_s: float) -> float:
        """``replica`` stands still until ``time_s``; returns for how long, which may be 0."""
        waited = max(0.0, time_s - self.now_s[replica])
        self.now_s[replica] += waited
        self.wait_s[replica] += waited
        return waited

    def compute_utilization(self, replica: int) -> float:
        """Compute time / (compute time + time waiting for communication) of ``replica`` so far; 1 before any time."""
        now_s = self.now_s[replica]
        return 1 - self.wait_s[replica] / now_s if now_s > 0 else 1.0

    def state_dict(self) -> dict[str, Any]:
        """Clocks and links, as plain values."""
        links = [[state.up_free_s, state.down_free_s] for state in self.states]
        return {"now_s": list(self.now_s), "wait_s": list(self.wait_s), "links": links}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.now_s = [float(value) for value in state["now_s"]]
        self.wait_s = [float(value) for value in state["wait_s"]]
        self.states = tuple(LinkState(float(up), float(down)) for up, down in state["links"])
