"""Estimates of a path, and what follows from them: the number of connections, and the pacing rate. All from data."""

from __future__ import annotations

import math
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.algorithm import UNKNOWN_UPLINK
from diloco.transport import (
    CYCLE,
    LEAST_SEGMENTS,
    MOST_IN_ALL,
    REMEMBERED_S,
    TRIPS,
    UTILIZATION,
    WINDOW,
    Counters,
    Pace,
    PathEstimate,
    PathSample,
    connections_worth_having,
)

TRIP_S = 0.1
INTERVAL_S = 0.05

BYTES = st.floats(1e3, 1e9)
TRIPS_S = st.floats(1e-4, 1.0)
LOSSES = st.floats(0.0, 0.2)
HOSTS = st.integers(1, 100)


@given(BYTES, TRIPS_S, LOSSES, HOSTS)
def test_there_is_at_least_one_connection_and_no_more_than_allowed(
    num_bytes: float, trip_s: float, loss: float, hosts: int
) -> None:
    number = connections_worth_having(num_bytes, trip_s, loss, hosts=hosts)
    assert number == 1 or number * hosts <= MOST_IN_ALL


@given(BYTES, TRIPS_S, LOSSES, LOSSES)
def test_more_loss_never_makes_fewer_connections_useful(
    num_bytes: float, trip_s: float, one: float, two: float
) -> None:
    less, more = sorted((one, two))
    assert connections_worth_having(num_bytes, trip_s, less) <= connections_worth_having(num_bytes, trip_s, more)


def test_a_way_that_a_few_connections_fill_gets_no_more() -> None:
    """A loss of 0.01 % limits a connection to 14 Mbit/s at an RTT of 100 ms, whatever the bandwidth."""
    filled = connections_worth_having(100e6, TRIP_S, 1e-4, 20e6)
    assert filled < connections_worth_having(100e6, TRIP_S, 1e-4) == MOST_IN_ALL


# Estimates.


def sample(
    bits_per_s: float, trip_s: float = TRIP_S, *, sent: int = 0, resent: int = 0, busy: bool = True
) -> PathSample:
    num_bytes = round(bits_per_s * INTERVAL_S / 8)
    return PathSample(INTERVAL_S, num_bytes, sent, resent, trip_s, TRIP_S, busy=busy)


def test_loss_is_told_once_enough_was_sent_and_forgets() -> None:
    path = PathEstimate()
    path.observe(sample(1e6, sent=LEAST_SEGMENTS - 1, resent=4))
    assert path.loss is None
    path.observe(sample(1e6, sent=1, resent=1))
    assert path.loss == pytest.approx(5 / LEAST_SEGMENTS)
    for _ in range(100):
        path.observe(sample(1e6, sent=2000))
    assert path.loss == pytest.approx(0.0, abs=1e-4)


def test_a_burst_is_what_comes_between_two_pauses() -> None:
    path = PathEstimate()
    assert not path.in_burst
    for _ in range(3):
        path.observe(sample(8e6))
    assert path.in_burst
    path.end_burst()
    path.observe(sample(8e6))
    path.end_burst()
    assert path.burst_bytes == 150_000, "the largest recent one"
    for _ in range(8):
        path.observe(sample(4e6))
        path.end_burst()
    assert path.burst_bytes == 25_000


def test_only_a_full_way_tells_its_bandwidth() -> None:
    path = PathEstimate()
    path.observe(sample(5e6))
    assert math.isinf(path.bandwidth_bits_per_s)
    path.observe(sample(5e6, trip_s=2 * TRIP_S, busy=False))
    assert math.isinf(path.bandwidth_bits_per_s), "nothing was sent during part of the time"
    path.observe(sample(5e6, trip_s=2 * TRIP_S))
    path.observe(sample(4e6, trip_s=2 * TRIP_S))
    assert path.bandwidth_bits_per_s == 5e6


# The pacing rate.


