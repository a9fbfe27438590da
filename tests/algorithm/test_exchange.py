"""Bytes of a round, against an explicit simulation of both patterns."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.algorithm.codec import Codec, codec_names, make_codec
from diloco.algorithm.exchange import Exchange, data_parallel_bytes, plan_exchange

Messages = list[tuple[int, int, int]]
"""(from, to, bytes)."""


def shards(numel: int, num_replicas: int) -> list[int]:
    """Stretches of ceil(numel / M) values; the last ones are shorter, or empty."""
    longest = -(-numel // num_replicas)
    return [max(0, min(longest, numel - m * longest)) for m in range(num_replicas)]


def all_gather(sizes: list[int]) -> Messages:
    """Everybody sends what it has to everybody else."""
    replicas = range(len(sizes))
    return [(a, b, sizes[a]) for a in replicas for b in replicas if a != b]


def reduce_scatter(codec: Codec, numel: int, num_replicas: int) -> Messages:
    """Replica b sums stretch b, so everybody sends it that stretch; then the float32 sums are all-gathered."""
    lengths, replicas = shards(numel, num_replicas), range(num_replicas)
    first = [(a, b, codec.payload_bytes(lengths[b])) for a in replicas for b in replicas if a != b]
    return first + all_gather([4 * length for length in lengths])


def busiest(messages: Messages, num_replicas: int) -> int:
    sent = [sum(size for a, _, size in messages if a == m) for m in range(num_replicas)]
    received = [sum(size for _, b, size in messages if b == m) for m in range(num_replicas)]
    return max(sent + received)


@settings(max_examples=200, deadline=None)
@given(
    codec=st.sampled_from(codec_names()),
    numel=st.integers(1, 3000),
    num_replicas=st.integers(1, 9),
    extra=st.integers(0, 50),
)
def test_the_plan_is_the_cheaper_of_two_simulated_exchanges(
    codec: str, numel: int, num_replicas: int, extra: int
) -> None:
    """Property. With shards of one length it is exact, else what the replica with the longest moves at most."""
    encoder = make_codec(codec)
    plan = plan_exchange(encoder, numel, num_replicas, extra)
    beside = busiest(all_gather([extra] * num_replicas), num_replicas)
    gather = busiest(all_gather([encoder.payload_bytes(numel)] * num_replicas), num_replicas) + beside
    scatter = busiest(reduce_scatter(encoder, numel, num_replicas), num_replicas) + beside
    assert plan.sent_bytes == plan.received_bytes
    if numel % num_replicas == 0:
        assert plan.sent_bytes == min(gather, scatter)
        assert plan.pattern == ("all-gather" if gather <= scatter else "reduce-scatter")
    elif plan.pattern == "all-gather":
        assert plan.sent_bytes == gather
    else:
        longest = -(-numel // num_replicas)
        shortest = min(shards(numel, num_replicas))
        short = encoder.payload_bytes(longest) + 4 * longest - encoder.payload_bytes(shortest) - 4 * shortest
        assert scatter <= plan.sent_bytes <= scatter + (num_replicas - 1) * short
        assert plan.sent_bytes < gather


@pytest.mark.parametrize("codec", codec_names())
@pytest.mark.parametrize("extra", [0, 10])
def test_one_replica_moves_nothing(codec: str, extra: int) -> None:
    assert plan_exchange(make_codec(codec), 1000, 1, extra) == Exchange("all-gather", 0, 0)


@pytest.mark.parametrize(
    ("codec", "num_replicas", "pattern"),
    [
        ("float32", 2, "all-gather"),  # a tie: 4 against (4 + 4) / 2 bytes a value
        ("float32", 3, "reduce-scatter"),
        ("float16", 3, "all-gather"),  # a tie: 2 against (2 + 4) / 3
        ("float16", 4, "reduce-scatter"),
        ("bfloat16", 3, "all-gather"),
        ("int8", 4, "all-gather"),  # 1 and a bit against (1 + 4) / 4 and a bit
        ("int8", 5, "reduce-scatter"),
        ("fp4", 8, "all-gather"),  # a half against (1/2 + 4) / 8
        ("fp4", 9, "reduce-scatter"),
    ],
)
def test_where_the_patterns_meet(codec: str, num_replicas: int, pattern: str) -> None:
    """At 256 * 8 * 9 * 5 values every stretch is whole blocks; on a tie the one trip of all-gather is taken."""
    encoder, numel = make_codec(codec), 256 * 8 * 9 * 5
    plan = plan_exchange(encoder, numel, num_replicas)
    assert plan.pattern == pattern
    if pattern == "all-gather":
        assert plan.sent_bytes == (num_replicas - 1) * encoder.payload_bytes(numel)
    else:
        assert plan.sent_bytes < (num_replicas - 1) * encoder.payload_bytes(numel)


def test_buffers_are_all_gathered_under_either_pattern() -> None:
    for codec in ("float32", "fp4"):
        with_buffers, without = (plan_exchange(make_codec(codec), 1000, 4, extra) for extra in (10, 0))
        assert with_buffers.pattern == without.pattern
        assert with_buffers.sent_bytes - without.sent_bytes == 3 * 10


@given(numel=st.integers(1, 10**10), num_replicas=st.integers(1, 100), steps=st.integers(0, 1000))
def test_data_parallel_is_the_plan_for_float32_gradients(numel: int, num_replicas: int, steps: int) -> None:
    """Property: the ring's bytes, but for the length of the longest stretch."""
    ring = data_parallel_bytes(numel, num_replicas, steps)
    planned = steps * plan_exchange(make_codec("float32"), numel, num_replicas).sent_bytes
    rounding = steps * (num_replicas - 1) * 8
    assert ring <= planned <= ring + rounding + 1
    if numel % num_replicas == 0:
        assert ring == planned
    if num_replicas == 1 or steps == 0:
        assert ring == 0
