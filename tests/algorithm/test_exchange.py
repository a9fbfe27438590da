"""The bytes of a round against an explicit simulation of both patterns."""

from itertools import combinations_with_replacement, pairwise, product

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.algorithm import (
    Codec,
    Exchange,
    Float32,
    MeanCodec,
    Uplink,
    data_parallel_bytes,
    encode_mean,
    make_codec,
    mean_codecs,
    plan_exchange,
)


class Blocks(Float32):
    """A codec of values that must stay together in blocks."""

    def __init__(self, size: int) -> None:
        self.block_size = size


Messages = list[tuple[int, int, int]]
"""``(sender, receiver, bytes)``."""


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


def busiest(messages: Messages, num_replicas: int) -> int:
    sent, received = traffic(messages, num_replicas)
    return max(sent + received)


def codecs(block_sizes: tuple[int, ...] = (2, 6, 64, 256)) -> list[Codec]:
    casts = [make_codec(name) for name in ("float32", "float16", "bfloat16")]
    return casts + [make_codec(name, block_size=size) for name in ("int8", "fp4") for size in block_sizes]


@settings(max_examples=100, deadline=None)
@given(
    codec=st.sampled_from(codecs()),
    numel=st.integers(0, 3000),
    num_replicas=st.integers(1, 9),
    extra=st.integers(0, 50),
)
def test_the_plan_is_the_cheaper_of_two_simulated_exchanges(
    codec: Codec, numel: int, num_replicas: int, extra: int
) -> None:
    """Property: the bytes are exact for every replica and direction, for any shards."""
    plan = plan_exchange(codec, numel, num_replicas, extra)
    lengths = [stop - start for start, stop in plan.shards]
    beside = all_gather([extra] * num_replicas)
    gather = all_gather([codec.payload_bytes(numel)] * num_replicas) + beside
    scatter = reduce_scatter(codec, lengths) + beside
    cheaper = gather if busiest(gather, num_replicas) <= busiest(scatter, num_replicas) else scatter
    assert plan.pattern == ("all-gather" if cheaper is gather else "reduce-scatter")
    assert (list(plan.sent), list(plan.received)) == traffic(cheaper, num_replicas)
    assert plan.busiest_bytes == busiest(cheaper, num_replicas)
    assert plan.mean_bytes == sum(size for _, _, size in cheaper) / num_replicas


@pytest.mark.parametrize("numel", [0, 1, 3, 4, 5, 15, 16, 17])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_no_other_cut_between_blocks_has_a_shorter_longest_stretch(
    numel: int, num_replicas: int, block_size: int
) -> None:
    between = [*range(0, numel, block_size), numel]
    others = combinations_with_replacement(between, num_replicas - 1)
    least = min(max(b - a for a, b in pairwise((0, *cuts, numel))) for cuts in others)
    assert max(stop - start for start, stop in plan_exchange(Blocks(block_size), numel, num_replicas).shards) == least


@given(numel=st.integers(2, 10**10), num_replicas=st.integers(1, 100), steps=st.integers(0, 1000))
def test_data_parallel_is_the_plan_for_float32_gradients(numel: int, num_replicas: int, steps: int) -> None:
    """Property: the ring's bytes on average, and no more for the longest range than its rounding.

    A single value can't be cut: there the patterns tie, and all-gather it is.
    """
    ring = data_parallel_bytes(numel, num_replicas, steps)
    plan = plan_exchange(make_codec("float32"), numel, num_replicas)
    assert ring == steps * sum(plan.sent) // num_replicas == steps * sum(plan.received) // num_replicas
    assert steps * plan.busiest_bytes <= ring + 1 + steps * (num_replicas - 1) * 4
    if num_replicas == 1 or steps == 0:
        assert ring == 0


KINDS = [("bfloat16", {}), ("int8", {"block_size": 8}), ("fp4", {"block_size": 8}), ("float32", {})]


def random_values(seed: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(KINDS), numel=st.integers(0, 100), owners=st.integers(1, 7), seed=st.integers(0, 9))
def test_owners_encode_what_one_would_encode_of_all_values(
    kind: tuple[str, dict[str, int]], numel: int, owners: int, seed: int
) -> None:
    """Property: for any number of owners, bits equal those of the whole, and the owner holds what others decode."""
    codec = make_codec(kind[0], **kind[1])
    values, expected = random_values(seed, numel), random_values(seed, numel)
    encode_mean(expected, codec)
    for start, stop in plan_exchange(codec, numel, owners).shards:
        payload = encode_mean(values[start:stop], codec)
        assert payload.numel() == codec.payload_bytes(stop - start)
        assert torch.equal(codec.decode(payload, stop - start), values[start:stop])
    assert torch.equal(values, expected)


def test_ranges_are_cut_between_the_blocks_of_both_codecs() -> None:
    mean = make_codec("fp4", block_size=4)
    plan = plan_exchange(make_codec("int8", block_size=6), 1000, 5, mean=mean)
    assert plan.pattern == "reduce-scatter"
    assert all(start % 12 == 0 for start, _ in plan.shards)


BLOCK = 256
INT8 = make_codec("int8", block_size=BLOCK)
SLOW, FAST = Uplink(20_000_000, full=True), Uplink(100_000_000, full=True)