class Bottleneck:
    """A path with a bottleneck queue, and a sender that always has data. Simulated in steps of a millisecond."""

    PART_BYTES = 6_000

    def __init__(self, bits_per_s: float) -> None:
        self.bits_per_s = bits_per_s
        self.most_queued_bytes = 0.4 * bits_per_s / 8
        self.pace = Pace()
        self.now_s = self.queue_bytes = self.queued_s = self.sent_bytes = 0.0

    def run(self, seconds: float) -> float:
        """Return the share of the bandwidth that was used."""
        before_bytes = self.sent_bytes
        for _ in range(round(seconds / INTERVAL_S)):
            acknowledged = longest = 0.0
            for _ in range(round(INTERVAL_S * 1000)):
                self.now_s += 0.001
                while self.queue_bytes < self.most_queued_bytes and self.pace.wait_s(self.now_s) <= 0:
                    self.pace.spend(self.now_s, self.PART_BYTES)
                    self.queue_bytes += self.PART_BYTES
                gone = min(self.queue_bytes, self.bits_per_s / 8000)
                self.queue_bytes -= gone
                acknowledged += gone
                longest = max(longest, 8 * self.queue_bytes / self.bits_per_s)
            self.queued_s += INTERVAL_S * (longest > 0.5 * TRIP_S)
            self.sent_bytes += acknowledged
            self.pace.observe(
                self.now_s,
                PathSample(INTERVAL_S, round(acknowledged), 0, 0, TRIP_S + longest, TRIP_S, busy=True),
            )
        return 8 * (self.sent_bytes - before_bytes) / self.bits_per_s / seconds


@pytest.mark.parametrize("bits_per_s", [2e7, 1e8, 1e9])
def test_a_way_is_used_well_and_its_queue_stays_short(bits_per_s: float) -> None:
    way = Bottleneck(bits_per_s)
    way.run(1.0)
    way.queued_s = 0.0
    assert way.run(10.0) > 0.95
    assert way.pace.bits_per_s == pytest.approx(UTILIZATION * bits_per_s, rel=0.03)
    assert way.queued_s <= 2.0, "without pacing the queue is never short"


def test_a_way_that_becomes_faster_is_followed_soon() -> None:
    way = Bottleneck(2e7)
    way.run(5.0)
    way.bits_per_s = 1e8
    way.run(15.0)
    assert way.run(1.0) > 0.9


def test_a_way_that_becomes_slower_is_followed_when_the_faster_time_is_forgotten() -> None:
    way = Bottleneck(1e8)
    way.run(5.0)
    way.bits_per_s = 2e7
    way.run(REMEMBERED_S + CYCLE * INTERVAL_S + TRIPS * 8 * way.most_queued_bytes / way.bits_per_s + 1.0)
    assert way.pace.bits_per_s == pytest.approx(UTILIZATION * 2e7, rel=0.05)


def test_a_way_that_never_fills_is_not_held_back() -> None:
    """For example because loss slows TCP down, or because the path is fast."""
    pace = Pace()
    for n in range(100):
        pace.observe(n * INTERVAL_S, sample(1e6 * (1 + n % 7)))
        pace.spend(n * INTERVAL_S, 1 << 20)
        assert pace.wait_s(n * INTERVAL_S) == 0.0
    assert math.isinf(pace.bits_per_s)
    assert pace.uplink == UNKNOWN_UPLINK, "the burst lasts still"
    pace.observe(5.0, sample(0.0, busy=False))
    assert not pace.uplink.full
    assert 4e6 <= pace.uplink.bits_per_s <= 7e6, "the mean of the last intervals, a lower limit"


def test_one_late_answer_is_no_queue() -> None:
    pace = Pace()
    for n in range(100):
        pace.observe(n * INTERVAL_S, sample(1e6, trip_s=TRIP_S * (3 if n % 2 else 1)))
    assert math.isinf(pace.bits_per_s)


def test_the_rate_of_a_full_way_is_that_of_the_uplink() -> None:
    pace = burst()
    assert pace.uplink.full
    assert pace.uplink.bits_per_s == pytest.approx(pace.bits_per_s / UTILIZATION, abs=1)


