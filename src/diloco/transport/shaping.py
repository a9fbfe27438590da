"""A slow link for real connections: when a message would have left and arrived, so that a sender can hold it back.

The same links as on the virtual clock of `links`, for bytes that really move. Times only: who sleeps, and where, is the
transport's business.
"""

from __future__ import annotations

import math

from diloco.transport.links import Link

__all__ = ["Pacer"]


class Pacer:
    """The uplink of one replica: messages leave in the order in which they are handed over, one after the other.

    Times are seconds of any one clock that does not go back. Not for several threads at once.

    Args:
        link: this replica's own.

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
        """When the last byte of a message handed over now has left; the uplink is taken until then.

        Args:
            now_s: the present time.
            num_bytes: the message's length.
        """
        self._free_s = max(self._free_s, now_s) + 8 * num_bytes / self.link.bandwidth_bits_per_s
        return self._free_s

    def arrival_s(self, now_s: float, num_bytes: int, to: Link | None = None) -> float:
        """When the last byte of a message handed over now arrives: `departure_s`, called in here, and the latency.

        From one replica to another that is the mean of the two links' latencies.

        Args:
            now_s: the present time.
            num_bytes: the message's length.
            to: the receiver's link, whose bandwidth is not emulated at this end; default: one like this replica's.
        """
        far = self.link if to is None else to
        return self.departure_s(now_s, num_bytes) + (self.link.latency_s + far.latency_s) / 2
