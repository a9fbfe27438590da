"""The second half of a reduce-scatter: each owner encodes the mean of its slice once, and all replicas decode it alike.

If the plan cuts the values differently than the last one, after a change of the view or of the uplinks, the owners of
that one first send the residuals of earlier encoded means to the replicas that own the values now.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.algorithm import (
    LARGEST_MEAN,
    PLAIN_MEAN,
    Contribution,
    Exchange,
    Residual,
    ValueRange,
    collected,
    encode_mean,
    largest_magnitude,
    overlap,
)
from diloco.errors import CodecError
from diloco.transport.peers.round_messages import RoundMessages

__all__ = ["MeanExchange"]

_RESIDUALS = 1 << 16  # piece number of the first piece of a residual; means have lower numbers


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
        self._encoding = plan.mean
        self._codec = plan.mean.codec
        self._mine = contribution.residual
        self._keeps = plan.keeps_residual
        self._left: Tensor | None = None  # the residual of this rank's slice, replaced by the new one piece by piece
        self._messages = messages
        self._values = values
        self._incoming_residuals: list[tuple[int, Residual, list[Future[None]]]] = []
        self._incoming = [
            self._expect(member, start, stop, piece)
            for member in messages.links
            for piece, (start, stop) in enumerate(messages.pieces(*self._shards[member], self._codec))
        ]

    def send_residuals(self, held: Mapping[int, ValueRange]) -> None:
        """Send the residuals that this rank holds to the owners of their values, and start receiving its own.

        There are such residuals only if the plan has changed. Otherwise each rank holds those of its own values.

        Args:
            held: replica -> the slice of values whose residual it holds, for all members.
        """
        for member in self._messages.links if self._keeps else ():
            if self._mine is not None:
                for piece, (a, b) in self._residual_pieces(overlap(self._mine.value_range, self._shards[member])):
                    values = self._mine.values[a - self._mine.start : b - self._mine.start]
                    self._messages.send((member,), values.cpu().view(torch.uint8), piece, second=True)
            start, stop = overlap(held[member], self.owned)
            buffer = torch.zeros(stop - start, dtype=torch.float32, device="cpu")
            works = [
                self._messages.receive(member, buffer[a - start : b - start].view(torch.uint8), piece, second=True)
                for piece, (a, b) in self._residual_pieces((start, stop))
            ]
            self._incoming_residuals.append((member, Residual(start, buffer), works))

    def send(self, stop: int) -> None:
        """Send the pieces of this rank's slice that end at ``stop`` or before it. Up to there ``values`` is the mean.

        So the others receive means while this rank still waits for the last contributions.

        Raises:
            TransportError: A link ended; the error names the replica.
            CodecError: A replica, which the error names, sent a residual that is not finite.
        """
        if self._keeps and self._left is None:
            self._left = self._residual()
        self._send(stop)

    def receive(self) -> Residual | None:
        """Send what is left of this rank's slice, and receive the means of the others' slices.

        Returns:
            The residual of this rank's slice, this round included, or None if residuals are not kept.

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
        return None if self._left is None else Residual(self.owned[0], self._left)

    def drain(self) -> None:
        """Complete the exchange of a void round: send zeros for what was not sent, and receive what others send."""
        if self._unsent:
            _, (start, _) = self._unsent[0]
            self._values[start : self.owned[1]] = 0.0
            self._left = None
            self._send(self.owned[1])
        for piece in self._incoming:
            self._messages.wait(piece.member, piece.work)
        for member, _, works in self._incoming_residuals:
            for work in works:
                self._messages.wait(member, work)

    def _send(self, end: int) -> None:
        """Encode and send the next pieces, up to the value ``end``."""
        first = self.owned[0]
        while self._unsent and self._unsent[0][1][1] <= end:
            piece, (start, stop) = self._unsent.popleft()
            lost = None if self._left is None else self._left[start - first : stop - first]
            payload, left = encode_mean(self._values[start:stop], lost, self._encoding)
            if lost is not None and left is not None:
                lost.copy_(left)
            self._messages.send(self._messages.links, payload, piece, second=True)

    def _residual(self) -> Tensor | None:
        """Wait for the residual of this rank's slice and return it, or None if residuals are not kept."""
        if not self._keeps:
            return None
        held = [] if self._mine is None else [self._mine]
        for member, residual, works in self._incoming_residuals:
            for work in works:
                self._messages.wait(member, work)
            if not math.isfinite(largest_magnitude(residual.values)):
                words = f"the residual of earlier means that replica {member} sent is not finite. It was refused."
                raise CodecError(words, replica=member)
            held.append(residual)
        return collected(held, self.owned, self._values.device)

    def _decode(self, piece: _MeanPiece, values: Tensor) -> None:
        try:
            self._codec.validate(piece.buffer, len(values))
        except CodecError as error:
            words = f"the mean of replica {piece.member} was refused: {error}"
            raise CodecError(words, replica=piece.member) from error
        self._codec.decode(piece.buffer, len(values), out=values)

    def _residual_pieces(self, value_range: ValueRange) -> enumerate[ValueRange]:
        return enumerate(self._messages.pieces(*value_range, PLAIN_MEAN.codec), _RESIDUALS)

    def _expect(self, member: int, start: int, stop: int, piece: int) -> _MeanPiece:
        """Start receiving a piece of a mean. An exact one is received in place."""
        if self._codec.exact:
            buffer = self._values[start:stop].view(torch.uint8)
        else:
            num_bytes = self._codec.payload_bytes(stop - start)
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        return _MeanPiece(member, start, stop, buffer, self._messages.receive(member, buffer, piece, second=True))
