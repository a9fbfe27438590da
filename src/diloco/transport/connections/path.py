"""What a way to others shows of itself while payloads travel: loss, round trips, the rate at which it is full. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from diloco.transport.tcp import SEGMENT_BYTES

__all__ = ["Pace", "PathEstimate", "PathSample", "together"]

LEAST_SEGMENTS, MOST_SEGMENTS = 500, 20_000
"""Sent before loss is judged by them, and by how many of the last ones it is."""

BURSTS = 8  # of the last ones the largest counts

QUEUE_SHARE, QUEUE_S = 0.5, 0.01
"""A way is full while round trips take so much longer than the shortest one, as a share and at least in seconds."""

WINDOW = 4
"""Intervals in all of which a way has to be full to count as full: a machine that is busy answers late now and then."""

TRIPS = 1.5
"""Round trips, with queues, over which a rate is taken, and at least a window: where several senders meet, answers
come in bunches, which alone would show a faster way than there is."""

OVERFLOW, LEAST_RESENT = 0.15, 100
"""Share of what arrives that is sent again where a queue has no room left, and at least so many segments. A burst that
takes no longer than a window may overflow a queue before it is full for all of one: then half of one is enough, where
a window is longer than a round trip."""

UTILIZATION, PROBING, DRAINING = 0.97, 1.25, 0.75
"""How much of a way's rate is used; what is tried in `PROBES` of `CYCLE` intervals to see whether there is more; and
what is used until a queue is gone."""

CYCLE, PROBES = 24, 6
MOST_KEPT = 200  # of the intervals of a burst
REMEMBERED_S = 30.0  # the highest rate within so many seconds counts

_BURST_S = 0.01  # of what may leave at once after a pause


@dataclass(frozen=True)
class PathSample:
    """What connections did in an interval."""

    interval_s: float  # its length
    acknowledged_bytes: int  # that the other side has got
    sent_segments: int = 0  # of TCP; 0 where the kernel does not tell
    resent_segments: int = 0
    round_trip_s: float = 0.0  # with queues on the way; 0: unknown
    least_round_trip_s: float = 0.0  # the shortest so far; 0: unknown
    busy: bool = True  # whether something was on its way all the time

    @property
    def full(self) -> bool:
        """Whether what was sent has queued up on the way."""
        queue_s = self.round_trip_s - self.least_round_trip_s
        return self.least_round_trip_s > 0 and queue_s > max(QUEUE_S, QUEUE_SHARE * self.least_round_trip_s)


def together(samples: Sequence[PathSample]) -> PathSample:
    """What the links to several hosts did in the same interval: the one whose way is the fullest tells how full it is.

    >>> together([PathSample(1.0, 10, 5, 0, 0.1, 0.1), PathSample(1.0, 20, 5, 1, 0.09, 0.03, busy=False)])
    PathSample(interval_s=1.0, acknowledged_bytes=30, sent_segments=10, resent_segments=1, round_trip_s=0.09, \
least_round_trip_s=0.03, busy=True)
    """
    fullest = max(samples, key=lambda sample: sample.round_trip_s - sample.least_round_trip_s)
    return PathSample(
        fullest.interval_s,
        sum(sample.acknowledged_bytes for sample in samples),
        sum(sample.sent_segments for sample in samples),
        sum(sample.resent_segments for sample in samples),
        fullest.round_trip_s,
        fullest.least_round_trip_s,
        busy=any(sample.busy for sample in samples),
    )


class PathEstimate:
    """The way to one other host.

    >>> path = PathEstimate()
    >>> path.observe(PathSample(1.0, 1_000_000, 800, 8, 0.08, 0.08))
    >>> path.end_burst()
    >>> path.loss, path.burst_bytes, path.bandwidth_bits_per_s
    (0.01, 1000000, inf)
    """

    def __init__(self) -> None:
        self.least_round_trip_s = 0.0  # without queues; 0: unknown
        self.bandwidth_bits_per_s = math.inf  # the highest rate at which it was full; infinite if it never was
        self._sent = self._resent = 0.0
        self._burst_bytes = 0
        self._bursts: deque[int] = deque(maxlen=BURSTS)

    @property
    def loss(self) -> float | None:
        """Share of segments that had to be sent again; None: too few were sent to tell."""
        return min(0.5, self._resent / self._sent) if self._sent >= LEAST_SEGMENTS else None

    @property
    def burst_bytes(self) -> int:
        """The most that were sent without a pause of late."""
        return max(self._bursts, default=0)

    def observe(self, sample: PathSample) -> None:
        """Take in what happened while something was on its way."""
        self._burst_bytes += sample.acknowledged_bytes
        self.least_round_trip_s = sample.least_round_trip_s or self.least_round_trip_s
        self._sent += sample.sent_segments
        self._resent += sample.resent_segments
        if self._sent > MOST_SEGMENTS:
            self._resent *= MOST_SEGMENTS / self._sent
            self._sent = MOST_SEGMENTS
        if sample.full and sample.busy:
            rate = 8 * sample.acknowledged_bytes / sample.interval_s
            known = 0.0 if math.isinf(self.bandwidth_bits_per_s) else self.bandwidth_bits_per_s
            self.bandwidth_bits_per_s = max(known, rate) or math.inf

    @property
    def in_burst(self) -> bool:
        """Whether something has been sent since the last pause."""
        return self._burst_bytes > 0

    def end_burst(self) -> None:
        """Nothing is on its way."""
        if self._burst_bytes:
            self._bursts.append(self._burst_bytes)
        self._burst_bytes = 0


class Pace:
    """How fast a host sends to all others together: at 97 % of the highest rate at which its way out was full, and less
    until a queue is gone.

    A way that never fills is not held back, nor is one on which loss alone slows TCP down. Now and then more is tried.

    >>> pace = Pace()
    >>> pace.wait_s(0.0)
    0.0
    >>> filled = PathSample(0.2, 250_000, round_trip_s=0.2, least_round_trip_s=0.1)  # 10 Mbit/s, and a queue
    >>> for now_s in (0.4, 0.6, 0.8, 1.0):
    ...     pace.observe(now_s, filled)
    >>> pace.bits_per_s
    9700000.0
    >>> pace.spend(1.0, 93_750)
    >>> round(pace.wait_s(1.0), 3)  # 0.1 s at three quarters, of which a hundredth of a second may be sent at once
    0.09
    """

    def __init__(self) -> None:
        self._full: deque[tuple[float, float]] = deque()  # when, and bits per second
        self._rate = math.inf
        self._intervals = 0
        # since the first answer after the last pause came, or could have come if nothing had held it up
        self._burst: deque[PathSample] = deque(maxlen=MOST_KEPT)
        self._unanswered_s = 0.0  # before that
        self._least_round_trip_s = math.inf
        self._rates: deque[float] = deque(maxlen=CYCLE)  # measured since the last pause, one in each interval
        self._paid_s = -math.inf

    @property
    def bits_per_s(self) -> float:
        """Not counting what is tried now and then; infinite: it is not held back."""
        return UTILIZATION * self._rate

    def observe(self, now_s: float, sample: PathSample) -> None:
        """Take in what happened to all connections together while something was on its way."""
        if not sample.busy:
            if 0 < len(self._burst) < WINDOW and self._was_full():
                self._full.append((now_s, self._measured()))
            self._burst.clear()
            self._rates.clear()
            self._unanswered_s = 0.0
        else:
            self._take_in(now_s, sample)
        while len(self._full) > 1 and self._full[0][0] < now_s - REMEMBERED_S:
            self._full.popleft()
        if self._full:
            self._rate = max(rate for _, rate in self._full)

    def _take_in(self, now_s: float, sample: PathSample) -> None:
        """Of a burst that goes on."""
        self._intervals += 1
        self._least_round_trip_s = sample.least_round_trip_s or self._least_round_trip_s
        if self._burst or sample.acknowledged_bytes or self._unanswered_s >= self._least_round_trip_s:
            self._burst.append(sample)
        else:
            self._unanswered_s += sample.interval_s
        if len(self._burst) >= WINDOW:
            self._rates.append(rate := self._measured())
            if self._is_full() or rate > self._rate:  # the end of a burst brings less than the way carries
                self._full.append((now_s, max(self._rates)))

    def _measured(self) -> float:
        """Bits per second over the last round trips, or all of the burst."""
        seconds = longest_s = num_bytes = 0.0
        for count, each in enumerate(reversed(self._burst), 1):
            seconds += each.interval_s
            num_bytes += each.acknowledged_bytes
            longest_s = max(longest_s, each.round_trip_s)
            if count >= WINDOW and seconds >= TRIPS * longest_s:
                break
        return 8 * num_bytes / seconds

    def _is_full(self) -> bool:
        window = list(self._burst)[-WINDOW:]
        resent = sum(each.resent_segments for each in window)
        arrived = sum(each.acknowledged_bytes for each in window) / SEGMENT_BYTES
        overflows = resent > max(LEAST_RESENT, OVERFLOW * arrived)
        longer = window[-1].least_round_trip_s < sum(each.interval_s for each in window)
        return sum(each.full for each in window) >= (WINDOW / 2 if overflows and longer else WINDOW)

    def _was_full(self) -> bool:
        """Of a burst that is over before there was a whole window of it."""
        resent = sum(each.resent_segments for each in self._burst)
        return resent > LEAST_RESENT and sum(each.full for each in self._burst) > len(self._burst) / 2

    def wait_s(self, now_s: float) -> float:
        """Seconds until something may leave."""
        return max(0.0, self._paid_s - now_s - _BURST_S)

    def spend(self, now_s: float, num_bytes: int) -> None:
        """So much leaves now."""
        share = PROBING if self._intervals % CYCLE >= CYCLE - PROBES else UTILIZATION
        if self._burst and self._burst[-1].full:
            share = DRAINING
        self._paid_s = max(self._paid_s, now_s) + 8 * num_bytes / (share * self._rate)
