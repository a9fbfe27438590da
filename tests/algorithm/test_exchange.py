"""The bytes of a round against an explicit simulation of both patterns."""

import math
from collections.abc import Sequence
from itertools import combinations_with_replacement, pairwise, product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diloco.algorithm import (
    Codec,
    Exchange,
    MeanCodec,
    Uplink,
    data_parallel_bytes,
    make_codec,
    mean_codecs,
    plan_exchange,
)

Messages = list[tuple[int, int, int]]  # sender, receiver, bytes


def all_gather(sizes: list[int]) -> Messages:
    """Every replica sends its payload to every other."""
    replicas = range(len(sizes))
    return [(a, b, sizes[a]) for a in replicas for b in replicas if a != b]


def reduce_scatter(codec: Codec, lengths: list[int]) -> Messages:
    """Replica b sums range b, which every other replica sends to it; then the float32 means are all-gathered."""
    replicas = range(len(lengths))
    first = [(a, b, codec.payload_bytes(lengths[b])) for a in replicas for b in replicas if a != b]
    return first + all_gather([4 * length for length in lengths])


def traffic(messages: Messages, num_replicas: int) -> tuple[list[int], list[int]]:
    """Return the sent and received bytes of every replica."""
    sent = [sum(size for a, _, size in messages if a == m) for m in range(num_replicas)]
    return sent, [sum(size for _, b, size in messages if b == m) for m in range(num_replicas)]


KINDS = [
    *(make_codec(name) for name in ("float32", "float16", "bfloat16")),
    *(make_codec(name, block_size=size) for name in ("int8", "fp4") for size in (2, 6, 64, 256)),
]


@given(
    codec=st.sampled_from(KINDS),
    numel=st.integers(0, 3000),
    num_replicas=st.integers(1, 9),
    extra=st.integers(0, 50),
)
def test_the_plan_is_the_cheaper_of_two_simulated(codec: Codec, numel: int, num_replicas: int, extra: int) -> None:
    """Property: the bytes are exact for every replica and direction, for any shards."""
    plan = plan_exchange(codec, numel, num_replicas, extra)
    lengths = [stop - start for start, stop in plan.shards]
    beside = all_gather([extra] * num_replicas)
    gather = all_gather([codec.payload_bytes(numel)] * num_replicas) + beside
    scatter = reduce_scatter(codec, lengths) + beside
    by_pattern = {"all-gather": traffic(gather, num_replicas), "reduce-scatter": traffic(scatter, num_replicas)}
    busiest = {pattern: max(sent + received) for pattern, (sent, received) in by_pattern.items()}
    cheaper = min(busiest, key=lambda pattern: busiest[pattern])  # the first on a tie
    assert plan.pattern == cheaper
    assert (list(plan.sent), list(plan.received)) == by_pattern[cheaper]
    assert plan.busiest_bytes == busiest[cheaper]
    assert plan.mean_bytes == sum(plan.sent) / num_replicas


@pytest.mark.parametrize("codec", [make_codec("float32"), *(make_codec("int8", block_size=n) for n in (2, 4))], ids=str)
def test_no_other_cut_between_blocks_has_a_shorter_longest_stretch(codec: Codec) -> None:
    for numel, num_replicas in product((0, 1, 3, 4, 5, 15, 16, 17), (1, 2, 3, 4)):
        between = [*range(0, numel, codec.block_size), numel]
        others = combinations_with_replacement(between, num_replicas - 1)
        least = min(max(b - a for a, b in pairwise((0, *cuts, numel))) for cuts in others)
        assert max(stop - start for start, stop in plan_exchange(codec, numel, num_replicas).shards) == least


@given(numel=st.integers(2, 10**10), num_replicas=st.integers(1, 100), steps=st.integers(0, 1000))
def test_data_parallel_is_the_plan_for_float32_gradients(numel: int, num_replicas: int, steps: int) -> None:
    """Property: the ring's bytes on average, and no more for the longest range than its rounding."""
    ring = data_parallel_bytes(numel, num_replicas, steps)
    plan = plan_exchange(make_codec("float32"), numel, num_replicas)
    assert ring == steps * sum(plan.sent) // num_replicas == steps * sum(plan.received) // num_replicas
    assert steps * plan.busiest_bytes <= ring + 1 + steps * (num_replicas - 1) * 4


def links(rates: Sequence[int], window_s: float = math.inf, *, full: bool = True) -> list[Uplink]:
    return [Uplink(1_000_000 * rate, full, window_s) for rate in rates]


def slowest(shares: Sequence[float], rates: Sequence[int], payload: int, mean: int) -> float:
    """The time of the slowest replica, by the bytes that each share sends and receives."""
    others, times = len(shares) - 1, []
    for share, rate in zip(shares, rates, strict=True):
        sent = (1 - share) * payload + others * share * mean
        received = others * share * payload + (1 - share) * mean
        times.append(max(sent, received) / rate)
    return max(times)


