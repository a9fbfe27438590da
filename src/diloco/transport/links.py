"""Emulated links on a virtual clock: what a round would have waited, without anybody waiting.

Each replica has one link with a bandwidth each way (full duplex, or half: one way at a time) and a one-way latency to
the middle of the network. Payloads of one replica leave in the order in which they were sent, one after the other; so
do those that arrive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.errors import ConfigurationError

__all__ = [
    "Link",
    "LinkArrays",
    "LinkState",
    "RoundTimes",
    "Transfer",
    "VirtualNetwork",
    "round_times",
    "transfer_times",
]

Floats = NDArray[np.float64]
"""Seconds or bytes by ``(..., M)``: any number of scenarios at once, and the replicas that take part."""


@dataclass(frozen=True)
class Link:
    """One replica's way to the others.

    Attributes:
        bandwidth_bits_per_s: each way; infinite by default.
        latency_s: one way, from this replica to any other half-way; a message from a to b takes the mean of both.
        half_duplex: sending and receiving take turns: what is received comes in after what the same round sends is out.
    """

    bandwidth_bits_per_s: float = math.inf
    latency_s: float = 0.0
    half_duplex: bool = False

    def __post_init__(self) -> None:
        if not self.bandwidth_bits_per_s > 0 or not 0 <= self.latency_s < math.inf:
            raise ConfigurationError(
                f"a link of {self.bandwidth_bits_per_s} bit/s and {self.latency_s} s was given; the bandwidth must "
                "be positive and the latency 0 or more."
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


@dataclass(frozen=True)
class LinkArrays:
    """The links of a round's replicas, each array ``(..., M)`` or what broadcasts to it."""

    bandwidth_bits_per_s: Floats
    latency_s: Floats
    half_duplex: NDArray[np.bool_]

    @classmethod
    def of(cls, links: Sequence[Link]) -> LinkArrays:
        return cls(
            np.array([link.bandwidth_bits_per_s for link in links]),
            np.array([link.latency_s for link in links]),
            np.array([link.half_duplex for link in links]),
        )


@dataclass(frozen=True)
class RoundTimes:
    """When what happens to a round, in seconds, each ``(..., M)`` by replica but for ``committed_s``, ``(..., 1)``."""

    up_start_s: Floats
    up_end_s: Floats
    down_start_s: Floats
    down_end_s: Floats
    committed_s: Floats


def round_times(
    links: LinkArrays,
    sent_at_s: Floats,
    sent_bytes: Floats,
    received_bytes: Floats,
    up_free_s: Floats,
    down_free_s: Floats,
) -> RoundTimes:
    """When a round is committed, and when it takes the links, for any number of scenarios at once.

    The upload of m starts when m has sent and its link is free, and takes ``8 * sent_bytes / bandwidth``. The download
    of m streams from the others as they upload: it starts with the first of them, takes at least
    ``8 * received_bytes / bandwidth``, and ends no earlier than the last of them plus the latency. A vote, one latency
    long, follows the last download; then the round is committed for all.

    Args:
        links: of the replicas that take part, M of them.
        sent_at_s: when each hands in its contribution.
        sent_bytes: by replica.
        received_bytes: by replica.
        up_free_s: until when each link is taken by earlier rounds, this way.
        down_free_s: and the other way.
    """
    half_s = links.latency_s / 2
    up_start = np.maximum(sent_at_s, up_free_s)
    up_end = up_start + 8 * sent_bytes / links.bandwidth_bits_per_s
    if up_end.shape[-1] == 1:  # nobody else: nothing to wait for
        return RoundTimes(up_start, up_end, sent_at_s, sent_at_s, sent_at_s)
    first = half_s - _most_of_others(-(up_start + half_s))
    last = half_s + _most_of_others(up_end + half_s)
    down_start = np.maximum(first, down_free_s)
    down_start = np.where(links.half_duplex, np.maximum(down_start, up_end), down_start)
    down_end = np.maximum(down_start + 8 * received_bytes / links.bandwidth_bits_per_s, last)
    votes = half_s + _most_of_others(down_end + half_s)
    return RoundTimes(up_start, up_end, down_start, down_end, votes.max(-1, keepdims=True))


def _most_of_others(values: Floats) -> Floats:
    """By replica, the largest value of all the others; at least two replicas.

    >>> _most_of_others(np.array([1.0, 5.0, 3.0]))
    array([5., 3., 5.])
    """
    if values.shape[-1] == 2:
        return values[..., ::-1]
    two = np.partition(values, -2, axis=-1)[..., -2:]
    second, most = two[..., :1], two[..., 1:]
    # where several have the most, the second is the most, too
    return np.where(values == most, second, most)


def transfer_times(
    transfers: Mapping[int, Transfer], links: Sequence[Link], states: Sequence[LinkState]
) -> tuple[float, tuple[LinkState, ...]]:
    """When a round is committed, and the links' states afterwards: `round_times` for the replicas that take part.

    Args:
        transfers: replica -> its part; those that take no part are missing.
        links: of all replicas.
        states: of all links, before.

    >>> links = [Link(8e6, 0.1), Link(8e6, 0.1)]    # 1 MB/s and 0.1 s between them
    >>> both = {replica: Transfer(0.0, 1_000_000, 1_000_000) for replica in (0, 1)}
    >>> round(transfer_times(both, links, [LinkState()] * 2)[0], 3)
    1.2
    """
    parts, after = list(transfers.values()), list(states)
    times = round_times(
        LinkArrays.of([links[replica] for replica in transfers]),
        np.array([part.sent_at_s for part in parts]),
        np.array([part.sent_bytes for part in parts], dtype=np.float64),
        np.array([part.received_bytes for part in parts], dtype=np.float64),
        np.array([states[replica].up_free_s for replica in transfers]),
        np.array([states[replica].down_free_s for replica in transfers]),
    )
    for replica, up_s, down_s in zip(transfers, times.up_end_s, times.down_end_s, strict=True):
        after[replica] = LinkState(float(up_s), max(states[replica].down_free_s, float(down_s)))
    return float(times.committed_s.max()), tuple(after)


class VirtualNetwork:
    """The links and clocks of all replicas. Time passes only by `tick` (compute) and `wait_until` (waiting).

    Args:
        links: one per replica.
        step_time_s: compute time of one inner step, one per replica.
    """

    def __init__(self, links: Sequence[Link], step_time_s: Sequence[float]) -> None:
        if len(links) != len(step_time_s) or any(not time_s >= 0 for time_s in step_time_s):
            raise ConfigurationError(
                f"{len(links)} links and step times {tuple(step_time_s)} were given; each replica needs a "
                "link and a step time of 0 or more seconds."
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
