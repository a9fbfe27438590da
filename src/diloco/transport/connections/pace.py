"""The pace of payloads: how fast the kernel may send them, by what the last full transfers achieved. Does no I/O.

A congestion control that keeps its rate at a loss, such as bbr, overfills the queue of a path that several of its
connections share, and a fifth of the bytes are sent twice. At the rate at which the path delivers, none are.
"""

from __future__ import annotations

import math
import socket
import struct
import sys
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

from diloco.algorithm import UNKNOWN_UPLINK, Uplink

NEAR_S = 0.002  # over a shorter round trip, one connection is as good as many, and compression is not worth its time
_FULL_TRIPS, _FULL_BYTES = 2.0, 1 << 18  # a transfer is full if it takes so many round trips, and is as large as this
_LONG_TRIPS = 8.0  # a transfer of so many round trips fills the path
_OVERFLOW = 0.05  # share of the bytes that are sent again if a queue overflows; loss alone is usually lower
_FADING = 0.95  # of the highest rate, per full transfer: the path may have become slower
_SEARCH, _GROWTH, _RETREAT = 1.25, 1.05, 0.9
"""Factors of the pace after a full transfer without an overflow (at first, and later), and after one with it."""
_NEEDLESS = 8.0  # times the highest rate: a pace above it holds nothing back, and would grow without end
_LEAST_BITS_PER_S = 1e6  # a transfer that is slower than this has stood still, which says nothing about the path
_FUTILE = 32  # full transfers without a pace after one that did not lower the loss

_SHARE, _MOST_SHARE = 1.1, 2.0
"""Of the uplink that the links may use together: more than all of it, to find a faster path. What is more doubles with
each transfer that comes close to it, as the first one over a path with losses may have been far too slow."""
_CLOSE = 0.945  # of what they may use; a path that is no faster than known has 1 / `_SHARE`
_HELD = 0.9  # a link that sends at this part of its share, or at more, is held by it
_HIGHER = 1.07  # a rate of more than so many times the highest one shows a faster path; less than `_SHARE`
MOST_STRIPES = 32  # to all other replicas together


def streams_to_each(others: int) -> int:
    """Return the number of payload connections to each of ``others`` replicas.

    A connection that slows down at every loss carries little over a long path, and many together carry much. One that
    keeps its rate needs no others, but they cost nothing at a common pace.

    >>> streams_to_each(1), streams_to_each(3), streams_to_each(80)
    (32, 11, 1)
    """
    return max(1, round(MOST_STRIPES / max(1, others)))


class TcpCounters(NamedTuple):
    """What the kernel counts for one connection, or the sum for several."""

    resent: int = 0  # bytes that were sent again
    round_trip_s: float = 0.0  # the shortest one; 0: unknown
    acked: int = 0  # bytes that have been acknowledged
    unsent: int = 0  # bytes that are held back until the path has room for them


def tcp_counters(connection: Any) -> TcpCounters:
    """Return the counters of a socket, or zeros if the kernel does not report them."""
    try:
        assert sys.platform == "linux"
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        places = (16, 100, 144, 148)
        segment_bytes, resent, unsent, least_us = (struct.unpack_from("=I", info, offset)[0] for offset in places)
    except (AssertionError, AttributeError, OSError, struct.error):
        return TcpCounters()  # no TCP, closed, or another system
    (acked,) = struct.unpack_from("=Q", info, 120)
    return TcpCounters(segment_bytes * resent, least_us / 1e6 if least_us < 1 << 31 else 0.0, acked, unsent)


def sum_of(counters: Iterable[TcpCounters]) -> TcpCounters:
    """Return the counters of several connections together.

    >>> sum_of([TcpCounters(0, 0.2, 100), TcpCounters(1448, 0.1, 50), TcpCounters()])
    TcpCounters(resent=1448, round_trip_s=0.1, acked=150, unsent=0)
    """
    resent, trips_s, acked, unsent = zip(TcpCounters(), *counters, strict=True)
    return TcpCounters(sum(resent), min(filter(None, trips_s), default=0.0), sum(acked), sum(unsent))


