"""The time that the DHT goes by: one for all peers, whatever the clocks of their machines say.

Hivemind dates records by each machine's clock and refuses peers whose clock is more than 3 s off. Here a peer takes
over the time of those through which it comes, so that no clock has to be right; it goes on evenly when the machine's is
set.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

__all__ = ["NetworkClock"]

_NOISE_S = 1.0  # what a slow answer may look like


class NetworkClock:
    """Seconds since 1970, as the peers of a network count them.

    Begins with the clock of this machine, which is looked at once.
    """

    def __init__(self) -> None:
        self._ahead_s = time.time() - time.monotonic()

    def now_s(self) -> float:
        """The time of the network."""
        return time.monotonic() + self._ahead_s

    def off_s(self) -> float:
        """How far the clock of this machine is ahead of the network's now; negative: behind."""
        return time.time() - self.now_s()

    def enter(self, ahead_s: Sequence[float]) -> None:
        """Take over the time of a network.

        Args:
            ahead_s: by how much the clocks of some of its peers are ahead of this one; empty: it is not known.

        >>> clock = NetworkClock()
        >>> clock.enter([3600.0, 3600.5, -50.0])
        >>> round(clock.off_s())
        -3600
        """
        if ahead_s:
            self._ahead_s += statistics.median_high(ahead_s)

    def keep_up(self, ahead_s: Sequence[float]) -> None:
        """Stay with the time that most have; of two, with the later one.

        Args:
            ahead_s: as in `enter`.

        >>> clock = NetworkClock()
        >>> clock.keep_up([3600.0])  # networks that meet: the other one does not move
        >>> clock.keep_up([0.0, 0.5, -3600.0])
        >>> round(clock.off_s())
        -3600
        """
        ahead = statistics.median_high([0.0, *ahead_s])
        if abs(ahead) > _NOISE_S:
            self._ahead_s += ahead
