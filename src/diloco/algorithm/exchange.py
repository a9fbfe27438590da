"""The exchange pattern of a round, the cheaper of two with equal results, and the bytes that it moves.

In a reduce-scatter each replica owns a range of the values. It sums the contributions to that range and sends their
mean to all others, perhaps encoded; then it decodes the same bytes as they do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from diloco.algorithm.codec.base import Codec, Float32, make_codec
from diloco.algorithm.codec.blockwise import FP4, Int8
from diloco.algorithm.settings import AUTO_MEANS_FROM_REPLICAS

__all__ = [
    "PLAIN_MEAN",
    "UNKNOWN_UPLINK",
    "Exchange",
    "MeanEncoding",
    "Uplink",
    "data_parallel_bytes",
    "encode_mean",
    "plan_exchange",
]

_WORTH_IT = 0.8  # what a slow uplink changes must take at most this part of the time, as measured rates are not exact

_AUTO: tuple[Codec, ...] = Float32(), Int8(), FP4()
MEASURED_COSTS = {"int8": "0.01 %", "fp4": "0.23 %"}
"""The largest change of the loss by encoded means, in runs of 4 to 16 replicas with contributions in fp4."""


@dataclass(frozen=True)
class MeanEncoding:
    """How the owner of a range encodes the mean that it sends to the other replicas.

    Args:
        codec: The codec; default: float32, which is exact.
        auto: Whether the codec follows from the number of replicas, their contributions and their uplinks instead.
    """

    codec: Codec = field(default_factory=Float32)
    auto: bool = False

    @classmethod
    def of(cls, codec: Codec | str) -> MeanEncoding:
        """Return the encoding for a codec, its name, or "auto"; see `choices`."""
        if codec == "auto":
            return cls(auto=True)
        return cls(make_codec(codec) if isinstance(codec, str) else codec)

    def choices(self, num_replicas: int, contributions: Codec) -> tuple[Codec, ...]:
        """Return the codecs in question: the one for uplinks that are fast enough, then coarser ones.

        "auto" begins with int8 among at least 8 replicas, where it saves much and cost nothing in measurements, and
        with float32 among fewer. Means are never coarser than contributions, and float32 if these take at least 2 bytes
        per value.

        >>> auto = MeanEncoding.of("auto")
        >>> [[each.name for each in auto.choices(number, make_codec("fp4"))] for number in (7, 8)]
        [['float32', 'int8', 'fp4'], ['int8', 'fp4']]
        >>> [[each.name for each in auto.choices(8, make_codec(name))] for name in ("int8", "bfloat16")]
        [['int8'], ['float32']]
        """
        if not self.auto:
            return (self.codec,)
        block = contributions.block_size
        size = contributions.payload_bytes(block) / block
        codecs = _AUTO[: 1 + (size < 2) + (size < 1)]
        return codecs[1:] if len(codecs) > 1 and num_replicas >= AUTO_MEANS_FROM_REPLICAS else codecs

    def __str__(self) -> str:
        parameters = "".join(f" ({name} {value})" for name, value in self.codec.parameters().items())
        return "auto" if self.auto else f"{self.codec.name}{parameters}"


PLAIN_MEAN = MeanEncoding()  # float32 means


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

    bits_per_s: int = 0  # the highest rate measured; 0: none
    window_s: float = math.inf  # how long a round may take before its training stands still for more than a little

    def late_s(self, sent_bytes: int) -> float:
        """Return by how much longer than the window it takes to send so many bytes; 0 if it does not, or is unknown."""
        late_s = 8 * sent_bytes / self.bits_per_s - self.window_s if self.bits_per_s else 0.0
        return late_s if late_s > 0 else 0.0  # not `max`: a peer may send NaN


UNKNOWN_UPLINK = Uplink()


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
    exactly for each range. On a tie the all-gather is chosen, which needs one trip instead of two. It is also chosen if
    replicas need ``whole`` contributions, e.g. to clip them by norm.

    Of several codecs of means it is the first with which every uplink sends its part within its window. If there is
    none, it is the first that saves all but a fifth of what can be saved of the time beyond.

    Args:
        extra_bytes: The bytes that each replica sends in addition to its payload (model buffers), always all-gathered.
        mean: The encoding of means. Ranges consist of whole blocks of both codecs.
        uplinks: What is known about the uplink of each replica; empty: nothing.

    >>> plan = plan_exchange(make_codec("float16"), 1002, 4)
    >>> plan.pattern, plan.shards
    ('reduce-scatter', ((0, 250), (250, 501), (501, 751), (751, 1002)))
    >>> plan.sent, plan.received
    ((4504, 4514, 4504, 4514), (4508, 4510, 4508, 4510))
    >>> home = [Uplink(15_000_000, window_s=2.6)] * 4
    >>> plan_exchange(make_codec("fp4"), 6_000_000, 4, mean=MeanEncoding.of("auto"), uplinks=home).mean.name
    'fp4'
    """
    plans: list[Exchange] = []
    late_s: list[float] = []
    for each in mean.choices(num_replicas, codec):
        plans.append(_cheaper(codec, each, numel, num_replicas, extra_bytes, whole=whole))
        late_s.append(max((link.late_s(sent) for link, sent in zip(uplinks, plans[-1].sent, strict=False)), default=0))
        if late_s[-1] == 0:
            break
    chosen = next(index for index, late in enumerate(late_s) if late * _WORTH_IT <= min(late_s))
    if chosen == 0:
        return plans[0]
    name, usual = plans[chosen].mean.name, plans[0].mean.name
    words = (
        f"the uplinks can't carry a round with means in {usual} within its overlap, so means are sent in {name}. In "
        f"measurements this changed the loss by at most {MEASURED_COSTS[name]}. The codec of means can also be set"
    )
    return replace(plans[chosen], choice=words)


