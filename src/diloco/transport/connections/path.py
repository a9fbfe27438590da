"""Estimates of a network path from its traffic: loss, round-trip time, bandwidth, and a pacing rate. Does no I/O."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from diloco.algorithm import Uplink
from diloco.transport.tcp import SEGMENT_BYTES

__all__ = ["Pace", "PathEstimate", "PathSample", "together"]

LEAST_SEGMENTS, MOST_SEGMENTS = 500, 20_000
"""The number of sent segments that an estimate of loss needs, and the number of recent ones that it is based on."""

BURSTS = 8  # number of recent bursts of which the largest counts

QUEUE_SHARE, QUEUE_S = 0.5, 0.01
"""A path is full while the RTT exceeds the shortest one by this share of it, and by at least this many seconds."""

WINDOW = 4
"""Consecutive intervals in all of which a path must be full to count as full, as a busy machine occasionally answers
late."""

TRIPS = 1.5
"""Round trips, queueing included, over which a rate is measured; at least a window. Where the traffic of several
senders meets, acknowledgements arrive in bunches, and a shorter measurement would overestimate the bandwidth."""

OVERFLOW, LEAST_RESENT = 0.15, 100
"""Retransmissions that indicate an overflowing queue: their share of the arriving segments, and their least number. A
burst that lasts no longer than a window may overflow a queue before the path is full for a whole window. Half a window
suffices then, provided that a window is longer than a round trip. A burst that ends within a window counts if it has so
many retransmissions and the path was full in most of its intervals."""

UTILIZATION, PROBING, DRAINING = 0.97, 1.25, 0.75
"""Shares of the measured rate: in normal use; while probing for more bandwidth, in `PROBES` of every `CYCLE` intervals;
and while a queue drains."""

CYCLE, PROBES = 24, 6
MOST_KEPT = 200  # intervals of a burst that are kept
REMEMBERED_S = 30.0  # the highest rate within this time counts

_BURST_S = 0.01  # pacing credit after a pause: bytes of this time may leave at once


@dataclass(frozen=True)
class PathSample:
    """The traffic of some connections during one interval."""

    interval_s: float  # its length
    acknowledged_bytes: int  # bytes that the other side has received
    sent_segments: int = 0  # TCP segments; 0 if the kernel does not report them
    resent_segments: int = 0
    round_trip_s: float = 0.0  # queueing included; 0: unknown
    least_round_trip_s: float = 0.0  # the shortest so far; 0: unknown
    busy: bool = True  # whether data was in flight throughout

    @property
    def full(self) -> bool:
        """Whether data has queued up on the path."""
        queue_s = self.round_trip_s - self.least_round_trip_s
        return self.least_round_trip_s > 0 and queue_s > max(QUEUE_S, QUEUE_SHARE * self.least_round_trip_s)


def together(samples: Sequence[PathSample]) -> PathSample:
    """Combine samples of the links to several hosts over one interval, with the round trips of the fullest path.

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
    """The estimate of the path to one other host.

    >>> path = PathEstimate()
    >>> path.observe(PathSample(1.0, 1_000_000, 800, 8, 0.08, 0.08))
    >>> path.end_burst()
    >>> path.loss, path.burst_bytes, path.bandwidth_bits_per_s
    (0.01, 1000000, inf)
    """

    def __init__(self) -> None:
        self.least_round_trip_s = 0.0  # without queueing; 0: unknown
        self.bandwidth_bits_per_s = math.inf  # the highest rate while the path was full; infinite if it never was
        self._sent = self._resent = 0.0
        self._burst_bytes = 0
        self._bursts: deque[int] = deque(maxlen=BURSTS)

    @property
    def loss(self) -> float | None:
        """The share of segments that were retransmitted, or None if too few were sent to tell."""
        return min(0.5, self._resent / self._sent) if self._sent >= LEAST_SEGMENTS else None

    @property
    def burst_bytes(self) -> int:
        """The size of the largest recent burst, which is data sent without a pause."""
        return max(self._bursts, default=0)

    def observe(self, sample: PathSample) -> None:
        """Process a sample taken while data was in flight."""
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
        """Whether data has been sent since the last pause."""
        return self._burst_bytes > 0

    def end_burst(self) -> None:
        """End the current burst, as nothing is in flight."""
        if self._burst_bytes:
            self._bursts.append(self._burst_bytes)
        self._burst_bytes = 0


