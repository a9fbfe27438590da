"""The exchange of one round's payloads, summed as they arrive: the same mean on every replica, bit for bit.

Payloads travel in pieces that are cut at block boundaries, so that each can be decoded and added on its own. Every
value is summed in ascending order of replicas, regardless of the order of arrival. In a reduce-scatter, each owner then
encodes the mean of its slice, and all replicas decode it alike. If the global parameters are on a GPU that has memory
for it, all of this is computed there, beside the training; payloads and the mean are in host memory.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from diloco.algorithm import (
    LARGEST_MEAN,
    Codec,
    Contribution,
    Mean,
    check_mean,
    encode_mean,
    largest_magnitude,
    mean_into_,
    mean_of_buffers,
    plan_round,
    scale_factors,
)
from diloco.devices import beside_training, empty, to_device, to_host, usable_cores
from diloco.errors import CodecError, TransportError
from diloco.membership import View
from diloco.protocol import Exchanged, GiveVerdict
from diloco.transport.connections.connection_manager import ConnectionManager
from diloco.transport.connections.payload_link import PIECE_BITS, PayloadLink, round_tag
from diloco.waiting import at_once

_LEAST_PIECES, _LEAST_PIECE_BYTES, _MOST_PIECES = 16, 1 << 18, 1 << 12
"""A payload is cut into at least this many pieces, so that summing starts early, unless they would be smaller than this
size. Each piece has a fixed cost: a message, an acknowledgement and a validation. There are at most so many, as a tag
has 16 bits for their number. Links cut pieces further into parts as needed."""


_Addends = Mapping[int, tuple[Codec, Tensor, float]]
"""Replica -> codec, payload and weight, in ascending order of replicas."""

_THREADS = min(8, usable_cores())  # more would wait for the memory

_VALUE_BYTES = 32  # of a GPU, for each value that is summed at a time: the sum, an addend, and scratch memory


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Return the threads that sum the pieces of all rounds, each piece in one of them. None of them waits."""
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="diloco-sum")


def _validate(codec: Codec, payload: Tensor, numel: int, name: str, replica: int) -> None:
    try:
        codec.validate(payload, numel)
    except CodecError as error:
        raise CodecError(f"{name} was refused: {error}", replica=replica) from error


_EXTRAS = (1 << 16) - 1  # piece number of the model buffers
_MEANS = 1 << 16  # what is added to the piece numbers of means


