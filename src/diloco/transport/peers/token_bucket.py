"""How soon bytes may leave, where no more than so many a second shall. Time is an argument."""

from __future__ import annotations

import math

from diloco.errors import ConfigurationError

__all__ = ["TokenBucket"]


class TokenBucket:
    """One budget for all who send from it; who comes first is served first.

    In any ``t`` seconds at most ``burst_bytes + t * bytes_per_s`` bytes leave.

    Args:
        bytes_per_s: the limit; None: there is none.
        burst_bytes: that may leave at once after a pause. One sending may be larger; it then waits for the rest.

    Raises:
        ConfigurationError: if the limit is no positive number.

    >>> bucket = TokenBucket(1000.0, burst_bytes=500)
    >>> bucket.take(10.0, 500), bucket.take(10.0, 500), bucket.take(10.0, 1000)
    (0.0, 0.5, 1.5)
    >>> bucket.take(100.0, 500)    # a long pause has saved up no more than the burst
    0.0
    """

    def __init__(self, bytes_per_s: float | None, burst_bytes: int) -> None:
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise ConfigurationError(
                f"a limit of {bytes_per_s} bytes a second was given; a positive number, or none, would work. "
                "Nothing was started."
            )
        self._bytes_per_s = math.inf if bytes_per_s is None else bytes_per_s
        self._burst_s = burst_bytes / self._bytes_per_s
        self._paid_s = -math.inf  # until then all that has left is paid for

    def take(self, now_s: float, num_bytes: int) -> float:
        """Seconds from ``now_s`` on to wait before ``num_bytes`` bytes leave; they count as sent from now on."""
        self._paid_s = max(self._paid_s, now_s) + num_bytes / self._bytes_per_s
        return max(0.0, self._paid_s - self._burst_s - now_s)