def test_answers_that_were_held_up_do_not_show_a_faster_way() -> None:
    """They were queued behind the traffic of others, and arrive closer together than the data left."""
    pace = Pace()
    pace.observe(0.0, sample(1e6))
    pace.observe(0.0, sample(1e6, busy=False))
    told = [(0.0, 0.0)] * 12 + [(1e7, 6 * TRIP_S)] * 8 + [(2e7, 6 * TRIP_S - n * INTERVAL_S) for n in range(1, 9)]
    for n, (bits_per_s, trip_s) in enumerate(told):
        pace.observe(n * INTERVAL_S, sample(bits_per_s, trip_s=trip_s))
    assert pace.bits_per_s < 1.35e7, "and while it is full, three quarters of that are used"


def burst(*, resent: bool = True, queued: bool = True) -> Pace:
    """Observe the recorded counters of bursts of 3.2 MB at 100 Mbit/s and 100 ms; the queue has room for 1.25 MB."""
    told = (  # MB acknowledged in an interval, retransmitted segments, and the RTT
        (0.0, 0, 0.0),
        (0.083, 0, 0.140),
        (0.290, 0, 0.185),
        (1.820, 211, 0.207),
        (0.187, 131, 0.204),
        (0.246, 233, 0.118),
        (0.172, 60, 0.106),
        (0.185, 40, 0.105),
        (0.152, 0, 0.105),
    )
    pace = Pace()
    for n, (megabytes, again, trip_s) in enumerate(told):
        trip_s = trip_s if queued else min(trip_s, TRIP_S)
        arrived = PathSample(INTERVAL_S, int(1e6 * megabytes), 0, again if resent else 0, trip_s, TRIP_S)
        pace.observe(n * INTERVAL_S, arrived)
    return pace


def test_answers_that_come_in_bunches_do_not_show_a_faster_way() -> None:
    """Recorded while eight hosts sent to each other at 100 Mbit/s each; four intervals alone show 140 Mbit/s."""
    told = (0.155, 0.361, 0.648, 1.308, 0.625, 0.938, 0.536, 0.426, 0.483)  # MB acknowledged
    trips_s = (0.177, 0.202, 0.238, 0.263, 0.256, 0.252, 0.156, 0.136, 0.123)
    pace = Pace()
    for n, (megabytes, trip_s) in enumerate(zip(told, trips_s, strict=True)):
        pace.observe(n * INTERVAL_S, PathSample(INTERVAL_S, int(1e6 * megabytes), 0, 0, trip_s, TRIP_S))
    assert 0.7e8 < pace.bits_per_s < 1.05e8


def test_held_up_answers_of_a_burst_do_not_raise_a_rate_that_is_known() -> None:
    """Recorded at 100 Mbit/s, of which payloads can have 95.6, between two hosts; the bytes alone show 104 Mbit/s."""
    pace = burst()
    known = pace.uplink.bits_per_s
    assert 9e7 < known < 9.56e7
    pace.observe(1.0, PathSample(INTERVAL_S, 0, busy=False))
    told = (0.0, 0.0, 0.381, 0.499, 0.485, 1.236)  # MB acknowledged
    trips_s = (0.0, 0.0, 0.136, 0.165, 0.161, 0.146)
    for n, (megabytes, trip_s) in enumerate(zip(told, trips_s, strict=True)):
        least_s = TRIP_S if trip_s else 0.0
        pace.observe(1.05 + n * INTERVAL_S, PathSample(INTERVAL_S, int(1e6 * megabytes), 0, 0, trip_s, least_s))
    assert known < pace.uplink.bits_per_s < 1e8