class Pace:
    """The pace towards one host, which follows from the bytes that were acknowledged in its full transfers.

    >>> pace = Pace()
    >>> def note(seconds: float, resent: int) -> float:
    ...     pace.note(1_250_000, seconds, resent=resent, round_trip_s=0.01)
    ...     return round(pace.bits_per_s / 1e6, 1)
    >>> note(0.11, 0), note(0.21, 312_500)  # a queue has overflowed
    (inf, 104.5)
    >>> note(0.12, 0), note(0.21, 312_500)  # nor does the pace help
    (130.6, inf)

    Where no queue overflows for long, the pace grows until it holds nothing back:

    >>> pace = Pace()
    >>> [note(0.21, resent) for resent in (312_500, *[0] * 9)]
    [55.0, 68.8, 85.9, 107.4, 134.3, 167.8, 209.8, 262.3, 327.8, inf]
    """

    def __init__(self) -> None:
        self.bits_per_s = math.inf  # the limit; infinite while none is needed
        self.seen_bits_per_s = 0.0  # the highest rate of late; 0: unknown
        self._growth = _SEARCH
        self._unpaced_share = 0.0  # share of the bytes that were sent again before the pace was set
        self._futile = 0  # full transfers during which no pace is set

    def note(self, num_bytes: int, seconds: float, *, resent: int, round_trip_s: float) -> None:
        """Take note of a transfer, from its first byte to its last acknowledgement.

        ``num_bytes`` are those that the peer has acknowledged, as they were sent: compressed, and without our
        acknowledgements. Those in ``resent`` were sent again meanwhile.
        """
        if num_bytes < _FULL_BYTES or seconds < _FULL_TRIPS * round_trip_s:
            return
        rate, share = 8 * num_bytes / max(1e-6, seconds - round_trip_s), resent / (num_bytes + resent)
        self.seen_bits_per_s = max(rate, _FADING * self.seen_bits_per_s)
        self._futile = max(0, self._futile - 1)
        if share <= _OVERFLOW:
            self.bits_per_s = max(self.seen_bits_per_s, self._growth * self.bits_per_s)
            if self.bits_per_s > _NEEDLESS * self.seen_bits_per_s:
                self.bits_per_s = math.inf
        elif math.isinf(self.bits_per_s):
            self._unpaced_share = share
            if not self._futile:  # the path carries more than was seen, as it has carried some of the bytes twice
                self.bits_per_s = (1 + share / 2) * self.seen_bits_per_s
        elif share > self._unpaced_share / 2:  # the path loses data however slowly it is sent
            self.bits_per_s, self._futile = math.inf, _FUTILE
        else:
            self.bits_per_s, self._growth = _RETREAT * self.bits_per_s, _GROWTH
        self.bits_per_s = max(_LEAST_BITS_PER_S, self.bits_per_s)

    def lift(self) -> None:
        """End the pace, as a transfer was given up: too low a pace would never let one end that could raise it."""
        self.bits_per_s = math.inf


