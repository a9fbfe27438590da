"""How many bytes a round moves, and by which pattern: the cheaper of two, both with the same result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diloco.algorithm.codec import Codec

__all__ = ["Exchange", "data_parallel_bytes", "plan_exchange"]


@dataclass(frozen=True)
class Exchange:
    """What one replica sends and receives in one round; both directions carry the same.

    Attributes:
        pattern: ``all-gather``: everybody gets every payload and sums for itself; ``reduce-scatter``: everybody sums
            one stretch of the values and sends the float32 mean of it to all others.
        sent_bytes: by one replica, payloads only.
        received_bytes: by one replica.
    """

    pattern: Literal["all-gather", "reduce-scatter"]
    sent_bytes: int
    received_bytes: int


def plan_exchange(codec: Codec, numel: int, num_replicas: int, extra_bytes: int = 0) -> Exchange:
    """The cheaper pattern for ``numel`` values between ``num_replicas`` replicas.

    All-gather moves ``(M - 1) * n`` bytes each way, with n the payload; reduce-scatter followed by an all-gather of the
    means moves ``(M - 1) * (n / M + 4 * numel / M)``. The means stay float32: quantising them again would be another
    algorithm. On a tie all-gather is taken, which needs one trip instead of two.

    Args:
        codec: encodes the contributions.
        numel: values in the round.
        num_replicas: M.
        extra_bytes: what travels beside the payload of each replica (model buffers), always all-gathered.

    >>> from diloco.algorithm.codec import make_codec
    >>> plan_exchange(make_codec("float32"), 1000, 4)
    Exchange(pattern='reduce-scatter', sent_bytes=6000, received_bytes=6000)
    >>> plan_exchange(make_codec("fp4"), 1024, 4).pattern
    'all-gather'
    """
    others = num_replicas - 1
    shard = -(-numel // num_replicas)
    gather = others * codec.payload_bytes(numel)
    scatter = others * (codec.payload_bytes(shard) + 4 * shard)
    extra = others * extra_bytes
    if gather <= scatter:
        return Exchange("all-gather", gather + extra, gather + extra)
    return Exchange("reduce-scatter", scatter + extra, scatter + extra)


def data_parallel_bytes(numel: int, num_replicas: int, steps: int) -> int:
    """What one replica sends in ``steps`` data-parallel steps: a ring all-reduce of float32 gradients at each.

    ``steps * 2 * (M - 1) / M * 4 * numel`` bytes, the least that any all-reduce can move.

    >>> data_parallel_bytes(1000, 4, 10)
    60000
    """
    return steps * 2 * (num_replicas - 1) * 4 * numel // num_replicas