@settings(max_examples=200)
@given(
    rates=st.lists(st.integers(1, 100), min_size=3, max_size=3),
    codec=st.sampled_from(["float32", "float16", "int8"]),
    means=st.sampled_from(["float32", "int8", "fp4"]),
)
def test_no_other_parts_let_the_slowest_finish_much_sooner(rates: list[int], codec: str, means: str) -> None:
    """Against a search over all parts of at most twice an equal one. Unequal parts must save a fifth."""
    numel, contributions, mean = 24 * 64 * 256, make_codec(codec), make_codec(means)
    exchange = plan_exchange(contributions, numel, 3, mean=mean, uplinks=links(rates))
    if exchange.pattern == "all-gather":
        return
    payload, encoded = contributions.payload_bytes(numel), mean.payload_bytes(numel)
    others = [(a, b, 24 - a - b) for a, b in product(range(17), repeat=2) if 8 <= a + b <= 24]  # in 24ths
    best = min(slowest([part / 24 for part in each], rates, payload, encoded) for each in others)
    shares = [(stop - start) / numel for start, stop in exchange.shards]
    limit = best * 1.01 if shares != [1 / 3] * 3 else best / 0.8 * 1.01
    assert slowest(shares, rates, payload, encoded) <= limit


@settings(max_examples=200)
@given(
    rates=st.lists(st.integers(1, 10_000), min_size=2, max_size=64),
    numel=st.integers(0, 300_000),
    codec=st.sampled_from([make_codec("int8", block_size=96), make_codec("bfloat16")]),
)
@example(  # 24 blocks and a value
    rates=[240, 317, 376, 304, 223, 187, 171], numel=24 * 192 + 1, codec=make_codec("int8", block_size=96)
)
def test_parts_are_whole_blocks_of_all_values_and_at_most_twice_an_equal_part(
    rates: list[int], numel: int, codec: Codec
) -> None:
    """Blocks of both codecs, of which the last counts as whole; each end is rounded to the next boundary."""
    mean = make_codec("int8", block_size=64)
    block = math.lcm(codec.block_size, mean.block_size)
    bounds = plan_exchange(codec, numel, len(rates), mean=mean, uplinks=links(rates)).shards
    assert (len(bounds), bounds[0][0], bounds[-1][1]) == (len(rates), 0, numel)
    assert all(before[1] == after[0] for before, after in pairwise(bounds))
    assert all(start % block == 0 or start == numel for start, _ in bounds)
    blocks = [-(-(stop - start) // block) for start, stop in bounds]
    assert min(blocks) >= 0
    assert max(blocks) <= 2 * sum(blocks) / len(rates) + 1


@settings(max_examples=200)
@given(
    rates=st.lists(st.integers(0, 200_000_000), min_size=1, max_size=9),
    window_s=st.one_of(st.floats(0, 100), st.just(float("nan"))),
    full=st.booleans(),
    codec=st.sampled_from(["fp4", "int8", "bfloat16", "float32"]),
    whole=st.booleans(),
)
def test_the_automatic_codec_of_means_is_never_slower_and_never_coarser_than_contributions(
    rates: list[int], window_s: float, full: bool, codec: str, whole: bool
) -> None:
    """Property: also for rates and windows that a member makes up."""
    uplinks, contributions = [Uplink(rate, full, window_s) for rate in rates], make_codec(codec)

    def planned(mean: MeanCodec) -> Exchange:
        return plan_exchange(contributions, 1_000_000, len(rates), mean=mean, whole=whole, uplinks=uplinks)

    def late_s(plan: Exchange) -> float:
        return max(link.late_s(sent) for link, sent in zip(uplinks, plan.sent, strict=True))

    chosen = planned("auto")
    usual = planned(mean_codecs("auto", len(rates), contributions)[0])
    assert planned("auto") == chosen, "the same inputs give the same plan"
    if late_s(usual) == 0:
        assert (chosen.mean.name, chosen.shards, chosen.choice) == (usual.mean.name, usual.shards, "")
    assert late_s(chosen) <= late_s(usual)
    assert bool(chosen.choice) == (chosen.mean.name != usual.mean.name)
    if chosen.choice:
        assert late_s(chosen) <= 0.8 * late_s(usual)
        assert chosen.mean.payload_bytes(256) >= contributions.payload_bytes(256)


@pytest.mark.parametrize(
    ("rates", "window_s", "name"),
    [
        ([1000] * 4, 2.6, "float32"),
        ([0] * 4, 2.6, "float32"),  # unknown
        ([20] * 4, 3.0, "int8"),
        ([15] * 4, 2.6, "fp4"),
        ([15] * 2, 1.0, "float32"),  # two replicas send each other their contributions and no means
        ([1] * 4, 0.0, "fp4"),  # still late, but by less
    ],
)
def test_the_first_codec_whose_round_is_in_time_is_taken(rates: list[int], window_s: float, name: str) -> None:
    """A fragment of 6.3M values: contributions and fp4 means take 0.5 bytes each, int8 means 1, float32 means 4."""
    uplinks = links(rates, window_s, full=False)
    plan = plan_exchange(make_codec("fp4"), 6_300_000, len(rates), mean="auto", uplinks=uplinks)
    assert plan.mean.name == name
    assert (name in plan.choice) == (name != "float32")
