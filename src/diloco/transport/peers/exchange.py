"""The exchange of one round's payloads, summed as they arrive: the same mean on every replica, bit for bit.

Payloads travel in pieces that are cut at block boundaries, so that each can be decoded and added on its own. Every
value is summed in ascending order of replicas, regardless of the order of arrival. In a reduce-scatter, each owner then
encodes the mean of its slice, and all replicas decode it alike.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from diloco.algorithm import (
    LARGEST_MEAN,
    Codec,
    Mean,
    RoundId,
    check_mean,
    combined,
    encode_mean,
    largest_magnitude,
    mean_into_,
    mean_of_buffers,
    sampled_ranges,
    scale_factors,
    spread,
    spread_terms,
    vector_norm,
)
from diloco.cores import usable_cores
from diloco.errors import CodecError, TransportError
from diloco.protocol import Computed, Event, ExchangeEnded, GiveVerdict, StartExchange
from diloco.transport.connections.link import PeerLink, round_tag

_LEAST_PIECES, _LEAST_PIECE_BYTES = 16, 1 << 18
"""A payload is cut into at least this many pieces, so that summing starts early, unless they would be smaller than this
size. Each piece has a fixed cost: a message, an acknowledgement and a validation. Links cut pieces further into parts
as needed."""


_Addends = Mapping[int, tuple[Codec, Tensor, float]]
"""Replica -> codec, payload and weight, in ascending order of replicas."""

_THREADS = min(8, usable_cores())  # more would wait for the memory


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Return the threads that sum the pieces of all rounds, each piece in one of them. None of them waits."""
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="diloco-sum")


def _at_once(act: Callable[..., None], *arguments: Any) -> Future[None]:
    done: Future[None] = Future()
    act(*arguments)
    done.set_result(None)
    return done