class Pace:
    """The pacing rate of a host towards all others together.

    It is 97 % of the highest rate at which the uplink was full, and less while a queue drains. A path that never fills
    is not paced, nor is one on which only loss slows TCP down. From time to time a higher rate is probed.

    >>> pace = Pace()
    >>> pace.wait_s(0.0)
    0.0
    >>> filled = PathSample(0.2, 250_000, round_trip_s=0.2, least_round_trip_s=0.1)  # 10 Mbit/s, and a queue
    >>> for now_s in (0.4, 0.6, 0.8, 1.0):
    ...     pace.observe(now_s, filled)
    >>> pace.bits_per_s, pace.uplink
    (9700000.0, Uplink(bits_per_s=10000000, full=True))
    >>> pace.spend(1.0, 93_750)
    >>> round(pace.wait_s(1.0), 3)  # 0.1 s at 75 % of the rate, less 0.01 s of burst credit
    0.09
    """

    def __init__(self) -> None:
        self._full: deque[tuple[float, float]] = deque()  # times and rates (bits per second) at which the path was full
        self._rate = math.inf
        self._seen = 0.0  # the highest rate (bits per second) measured so far, whether or not the path was full
        self._intervals = 0
        # the samples since the first acknowledgement after a pause, or since the time at which it was due
        self._burst: deque[PathSample] = deque(maxlen=MOST_KEPT)
        self._unanswered_s = 0.0  # length of the burst before that
        self._least_round_trip_s = math.inf
        self._rates: deque[float] = deque(maxlen=CYCLE)  # rates measured since the last pause, one per interval
        self._paid_s = -math.inf  # when the data sent so far has been paid for

    @property
    def bits_per_s(self) -> float:
        """The pacing rate, probing and draining aside; infinite if there is no limit."""
        return UTILIZATION * self._rate

    @property
    def uplink(self) -> Uplink:
        """What is known about the bandwidth of the uplink."""
        full = math.isfinite(self._rate)
        return Uplink(int(self._rate if full else self._seen), full)

    def observe(self, now_s: float, sample: PathSample) -> None:
        """Process the combined sample of all links that have or had data in flight."""
        if not sample.busy:
            if self._burst:
                self._seen = max(self._seen, self._measured())
            if 0 < len(self._burst) < WINDOW and self._was_full():
                self._full.append((now_s, self._measured()))
            self._burst.clear()
            self._rates.clear()
            self._unanswered_s = 0.0
        else:
            self._continue_burst(now_s, sample)
        while len(self._full) > 1 and self._full[0][0] < now_s - REMEMBERED_S:
            self._full.popleft()
        if self._full:
            self._rate = max(rate for _, rate in self._full)

    def _continue_burst(self, now_s: float, sample: PathSample) -> None:
        """Process a sample of the current burst."""
        self._intervals += 1
        self._least_round_trip_s = sample.least_round_trip_s or self._least_round_trip_s
        if self._burst or sample.acknowledged_bytes or self._unanswered_s >= self._least_round_trip_s:
            self._burst.append(sample)
        else:
            self._unanswered_s += sample.interval_s
        if len(self._burst) >= WINDOW:
            self._rates.append(rate := self._measured())
            if self._is_full() or rate > self._rate:  # the last intervals of a burst show less than the bandwidth
                self._full.append((now_s, max(self._rates)))

    def _measured(self) -> float:
        """Return the rate (bits per second) over the last `TRIPS` round trips, or over the whole burst if shorter.

        While round trips become shorter, acknowledgements that had been held up on their way arrive together with those
        that had not, and show a higher rate than that of the data. This must not raise a known rate. Half of the
        difference is assumed to be on the way back.
        """
        seconds = longest_s = last_s = num_bytes = 0.0
        for count, each in enumerate(reversed(self._burst), 1):
            seconds += each.interval_s
            num_bytes += each.acknowledged_bytes
            longest_s = max(longest_s, each.round_trip_s)
            last_s = last_s or each.round_trip_s
            if count >= WINDOW and seconds >= TRIPS * longest_s:
                break
        held_up_s = (longest_s - last_s) / 2 if math.isfinite(self._rate) else 0.0
        return 8 * num_bytes / (seconds + held_up_s)

    def _is_full(self) -> bool:
        window = list(self._burst)[-WINDOW:]
        resent = sum(each.resent_segments for each in window)
        arrived = sum(each.acknowledged_bytes for each in window) / SEGMENT_BYTES
        overflows = resent > max(LEAST_RESENT, OVERFLOW * arrived)
        longer = window[-1].least_round_trip_s < sum(each.interval_s for each in window)
        return sum(each.full for each in window) >= (WINDOW / 2 if overflows and longer else WINDOW)

    def _was_full(self) -> bool:
        """Return whether the path was full in a burst that ended within a window."""
        resent = sum(each.resent_segments for each in self._burst)
        return resent > LEAST_RESENT and sum(each.full for each in self._burst) > len(self._burst) / 2

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the next part may leave."""
        return max(0.0, self._paid_s - now_s - _BURST_S)

    def spend(self, now_s: float, num_bytes: int) -> None:
        """Account for ``num_bytes`` that leave now."""
        share = PROBING if self._intervals % CYCLE >= CYCLE - PROBES else UTILIZATION
        if self._burst and self._burst[-1].full:
            share = DRAINING
        self._paid_s = max(self._paid_s, now_s) + 8 * num_bytes / (share * self._rate)
