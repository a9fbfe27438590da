"""Emulated links on a virtual clock, which compute how long a round would take without waiting for it.

Each replica has one full-duplex link with the same bandwidth in both directions, and a one-way latency. The link sends
the payloads of a replica one after the other, in the order in which they were submitted, and receives them in the same
way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.algorithm import UNKNOWN_UPLINK, Uplink
from diloco.errors import ConfigurationError

Floats = NDArray[np.float64]
"""Seconds or bytes of shape ``(..., M)``: any number of scenarios, and the M replicas that take part."""


@dataclass(frozen=True)
class Link:
    """One replica's link to the others.

    Attributes:
        bandwidth_bits_per_s: bandwidth in each direction; infinite by default.
        latency_s: one-way latency; a message from one replica to another takes the mean of their latencies.
    """

    bandwidth_bits_per_s: float = math.inf
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth_bits_per_s > 0 or not 0 <= self.latency_s < math.inf:
            raise ConfigurationError(
                "A link must have a positive bandwidth and a finite latency of at least 0 s, got "
                f"{self.bandwidth_bits_per_s} bit/s and {self.latency_s} s."
            )

    @property
    def uplink(self) -> Uplink:
        """What its replica knows about the bandwidth with which it sends: all, unless it is unlimited."""
        finite = math.isfinite(self.bandwidth_bits_per_s)
        return Uplink(int(self.bandwidth_bits_per_s), full=True) if finite else UNKNOWN_UPLINK


@dataclass(frozen=True)
class LinkArrays:
    bandwidth_bits_per_s: Floats
    latency_s: Floats

    @classmethod
    def of(cls, links: Sequence[Link]) -> LinkArrays:
        return cls(
            np.array([link.bandwidth_bits_per_s for link in links]),
            np.array([link.latency_s for link in links]),
        )


@dataclass(frozen=True)
class RoundTimes:
    """The times of a round in seconds, each of shape ``(..., M)``, except ``committed_s`` of shape ``(..., 1)``."""

    up_end_s: Floats
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
    """Return when a round occupies the links and when it is committed, for any number of scenarios at once.

    The upload of replica m starts when m has submitted its contribution and its uplink is free, and takes
    ``8 * sent_bytes / bandwidth``. The download of m runs while the others upload. It starts when the first byte of the
    earliest upload arrives, takes at least ``8 * received_bytes / bandwidth``, and ends no earlier than the last
    upload plus the latency. A vote, which takes one latency, follows the last download. Then the round is committed for
    all replicas.

    Args:
        links: the links of the M replicas that take part.
        sent_at_s: when each replica submits its contribution.
        sent_bytes: bytes that each replica sends.
        received_bytes: bytes that each replica receives.
        up_free_s: when earlier rounds release each uplink.
        down_free_s: when earlier rounds release each downlink.
    """
    half_s = links.latency_s / 2
    up_start = np.maximum(sent_at_s, up_free_s)
    up_end = up_start + 8 * sent_bytes / links.bandwidth_bits_per_s
    if up_end.shape[-1] == 1:  # a lone replica waits for nothing
        return RoundTimes(up_end, sent_at_s, sent_at_s)
    first = half_s - _most_of_others(-(up_start + half_s))
    last = half_s + _most_of_others(up_end + half_s)
    down_start = np.maximum(first, down_free_s)
    down_end = np.maximum(down_start + 8 * received_bytes / links.bandwidth_bits_per_s, last)
    votes = half_s + _most_of_others(down_end + half_s)
    return RoundTimes(up_end, down_end, votes.max(-1, keepdims=True))


def _most_of_others(values: Floats) -> Floats:
    """Return for each of at least two replicas the largest value among the others.

    >>> _most_of_others(np.array([1.0, 5.0, 3.0]))
    array([5., 3., 5.])
    """
    if values.shape[-1] == 2:
        return values[..., ::-1]
    two = np.partition(values, -2, axis=-1)[..., -2:]
    second, most = two[..., :1], two[..., 1:]
    # where several replicas have the largest value, the second largest equals it
    return np.where(values == most, second, most)


class VirtualNetwork:
    """The links and virtual clocks of all replicas. Only `tick` (compute) and `wait_until` (waiting) advance a clock.

    Args:
        links: one link per replica.
        step_time_s: compute time of one inner step, one value per replica.
    """

    def __init__(self, links: Sequence[Link], step_time_s: Sequence[float]) -> None:
        if len(links) != len(step_time_s) or any(not time_s >= 0 for time_s in step_time_s):
            raise ConfigurationError(
                f"Each replica needs one link and a step time of at least 0 s, got {len(links)} links and step times "
                f"{tuple(step_time_s)}."
            )
        self.links = tuple(links)
        self.step_time_s = tuple(step_time_s)
        self.now_s = [0.0] * len(links)
        self.wait_s = [0.0] * len(links)
        self._arrays = LinkArrays.of(links)
        self._up_free_s = self._down_free_s = np.zeros(len(links))  # until when links are busy in each direction

    def uplink(self, replica: int, transfer_steps: float) -> Uplink:
        """Return what ``replica`` knows of its uplink; see `SyncSchedule.transfer_steps`."""
        return replace(self.links[replica].uplink, window_s=transfer_steps * self.step_time_s[replica])

    def tick(self, replica: int) -> None:
        """Advance the clock of ``replica`` by one inner step."""
        self.now_s[replica] += self.step_time_s[replica]

    def commit_time_s(
        self, sent_at_s: Sequence[float], sent_bytes: Sequence[int], received_bytes: Sequence[int]
    ) -> float:
        """Return when a round is committed, from `round_times`, and occupy the links with its bytes.

        Args:
            sent_at_s: when each replica submits its contribution.
            sent_bytes: what each replica sends.
            received_bytes: what each replica receives.

        >>> network = VirtualNetwork([Link(8e6, 0.1)] * 2, [1.0] * 2)  # 1 MB/s and 0.1 s between them
        >>> round(network.commit_time_s([0.0, 0.0], [1_000_000] * 2, [1_000_000] * 2), 3)
        1.2
        """
        sent_s, sent, received = (np.array(each, np.float64) for each in (sent_at_s, sent_bytes, received_bytes))
        times = round_times(self._arrays, sent_s, sent, received, self._up_free_s, self._down_free_s)
        self._up_free_s, self._down_free_s = times.up_end_s, np.maximum(self._down_free_s, times.down_end_s)
        return float(times.committed_s.max())

    def wait_until(self, replica: int, time_s: float) -> float:
        """Stall ``replica`` until ``time_s`` and return for how long, in seconds (>= 0)."""
        waited = max(0.0, time_s - self.now_s[replica])
        self.now_s[replica] += waited
        self.wait_s[replica] += waited
        return waited

    def compute_utilization(self, replica: int) -> float:
        """Return compute time / (compute time + time spent waiting) of ``replica`` so far; 1 if no time has passed."""
        now_s = self.now_s[replica]
        return 1 - self.wait_s[replica] / now_s if now_s > 0 else 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return clocks and link states as plain values."""
        links = np.stack([self._up_free_s, self._down_free_s], axis=1)
        return {"now_s": list(self.now_s), "wait_s": list(self.wait_s), "links": links.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.now_s, self.wait_s = list(map(float, state["now_s"])), list(map(float, state["wait_s"]))
        self._up_free_s, self._down_free_s = np.array(state["links"], np.float64).T
