"""The exchange pattern of a round, the cheaper of two with equal results, and the bytes that it moves.

In a reduce-scatter each replica owns a range of the values. It sums the contributions to that range and sends their
mean to all others, perhaps encoded; then it decodes the same bytes as they do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor

from diloco.algorithm.codec.base import Codec, Float32, make_codec
from diloco.algorithm.codec.blockwise import FP4, Int8
from diloco.algorithm.settings import AUTO_MEANS_FROM_REPLICAS

_WORTH_IT = 0.8  # what a slow uplink changes must take at most this part of the time, as measured rates are not exact

_MOST_SHARE = 2.0  # the most that a replica owns, in equal shares: the others can't check the mean that an owner sends
_HALVINGS = 60

_AUTO: tuple[Codec, ...] = Float32(), Int8(), FP4()

MeanCodec = Codec | str
"""The codec in which the owner of a range sends its mean to the other replicas, its name, or "auto" (`mean_codecs`)."""

PLAIN_MEAN: MeanCodec = Float32()


def mean_codecs(mean: MeanCodec, num_replicas: int, contributions: Codec) -> tuple[Codec, ...]:
    """Return the codecs of means in question: the one for uplinks that are fast enough, then coarser ones.

    "auto" begins with int8 among at least 8 replicas, where it saves much and cost nothing in measurements, and with
    float32 among fewer. Means are never coarser than contributions, and float32 if these take at least 2 bytes per
    value.

    >>> [[each.name for each in mean_codecs("auto", number, make_codec("fp4"))] for number in (7, 8)]
    [['float32', 'int8', 'fp4'], ['int8', 'fp4']]
    >>> [[each.name for each in mean_codecs("auto", 8, make_codec(name))] for name in ("int8", "bfloat16")]
    [['int8'], ['float32']]
    """
    if mean != "auto":
        return (make_codec(mean) if isinstance(mean, str) else mean,)
    block = contributions.block_size
    size = contributions.payload_bytes(block) / block
    codecs = _AUTO[: 1 + (size < 2) + (size < 1)]
    has_coarser = len(codecs) > 1
    return codecs[1:] if has_coarser and num_replicas >= AUTO_MEANS_FROM_REPLICAS else codecs


def encode_mean(values: Tensor, codec: Codec) -> Tensor:
    """Encode a mean and replace it by the values that all replicas decode.

    Args:
        values: ``(n,)`` float32, the mean of whole blocks of ``codec``. Overwritten with the decoded payload.
        codec: The codec of means.

    Returns:
        The payload, ``(payload_bytes(n),)`` uint8. With an exact codec it shares memory with ``values``.
    """
    if codec.exact:
        return values.view(torch.uint8)
    payload = codec.encode(values)
    codec.decode(payload, values.numel(), out=values)
    return payload


@dataclass(frozen=True)
class Uplink:
    """What a replica knows about the bandwidth with which it sends."""

    bits_per_s: Annotated[int, Meta(ge=0)] = 0  # the highest rate measured; 0: none
    full: bool = False  # whether the uplink was full at that rate
    window_s: float = math.inf  # how long its bytes may take before its training stands still for more than a little

    def late_s(self, sent_bytes: int) -> float:
        """Return by how much longer than the window it takes to send so many bytes; 0 if it does not, or is unknown."""
        late_s = 8 * sent_bytes / self.bits_per_s - self.window_s if self.bits_per_s else 0.0
        return late_s if late_s > 0 else 0.0  # not `max`: a peer may send NaN


UNKNOWN_UPLINK = Uplink()


def payload_window_s(round_s: float, round_trip_s: float) -> float:
    """Return how long a replica may send in a round that may take ``round_s``.

    Headers, contributions, means and votes each travel for half a round trip besides.
    """
    return max(0.0, round_s - 2 * round_trip_s)


@dataclass(frozen=True)
class Exchange:
    """The bytes that every replica sends and receives in one round.

    A replica's position is its index among the members of the view, from 0.
    """

    # ``all-gather``: every replica receives all payloads and sums them itself; ``reduce-scatter``: the replica at
    # position i owns range i of the values, sums it and sends its mean to all others
    pattern: Literal["all-gather", "reduce-scatter"]
    shards: tuple[tuple[int, int], ...]  # the range of each position, in whole blocks; unused in an all-gather
    mean: Codec  # the codec of the means in a reduce-scatter
    sent: tuple[int, ...]  # bytes by position: payloads, means and extras
    received: tuple[int, ...]  # bytes by position
    choice: str = ""  # what the uplinks forced, and what it costs; "": nothing

    @property
    def mean_bytes(self) -> float:
        """The bytes per replica and direction, averaged over replicas."""
        return sum(self.sent) / len(self.sent)

    @property
    def busiest_bytes(self) -> int:
        """The most bytes that a replica moves in one direction."""
        return max(*self.sent, *self.received)

    def time(self, rates: Sequence[float]) -> float:
        """Return the time of the slowest replica, in bytes over the unit of ``rates``, which are by position."""
        moved = map(max, self.sent, self.received)
        return max(num_bytes / rate for num_bytes, rate in zip(moved, rates, strict=True))


def plan_exchange(
    codec: Codec,
    numel: int,
    num_replicas: int,
    extra_bytes: int = 0,
    *,
    mean: MeanCodec = PLAIN_MEAN,
    whole: bool = False,
    uplinks: Sequence[Uplink] = (),
) -> Exchange:
    """Return the exchange pattern that moves fewer bytes at its busiest replica.

    With n the payload and m the encoded mean of all values, in bytes, an all-gather moves ``(M - 1) * n`` bytes each
    way. A reduce-scatter followed by an all-gather of the means moves about ``(M - 1) / M * (n + m)``, counted here
    exactly for each range. On a tie the all-gather is chosen, which needs one trip instead of two. It is also chosen if
    replicas need ``whole`` contributions, e.g. to clip them by norm.

    In a reduce-scatter, replicas with slow uplinks may own less of the sum, or nothing: such a replica sends n and no
    mean. Unequal shares are chosen if they save at least a fifth of the time of the slowest. They don't change the
    pattern, nor the result: ranges consist of whole blocks, which are summed and encoded alike by any owner.

    Of several codecs of means it is the first with which every uplink sends its part within its window. If there is
    none, it is the first that saves all but a fifth of what can be saved of the time beyond.

    Args:
        extra_bytes: The bytes that each replica sends in addition to its payload (model buffers), always all-gathered.
        mean: The codec of means. Ranges consist of whole blocks of both codecs.
        uplinks: What is known about the uplink of each replica; empty: nothing.

    >>> plan = plan_exchange(make_codec("float16"), 1002, 4)
    >>> plan.pattern, plan.shards
    ('reduce-scatter', ((0, 250), (250, 501), (501, 751), (751, 1002)))
    >>> plan.sent, plan.received
    ((4504, 4514, 4504, 4514), (4508, 4510, 4508, 4510))
    >>> slow, fast = Uplink(20_000_000, full=True), Uplink(100_000_000)
    >>> plan_exchange(make_codec("int8"), 4096, 3, mean=make_codec("int8"), uplinks=[slow, fast, fast]).shards
    ((0, 0), (0, 2048), (2048, 4096))
    >>> home = [Uplink(15_000_000, window_s=2.6)] * 4
    >>> plan_exchange(make_codec("fp4"), 6_000_000, 4, mean="auto", uplinks=home).mean.name
    'fp4'
    """
    plans: list[Exchange] = []
    late_s: list[float] = []
    for candidate in mean_codecs(mean, num_replicas, codec):
        plans.append(_cheaper(codec, candidate, numel, num_replicas, extra_bytes, whole=whole, uplinks=uplinks))
        late_s.append(max((link.late_s(sent) for link, sent in zip(uplinks, plans[-1].sent, strict=False)), default=0))
        if late_s[-1] == 0:
            break
    chosen = next(index for index, late in enumerate(late_s) if late * _WORTH_IT <= min(late_s))
    if chosen == 0:
        return plans[0]
    coarser, usual = plans[chosen].mean, plans[0].mean
    words = (
        f"the uplinks can't carry a round with means in {usual.name} within its overlap, so means are sent in "
        f"{coarser.name}. In measurements this changed the loss by at most {coarser.cost_of_means}. The codec of means "
        "can also be set"
    )
    return replace(plans[chosen], choice=words)


def _cheaper(
    codec: Codec,
    mean: Codec,
    numel: int,
    num_replicas: int,
    extra_bytes: int,
    *,
    whole: bool,
    uplinks: Sequence[Uplink],
) -> Exchange:
    """Return the cheaper pattern with means in ``mean``; see `plan_exchange`."""
    block_size = math.lcm(codec.block_size, mean.block_size)
    shards = _shard_bounds(numel, num_replicas, block_size)
    gathered = ((num_replicas - 1) * (codec.payload_bytes(numel) + extra_bytes),) * num_replicas
    gather = Exchange("all-gather", shards, mean, gathered, gathered)
    scatter = _scatter(codec, mean, shards, extra_bytes)
    if whole or gather.busiest_bytes <= scatter.busiest_bytes:
        return gather
    rates = _speeds(uplinks)
    # all together move as much for any shares, so the slowest can't gain more than it is slower than the fastest
    if not rates or min(rates) >= _WORTH_IT * max(rates):
        return scatter
    shares = _owned_shares(rates, codec.payload_bytes(numel), mean.payload_bytes(numel))
    unequal = _scatter(codec, mean, _shard_bounds(numel, num_replicas, block_size, shares), extra_bytes)
    return unequal if unequal.time(rates) <= _WORTH_IT * scatter.time(rates) else scatter


def _scatter(codec: Codec, mean: Codec, shards: tuple[tuple[int, int], ...], extra_bytes: int) -> Exchange:
    """Return the reduce-scatter in which the replica at position i owns the range ``shards[i]``."""
    others = len(shards) - 1
    payloads = [codec.payload_bytes(stop - start) for start, stop in shards]
    means = [mean.payload_bytes(stop - start) for start, stop in shards]
    both, all_payloads, all_means = list(zip(payloads, means, strict=True)), sum(payloads), sum(means)
    return Exchange(
        "reduce-scatter",
        shards,
        mean,
        sent=tuple(all_payloads - payload + others * (encoded + extra_bytes) for payload, encoded in both),
        received=tuple(others * (payload + extra_bytes) + all_means - encoded for payload, encoded in both),
    )


def _shard_bounds(
    numel: int, num_replicas: int, block_size: int, shares: Sequence[float] = ()
) -> tuple[tuple[int, int], ...]:
    """Divide ``numel`` values into consecutive ranges of whole blocks, by ``shares``, which add up to 1, or equal ones.

    Rounding adds at most one block to what ``shares`` give a replica. Equal ranges differ by at most one block; with
    fewer blocks than replicas some are empty. The last, which holds the last, perhaps shorter block, is one of those
    with the most blocks, so no other division has a shorter longest range.
    """
    blocks = -(-numel // block_size)
    ends = [position * blocks // num_replicas for position in range(1, num_replicas)]
    if shares:
        ends = [min(blocks, round(blocks * each)) for each in accumulate(shares[:-1])]
    return tuple(pairwise([0, *(min(end * block_size, numel) for end in ends), numel]))


def _speeds(uplinks: Sequence[Uplink]) -> list[float]:
    """Return the rates at which replicas are assumed to send; empty if no uplink is known to have been full.

    One whose uplink was never full is among the fastest.
    """
    if not any(uplink.full and uplink.bits_per_s for uplink in uplinks):
        return []
    fastest = float(max(uplink.bits_per_s for uplink in uplinks))
    return [float(uplink.bits_per_s) if uplink.full and uplink.bits_per_s else fastest for uplink in uplinks]


def _owned_shares(rates: Sequence[float], payload_bytes: float, mean_bytes: float) -> list[float]:
    """Return the share of the sum that each replica should own so that the slowest is done soonest.

    The replica at position i has the share s_i. It sends ``(1 - s_i) n + (M - 1) s_i m`` and receives
    ``(M - 1) s_i n + (1 - s_i) m``, where n is the payload and m the encoded mean of all values. T is the least time in
    which all replicas can do both, at their rates, with s_i at most 2 / M. What T leaves open is shared out in
    proportion. Every operation is correctly rounded (`sum` is not, in some versions of Python), so every machine gets
    the same bits. A downlink is assumed to be as fast as the uplink.
    """
    replicas = len(rates)
    sent, received = (payload_bytes, (replicas - 1) * mean_bytes), (mean_bytes, (replicas - 1) * payload_bytes)

    def limits(time: float) -> list[tuple[float, float]]:
        """Return the least and the greatest share with which each replica is done in ``time``."""
        bounds = []
        for rate in rates:
            least, greatest = 0.0, _MOST_SHARE / replicas
            for as_none, as_only in (sent, received):  # the bytes with a share of 0, and with a share of 1
                if as_only > as_none:
                    greatest = min(greatest, (time * rate - as_none) / (as_only - as_none))
                elif as_only < as_none:
                    least = max(least, (as_none - time * rate) / (as_none - as_only))
            bounds.append((least, greatest))
        return bounds

    def enough(time: float) -> bool:
        bounds = limits(time)
        possible = all(least <= greatest for least, greatest in bounds)
        sums = math.fsum(least for least, _ in bounds), math.fsum(greatest for _, greatest in bounds)
        return possible and sums[0] <= 1 <= sums[1]

    low, high = 0.0, 2 * (payload_bytes + mean_bytes) / min(rates)  # equal shares take less
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    bounds = limits(high)
    left_open = math.fsum(greatest - least for least, greatest in bounds)
    part = (1 - math.fsum(least for least, _ in bounds)) / left_open if left_open else 0.0
    return [least + part * (greatest - least) for least, greatest in bounds]


def data_parallel_bytes(numel: int, num_replicas: int, steps: int) -> int:
    """Return the bytes that a replica sends in ``steps`` data-parallel steps.

    Each step is a ring all-reduce of float32 gradients. Together they send ``steps * 2 * (M - 1) / M * 4 * numel``
    bytes, the least that any all-reduce can move.

    >>> data_parallel_bytes(1000, 4, 10)
    60000
    """
    return steps * 2 * (num_replicas - 1) * 4 * numel // num_replicas
