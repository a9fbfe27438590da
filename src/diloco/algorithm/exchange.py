"""The exchange pattern of a round, the cheaper of two with equal results, and the bytes that it moves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from diloco.algorithm.averaging import Contribution
from diloco.algorithm.codec import Codec
from diloco.algorithm.mean_encoding import PLAIN_MEAN, MeanEncoding

__all__ = ["Exchange", "data_parallel_bytes", "plan_exchange", "plan_round", "shard_bounds"]


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
    def keeps_residual(self) -> bool:
        """Whether the owners of ranges keep the quantisation error of their means."""
        return self.pattern == "reduce-scatter" and self.mean.keeps_residual

    @property
    def mean_bytes(self) -> float:
        """The bytes per replica and direction, averaged over replicas."""
        return sum(self.sent) / len(self.sent)

    @property
    def busiest_bytes(self) -> int:
        """The most bytes that a replica moves in one direction."""
        return max(*self.sent, *self.received)


def shard_bounds(numel: int, num_replicas: int, block_size: int) -> tuple[tuple[int, int], ...]:
    """Divide ``numel`` values into ``num_replicas`` consecutive ranges and return their ``(start, stop)``.

    Ranges consist of whole blocks and differ by at most one block. With fewer blocks than replicas some are empty. The
    last range holds the last, perhaps shorter block and is one of those with the most blocks, so no other division into
    whole blocks has a shorter longest range.

    >>> shard_bounds(10, 3, block_size=1)
    ((0, 3), (3, 6), (6, 10))
    >>> shard_bounds(1000, 3, block_size=256)
    ((0, 256), (256, 512), (512, 1000))
    >>> shard_bounds(300, 3, block_size=256)
    ((0, 0), (0, 256), (256, 300))
    """
    blocks = -(-numel // block_size)
    cuts = [min(position * blocks // num_replicas * block_size, numel) for position in range(num_replicas + 1)]
    return tuple(pairwise(cuts))


def plan_exchange(
    codec: Codec,
    numel: int,
    num_replicas: int,
    extra_bytes: int = 0,
    *,
    mean: MeanEncoding = PLAIN_MEAN,
    whole: bool = False,
) -> Exchange:
    """Return the exchange pattern that moves fewer bytes at its busiest replica.

    With n the payload and m the encoded mean of all values, in bytes, an all-gather moves ``(M - 1) * n`` bytes each
    way. A reduce-scatter followed by an all-gather of the means moves about ``(M - 1) / M * (n + m)``, counted here
    exactly for each range. On a tie the all-gather is chosen, which needs one trip instead of two.

    Args:
        codec: The codec of the contributions.
        numel: The number of values in the round.
        num_replicas: M.
        extra_bytes: The bytes that each replica sends in addition to its payload (model buffers), always all-gathered.
        mean: The encoding of means, if it applies to this many replicas and this codec. Ranges consist of whole blocks
            of both codecs.
        whole: Whether every replica needs whole contributions, e.g. to clip them by norm. The pattern is then
            all-gather.

    >>> from diloco.algorithm.codec import make_codec
    >>> plan = plan_exchange(make_codec("float16"), 1002, 4)
    >>> plan.pattern, plan.sent, plan.received
    ('reduce-scatter', (4504, 4514, 4504, 4514), (4508, 4510, 4508, 4510))
    >>> plan_exchange(make_codec("fp4"), 1024, 4).pattern
    'all-gather'
    >>> plan_exchange(make_codec("fp4"), 1024, 4, mean=MeanEncoding.of("fp4")).sent
    (774, 774, 774, 774)
    """
    others, mean = num_replicas - 1, mean.among(num_replicas, codec)
    shards = shard_bounds(numel, num_replicas, math.lcm(codec.block_size, mean.codec.block_size))
    payloads = [codec.payload_bytes(stop - start) for start, stop in shards]
    means = [mean.codec.payload_bytes(stop - start) for start, stop in shards]
    both = list(zip(payloads, means, strict=True))
    gathered = (others * (codec.payload_bytes(numel) + extra_bytes),) * num_replicas
    gather = Exchange("all-gather", shards, mean, gathered, gathered)
    scatter = Exchange(
        "reduce-scatter",
        shards,
        mean,
        sent=tuple(sum(payloads) - payload + others * (encoded + extra_bytes) for payload, encoded in both),
        received=tuple(others * (payload + extra_bytes) + sum(means) - encoded for payload, encoded in both),
    )
    return gather if whole else min(gather, scatter, key=lambda exchange: exchange.busiest_bytes)  # the first on a tie


def plan_round(contribution: Contribution, num_replicas: int) -> Exchange:
    """Return `plan_exchange` for a round of ``num_replicas`` contributions like this one."""
    return plan_exchange(
        contribution.codec,
        contribution.numel,
        num_replicas,
        contribution.extra_bytes,
        mean=contribution.mean,
        whole=contribution.whole,
    )


def data_parallel_bytes(numel: int, num_replicas: int, steps: int) -> int:
    """Return the bytes that a replica sends in ``steps`` data-parallel steps.

    Each step is a ring all-reduce of float32 gradients. Together they send ``steps * 2 * (M - 1) / M * 4 * numel``
    bytes, the least that any all-reduce can move.

    >>> data_parallel_bytes(1000, 4, 10)
    60000
    """
    return steps * 2 * (num_replicas - 1) * 4 * numel // num_replicas