@dataclass(eq=False)
class RoundMessages:
    """Sends and receives the pieces of one round."""

    view_id: int
    round_id: RoundId
    loop: asyncio.AbstractEventLoop  # links are used in its thread
    piece_bytes: int  # approximate upper limit on the size of a piece
    links: Mapping[int, PeerLink] = field(default_factory=dict)  # by replica
    _sends: list[Future[None]] = field(default_factory=list)
    # member, piece and half -> receive buffer, and a future that is resolved when the piece has arrived
    _incoming: dict[tuple[int, int, bool], tuple[Tensor, Future[None]]] = field(default_factory=dict)

    def pieces(self, start: int, stop: int, codec: Codec) -> Iterator[tuple[int, int]]:
        """Cut a range of values into the ranges of its pieces, at block boundaries.

        The result is the same on every replica, regardless of its number of connections.
        """
        even = math.ceil(codec.payload_bytes(stop - start) / _LEAST_PIECES)
        size = min(self.piece_bytes, max(_LEAST_PIECE_BYTES, even))
        step = max(1, size // codec.payload_bytes(codec.block_size)) * codec.block_size
        return ((low, min(low + step, stop)) for low in range(start, stop, step))

    def send(self, members: Iterable[int], payload: Tensor, piece: int, *, second: bool = False) -> None:
        """Start sending a contiguous CPU tensor, which must not change until `finish`, to each of ``members``."""
        self._sends += self._begin(PeerLink.send, members, payload, piece, second)

    def receive(self, member: int, buffer: Tensor, piece: int, *, second: bool = False) -> Future[None]:
        """Start receiving a piece from ``member`` into ``buffer``; see `take`. Otherwise as `send`."""
        (received,) = self._begin(PeerLink.receive, (member,), buffer, piece, second)
        self._incoming[member, piece, second] = buffer, received
        return received

    def _begin(
        self,
        act: Callable[[PeerLink, int, memoryview, Future[None]], None],
        members: Iterable[int],
        values: Tensor,
        piece: int,
        second: bool,
    ) -> list[Future[None]]:
        """Let the links of ``members`` send or receive, in the loop's thread: at once if this is that thread.

        A tag is that of the round, 1 bit for the half, and 16 bits for the piece.
        """
        tag = round_tag(self.view_id, self.round_id) << 17 | int(second) << 16 | piece
        data = values.detach().view(-1).numpy().data.cast("B") if values.numel() else memoryview(bytearray())
        works = {member: Future[None]() for member in members}

        def begin() -> None:
            for member, work in works.items():
                try:
                    act(self.links[member], tag, data, work)
                except Exception as error:  # the thread of the exchange waits for this
                    work.set_exception(error)

        if asyncio._get_running_loop() is self.loop:
            begin()
        else:
            try:
                self.loop.call_soon_threadsafe(begin)
            except RuntimeError as error:  # the loop is closed
                raise TransportError("a payload connection ended: the transport was closed") from error
        return list(works.values())

    def open(self, early_bytes: int) -> None:
        """Keep up to so many bytes of each member's that arrive before `take_early`. In the loop's thread."""
        for link in self.links.values():
            link.open_round(round_tag(self.view_id, self.round_id), early_bytes)

    def take_early(self) -> None:
        for link in self.links.values():
            link.take_early(round_tag(self.view_id, self.round_id))

    def close(self) -> None:
        """Send and await nothing more, in the loop's thread; who waits is released."""
        for link in self.links.values():
            link.close_round(round_tag(self.view_id, self.round_id))

    def arrived(self, piece: int) -> bool:
        """Return whether a piece of the first half has arrived from every member, or never will."""
        return all(self._incoming[member, piece, False][1].done() for member in self.links)

    def take(self, member: int, piece: int, *, second: bool = False) -> Tensor:
        """Wait until a piece from ``member`` has arrived, and return its buffer."""
        buffer, received = self._incoming[member, piece, second]
        try:
            received.result()
        except TransportError as error:
            raise TransportError(f"payloads of replica {member} can't arrive: {error}", replicas=[member]) from error
        return buffer

    def finish(self) -> None:
        """Wait until everything has been sent, so that its memory can be reused."""
        for sent in self._sends:
            sent.result()


def _validate(codec: Codec, payload: Tensor, numel: int, name: str, replica: int) -> None:
    try:
        codec.validate(payload, numel)
    except CodecError as error:
        raise CodecError(f"{name} was refused: {error}", replica=replica) from error


_EXTRAS = (1 << 16) - 1  # piece number of the model buffers


class PayloadExchange:
    """The payloads of one round between this rank and its peers."""

    def __init__(self, started: StartExchange, loop: asyncio.AbstractEventLoop, piece_bytes: int) -> None:
        self.contribution = started.contribution
        self.members = started.view.members
        self.me = self.members.index(started.contribution.replica)
        # which contributions to sum, and the plan by which payloads are being sent
        self.verdict: Future[GiveVerdict] = Future()
        self._view_id = started.view.id
        self._messages = RoundMessages(started.view.id, started.contribution.round, loop, piece_bytes)
        extras = [each for each in (self.contribution.buffers, self.contribution.integers) if each is not None]
        parts = [each.detach().cpu().contiguous().view(torch.uint8) for each in extras]
        # model buffers as bytes: floating ones, then integer ones
        self._extras = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device="cpu")
        # in a reduce-scatter, the pieces of this rank's mean that are not sent yet, and those of the others' means
        self._unsent: deque[tuple[int, tuple[int, int]]] = deque()
        self._awaited: list[tuple[int, int, int, int]] = []  # member, piece and range of values
        self.values = torch.zeros(0, dtype=torch.float32, device="cpu")

    def begin(self, links: Mapping[int, PeerLink]) -> None:
        """Keep what arrives early over these links. `run` reports a failure. Runs in their thread, as `give` does."""
        self._messages.links = links
        self._messages.open(self.contribution.payload.numel() + len(self._extras))
        if missing := {*self.members} - {*links, self.contribution.replica}:
            words = f"replica {min(missing)} is not connected"
            self.verdict.set_exception(TransportError(words, replicas=[min(missing)]))

    def give(self, given: GiveVerdict) -> None:
        """Take the verdict: start receiving, and send this rank's payload, or send nothing, as the round is void."""
        if given.verdict.void:
            self.cancel()
            return
        assert given.plan is not None
        codec, messages, self.plan = self.contribution.codec, self._messages, given.plan
        everything = ((0, self.contribution.numel),) * len(self.members)
        # the slice of values that each member sums
        self._summed = everything if self.plan.pattern == "all-gather" else self.plan.shards
        try:
            self.values = torch.empty(self.contribution.numel, dtype=torch.float32, device="cpu")
            pieces = enumerate(messages.pieces(*self._summed[self.me], codec))
            sizes = {piece: codec.payload_bytes(b - a) for piece, (a, b) in pieces}
            if len(self._extras):
                sizes[_EXTRAS] = len(self._extras)
            for member in messages.links:
                for piece, num_bytes in sizes.items():
                    messages.receive(member, torch.empty(num_bytes, dtype=torch.uint8, device="cpu"), piece)
            if self.plan.pattern == "reduce-scatter":
                self._begin_means()
            messages.take_early()
            self._send()
        except Exception as error:
            self.verdict.set_exception(error)
        else:
            self.verdict.set_result(given)

    def run(self) -> Iterator[Event]:
        """Sum the payloads and yield the resulting events. Blocks until the exchange has ended."""
        round_id = self.contribution.round
        try:
            given = self.verdict.result()
            mean = self.reduce(given.weights, given.verdict.contributors)
            yield Computed(self._view_id, round_id, mean, mean.digest())
            self._messages.finish()
            yield ExchangeEnded(self._view_id, round_id)
        except CancelledError:
            yield ExchangeEnded(self._view_id, round_id)
        except TransportError as error:
            links = self._messages.links.values()
            peer_lost = len(links) + 1 < len(self.members) or any(link.ended for link in links)
            yield ExchangeEnded(self._view_id, round_id, str(error), peer_lost=peer_lost)
        except Exception as error:  # of any kind: the other ranks must not wait for this rank's vote
            words = (str(error) or type(error).__name__).splitlines()[0]
            spoiler = error.replica if isinstance(error, CodecError) else None
            yield ExchangeEnded(self._view_id, round_id, words, spoiler=spoiler)

    def cancel(self) -> None:
        """Stop, as the round is void or has ended. Runs in the thread of the links."""
        self._messages.close()
        if not self.verdict.done():
            self.verdict.cancel()

    def _send(self) -> None:
        messages, codec, numel = self._messages, self.contribution.codec, self.contribution.numel
        plans = [
            [(member, a, b) for a, b in messages.pieces(*bounds, codec)]
            for member, bounds in zip(self.members, self._summed, strict=True)
            if member in messages.links
        ]
        # Peers take turns, piece by piece, so that all of them can start to sum. Each piece is cut once.
        for piece, row in enumerate(itertools.zip_longest(*plans)):
            receivers: dict[tuple[int, int], list[int]] = {}
            for member, a, b in filter(None, row):
                receivers.setdefault((a, b), []).append(member)
            for (a, b), members in receivers.items():
                messages.send(members, codec.cut(self.contribution.payload, numel, a, b), piece)
        if len(self._extras):
            messages.send(messages.links, self._extras, _EXTRAS)

    def reduce(self, weights: Mapping[int, float], contributors: Sequence[int]) -> Mean:
        """Return the mean over ``contributors``, weighted by ``weights``."""
        total = sum(weights[member] for member in contributors)
        factors, moments = self._reduce_mine(weights, contributors, total)
        self._receive_means()
        buffers, integers = self._reduce_extras(weights, contributors) if len(self._extras) else (None, None)
        return Mean(
            values=self.values,
            contributors=tuple(contributors),
            weight=total,
            buffers=buffers,
            integers=integers,
            clipped=tuple(factors),
            spread=spread(*moments, total),
        )

    def _reduce_mine(
        self, weights: Mapping[int, float], contributors: Sequence[int], total: float
    ) -> tuple[dict[int, float], tuple[float, float]]:
        """Sum this rank's slice, and send its mean. Return the clipping factors and the terms of the spread."""
        codec, rule = self.contribution.codec, self.contribution.average_rule
        factors = self._scale_factors(contributors)
        if rule is not None:
            decoded = ((member, self._decoded(member)) for member in contributors)
            self.values[:] = combined(rule, decoded, weights, factors, self.contribution.tensors)
        at_hand = self.contribution.telemetry and self.plan.pattern == "all-gather"
        watched = sampled_ranges(self.contribution.numel, codec.block_size) if at_hand else []
        squares = of_sum = 0.0
        summing: deque[tuple[int, int, _Addends, Future[None]]] = deque()

        def finish(at_most: int) -> None:
            """Finish the pieces in order, and leave the last ones to their threads."""
            nonlocal squares, of_sum
            while len(summing) > at_most:
                a, b, addends, done = summing.popleft()
                done.result()
                check_mean(self.values[a:b], addends)
                self._send_means(b)
                within = [(max(low, a) - a, min(high, b) - a) for low, high in watched if low < b and high > a]
                payloads = [(weights[member], payload) for member, (_, payload, _) in addends.items()]
                terms = spread_terms(codec, payloads, b - a, within)
                squares, of_sum = squares + terms[0], of_sum + terms[1]

        act = _threads().submit if codec.implementation != "torch" else _at_once  # torch has threads of its own
        for piece, (a, b) in enumerate(self._messages.pieces(*self._summed[self.me], codec)):
            finish(2 * _THREADS if self._messages.arrived(piece) else 0)
            payloads = {member: self._piece(member, piece, a, b) for member in self.members}
            addends = {m: (codec, payloads[m], weights[m] * factors.get(m, 1.0)) for m in self.members if m in weights}
            summing.append((a, b, addends, act(self._sum, a, b, addends, total)))
        finish(0)
        return factors, (squares, of_sum)

    def _sum(self, start: int, stop: int, addends: _Addends, total: float) -> None:
        """Set a piece of the values to the mean, unless a rule has made it, and validate what nothing else does."""
        if not self.contribution.whole:
            for member, (codec, payload, _) in addends.items():
                _validate(codec, payload, stop - start, f"the contribution of replica {member}", member)
        if self.contribution.average_rule is None:
            mean_into_(self.values[start:stop], addends.values(), total)

    def _begin_means(self) -> None:
        """Await the means of the others' slices. Each owner encodes the mean of its slice, and all decode it alike."""
        messages, codec, shards = self._messages, self.plan.mean, dict(zip(self.members, self.plan.shards, strict=True))
        self._unsent.extend(enumerate(messages.pieces(*shards[self.contribution.replica], codec)))
        for member in messages.links:
            for piece, (start, stop) in enumerate(messages.pieces(*shards[member], codec)):
                size, in_place = codec.payload_bytes(stop - start), self.values[start:stop].view(torch.uint8)
                buffer = in_place if codec.exact else torch.empty(size, dtype=torch.uint8, device="cpu")
                messages.receive(member, buffer, piece, second=True)
                self._awaited.append((member, piece, start, stop))

    def _send_means(self, stop: int) -> None:
        """Send the pieces of this rank's mean that end at ``stop`` or before it, up to where it is summed.

        So the others receive means while this rank still waits for the last contributions.
        """
        while self._unsent and self._unsent[0][1][1] <= stop:
            piece, (start, end) = self._unsent.popleft()
            payload = encode_mean(self.values[start:end], self.plan.mean)
            self._messages.send(self._messages.links, payload, piece, second=True)

    def _receive_means(self) -> None:
        """Receive the means of the others' slices; raise `CodecError` for one that is malformed or too large."""
        codec = self.plan.mean
        for member, piece, start, stop in self._awaited:
            payload, values = self._messages.take(member, piece, second=True), self.values[start:stop]
            if not codec.exact:  # else it was received in place
                _validate(codec, payload, len(values), f"the mean of replica {member}", member)
                codec.decode(payload, len(values), out=values)
            if not largest_magnitude(values) <= LARGEST_MEAN:
                words = f"replica {member} sent a part of the mean that is not finite or too large"
                raise CodecError(words, replica=member)

    def _scale_factors(self, contributors: Sequence[int]) -> dict[int, float]:
        if self.contribution.max_norm is None:
            return {}
        norms = {member: vector_norm(self._decoded(member)) for member in contributors}
        return scale_factors(self.contribution.max_norm, norms)

    def _decoded(self, member: int) -> Tensor:
        """Wait for a whole contribution, validate it, and return its values."""
        codec, values = self.contribution.codec, torch.empty_like(self.values)
        for piece, (a, b) in enumerate(self._messages.pieces(*self._summed[self.me], codec)):
            payload = self._piece(member, piece, a, b)
            _validate(codec, payload, b - a, f"the contribution of replica {member}", member)
            codec.decode(payload, b - a, out=values[a:b])
        return values

    def _piece(self, member: int, piece: int, start: int, stop: int) -> Tensor:
        """Wait for a piece of a payload and return it."""
        mine = self.contribution
        if member == mine.replica:
            return mine.codec.cut(mine.payload, mine.numel, start, stop)
        return self._messages.take(member, piece)

    def _reduce_extras(
        self, weights: Mapping[int, float], contributors: Sequence[int]
    ) -> tuple[Tensor | None, Tensor | None]:
        mine = self.contribution
        raw: dict[int, Tensor] = {mine.replica: self._extras}
        raw |= {member: self._messages.take(member, _EXTRAS) for member in self._messages.links}
        buffers = integers = None
        if mine.buffers is not None:
            size = 4 * mine.buffers.numel()
            values = {member: raw[member][:size].clone().view(torch.float32) for member in contributors}
            buffers = mean_of_buffers(values, weights)
        if mine.integers is not None:
            first = raw[contributors[0]]
            integers = first[len(first) - mine.integers.numel() :].clone()
        return buffers, integers