class UplinkMeter:
    """The highest rate of late at which this process has sent to all others together, while it had anything to send.

    The kernel's acknowledgements count, since those of a peer whose uplink is slow wait behind what that peer sends.
    They may include bytes from before, so that no more count than were written meanwhile. The rate is measured whenever
    one link has nothing more to send: it falls when only that to a slow peer is left, which says nothing of the uplink.
    Nor does the rate fall if that link was held by its share: then others did not use theirs, as their peers are slow.

    >>> counters = iter([TcpCounters(acked=each, round_trip_s=0.02) for each in (0, 2_500_000, 3_000_000)])
    >>> meter = UplinkMeter(lambda: next(counters))
    >>> for link, sending, now_s in [("a", True, 1.0), ("b", True, 1.0), ("a", False, 1.2), ("b", False, 3.0)]:
    ...     meter.note(link, sending, 0, now_s)
    ...     meter.written_bytes += 1_250_000
    >>> meter.uplink(full=True).bits_per_s
    111111111

    Here the uplink carries 40 Mbit/s, and the last of three peers takes 5 of them:

    >>> meter = UplinkMeter(lambda: TcpCounters(acked=meter.written_bytes, round_trip_s=0.02))
    >>> for _ in range(50):
    ...     _ = [meter.note(link, True, 0, 0.0) for link in "abc"]
    ...     seconds = 8 * 5.0 / min(17.5, meter.share_bits_per_s / 1e6)
    ...     meter.written_bytes += 10_000_000 + int(seconds * 5e6 / 8)
    ...     _ = [meter.note(link, False, 5_000_000, now_s) for link, now_s in zip("abc", (seconds, seconds, 8.0))]
    >>> round(meter.uplink(full=True).bits_per_s / 1e6)
    40

    Here it carries 15, but the first transfer had 10, as it began slowly, and later ones get 96 % of what they may:

    >>> meter = UplinkMeter(lambda: TcpCounters(acked=meter.written_bytes, round_trip_s=0.02))
    >>> def rate(most: float) -> float:
    ...     _ = [meter.note(link, True, 0, 0.0) for link in "ab"]
    ...     seconds = 8 * 5.0 / min(most, 0.96 * 2 * meter.share_bits_per_s / 1e6)
    ...     meter.written_bytes += 5_000_000
    ...     _ = [meter.note(link, False, 2_500_000, seconds + 0.02) for link in "ab"]
    ...     return round(8 * 5.0 / seconds, 1)
    >>> [rate(most) for most in (10.0, 15.0, 15.0, 15.0)]
    [10.0, 10.6, 12.2, 15.0]
    """

    def __init__(self, counters: Callable[[], TcpCounters]) -> None:
        self._counters = counters  # of all links together
        self._sending: dict[Hashable, int] = {}  # links that send -> what each had written when it began
        self.written_bytes = 0  # by all links
        self._began_s, self._acked, self._written_bytes = 0.0, 0, 0
        self._fading = _FADING  # of the rate, once since this process last began to send
        self._bits_per_s = 0.0
        self._was_full = False  # whether the path was full, which is not known where it is near
        self._searches = False  # whether the last transfer was faster than those before
        self._share = _SHARE

    def note(self, link: Hashable, sending: bool, written_bytes: int, now_s: float) -> None:
        """Take note of whether a link, which has written so much, has anything that no stripe has taken yet."""
        if sending and not self._sending:
            self._began_s, self._acked, self._written_bytes = now_s, self._counters().acked, self.written_bytes
            self._fading = _FADING
        elif link in self._sending and not sending:
            now, seconds = self._counters(), now_s - self._began_s
            num_bytes, trip_s = min(now.acked - self._acked, self.written_bytes - self._written_bytes), now.round_trip_s
            if num_bytes >= _FULL_BYTES and seconds > _LONG_TRIPS * trip_s:
                rate = 8 * num_bytes / (seconds - trip_s)
                if self._fading < 1.0:  # the first measurement of this transfer
                    is_held = 8 * (written_bytes - self._sending[link]) >= _HELD * self.share_bits_per_s * seconds
                    self._fading = 1.0 if is_held else self._fading
                    self._searches = 0 < _HIGHER * self._bits_per_s < rate
                    is_close = 0 < _CLOSE * self._share * self._bits_per_s < rate
                    self._share = min(_MOST_SHARE, 2 * self._share - 1) if is_close else _SHARE
                self._bits_per_s = max(rate, self._fading * self._bits_per_s)
                self._fading, self._was_full = 1.0, trip_s > NEAR_S
        if not sending:
            self._sending.pop(link, None)
        elif link not in self._sending:
            self._sending[link] = written_bytes

    @property
    def share_bits_per_s(self) -> float:
        """The pace of each of several links that send, at which they end together; infinite while none is needed.

        Without it, links that are ahead leave the uplink to the last one, which takes many round trips to fill it. Nor
        is there one after a transfer that was clearly faster than those before, which the pace may have limited.

        >>> meter = UplinkMeter(lambda: TcpCounters(acked=meter.written_bytes, round_trip_s=0.02))
        >>> def share(seconds: float) -> float:
        ...     _ = [meter.note(link, True, 0, 0.0) for link in "ab"]
        ...     pace, meter.written_bytes = meter.share_bits_per_s, meter.written_bytes + 20_000_000
        ...     _ = [meter.note(link, False, 10_000_000, seconds) for link in "ab"]
        ...     return round(pace / 1e6, 1)
        >>> [share(seconds) for seconds in (160.02, 145.02, 4.02, 4.02, 4.02)]  # at first the path has stood still
        [inf, 0.6, inf, inf, 22.0]
        """
        number = len(self._sending)
        is_known = self._was_full and not self._searches
        return self._share * self._bits_per_s / number if is_known and number > 1 else math.inf

    def uplink(self, *, full: bool) -> Uplink:
        """Return what is known; ``full``: whether a link has a pace, so that the rate is that of the path."""
        return Uplink(int(self._bits_per_s), full or self._was_full) if self._bits_per_s else UNKNOWN_UPLINK
