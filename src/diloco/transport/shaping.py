"""Traffic shaping: when an emulated link lets a message go, and rate limits.

Pure arithmetic on times that are passed in; who sleeps, and where, is the caller's business.
"""

from __future__ import annotations

import math

from diloco.errors import ConfigurationError
from diloco.transport.links import Link

__all__ = ["Pacer", "TokenBucket"]


class Pacer:
    """The uplink of one replica: messages leave in the order in which they are handed over, one after the other.

    Times are seconds of any one clock that does not go back. Not for several threads at once.

    >>> pacer = Pacer(Link(8e6, latency_s=0.1))    # 1 MB/s
    >>> pacer.departure_s(10.0, 500_000), pacer.departure_s(10.0, 500_000)
    (10.5, 11.0)
    >>> pacer.departure_s(20.0, 0)    # the link was idle since 11 s; that time can't be used later
    20.0
    >>> pacer.arrival_s(20.0, 1_000_000, to=Link(latency_s=0.3))
    21.2
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._free_s = -math.inf

    def departure_s(self, now_s: float, num_bytes: int) -> float:
        """When the last byte of a message handed over now has left; the uplink is taken until then."""
        self._free_s = max(self._free_s, now_s) + 8 * num_bytes / self.link.bandwidth_bits_per_s
        return self._free_s

    def arrival_s(self, now_s: float, num_bytes: int, to: Link | None = None) -> float:
        """When the last byte of a message handed over now arrives: `departure_s`, called in here, and the latency.

        From one replica to another that is the mean of the two links' latencies.

        Args:
            to: the receiver's link, whose bandwidth is not emulated at this end; default: one like this replica's.
        """
        far = self.link if to is None else to
        return self.departure_s(now_s, num_bytes) + (self.link.latency_s + far.latency_s) / 2


class TokenBucket:
    """A rate limit shared by all senders, first come, first served.

    In any ``t`` seconds at most ``burst_bytes + t * bytes_per_s`` bytes leave.

    Args:
        bytes_per_s: the limit; None: unlimited.
        burst_bytes: that may leave at once after a pause. A larger message waits for the rest.

    Raises:
        ConfigurationError: if the limit is not positive.

    >>> bucket = TokenBucket(1000.0, burst_bytes=500)
    >>> bucket.take(10.0, 500), bucket.take(10.0, 500), bucket.take(10.0, 1000)
    (0.0, 0.5, 1.5)
    >>> bucket.take(100.0, 500)    # a long pause has saved up no more than the burst
    0.0
    """

    def __init__(self, bytes_per_s: float | None, burst_bytes: int) -> None:
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise ConfigurationError(f"a limit of {bytes_per_s} bytes a second was given. It must be positive or None.")
        self._bytes_per_s = math.inf if bytes_per_s is None else bytes_per_s
        self._burst_s = burst_bytes / self._bytes_per_s
        self._paid_s = -math.inf  # when what has left will be paid for

    def take(self, now_s: float, num_bytes: int) -> float:
        """Seconds from ``now_s`` on to wait before ``num_bytes`` bytes leave; they count as sent from now on."""
        self._paid_s = max(self._paid_s, now_s) + num_bytes / self._bytes_per_s
        return max(0.0, self._paid_s - self._burst_s - now_s)
