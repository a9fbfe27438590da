"""The pacing of an emulated uplink: in order, never above its rate, and never idle while messages wait."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.transport import Link, LinkState, Pacer, Transfer, transfer_times

MESSAGES = st.lists(st.tuples(st.floats(0, 10), st.integers(0, 10**7)), min_size=1, max_size=20)
"""Messages as (seconds since the previous message, bytes)."""
RATES = st.floats(1e3, 1e11)


def paced(link: Link, messages: list[tuple[float, int]]) -> list[tuple[float, int, float]]:
    """Return (time of submission, bytes, time of departure) of each message."""
    pacer, times = Pacer(link), accumulate(gap for gap, _ in messages)
    submitted = [(now_s, num_bytes) for now_s, (_, num_bytes) in zip(times, messages, strict=True)]
    return [(now_s, num_bytes, pacer.departure_s(now_s, num_bytes)) for now_s, num_bytes in submitted]


def test_messages_queue_up_and_idle_time_is_not_saved() -> None:
    """1 MB/s."""
    pacer = Pacer(Link(8e6))
    given = [(1.0, 2_000_000), (1.5, 1_000_000), (10.0, 1_000_000), (10.0, 0)]
    assert [pacer.departure_s(*message) for message in given] == [3.0, 4.0, 11.0, 11.0]


@given(messages=MESSAGES, rate=RATES)
def test_over_no_window_is_the_rate_exceeded(messages: list[tuple[float, int]], rate: float) -> None:
    """Property: this holds from the first byte of any message to the last byte of any later one."""
    sent = paced(Link(rate), messages)
    for first, (_, length, departed_s) in enumerate(sent):
        begin_s, bits = departed_s - 8 * length / rate, 0
        for _, num_bytes, until_s in sent[first:]:
            bits += 8 * num_bytes
            assert bits <= rate * (until_s - begin_s + 1e-9 * max(until_s, 1))


@given(messages=MESSAGES, rate=RATES)
def test_a_link_works_in_order_and_without_pause(messages: list[tuple[float, int]], rate: float) -> None:
    """Property: a message starts when it is submitted or when the previous one has departed, whichever is later."""
    before_s = -math.inf
    for now_s, num_bytes, departed_s in paced(Link(rate), messages):
        assert departed_s >= before_s
        assert departed_s == pytest.approx(max(now_s, before_s) + 8 * num_bytes / rate)
        before_s = departed_s


@given(messages=MESSAGES)
def test_an_unlimited_link_holds_nothing_back(messages: list[tuple[float, int]]) -> None:
    assert all(departed_s == now_s for now_s, _, departed_s in paced(Link(math.inf, 5.0), messages))


@given(messages=MESSAGES, rate=RATES, ours=st.floats(0, 10), theirs=st.floats(0, 10))
def test_latency_delays_arrivals_and_nothing_else(
    messages: list[tuple[float, int]], rate: float, ours: float, theirs: float
) -> None:
    far, alike = Pacer(Link(rate, ours)), Pacer(Link(rate, ours))
    for now_s, num_bytes, departed_s in paced(Link(rate), messages):
        assert far.arrival_s(now_s, num_bytes, Link(1.0, theirs)) == departed_s + (ours + theirs) / 2
        assert alike.arrival_s(now_s, num_bytes) == departed_s + ours


@given(rate=RATES, latency=st.floats(0, 10), size=st.integers(0, 10**7))
def test_two_replicas_with_equal_links_take_as_long_as_on_the_virtual_clock(
    rate: float, latency: float, size: int
) -> None:
    """Property: payloads go one way and votes, without bytes, the other."""
    link = Link(rate, latency)
    virtual, _ = transfer_times({m: Transfer(1.0, size, size) for m in (0, 1)}, [link] * 2, [LinkState()] * 2)
    pacer = Pacer(link)
    assert pacer.arrival_s(pacer.arrival_s(1.0, size), 0) == pytest.approx(virtual)
