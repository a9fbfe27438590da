"""Traffic shaping: the departure times of messages on an emulated link, and rate limits.

This module only computes times from the times it is given. The caller does the waiting.
"""

from __future__ import annotations

import math

from diloco.errors import ConfigurationError
from diloco.transport.links import Link

__all__ = ["Pacer", "TokenBucket"]


class Pacer:
    """The uplink of one replica, which sends messages one after the other in the order in which it gets them.

    All times are seconds of the same monotonic clock. A pacer is not thread-safe.

    >>> pacer = Pacer(Link(8e6, latency_s=0.1))    # 1 MB/s
    >>> pacer.departure_s(10.0, 500_000), pacer.departure_s(10.0, 500_000)
    (10.5, 11.0)
    >>> pacer.departure_s(20.0, 0)    # idle time, here since 11 s, is not saved up
    20.0
    >>> pacer.arrival_s(20.0, 1_000_000, to=Link(latency_s=0.3))
    21.2
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._free_s = -math.inf

    def departure_s(self, now_s: float, num_bytes: int) -> float:
        """Return when the last byte of a message submitted now departs, and keep the uplink busy until then."""
        self._free_s = max(self._free_s, now_s) + 8 * num_bytes / self.link.bandwidth_bits_per_s
        return self._free_s

    def arrival_s(self, now_s: float, num_bytes: int, to: Link | None = None) -> float:
        """Return when the last byte of a message submitted now arrives.

        This calls `departure_s`, which occupies the uplink, and adds the mean latency of the two links.

        Args:
            now_s: the current time.
            num_bytes: size of the message.
            to: the receiver's link, of which only the latency counts; the default is a link like this replica's.
        """
        far = self.link if to is None else to
        return self.departure_s(now_s, num_bytes) + (self.link.latency_s + far.latency_s) / 2


class TokenBucket:
    """A rate limit that all senders share in first-come, first-served order.

    At most ``burst_bytes + t * bytes_per_s`` bytes are sent in any ``t`` seconds.

    Args:
        bytes_per_s: the limit; None means unlimited.
        burst_bytes: how many bytes may be sent at once after a pause; a larger message waits for the remainder.

    Raises:
        ConfigurationError: if the limit is not positive.

    >>> bucket = TokenBucket(1000.0, burst_bytes=500)
    >>> bucket.take(10.0, 500), bucket.take(10.0, 500), bucket.take(10.0, 1000)
    (0.0, 0.5, 1.5)
    >>> bucket.take(100.0, 500)    # a long pause saves up no more than the burst
    0.0
    """

    def __init__(self, bytes_per_s: float | None, burst_bytes: int) -> None:
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise ConfigurationError(f"The rate limit must be a positive number or None, got {bytes_per_s} bytes/s.")
        self._bytes_per_s = math.inf if bytes_per_s is None else bytes_per_s
        self._burst_s = burst_bytes / self._bytes_per_s
        self._paid_s = -math.inf  # the time at which the limit allows for all bytes taken so far

    def take(self, now_s: float, num_bytes: int) -> float:
        """Count ``num_bytes`` bytes as sent, and return how many seconds after ``now_s`` they may leave."""
        self._paid_s = max(self._paid_s, now_s) + num_bytes / self._bytes_per_s
        return max(0.0, self._paid_s - self._burst_s - now_s)
