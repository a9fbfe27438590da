"""The exchange pattern of a round, the cheaper of two with equal results, and the bytes that it moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from diloco.algorithm.averaging import Contribution
from diloco.algorithm.codec.base import Codec
from diloco.algorithm.mean_encoding import PLAIN_MEAN, MeanEncoding
from diloco.algorithm.shards import Uplink, owned_shares, shard_bounds, speeds

__all__ = ["Exchange", "data_parallel_bytes", "plan_exchange", "plan_round"]

_WORTH_IT = 0.8
"""Unequal shares must take at most this part of the time, since measured rates are not exact."""


@dataclass(frozen=True)
class Exchange:
    """The bytes that every replica sends and receives in one round.

    A replica's position is its index among the members of the view, from 0.
    """

    # ``all-gather``: every replica receives all payloads and sums them itself; ``reduce-scatter``: the replica at
    # position i owns range i of the values, sums it and sends its mean to all others
    pattern: Literal["all-gather", "reduce-scatter"]
    shards: tuple[tuple[int, int], ...]  # the range of each position, by `shard_bounds`; unused in an all-gather
    mean: MeanEncoding  # the encoding of the means in a reduce-scatter
    sent: tuple[int, ...]  # bytes by position: payloads, means and extras
    received: tuple[int, ...]  # bytes by position

    def sent_bytes(self, position: int) -> int:
        """Return the bytes that the replica at ``position`` sends in this round."""
        return self.sent[position]

    def received_bytes(self, position: int) -> int:
        """Return the bytes that the replica at ``position`` receives in this round."""
        return self.received[position]

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
    mean: MeanEncoding = PLAIN_MEAN,
    whole: bool = False,
    uplinks: Sequence[Uplink] = (),
) -> Exchange:
    """Return the exchange pattern that moves fewer bytes at its busiest replica.

    With n the payload and m the encoded mean of all values, in bytes, an all-gather moves ``(M - 1) * n`` bytes each
    way. A reduce-scatter followed by an all-gather of the means moves about ``(M - 1) / M * (n + m)``, counted here
    exactly for each range. On a tie the all-gather is chosen, which needs one trip instead of two.

    In a reduce-scatter, replicas with slow uplinks may own less of the sum, or nothing: such a replica sends n and no
    mean. Unequal shares are chosen if they save at least a fifth of the time of the slowest. They don't change the
    pattern, nor the result: ranges consist of whole blocks, which are summed and encoded alike by any owner.

    Args:
        codec: The codec of the contributions.
        numel: The number of values in the round.
        num_replicas: M.
        extra_bytes: The bytes that each replica sends in addition to its payload (model buffers), always all-gathered.
        mean: The encoding of means, if it applies to this many replicas and this codec. Ranges consist of whole blocks
            of both codecs.
        whole: Whether every replica needs whole contributions, e.g. to clip them by norm. The pattern is then
            all-gather.
        uplinks: What is known about the uplink of each replica; empty: nothing.

    >>> from diloco.algorithm.codec.base import make_codec
    >>> plan = plan_exchange(make_codec("float16"), 1002, 4)
    >>> plan.pattern, plan.sent, plan.received
    ('reduce-scatter', (4504, 4514, 4504, 4514), (4508, 4510, 4508, 4510))
    >>> plan_exchange(make_codec("fp4"), 1024, 4).pattern
    'all-gather'
    >>> plan_exchange(make_codec("fp4"), 1024, 4, mean=MeanEncoding.of("fp4")).sent
    (774, 774, 774, 774)
    >>> slow, fast = Uplink(20_000_000, full=True), Uplink(100_000_000)
    >>> plan_exchange(make_codec("int8"), 4096, 3, mean=MeanEncoding.of("int8"), uplinks=[slow, fast, fast]).shards
    ((0, 0), (0, 2048), (2048, 4096))
    """
    mean = mean.among(num_replicas, codec)
    block_size = math.lcm(codec.block_size, mean.codec.block_size)
    shards = shard_bounds(numel, num_replicas, block_size)
    gathered = ((num_replicas - 1) * (codec.payload_bytes(numel) + extra_bytes),) * num_replicas
    gather = Exchange("all-gather", shards, mean, gathered, gathered)
    scatter = _scatter(codec, mean, shards, extra_bytes)
    if whole or gather.busiest_bytes <= scatter.busiest_bytes:
        return gather
    rates = speeds(uplinks)
    # all together move as much for any shares, so the slowest can't gain more than it is slower than the fastest
    if not rates or min(rates) >= _WORTH_IT * max(rates):
        return scatter
    shares = owned_shares(rates, codec.payload_bytes(numel), mean.codec.payload_bytes(numel))
    unequal = _scatter(codec, mean, shard_bounds(numel, num_replicas, block_size, shares), extra_bytes)
    return unequal if unequal.time(rates) <= _WORTH_IT * scatter.time(rates) else scatter


def _scatter(codec: Codec, mean: MeanEncoding, shards: tuple[tuple[int, int], ...], extra_bytes: int) -> Exchange:
    """Return the reduce-scatter in which the replica at position i owns the range ``shards[i]``."""
    others = len(shards) - 1
    payloads = [codec.payload_bytes(stop - start) for start, stop in shards]
    means = [mean.codec.payload_bytes(stop - start) for start, stop in shards]
    both = list(zip(payloads, means, strict=True))
    return Exchange(
        "reduce-scatter",
        shards,
        mean,
        sent=tuple(sum(payloads) - payload + others * (encoded + extra_bytes) for payload, encoded in both),
        received=tuple(others * (payload + extra_bytes) + sum(means) - encoded for payload, encoded in both),
    )


def plan_round(contribution: Contribution, num_replicas: int, uplinks: Sequence[Uplink] = ()) -> Exchange:
    """Return `plan_exchange` for a round of ``num_replicas`` contributions like this one."""
    return plan_exchange(
        contribution.codec,
        contribution.numel,
        num_replicas,
        contribution.extra_bytes,
        mean=contribution.mean,
        whole=contribution.whole,
        uplinks=uplinks,
    )


def data_parallel_bytes(numel: int, num_replicas: int, steps: int) -> int:
    """Return the bytes that a replica sends in ``steps`` data-parallel steps.

    Each step is a ring all-reduce of float32 gradients. Together they send ``steps * 2 * (M - 1) / M * 4 * numel``
    bytes, the least that any all-reduce can move.

    >>> data_parallel_bytes(1000, 4, 10)
    60000
    """
    return steps * 2 * (num_replicas - 1) * 4 * numel // num_replicas
