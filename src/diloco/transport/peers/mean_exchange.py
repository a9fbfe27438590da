"""The second half of a reduce-scatter: each owner encodes the mean of its slice, and all replicas decode it alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.algorithm import LARGEST_MEAN, Contribution, Exchange, encode_mean, largest_magnitude
from diloco.errors import CodecError
from diloco.transport.peers.round_messages import RoundMessages

__all__ = ["MeanExchange"]


@dataclass(frozen=True)
class _MeanPiece:
    """A piece of the mean, of values ``start`` to ``stop``, that its owner ``member`` sends."""

    member: int
    start: int
    stop: int
    buffer: Tensor
    work: Future[None]


class MeanExchange:
    """The exchange of means in one reduce-scatter.

    Args:
        plan: The owner of each slice, and the encoding of its mean.
        values: ``(numel,)`` float32; filled with the decoded mean, which is the same on all replicas.

    Raises:
        TransportError: A link has ended.
    """

    def __init__(
        self,
        contribution: Contribution,
        plan: Exchange,
        members: Sequence[int],
        messages: RoundMessages,
        values: Tensor,
    ) -> None:
        self._shards = dict(zip(members, plan.shards, strict=True))
        self.owned = self._shards[contribution.replica]  # the slice whose mean this rank sends
        self._unsent = deque(enumerate(messages.pieces(*self.owned, plan.mean.codec)))
        self._codec = plan.mean.codec
        self._messages = messages
        self._values = values
        self._incoming = [
            self._expect(member, start, stop, piece)
            for member in messages.links
            for piece, (start, stop) in enumerate(messages.pieces(*self._shards[member], self._codec))
        ]

    def send(self, stop: int) -> None:
        """Send the pieces of this rank's slice that end at ``stop`` or before it. Up to there ``values`` is the mean.

        So the others receive means while this rank still waits for the last contributions.

        Raises:
            TransportError: A link ended; the error names the replica.
        """
        while self._unsent and self._unsent[0][1][1] <= stop:
            piece, (start, end) = self._unsent.popleft()
            payload = encode_mean(self._values[start:end], self._codec)
            self._messages.send(self._messages.links, payload, piece, second=True)

    def receive(self) -> None:
        """Send what is left of this rank's slice, and receive the means of the others' slices.

        Raises:
            TransportError: A link ended; the error names the replica.
            CodecError: A replica, which the error names, sent an invalid payload, or a mean that is not finite or too
                large.
        """
        self.send(self.owned[1])
        for piece in self._incoming:
            self._messages.wait(piece.member, piece.work)
            values = self._values[piece.start : piece.stop]
            if not self._codec.exact:  # else it was received in place
                self._decode(piece, values)
            if not largest_magnitude(values) <= LARGEST_MEAN:
                words = f"replica {piece.member} sent a part of the mean that is not finite or too large"
                raise CodecError(words, replica=piece.member)

    def _decode(self, piece: _MeanPiece, values: Tensor) -> None:
        try:
            self._codec.validate(piece.buffer, len(values))
        except CodecError as error:
            words = f"the mean of replica {piece.member} was refused: {error}"
            raise CodecError(words, replica=piece.member) from error
        self._codec.decode(piece.buffer, len(values), out=values)

    def _expect(self, member: int, start: int, stop: int, piece: int) -> _MeanPiece:
        """Start receiving a piece of a mean. An exact one is received in place."""
        if self._codec.exact:
            buffer = self._values[start:stop].view(torch.uint8)
        else:
            num_bytes = self._codec.payload_bytes(stop - start)
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        return _MeanPiece(member, start, stop, buffer, self._messages.receive(member, buffer, piece, second=True))