class PayloadExchange:
    """The exchange of one round's payloads between this rank and its peers. `run` reports a failure.

    It is made in the control thread, once this rank has contributed; ``links`` are those to connected members, by
    replica.
    """

    def __init__(
        self, contribution: Contribution, view: View, links: Mapping[int, PayloadLink], connections: ConnectionManager
    ) -> None:
        self.contribution, self.members = contribution, view.members
        self._ended = partial(Exchanged, view.id, contribution.round)
        self.me = self.members.index(contribution.replica)
        # which contributions to sum, or why the exchange has failed
        self.verdict: Future[GiveVerdict] = Future()
        self.mean: Mean | None = None  # once this rank has computed it
        self._links, self._loop, self._piece_bytes = links, connections.loop, connections.rules.piece_bytes
        self._tag = round_tag(view.id, contribution.round)
        self._sends: list[Future[None]] = []
        # member and piece -> receive buffer, and a future that is resolved when the piece has arrived
        self._incoming: dict[tuple[int, int], tuple[Tensor, Future[None]]] = {}
        extras = [each for each in (self.contribution.buffers, self.contribution.integers) if each is not None]
        parts = [each.detach().cpu().contiguous().view(torch.uint8) for each in extras]
        # model buffers as bytes: floating ones, then integer ones
        self._extras = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device="cpu")
        # in a reduce-scatter, the pieces of this rank's mean that are not sent yet, and those of the others' means
        self._unsent: deque[tuple[int, tuple[int, int]]] = deque()
        self._awaited: list[tuple[int, int, int, int]] = []  # member, piece and range of values
        self.values = empty(self.contribution.numel, torch.float32)
        self._device = self.values.device  # where contributions are decoded and summed
        for link in links.values():  # keep what arrives before the verdict
            link.open_round(self._tag, contribution.payload.numel() + len(self._extras))
        if missing := {*self.members} - {*self._links, self.contribution.replica}:
            failure = f"replica {min(missing)} is not connected"
            self.verdict.set_exception(TransportError(failure, replicas=[min(missing)]))

    def give(self, given: GiveVerdict) -> None:
        """Take the verdict: start receiving, and send this rank's payload, unless the round is void.

        Runs in the control thread, which saves one thread switch for each message.
        """
        if given.verdict.void:
            self.cancel()
            return
        self.plan = plan_round(self.contribution, len(self.members), given.uplinks)
        everything = ((0, self.contribution.numel),) * len(self.members)
        # the slice of values that each member sums
        self._summed = everything if self.plan.pattern == "all-gather" else self.plan.shards
        contributors = given.verdict.contributors
        try:
            self._begin_receiving(contributors)
            if self.contribution.replica in contributors:  # else no mean contains its payload
                self._send_payload()
        except Exception as error:
            self.verdict.set_exception(error)
        else:
            self.verdict.set_result(given)

    def run(self, on_mean: Callable[[Mean], None]) -> Exchanged:
        """Sum the payloads, until the exchange has ended, and give ``on_mean`` the mean."""
        try:
            given = self.verdict.result()
            weights, contributors = given.weights, given.verdict.contributors
            total = sum(weights[member] for member in contributors)
            self._device = self._roomy_device()
            with beside_training(self._device):
                factors = self._reduce_mine(weights, contributors, total)
                self._receive_means()
            buffers, integers = self._reduce_extras(weights, contributors) if len(self._extras) else (None, None)
            self.mean = Mean(
                values=self.values,
                contributors=tuple(contributors),
                weight=total,
                buffers=buffers,
                integers=integers,
                clipped=tuple(factors),
            )
            on_mean(self.mean)
            for sent in self._sends:  # then its memory can be reused
                sent.result()
            return self._ended()
        except CancelledError:
            return self._ended()
        except TransportError as error:
            peer_lost = len(self._links) + 1 < len(self.members) or any(link.ended for link in self._links.values())
            return self._ended(str(error), peer_lost=peer_lost)
        except Exception as error:  # of any kind: the other ranks must not wait for this rank's vote
            failure = (str(error) or type(error).__name__).splitlines()[0]
            return self._ended(failure, spoiler=error.replica if isinstance(error, CodecError) else None)

    def cancel(self) -> None:
        """Stop, as the round is void or has ended; threads that wait are released. Runs in the control thread."""
        for link in self._links.values():
            link.close_round(self._tag)
        if not self.verdict.done():
            self.verdict.cancel()

    def _pieces(self, start: int, stop: int, codec: Codec) -> Iterator[tuple[int, int]]:
        """Cut a range of values into the ranges of its pieces, at block boundaries.

        The result is the same on every replica, regardless of its number of connections.
        """
        even = math.ceil(codec.payload_bytes(stop - start) / _LEAST_PIECES)
        size = min(self._piece_bytes, max(_LEAST_PIECE_BYTES, even))
        least = math.ceil((stop - start) / codec.block_size / _MOST_PIECES)
        step = max(1, least, size // codec.payload_bytes(codec.block_size)) * codec.block_size
        return ((low, min(low + step, stop)) for low in range(start, stop, step))

    def _message(self, values: Tensor, piece: int) -> tuple[int, memoryview]:
        """Return the tag and the bytes of a contiguous CPU tensor."""
        data = values.detach().view(-1).numpy().data.cast("B") if values.numel() else memoryview(bytearray())
        return self._tag << PIECE_BITS | piece, data

    def _receive(self, member: int, buffer: Tensor, piece: int) -> None:
        received: Future[None] = Future()
        self._incoming[member, piece] = buffer, received
        self._links[member].receive(*self._message(buffer, piece), received)

    def _send(self, members: Iterable[int], payload: Tensor, piece: int) -> None:
        """Start sending a tensor, which must not change until the exchange has ended. For any thread."""
        message, sends = self._message(payload, piece), {member: Future[None]() for member in members}
        self._sends += sends.values()

        def start() -> None:
            for member, sent in sends.items():
                self._links[member].send(*message, sent)

        start() if asyncio._get_running_loop() is self._loop else self._loop.call_soon_threadsafe(start)

    def _send_payload(self) -> None:
        """Send each member the part that it sums. They take turns, piece by piece, so that all can start to sum."""
        codec, numel = self.contribution.codec, self.contribution.numel
        plans = [
            [(member, a, b) for a, b in self._pieces(*bounds, codec)]
            for member, bounds in zip(self.members, self._summed, strict=True)
            if member in self._links
        ]
        for piece, row in enumerate(itertools.zip_longest(*plans)):
            receivers: dict[tuple[int, int], list[int]] = {}  # each piece is cut once
            for member, a, b in filter(None, row):
                receivers.setdefault((a, b), []).append(member)
            for (a, b), members in receivers.items():
                self._send(members, codec.cut(self.contribution.payload, numel, a, b), piece)
        if len(self._extras):
            self._send(self._links, self._extras, _EXTRAS)

    def _begin_receiving(self, contributors: Collection[int]) -> None:
        codec = self.contribution.codec
        self._ranges = [*self._pieces(*self._summed[self.me], codec)]
        sizes = {piece: codec.payload_bytes(b - a) for piece, (a, b) in enumerate(self._ranges)}
        if len(self._extras):
            sizes[_EXTRAS] = len(self._extras)
        for member in self._links.keys() & {*contributors}:
            for piece, num_bytes in sizes.items():
                self._receive(member, torch.empty(num_bytes, dtype=torch.uint8, device="cpu"), piece)
        if self.plan.pattern == "reduce-scatter":
            self._begin_means()
        for link in self._links.values():
            link.take_early(self._tag)

    def _take(self, member: int, piece: int) -> Tensor:
        """Wait until a piece from ``member`` has arrived, and return it."""
        mine = self.contribution
        if member == mine.replica:
            return mine.codec.cut(mine.payload, mine.numel, *self._ranges[piece])
        buffer, received = self._incoming[member, piece]
        try:
            received.result()
        except CodecError as error:
            raise CodecError(f"the payload of replica {member} was refused: {error}", replica=member) from error
        except TransportError as error:
            raise TransportError(f"payloads of replica {member} can't arrive: {error}", replicas=[member]) from error
        return buffer

    def _roomy_device(self) -> torch.device:
        """Return the device of the global parameters if it has room for twice what is summed at a time, else the CPU.

        Only memory that nothing has reserved counts: training needs in its next step what is free for the moment.
        """
        contribution, device = self.contribution, self.contribution.device
        if device.type != "cuda":
            return device
        most = contribution.numel
        if not contribution.whole:
            cuts = (self._pieces(0, most, codec) for codec in (contribution.codec, self.plan.mean))
            most = max((stop - start for start, stop in itertools.chain.from_iterable(cuts)), default=0)
        return device if torch.cuda.mem_get_info(device)[0] >= 2 * _VALUE_BYTES * most else self.values.device

    def _room(self, values: Tensor) -> Tensor:
        """Return memory for ``values`` where they are computed, which is their own on the CPU."""
        return values if values.device == self._device else torch.empty_like(values, device=self._device)

    def _reduce_mine(self, weights: Mapping[int, float], contributors: Sequence[int], total: float) -> dict[int, float]:
        """Sum this rank's slice, and send its mean. Return the clipping factors."""
        codec, rule = self.contribution.codec, self.contribution.average_rule
        factors = scale_factors(self.contribution.max_norm, ((m, self._decoded(m)) for m in contributors))
        if rule is not None:
            pairs = ((weights[m], self._decoded(m).mul_(factors.get(m, 1.0))) for m in contributors)
            self.values.copy_(to_host(rule.combine(pairs, self.contribution.tensors)))
        summing: deque[tuple[int, Future[None]]] = deque()  # the end of each piece, and its sum

        def finish(at_most: int) -> None:
            """Finish the pieces in order, and leave the last ones to their threads."""
            while len(summing) > at_most:
                end, done = summing.popleft()
                done.result()
                self._send_means(end)

        native = self._device.type == "cpu" and codec.implementation != "torch"
        act = _threads().submit if native else at_once  # torch has threads of its own, and a GPU needs one
        others = [member for member in contributors if member in self._links]
        for piece, (a, b) in enumerate(self._ranges):
            arrived = all(self._incoming[member, piece][1].done() for member in others)  # or never will
            finish(2 * _THREADS if arrived else 0)
            addends = {m: (codec, self._take(m, piece), weights[m] * factors.get(m, 1.0)) for m in contributors}
            summing.append((b, act(self._sum, a, b, addends, total)))
        finish(0)
        return factors

    def _sum(self, start: int, stop: int, addends: _Addends, total: float) -> None:
        """Set a piece of the values to the mean, unless a rule has made it, and check the mean."""
        if self.contribution.average_rule is None:
            self._sum_piece(start, stop, addends, total)
        check_mean(self.values[start:stop], addends)  # still in the processor's cache

    def _sum_piece(self, start: int, stop: int, addends: _Addends, total: float) -> None:
        """Set a piece of the values to the mean. Payloads are validated here, unless they are needed as a whole."""
        parts = {m: (codec, to_device(part, self._device), weight) for m, (codec, part, weight) in addends.items()}
        if not self.contribution.whole:
            for member, (codec, payload, _) in parts.items():
                _validate(codec, payload, stop - start, f"the contribution of replica {member}", member)
        mean = self.values[start:stop]
        mean_into_(computed := self._room(mean), parts.values(), total)
        mean.copy_(to_host(computed))

    def _begin_means(self) -> None:
        """Await the means of the others' slices. Each owner encodes the mean of its slice, and all decode it alike."""
        codec, shards = self.plan.mean, dict(zip(self.members, self.plan.shards, strict=True))
        self._unsent.extend(enumerate(self._pieces(*shards[self.contribution.replica], codec), start=_MEANS))
        for member in self._links:
            for piece, (start, stop) in enumerate(self._pieces(*shards[member], codec), start=_MEANS):
                size, in_place = codec.payload_bytes(stop - start), self.values[start:stop].view(torch.uint8)
                buffer = in_place if codec.exact else torch.empty(size, dtype=torch.uint8, device="cpu")
                self._receive(member, buffer, piece)
                self._awaited.append((member, piece, start, stop))

    def _send_means(self, stop: int) -> None:
        """Send the pieces of this rank's mean that end at ``stop`` or before it, up to where it is summed.

        So the others receive means while this rank still waits for the last contributions.
        """
        codec = self.plan.mean
        while self._unsent and self._unsent[0][1][1] <= stop:
            piece, (start, end) = self._unsent.popleft()
            mean = self.values[start:end]
            computed = mean if codec.exact else to_device(mean, self._device)
            payload = to_host(encode_mean(computed, codec))  # overwrites it with what the others decode
            mean.copy_(to_host(computed))
            self._send(self._links, payload, piece)

    def _receive_means(self) -> None:
        """Receive the means of the others' slices; raise `CodecError` for one that is malformed or too large."""
        codec = self.plan.mean
        for member, piece, start, stop in self._awaited:
            payload, mean = self._take(member, piece), self.values[start:stop]
            if not codec.exact:  # else it was received in place
                payload = to_device(payload, self._device)
                _validate(codec, payload, len(mean), f"the mean of replica {member}", member)
                mean.copy_(to_host(codec.decode(payload, len(mean), out=self._room(mean))))
            if not largest_magnitude(mean) <= LARGEST_MEAN:
                fault = f"replica {member} sent a part of the mean that is not finite or too large"
                raise CodecError(fault, replica=member)

    def _decoded(self, member: int) -> Tensor:
        """Wait for a whole contribution, validate it, and return its values."""
        codec, values = self.contribution.codec, empty(len(self.values), torch.float32, self._device)
        for piece, (a, b) in enumerate(self._ranges):
            payload = to_device(self._take(member, piece), self._device)
            _validate(codec, payload, b - a, f"the contribution of replica {member}", member)
            codec.decode(payload, b - a, out=values[a:b])
        return values

    def _reduce_extras(
        self, weights: Mapping[int, float], contributors: Sequence[int]
    ) -> tuple[Tensor | None, Tensor | None]:
        mine = self.contribution
        raw = {m: self._extras if m == mine.replica else self._take(m, _EXTRAS) for m in contributors}
        buffers = integers = None
        if mine.buffers is not None:
            size = 4 * mine.buffers.numel()
            values = {member: raw[member][:size].clone().view(torch.float32) for member in contributors}
            buffers = mean_of_buffers(values, weights)
        if mine.integers is not None:
            first = raw[contributors[0]]
            integers = first[len(first) - mine.integers.numel() :].clone()
        return buffers, integers