def slowest(shares: list[float], rates: list[float], payload: float, mean: float) -> float:
    """The time of the slowest replica, by the bytes that each share sends and receives."""
    others = len(shares) - 1
    times = []
    for share, rate in zip(shares, rates, strict=True):
        sent = (1 - share) * payload + others * share * mean
        received = others * share * payload + (1 - share) * mean
        times.append(max(sent, received) / rate)
    return max(times)


@settings(max_examples=200, deadline=None)
@given(
    rates=st.lists(st.integers(1, 100), min_size=3, max_size=3),
    codec=st.sampled_from(["float32", "float16", "int8"]),
    means=st.sampled_from(["float32", "int8", "fp4"]),
)
def test_no_other_parts_let_the_slowest_finish_much_sooner(rates: list[int], codec: str, means: str) -> None:
    """Against a search over all parts of at most twice an equal one. Unequal parts must save a fifth."""
    uplinks = [Uplink(1_000_000 * rate, full=True) for rate in rates]
    blocks, contributions, mean = 24 * 64, make_codec(codec), make_codec(means)
    numel = blocks * BLOCK
    exchange = plan_exchange(contributions, numel, 3, mean=mean, uplinks=uplinks)
    if exchange.pattern == "all-gather":
        return
    payload, encoded, steps = contributions.payload_bytes(numel), mean.payload_bytes(numel), 24
    others = (
        [first / steps, second / steps, (steps - first - second) / steps]
        for first, second in product(range(steps + 1), repeat=2)
        if first + second <= steps
    )
    speeds = [float(rate) for rate in rates]
    best = min(slowest(each, speeds, payload, encoded) for each in others if max(each) <= 2 / 3)
    equal = [1 / 3] * 3
    shares = [(stop - start) / numel for start, stop in exchange.shards]
    limit = best * 1.01 if shares != equal else best / 0.8 * 1.01
    assert slowest(shares, speeds, payload, encoded) <= limit


@settings(max_examples=200, deadline=None)
@given(
    rates=st.lists(st.integers(1, 10_000), min_size=2, max_size=64),
    numel=st.integers(0, 300_000),
    codec=st.sampled_from(["int8", "bfloat16"]),
)
@example(rates=[240, 317, 376, 304, 223, 187, 171], numel=6145, codec="int8")  # 24 blocks and a value
def test_parts_hold_all_values_in_whole_blocks_and_none_more_than_twice_an_equal_one_and_a_block(
    rates: list[int], numel: int, codec: str
) -> None:
    """Equal parts of the blocks, as the last one counts as whole; each end is rounded to the next boundary."""
    uplinks = [Uplink(1_000_000 * rate, full=True) for rate in rates]
    mean = make_codec("int8")
    bounds = plan_exchange(make_codec(codec), numel, len(rates), mean=mean, uplinks=uplinks).shards
    assert (len(bounds), bounds[0][0], bounds[-1][1]) == (len(rates), 0, numel)
    assert all(before[1] == after[0] for before, after in pairwise(bounds))
    assert all(start % BLOCK == 0 or start == numel for start, _ in bounds)
    blocks = [-(-(stop - start) // BLOCK) for start, stop in bounds]
    assert min(blocks) >= 0
    assert max(blocks) <= 2 * sum(blocks) / len(rates) + 1


def plan(*uplinks: Uplink) -> Exchange:
    return plan_exchange(INT8, 64 * BLOCK, 3, mean=INT8, uplinks=uplinks)


def links(rates: list[int], window_s: float, *, full: bool = False) -> list[Uplink]:
    return [Uplink(rate, full, window_s) for rate in rates]


@settings(max_examples=200, deadline=None)
@given(
    rates=st.lists(st.integers(0, 200_000_000), min_size=1, max_size=9),
    window_s=st.one_of(st.floats(0, 100), st.just(float("nan"))),
    full=st.booleans(),
    codec=st.sampled_from(["fp4", "int8", "bfloat16", "float32"]),
    whole=st.booleans(),
)
def test_auto_is_the_usual_choice_where_that_fits_and_never_later_and_never_coarser_than_contributions(
    rates: list[int], window_s: float, full: bool, codec: str, whole: bool
) -> None:
    """Property: also for rates and windows that a member makes up."""
    uplinks, contributions = links(rates, window_s, full=full), make_codec(codec)

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
        assert chosen.mean.payload_bytes(BLOCK) >= contributions.payload_bytes(BLOCK)


@pytest.mark.parametrize(
    ("rates", "window_s", "name"),
    [
        ([1_000_000_000] * 4, 2.6, "float32"),
        ([0] * 4, 2.6, "float32"),  # unknown
        ([20_000_000] * 4, 3.0, "int8"),
        ([15_000_000] * 4, 2.6, "fp4"),
        ([15_000_000] * 2, 1.0, "float32"),  # two replicas send each other their contributions and no means
        ([1_000_000] * 4, 0.0, "fp4"),  # still late, but by less
    ],
)
def test_the_first_codec_whose_round_fits_into_the_windows_is_taken(
    rates: list[int], window_s: float, name: str
) -> None:
    """A fragment of 6.3M values: contributions and fp4 means take 0.5 bytes each, int8 means 1, float32 means 4."""
    plan = plan_exchange(make_codec("fp4"), 6_300_000, len(rates), mean="auto", uplinks=links(rates, window_s))
    assert plan.mean.name == name
    assert (name in plan.choice) == (name != "float32")
