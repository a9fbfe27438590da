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

from diloco.algorithm import UNKNOWN_UPLINK, Uplink, payload_window_s
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


def uplinks_of(links: Sequence[Link], rounds_s: Sequence[float]) -> list[Uplink]:
    """Return what each replica knows of its uplink, where its rounds may take so long."""
    latency_s = np.array([link.latency_s for link in links])
    round_trips_s = latency_s + (_most_of_others(latency_s) if len(links) > 1 else 0.0)
    windows_s = map(payload_window_s, rounds_s, round_trips_s.tolist())
    return [replace(link.uplink, window_s=window_s) for link, window_s in zip(links, windows_s, strict=True)]


class Links:
    """The links of the M replicas that take part in rounds, in any number of scenarios, and for how long they are busy.

    See `Link`; all arrays are ``(..., M)``.
    """

    def __init__(self, bandwidth_bits_per_s: Floats, latency_s: Floats) -> None:
        self.bandwidth_bits_per_s, self.latency_s = bandwidth_bits_per_s, latency_s
        self.up_free_s = self.down_free_s = np.zeros(latency_s.shape[-1])  # until when earlier rounds occupy the links

    def commit_s(self, sent_at_s: Floats, sent_bytes: Floats, received_bytes: Floats) -> Floats:
        """Occupy the links with a round, and return when it is committed, ``(..., 1)``; a lone replica: ``(..., M)``.

        The upload of replica m starts when m has submitted its contribution and its uplink is free, and takes
        ``8 * sent_bytes / bandwidth``. The download of m runs while the others upload. It starts when the first byte of
        the earliest upload arrives, takes at least ``8 * received_bytes / bandwidth``, and ends no earlier than the
        last upload plus the latency. A vote, which takes one latency, follows the last download. Then the round is
        committed for all replicas.
        """
        half_s, bandwidth = self.latency_s / 2, self.bandwidth_bits_per_s
        up_start = np.maximum(sent_at_s, self.up_free_s)
        self.up_free_s = up_end = up_start + 8 * sent_bytes / bandwidth
        if up_end.shape[-1] == 1:  # a lone replica waits for nothing
            self.down_free_s = np.maximum(self.down_free_s, sent_at_s)
            return sent_at_s
        first = half_s - _most_of_others(-(up_start + half_s))
        last = half_s + _most_of_others(up_end + half_s)
        down_start = np.maximum(first, self.down_free_s)
        down_end = np.maximum(down_start + 8 * received_bytes / bandwidth, last)
        self.down_free_s = np.maximum(self.down_free_s, down_end)
        votes: Floats = half_s + _most_of_others(down_end + half_s)
        return votes.max(-1, keepdims=True)  # type: ignore[no-any-return]  # numpy's stub


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
        bandwidths = np.array([link.bandwidth_bits_per_s for link in links])
        self._links = Links(bandwidths, np.array([link.latency_s for link in links]))

    def uplink(self, replica: int, transfer_steps: float) -> Uplink:
        """Return what ``replica`` knows of its uplink; see `SyncSchedule.transfer_steps`."""
        return uplinks_of(self.links, [transfer_steps * step_s for step_s in self.step_time_s])[replica]

    def tick(self, replica: int) -> None:
        self.now_s[replica] += self.step_time_s[replica]

    def commit_time_s(
        self, sent_at_s: Sequence[float], sent_bytes: Sequence[int], received_bytes: Sequence[int]
    ) -> float:
        """Return when a round is committed, and occupy the links with its bytes; see `Links.commit_s`.

        >>> network = VirtualNetwork([Link(8e6, 0.1)] * 2, [1.0] * 2)  # 1 MB/s and 0.1 s between them
        >>> round(network.commit_time_s([0.0, 0.0], [1_000_000] * 2, [1_000_000] * 2), 3)
        1.2
        """
        sent_s, sent, received = (np.array(each, np.float64) for each in (sent_at_s, sent_bytes, received_bytes))
        return float(self._links.commit_s(sent_s, sent, received).max())

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
        links = np.stack([self._links.up_free_s, self._links.down_free_s], axis=1)
        return {"now_s": list(self.now_s), "wait_s": list(self.wait_s), "links": links.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.now_s, self.wait_s = list(map(float, state["now_s"])), list(map(float, state["wait_s"]))
        self._links.up_free_s, self._links.down_free_s = np.array(state["links"], np.float64).T
