"""The mean of a stretch of values, encoded once by its owner and decoded by everybody alike, its owner included.

In a reduce-scatter each replica owns a stretch: it sums the contributions to it and sends their mean to all others.
With x the mean, Q the codec (encoded and decoded) and e what Q has lost of earlier means, starting at zero::

    send  Q(x + beta e);    e <- (x + beta e) - Q(x + beta e)

e belongs to the owner. It is a value that goes into a round and comes out of it: a round that is void leaves it as it
was, and where the next view cuts other stretches its parts go to their new owners.
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

Stretch = tuple[int, int]  # ``(start, stop)`` of some values of a fragment


@dataclass(frozen=True)
class MeanEncoding:
    """How the mean of a stretch travels from its owner to the others.

    Args:
        codec: Q; default: float32, which loses nothing.
        decay: beta, how much of what ``codec`` loses is added to the next mean, from 0 (nothing) to 1 (all of it).
        least_replicas: among fewer, means travel as they are.
        contribution_bytes: so they do where contributions take as many bytes a value, or more.

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
        """By a codec or its name; by the name "auto" it is int8 where that saves much and was measured to cost nothing:
        among 8 replicas or more whose contributions take less than the two bytes a value of the 16-bit floats."""
        if codec == "auto":
            return cls(Int8(), decay, AUTO_MEANS_FROM_REPLICAS, contribution_bytes=2.0)
        return cls(make_codec(codec) if isinstance(codec, str) else codec, decay)

    def among(self, num_replicas: int, contributions: Codec) -> MeanEncoding:
        """The encoding in effect in a round, alike for all in it.

        Args:
            num_replicas: members of the view of the round, whether their contributions count or not.
            contributions: what encodes them.

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
        """Whether owners keep what the codec loses."""
        return self.decay > 0 and not self.codec.exact

    def __str__(self) -> str:
        parameters = "".join(f" ({name} {value})" for name, value in self.codec.parameters().items())
        feedback = f", error feedback {self.decay:g}" if self.decay else ""
        among = f", from {self.least_replicas} replicas on" if self.least_replicas > 1 else ""
        return f"{self.codec.name}{parameters}{feedback}{among}"


PLAIN_MEAN = MeanEncoding()  # means as they are


@dataclass(frozen=True, eq=False)
class Residual:
    """What an owner has not sent yet of the means of a stretch."""

    start: int  # the first value of the stretch
    values: Tensor  # ``(n,)`` float32; never changed

    @property
    def stretch(self) -> Stretch:
        return self.start, self.start + self.values.numel()


def encode_mean(values: Tensor, residual: Tensor | None, encoding: MeanEncoding) -> tuple[Tensor, Tensor | None]:
    """Encode a mean, and replace it by what everybody decodes.

    Args:
        values: ``(n,)`` float32, the mean; afterwards what the payload decodes to.
        residual: ``(n,)`` float32, what was lost of earlier means; None: nothing is kept of them.

    Returns:
        The payload, ``(payload_bytes(n),)`` uint8, and the residual that is left, or None as before. With an exact
        codec the payload shares its memory with ``values``, and nothing is lost.

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
        kept = residual * encoding.decay  # not fused with the sum, or bits would depend on where stretches are cut
        left = encode_with_residual(codec, values, kept, 1.0, payload)
    codec.decode(payload, numel, out=values)
    return payload, left


def encode_all_means(
    values: Tensor, held: Sequence[Residual], shards: Sequence[Stretch], encoding: MeanEncoding
) -> Sequence[Residual]:
    """What the owners of all stretches do, at once: stretches are whole blocks of the codec.

    Args:
        values: ``(numel,)`` float32, the mean; afterwards what everybody decodes.
        held: what the replicas hold of earlier means.
        shards: the stretch of each owner.

    Returns:
        The residual of each owner, in the order of ``shards``; nothing where nothing is kept.
    """
    residual = collected(held, (0, values.numel()), values.device) if encoding.keeps_residual else None
    _, left = encode_mean(values, residual, encoding)
    return [] if left is None else [Residual(start, left[start:stop].clone()) for start, stop in shards]


def collected(residuals: Iterable[Residual], stretch: Stretch, device: torch.device) -> Tensor:
    """What ``residuals`` hold of a stretch, ``(stop - start,)`` float32 on ``device``; 0 where they hold nothing.

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
    """What two stretches have in common; of length 0 if nothing.

    >>> overlap((0, 10), (5, 20)), overlap((0, 3), (7, 9))
    ((5, 10), (7, 7))
    """
    start = max(first[0], second[0])
    return start, max(start, min(first[1], second[1]))


def lost_words(held: Iterable[Stretch], numel: int) -> str:
    """That some of what codecs have lost of earlier means will never be sent, since its owner is gone; or "".

    Args:
        held: the stretches whose residuals the members of a round hold; all empty before the first mean was encoded.

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
