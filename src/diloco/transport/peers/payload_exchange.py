"""Moving the payloads of one round and summing them as they come in: the same mean on every replica, to the bit.

Payloads travel in pieces that are cut at block boundaries, so that each can be decoded and added on its own. Pieces
take turns on the streams of a link. The sum of every value is taken in ascending order of replicas, whatever arrives
first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from diloco.algorithm.averaging import Contribution, Mean, RoundId
from diloco.algorithm.clipping import scale_factors, vector_norm
from diloco.algorithm.codec import Codec
from diloco.algorithm.digest import digest_tensors
from diloco.errors import CodecError, TransportError
from diloco.protocol.actions import GiveVerdict, StartExchange
from diloco.protocol.events import Computed, Event, ExchangeEnded
from diloco.transport.peers.data_link import DataLink, Work
from diloco.transport.peers.payload_links import SendQueue

__all__ = ["PayloadExchange", "message_tag"]

_LEAST_PIECES, _LEAST_PIECE_BYTES = 16, 1 << 14
"""A payload is cut into so many pieces at least, so that each of many streams has a part of it, unless they would be
smaller than what a connection sends at once after a pause."""

_EXTRAS = (1 << 16) - 1  # the piece number under which model buffers travel


class PayloadExchange:
    """One round's payloads between this rank and its peers.

    Args:
        started: the contribution, its view, and how payloads travel.
        queue: paces what is sent.
        piece_bytes: about how large a piece is at most.

    Attributes:
        verdict: what to sum, once it is known.
    """

    def __init__(
        self,
        started: StartExchange,
        queue: SendQueue,
        piece_bytes: int,
    ) -> None:
        self.contribution, self.plan = started.contribution, started.plan
        self.members = started.view.members
        self.me = self.members.index(started.contribution.replica)
        self.links: Mapping[int, DataLink] = {}
        self.verdict: Future[GiveVerdict] = Future()
        self._view_id = started.view.id
        self._queue = queue
        self._piece_bytes = piece_bytes
        self._sends: list[Work] = []
        self._incoming: dict[int, list[tuple[Tensor, Work]]] = {}
        self._arrived: set[tuple[int, int]] = set()
        self._extras: dict[int, tuple[Tensor, Work]] = {}
        self._means: list[tuple[int, Work]] = []
        self.values = torch.zeros(0, dtype=torch.float32)

    def run(self, links: Future[Mapping[int, DataLink]]) -> Iterator[Event]:
        """Move the payloads, for which this takes as long as it takes; what comes of it, as it comes.

        Args:
            links: replica -> the way to it, for all members but me, once they stand.
        """
        round_id = self.contribution.round
        try:
            self.start(links.result())
            given = self.verdict.result()
            if given.verdict.void:
                self.drain()
            else:
                mean = self.reduce(given.weights, given.verdict.contributors)
                yield Computed(self._view_id, round_id, mean, digest_of(mean))
            self.finish()
            yield ExchangeEnded(self._view_id, round_id)
        except TransportError as error:
            yield ExchangeEnded(self._view_id, round_id, str(error), link_broken=True)
        except Exception as error:  # whatever it is, the others are not to wait for this rank's vote
            yield ExchangeEnded(self._view_id, round_id, (str(error) or type(error).__name__).splitlines()[0])

    def start(self, links: Mapping[int, DataLink]) -> None:
        """Make room for what is to come, and send what is mine.

        Raises:
            TransportError: if a link has ended.
        """
        self.links, self.values = links, torch.zeros(self.contribution.numel, dtype=torch.float32)
        codec, numel = self.contribution.codec, self.contribution.numel
        mine = self._mine()
        for member, link in self.links.items():
            self._incoming[member] = [
                self._receive(link, torch.empty(codec.payload_bytes(b - a), dtype=torch.uint8), piece)
                for piece, (a, b) in enumerate(_stretches(*mine, codec, self._piece_bytes))
            ]
            room = torch.empty(self.contribution.extra_bytes, dtype=torch.uint8)
            if len(room):
                self._extras[member] = self._receive(link, room, _EXTRAS)
        if self.plan.pattern == "reduce-scatter":
            for index, member in enumerate(self.members):
                if member in self.links:
                    for piece, (a, b) in enumerate(_floats(*self.plan.shards[index], self._piece_bytes)):
                        _, work = self._receive(self.links[member], self.values[a:b], piece, second=True)
                        self._means.append((member, work))
        extras = _extras_of(self.contribution)
        wanted = {member: self._wanted_by(index) for index, member in enumerate(self.members) if member in self.links}
        plans = {
            member: list(enumerate(_stretches(*bounds, codec, self._piece_bytes))) for member, bounds in wanted.items()
        }
        # Peers take turns, piece by piece, so that all of them can begin to sum; each piece is cut once.
        for row in itertools.zip_longest(*plans.values()):
            cut: dict[tuple[int, int], Tensor] = {}
            for member, planned in zip(plans, row, strict=True):
                if planned is not None:
                    piece, (a, b) = planned
                    if (a, b) not in cut:
                        cut[a, b] = codec.cut(self.contribution.payload, numel, a, b)
                    self._send(self.links[member], cut[a, b], piece)
        if len(extras):
            for link in self.links.values():
                self._send(link, extras, _EXTRAS)

    def reduce(self, weights: Mapping[int, float], contributors: Sequence[int]) -> Mean:
        """The mean over ``contributors``; ``weights`` has theirs.

        Raises:
            TransportError: if a link ended; it names the replica.
            CodecError: if something came in that no encoder writes; it names the replica.
        """
        codec, clips = self.contribution.codec, self.contribution.clipping.active
        total = sum(weights[member] for member in contributors)
        factors = self._scale_factors(contributors) if clips else {}
        for piece, (a, b) in enumerate(_stretches(*self._mine(), codec, self._piece_bytes)):
            for member in self.members:
                payload = self._piece(member, piece, a, b)
                if member in contributors:
                    if not clips:  # else they were checked before their norms were taken
                        self._check(member, payload, b - a)
                    codec.accumulate(payload, self.values[a:b], weights[member] * factors.get(member, 1.0))
            self.values[a:b].div_(total)
        self._share_means()
        buffers, integers = self._reduce_extras(weights, contributors, total)
        return Mean(
            values=self.values,
            contributors=tuple(contributors),
            weight=total,
            buffers=buffers,
            integers=integers,
            clipped=tuple(factors),
        )

    def drain(self) -> None:
        """Take in what the others send for a round that is void, so that the links stay clean.

        The second half of a reduce-scatter is sent as well, since the peers have made room for it.
        """
        for member, pieces in self._incoming.items():
            for _, work in pieces:
                self._wait(member, work)
        for member, (_, work) in self._extras.items():
            self._wait(member, work)
        self._share_means()

    def finish(self) -> None:
        """Wait until everything of mine has been sent; its memory is free then.

        Raises:
            TransportError: if a link ended.
        """
        for work in self._sends:
            work.wait()

    def _scale_factors(self, contributors: Sequence[int]) -> dict[int, float]:
        """By what contributions that are too large are multiplied: all of them are waited for, and kept until then."""
        codec, norms = self.contribution.codec, {}
        decoded = torch.empty_like(self.values)
        for member in contributors:
            for piece, (a, b) in enumerate(_stretches(*self._mine(), codec, self._piece_bytes)):
                payload = self._piece(member, piece, a, b, keep=True)
                self._check(member, payload, b - a)
                decoded[a:b] = codec.decode(payload, b - a)
            norms[member] = vector_norm(decoded)
        return scale_factors(self.contribution.clipping, norms)

    def _share_means(self) -> None:
        """The second half of a reduce-scatter."""
        if self.plan.pattern == "reduce-scatter":
            for piece, (a, b) in enumerate(_floats(*self._mine(), self._piece_bytes)):
                for link in self.links.values():
                    self._send(link, self.values[a:b], piece, second=True)
            for member, work in self._means:
                self._wait(member, work)

    def _mine(self) -> tuple[int, int]:
        """The values that I sum."""
        return (0, self.contribution.numel) if self.plan.pattern == "all-gather" else self.plan.shards[self.me]

    def _wanted_by(self, index: int) -> tuple[int, int]:
        return (0, self.contribution.numel) if self.plan.pattern == "all-gather" else self.plan.shards[index]

    def _piece(self, member: int, piece: int, start: int, stop: int, *, keep: bool = False) -> Tensor:
        if member == self.contribution.replica:
            return self.contribution.codec.cut(self.contribution.payload, self.contribution.numel, start, stop)
        payload, work = self._incoming[member][piece]
        if (member, piece) not in self._arrived:  # gloo can't be waited for twice
            self._wait(member, work)
        if keep:
            self._arrived.add((member, piece))
        else:
            self._incoming[member][piece] = (payload[:0], work)
        return payload

    def _check(self, member: int, payload: Tensor, numel: int) -> None:
        try:
            self.contribution.codec.validate(payload, numel)
        except CodecError as error:
            raise CodecError(f"the contribution of replica {member} was refused: {error}") from error

    def _reduce_extras(
        self, weights: Mapping[int, float], contributors: Sequence[int], total: float
    ) -> tuple[Tensor | None, Tensor | None]:
        mine = self.contribution
        raw: dict[int, Tensor] = {mine.replica: _extras_of(mine)}
        for member, (room, work) in self._extras.items():
            self._wait(member, work)
            raw[member] = room
        buffers = integers = None
        if mine.buffers is not None:
            size = 4 * mine.buffers.numel()
            buffers = torch.zeros_like(mine.buffers, device="cpu")
            for member in contributors:
                values = raw[member][:size].clone().view(torch.float32)
                if not bool(torch.isfinite(values).all()):
                    raise CodecError(f"the contribution of replica {member} was refused: buffers that are not finite")
                buffers.add_(values * weights[member])
            buffers.div_(total)
        if mine.integers is not None:
            first = raw[contributors[0]]
            integers = first[len(first) - mine.integers.numel() :].clone()
        return buffers, integers

    def _receive(self, link: DataLink, room: Tensor, piece: int, *, second: bool = False) -> tuple[Tensor, Work]:
        return room, link.receive(room, piece, message_tag(self.contribution.round, piece, second))

    def _send(self, link: DataLink, values: Tensor, piece: int, *, second: bool = False) -> None:
        tag = message_tag(self.contribution.round, piece, second)
        self._sends.append(self._queue.send(link, values, piece, tag))

    def _wait(self, member: int, work: Work) -> None:
        try:
            work.wait()
        except TransportError as error:
            raise TransportError(f"the payloads of replica {member} stopped: {error}", replicas=[member]) from error


def digest_of(mean: Mean) -> str:
    """Of everything that the average would change."""
    parts = {f"{mean.contributors} {mean.weight!r}": mean.values}
    if mean.buffers is not None:
        parts["buffers"] = mean.buffers
    if mean.integers is not None:
        parts["integers"] = mean.integers
    return digest_tensors(parts)


def _extras_of(contribution: Contribution) -> Tensor:
    """Model buffers as bytes: the floating ones, then the integer ones."""
    parts = [
        part.detach().cpu().contiguous().view(torch.uint8)
        for part in (contribution.buffers, contribution.integers)
        if part is not None
    ]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _stretches(start: int, stop: int, codec: Codec, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Stretches of values whose payloads are pieces, cut at blocks."""
    size = _piece_size(codec.payload_bytes(stop - start), piece_bytes)
    step = max(1, size // codec.payload_bytes(codec.block_size)) * codec.block_size
    return ((low, min(low + step, stop)) for low in range(start, stop, step))


def _floats(start: int, stop: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    step = max(1, _piece_size(4 * (stop - start), piece_bytes) // 4)
    return ((low, min(low + step, stop)) for low in range(start, stop, step))


def _piece_size(payload_bytes: int, piece_bytes: int) -> int:
    """The same on every replica, however many streams it has to each of the others.

    >>> _piece_size(50_000_000, 524_288), _piece_size(3_200_000, 524_288), _piece_size(50_000, 524_288)
    (524288, 200000, 16384)
    """
    return min(piece_bytes, max(_LEAST_PIECE_BYTES, math.ceil(payload_bytes / _LEAST_PIECES)))


def message_tag(round_id: RoundId, piece: int, second: bool) -> int:
    """31 bits: fragment 11, outer step 2 (no two rounds of a fragment are further apart), half 1, piece 17.

    Two messages of one tag would still arrive in the order sent.
    """
    return ((((round_id.fragment + 1) % 2048) * 4 + round_id.outer_step % 4) << 18) | (int(second) << 17) | piece
