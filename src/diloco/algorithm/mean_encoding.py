"""Encoding of the mean of a range of values: its owner encodes it once, and all replicas decode the same bytes.

In a reduce-scatter each replica owns a range of the values. It sums the contributions to that range and sends their
encoded mean to all others; it also decodes that mean itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diloco.algorithm.codec.base import Codec, make_codec
from diloco.algorithm.codec.casts import Float32
from diloco.algorithm.codec.integers import Int8
from diloco.algorithm.settings import AUTO_MEANS_FROM_REPLICAS

__all__ = ["PLAIN_MEAN", "MeanEncoding", "encode_mean"]


@dataclass(frozen=True)
class MeanEncoding:
    """The encoding of the mean that the owner of a range sends to the other replicas.

    Args:
        codec: The codec; default: float32, which is exact.
        least_replicas: Among fewer replicas, means are sent as float32.
        contribution_bytes: Means are also sent as float32 if contributions take at least this many bytes per value.
    """

    codec: Codec = field(default_factory=Float32)
    least_replicas: int = 1
    contribution_bytes: float = math.inf

    @classmethod
    def of(cls, codec: Codec | str) -> MeanEncoding:
        """Return the encoding for a codec, its name, or "auto".

        "auto" is int8 among at least 8 replicas whose contributions take less than 2 bytes per value, where it saves
        much and cost nothing in measurements; otherwise float32.
        """
        if codec == "auto":
            return cls(Int8(), AUTO_MEANS_FROM_REPLICAS, contribution_bytes=2.0)
        return cls(make_codec(codec) if isinstance(codec, str) else codec)

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
        return MeanEncoding(self.codec) if coarse and num_replicas >= self.least_replicas else PLAIN_MEAN

    def __str__(self) -> str:
        parameters = "".join(f" ({name} {value})" for name, value in self.codec.parameters().items())
        among = f", from {self.least_replicas} replicas on" if self.least_replicas > 1 else ""
        return f"{self.codec.name}{parameters}{among}"


PLAIN_MEAN = MeanEncoding()  # float32 means


def encode_mean(values: Tensor, codec: Codec) -> Tensor:
    """Encode a mean and replace it by the values that all replicas decode.

    Args:
        values: ``(n,)`` float32, the mean of whole blocks of ``codec``. Overwritten with the decoded payload.
        codec: The codec of means.

    Returns:
        The payload, ``(payload_bytes(n),)`` uint8. With an exact codec it shares memory with ``values``.

    >>> from diloco.algorithm.codec.fp4 import FP4
    >>> mean = torch.tensor([1.0, 0.7])
    >>> payload = encode_mean(mean, FP4())
    >>> mean
    tensor([1.0000, 0.5000])
    """
    if codec.exact:
        return values.view(torch.uint8)
    payload = codec.encode(values)
    codec.decode(payload, values.numel(), out=values)
    return payload
