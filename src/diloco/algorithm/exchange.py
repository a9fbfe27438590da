"""How many bytes a round moves, and by which pattern: the cheaper of two, both with the same result."""

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
    """What every replica sends and receives in one round.

    A replica is named by its position: its index among the members of the view, from 0.
    """

    # ``all-gather``: everybody gets every payload and sums for itself; ``reduce-scatter``: the replica at position i
    # owns stretch i of the values: it sums it and sends the mean of it to all others
    pattern: Literal["all-gather", "reduce-scatter"]
    # ``(start, stop)`` of the stretch of each position, as `shard_bounds` cuts them. All-gather has them, too, and
    # makes no use of them.
    shards: tuple[tuple[int, int], ...]
    mean: MeanEncoding  # how the means of a reduce-scatter travel among so many replicas
    sent: tuple[int, ...]  # bytes by position; payloads, means and what travels beside them
    received: tuple[int, ...]  # bytes by position

    def sent_bytes(self, position: int) -> int:
        """Bytes that the replica at ``position`` sends in this round."""
        return self.sent[position]

    def received_bytes(self, position: int) -> int:
        """Bytes that the replica at ``position`` receives in this round."""
        return self.received[position]

    @property
    def keeps_residual(self) -> bool:
        """Whether owners of stretches keep what the encoding of their means loses."""
        return self.pattern == "reduce-scatter" and self.mean.keeps_residual

    @property
    def mean_bytes(self) -> float:
        """Bytes each way, mean over replicas: what is sent is received."""
        return sum(self.sent) / len(self.sent)

    @property
    def busiest_bytes(self) -> int:
        """The most that one replica moves in one direction."""
        return max(*self.sent, *self.received)


def shard_bounds(numel: int, num_replicas: int, block_size: int) -> tuple[tuple[int, int], ...]:
    """``(start, stop)`` of ``num_replicas`` stretches that follow each other and together are all ``numel`` values.

    They are cut between blocks and no two differ by more than one block. With fewer blocks than replicas some are
    empty. The last stretch holds the last, perhaps shorter block and is one of those with the most blocks; so no other
    cut between blocks has a shorter longest stretch.

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
    """The pattern for ``numel`` values between ``num_replicas`` replicas that asks less of the busiest of them.

    With n the payload and m the encoded mean of all values, all-gather moves ``(M - 1) * n`` bytes each way;
    reduce-scatter followed by an all-gather of the means moves about ``(M - 1) / M * (n + m)``, counted here stretch by
    stretch. On a tie all-gather is taken, which needs one trip instead of two.

    Args:
        codec: encodes the contributions.
        numel: values in the round.
        num_replicas: M.
        extra_bytes: what travels beside the payload of each replica (model buffers), always all-gathered.
        mean: how means are encoded, where it applies to so many replicas and this codec; stretches are cut between the
            blocks of both codecs.
        whole: whether every replica needs whole contributions, as to clip them by their norms: then it is all-gather.

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
    """`plan_exchange` for a round of ``num_replicas`` contributions like this one: the same for each of them."""
    return plan_exchange(
        contribution.codec,
        contribution.numel,
        num_replicas,
        contribution.extra_bytes,
        mean=contribution.mean,
        whole=contribution.whole,
    )


def data_parallel_bytes(numel: int, num_replicas: int, steps: int) -> int:
    """What one replica sends in ``steps`` data-parallel steps: a ring all-reduce of float32 gradients at each.

    ``steps * 2 * (M - 1) / M * 4 * numel`` bytes, the least that any all-reduce can move.

    >>> data_parallel_bytes(1000, 4, 10)
    60000
    """
    return steps * 2 * (num_replicas - 1) * 4 * numel // num_replicas