def _cheaper(codec: Codec, mean: Codec, numel: int, num_replicas: int, extra_bytes: int, *, whole: bool) -> Exchange:
    """Return the cheaper pattern with means in ``mean``; see `plan_exchange`."""
    others, block_size = num_replicas - 1, math.lcm(codec.block_size, mean.block_size)
    # Ranges differ by at most one block. The last, with the perhaps shorter last block, is one of the longest, so no
    # other division has a shorter longest range. With fewer blocks than replicas some are empty.
    blocks = -(-numel // block_size)
    ends = [min(position * blocks // num_replicas * block_size, numel) for position in range(num_replicas + 1)]
    shards = tuple(pairwise(ends))
    gathered = (others * (codec.payload_bytes(numel) + extra_bytes),) * num_replicas
    gather = Exchange("all-gather", shards, mean, gathered, gathered)
    payloads = [codec.payload_bytes(stop - start) for start, stop in shards]
    means = [mean.payload_bytes(stop - start) for start, stop in shards]
    both = list(zip(payloads, means, strict=True))
    scatter = Exchange(
        "reduce-scatter",
        shards,
        mean,
        sent=tuple(sum(payloads) - payload + others * (encoded + extra_bytes) for payload, encoded in both),
        received=tuple(others * (payload + extra_bytes) + sum(means) - encoded for payload, encoded in both),
    )
    return gather if whole or gather.busiest_bytes <= scatter.busiest_bytes else scatter


def data_parallel_bytes(numel: int, num_replicas: int, steps: int) -> int:
    """Return the bytes that a replica sends in ``steps`` data-parallel steps.

    Each step is a ring all-reduce of float32 gradients. Together they send ``steps * 2 * (M - 1) / M * 4 * numel``
    bytes, the least that any all-reduce can move.

    >>> data_parallel_bytes(1000, 4, 10)
    60000
    """
    return steps * 2 * (num_replicas - 1) * 4 * numel // num_replicas