def test_what_was_answered_late_has_left_when_it_could_have_been_answered() -> None:
    """Recorded while four hosts sent to each other at 100 Mbit/s and 300 ms; four intervals alone show 230 Mbit/s."""
    pace, trip_s = Pace(), 0.3
    pace.observe(0.0, PathSample(INTERVAL_S, 1, 0, 0, trip_s, trip_s))  # an earlier burst
    pace.observe(0.0, PathSample(INTERVAL_S, 0, busy=False))
    told = [*[0.0] * 12, 0.052, 0.486, 4.285, 0.605, 0.400, 0.360]  # MB acknowledged
    trips_s = [*[0.0] * 12, 0.424, 0.565, 0.572, 0.596, 0.613, 0.620]
    for n, (megabytes, longer_s) in enumerate(zip(told, trips_s, strict=True)):
        again, least_s = (100 if n > 14 else 0), trip_s if longer_s else 0.0
        pace.observe(n * INTERVAL_S, PathSample(INTERVAL_S, int(1e6 * megabytes), 0, again, longer_s, least_s))
    assert 0.7e8 < pace.bits_per_s < 1.05e8


def test_a_way_that_is_full_only_when_little_is_left_is_as_fast_as_it_was_before() -> None:
    pace = Pace()
    for n in range(WINDOW):
        pace.observe(n * INTERVAL_S, sample(1e8))
    for n in range(WINDOW, WINDOW + WINDOW // 2):
        pace.observe(n * INTERVAL_S, sample(1e5, trip_s=3 * TRIP_S, resent=5))
    assert math.isinf(pace.bits_per_s), "a few lost segments and late answers are no overflowing queue"
    for n in range(WINDOW + WINDOW // 2, 2 * WINDOW):
        pace.observe(n * INTERVAL_S, sample(1e5, trip_s=3 * TRIP_S))
    assert pace.bits_per_s == pytest.approx(UTILIZATION * 1e8)


def test_a_burst_that_overflows_a_queue_tells_the_rate_though_it_is_over_soon() -> None:
    assert 0.85e8 < burst().bits_per_s < 1e8
    assert math.isinf(burst(resent=False).bits_per_s), "late answers, as of a busy machine"
    assert math.isinf(burst(queued=False).bits_per_s), "loss on the path"


@pytest.mark.parametrize(("resent", "queue_s", "learns"), [(150, 0.04, True), (30, 0.04, False), (150, 0.0, False)])
def test_a_burst_that_is_over_before_a_window_tells_the_rate_where_it_overflowed(
    resent: int, queue_s: float, learns: bool
) -> None:
    """3 MB at 200 Mbit/s and 30 ms take three intervals. They show a lower bound, and probing shows the rest."""
    pace, trip_s = Pace(), 0.03
    for megabytes in (0.9, 1.25, 0.85):
        pace.observe(0.0, PathSample(INTERVAL_S, int(1e6 * megabytes), 0, resent, trip_s + queue_s, trip_s))
    assert math.isinf(pace.bits_per_s)
    pace.observe(0.0, PathSample(INTERVAL_S, 0, busy=False))
    assert pace.bits_per_s == (pytest.approx(UTILIZATION * 1.6e8) if learns else math.inf)


# TCP counters.


class OneLost:
    """A connection that has lost one segment: 10 arrived before it, and 30 after it."""

    family = socket.AF_INET

    def getsockopt(self, level: int, optname: int, buflen: int) -> bytes:
        words = [0] * 24
        words[2], words[5] = 1000, 30
        return struct.pack("=8B24I4Q6I", *[0] * 8, *words, 0, 0, 10_000, 0, *[0] * 6)


def test_what_came_after_a_lost_segment_has_come() -> None:
    """Otherwise the path would seem to stall until the segment is retransmitted, and to be fast afterwards."""
    counters = Counters.of(OneLost())
    assert counters is None or counters.acknowledged_bytes == 40_000


def test_the_kernel_counts_what_is_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        other, _ = server.accept()
        with other:
            connection.sendall(bytes(100_000))
            left = 100_000
            while left:
                left -= len(other.recv(left))
            counters = Counters.of(connection)
    if counters is None:
        pytest.skip("this kernel does not tell")
    assert 0 < counters.acknowledged_bytes <= 100_001, "SYN counts as a byte"
    assert counters.sent_segments >= 1
    assert 0 < counters.least_round_trip_s <= counters.round_trip_s < 1


def test_where_nobody_counts_nothing_is_told() -> None:
    one, two = socket.socketpair()
    with one, two:
        assert Counters.of(one) is None
    assert Counters.of(None) is None
