"""Encoding of the mean of a range of values: its owner encodes it once, and all replicas decode the same bytes.

In a reduce-scatter each replica owns a range of the values. It sums the contributions to that range and sends their
encoded mean to all others; it also decodes that mean itself. With x the mean, Q the codec (encoding followed by
decoding) and e the residual of earlier means, starting at zero::

    send  Q(x + beta e);    e <- (x + beta e) - Q(x + beta e)

The owner keeps e. A round takes e as input and returns the new e, so a void round leaves it unchanged. If the next view
divides the values otherwise, the parts of e move to their new owners.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diloco.algorithm.codec import Codec, Float32, Int8, make_codec
from diloco.algorithm.error_feedback import encode_with_residual
from diloco.algorithm.memory import empty
from diloco.algorithm.numbers import check_number
from diloco.algorithm.settings import AUTO_MEANS_FROM_REPLICAS

__all__ = [
    "PLAIN_MEAN",
    "MeanEncoding",
    "Residual",
    "Stretch",
    "collected",
    "encode_all_means",
    "encode_mean",
    "lost_words",
    "overlap",
]

Stretch = tuple[int, int]  # the range ``(start, stop)`` of some values of a fragment


@dataclass(frozen=True)
class MeanEncoding:
    """The encoding of the mean that the owner of a range sends to the other replicas.

    Args:
        codec: Q; default: float32, which is exact.
        decay: beta, the fraction of the quantisation error that is added to the next mean, from 0 to 1.
        least_replicas: Among fewer replicas, means are sent as float32.
        contribution_bytes: Means are also sent as float32 if contributions take at least this many bytes per value.

    Raises:
        ConfigurationError: if ``decay`` is out of range.
    """

    codec: Codec = field(default_factory=Float32)
    decay: float = 0.0
    least_replicas: int = 1
    contribution_bytes: float = math.inf

    def __post_init__(self) -> None:
        check_number("the decay of the mean's error feedback", self.decay, 0, 1)

    @classmethod
    def of(cls, codec: Codec | str, decay: float = 0.0) -> MeanEncoding:
        """Return the encoding for a codec, its name, or "auto".

        "auto" is int8 among at least 8 replicas whose contributions take less than 2 bytes per value, where it saves
        much and cost nothing in measurements; otherwise float32.
        """
        if codec == "auto":
            return cls(Int8(), decay, AUTO_MEANS_FROM_REPLICAS, contribution_bytes=2.0)
        return cls(make_codec(codec) if isinstance(codec, str) else codec, decay)

    def among(self, num_replicas: int, contributions: Codec) -> MeanEncoding:
        """Return the encoding in effect in a round, the same for all its members.

        Args:
            num_replicas: The number of members of the round's view, including those whose contributions do not count.
            contributions: The codec of the contributions.

        >>> auto = MeanEncoding.of("auto")
        >>> [str(auto.among(number, make_codec("fp4"))) for number in (7, 8)]
        ['float32', 'int8 (block_size 256)']
        >>> [str(auto.among(8, make_codec(name))) for name in ("int8", "bfloat16")]
        ['int8 (block_size 256)', 'float32']
        """
        block = contributions.block_size
        coarse = contributions.payload_bytes(block) < self.contribution_bytes * block
        return MeanEncoding(self.codec, self.decay) if coarse and num_replicas >= self.least_replicas else PLAIN_MEAN

    @property
    def keeps_residual(self) -> bool:
        """Whether owners keep the quantisation error."""
        return self.decay > 0 and not self.codec.exact

    def __str__(self) -> str:
        parameters = "".join(f" ({name} {value})" for name, value in self.codec.parameters().items())
        feedback = f", error feedback {self.decay:g}" if self.decay else ""
        among = f", from {self.least_replicas} replicas on" if self.least_replicas > 1 else ""
        return f"{self.codec.name}{parameters}{feedback}{among}"


PLAIN_MEAN = MeanEncoding()  # float32 means


@dataclass(frozen=True, eq=False)
class Residual:
    """The residual that an owner keeps of the means of a range."""

    start: int  # the first value of the range
    values: Tensor  # ``(n,)`` float32, never changed

    @property
    def stretch(self) -> Stretch:
        return self.start, self.start + self.values.numel()


def encode_mean(values: Tensor, residual: Tensor | None, encoding: MeanEncoding) -> tuple[Tensor, Tensor | None]:
    """Encode a mean and replace it by the values that all replicas decode.

    Args:
        values: ``(n,)`` float32, the mean. Overwritten with the decoded payload.
        residual: ``(n,)`` float32, the residual of earlier means; None if no residual is kept.
        encoding: The codec and the decay.

    Returns:
        The payload, ``(payload_bytes(n),)`` uint8, and the new residual, or None if no residual is kept. With an exact
        codec the payload shares memory with ``values`` and the residual is None.

    >>> from diloco.algorithm.codec import FP4
    >>> mean = torch.tensor([1.0, 0.7])
    >>> payload, residual = encode_mean(mean, torch.zeros(2), MeanEncoding(FP4(), decay=1.0))
    >>> mean, residual
    (tensor([1.0000, 0.5000]), tensor([0.0000, 0.2000]))
    """
    codec, numel = encoding.codec, values.numel()
    if codec.exact:
        return values.view(torch.uint8), None
    if residual is None:
        payload, left = codec.encode(values), None
    else:
        payload = empty(codec.payload_bytes(numel), torch.uint8, values.device)
        kept = residual * encoding.decay  # not fused with the sum, or the bits would depend on how ranges are cut
        left = encode_with_residual(codec, values, kept, 1.0, payload)
    codec.decode(payload, numel, out=values)
    return payload, left


def encode_all_means(
    values: Tensor, held: Sequence[Residual], shards: Sequence[Stretch], encoding: MeanEncoding
) -> Sequence[Residual]:
    """Encode a mean as the owners of all ranges do together.

    Args:
        values: ``(numel,)`` float32, the mean. Overwritten with the values that all replicas decode.
        held: The residuals of the replicas.
        shards: The range of each owner. Ranges consist of whole blocks of the codec.
        encoding: The codec and the decay.

    Returns:
        The new residual of each owner, in the order of ``shards``; empty if no residual is kept.
    """
    residual = collected(held, (0, values.numel()), values.device) if encoding.keeps_residual else None
    _, left = encode_mean(values, residual, encoding)
    return [] if left is None else [Residual(start, left[start:stop].clone()) for start, stop in shards]


def collected(residuals: Iterable[Residual], stretch: Stretch, device: torch.device) -> Tensor:
    """Return the part of ``residuals`` in a range, ``(stop - start,)`` float32 on ``device``, 0 where there is none.

    >>> held = [Residual(0, torch.tensor([1.0, 2.0])), Residual(3, torch.tensor([4.0, 5.0]))]
    >>> collected(held, (1, 4), torch.device("cpu"))
    tensor([2., 0., 4.])
    """
    start, stop = stretch
    values = torch.zeros(stop - start, dtype=torch.float32, device=device)
    for each in residuals:
        low, high = overlap(each.stretch, stretch)
        values[low - start : high - start] += each.values[low - each.start : high - each.start].to(device)
    return values


def overlap(first: Stretch, second: Stretch) -> Stretch:
    """Return the intersection of two ranges; it has length 0 if they are disjoint.

    >>> overlap((0, 10), (5, 20)), overlap((0, 3), (7, 9))
    ((5, 10), (7, 7))
    """
    start = max(first[0], second[0])
    return start, max(start, min(first[1], second[1]))


def lost_words(held: Iterable[Stretch], numel: int) -> str:
    """Report that part of the residual of earlier means is lost because its owner has left; "" if none is.

    Args:
        held: The ranges whose residuals the members of a round hold; all empty before the first mean is encoded.
        numel: The number of values of the fragment.

    >>> lost_words([(0, 10), (30, 40)], 40)
    'the residual of the mean of 20 of 40 values is lost with its owner'
    >>> lost_words([(0, 10), (10, 40)], 40), lost_words([(0, 0), (20, 20)], 40)
    ('', '')
    """
    covered = end = 0
    for start, stop in sorted(held):
        covered += max(0, stop - max(start, end))
        end = max(end, stop)
    if covered in (0, numel):
        return ""
    return f"the residual of the mean of {numel - covered} of {numel} values is lost with its owner"
