"""Serving the state of fragments to other ranks, and fetching it from them, over connections of their own.

Votes therefore never queue behind a state, and the donor's training continues. A rank that needs a state asks all
donors for offers, and takes the snapshot that most of them hold. It then fetches the bytes from one of these donors,
and continues at the next one where the last one stopped. What arrives must match the digest and be finite.

A donor keeps one snapshot until all who fetch it have it, or a time has passed in which it could have been sent.

::

    fetcher  Fetch(fragment, after)
    donor    Offer(...)                              see `state_wire`
    fetcher  Fetch(fragment, after, snapshot, offset)
    donor    Chunk(offset, bytes), until all are sent
    or       Refused(reason), such as that the snapshot no longer exists
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from diloco.errors import TransportError
from diloco.membership import Count, Digest, names_of
from diloco.protocol import Entry, Refused, WireMessage, encode
from diloco.transport.base import SnapshotSource
from diloco.transport.connections.connection_manager import ConnectionManager
from diloco.transport.connections.limits import ConnectionLimit, pauses
from diloco.transport.connections.streams import MAX_MESSAGE_BYTES, RefusedError, ask, pack, read_frame, within
from diloco.transport.state_wire import Offer, TensorBytes, describe, not_finite

T = TypeVar("T")

MAX_CHUNK_BYTES = 1 << 18
MAX_FETCHERS, MAX_OF_ONE = 16, 4  # connections, in total and of one peer or host
_IDLE_S = _STALLED_S = 30.0  # longest pause of a fetcher before its next request, and in reading
_FRESH_S = 0.5  # age at which a snapshot of a state without versions is outdated
_KEPT_S = 30.0  # how long a snapshot stays unused, or for a fetcher whose connection broke
_LEAST_BYTES_PER_S = 125_000  # a snapshot stays for as long as it takes at this rate, but at most for a round
_SLOW_S = 15.0  # a donor that sends nothing for this long, or too little to finish in time, has failed once
_MOST_FAILURES = 3
_PAUSES_S = 0.05, 1.0
_GRACE_S = 1.0  # a choice that is possible waits this long for more offers
_CANCEL_AGAIN_S = 0.2


class Fetch(WireMessage):
    """The question what a donor holds, or for a snapshot from an offset on."""

    fragment: Count
    after: Count  # rounds that the state must include
    snapshot: Digest = ""  # "": which one?
    offset: Count = 0


class Chunk(WireMessage):
    """A part of a snapshot."""

    offset: Count
    data: Annotated[bytes, Meta(min_length=1, max_length=MAX_CHUNK_BYTES)]


_MOVED = Refused("its state has changed in the meantime")


@dataclass(eq=False)
class Snapshot:
    version: object  # of the donor's state when it was copied
    offer: Offer
    values: TensorBytes  # the bytes of its tensors, which never change
    until_s: float  # for how long fetchers may keep it
    used_s: float  # when it was last used
    leases: dict[tuple[str, ...], float] = field(default_factory=dict)  # origins of a fetcher -> when it last read


class StateTransfer:
    def __init__(self, connections: ConnectionManager) -> None:
        self.fetched_bytes = 0  # received in all fetches
        self._connections = connections
        self._source: SnapshotSource | None = None
        self._version: Callable[[int], object] | None = None
        self._snapshots: dict[int, Snapshot] = {}  # fragment -> its snapshot, one at a time
        self._fetchers = ConnectionLimit[asyncio.StreamWriter](MAX_FETCHERS, MAX_OF_ONE)
        self._copying = asyncio.Lock()  # one copy at a time, to limit the donor's memory
        connections.services[Fetch] = self._serve

    def publish(self, source: SnapshotSource, version: Callable[[int], object] | None) -> None:
        """Serve ``source``; see `Transport.publish`. ``version`` is called in the control thread."""
        self._source, self._version = source, version

    def fetch(
        self, fragment: int, donors: Sequence[int], entries: Mapping[int, Entry], after: int, expected_bytes: int | None
    ) -> Mapping[str, Any]:
        """Fetch the state of a fragment; see `Transport.fetch`.

        Args:
            entries: Of those of the donors that are other members.
            after: Rounds that the state must include. A donor that has finished fewer is asked again.
        """
        if not entries:
            asked = f"replica {', '.join(map(str, donors))} was asked for fragment {fragment}"
            raise TransportError(f"{asked}, but the view has no such other member.", replicas=donors)
        connections, rules = self._connections, self._connections.rules
        start = (rules.replica + fragment) % len(entries)  # not all begin with the same donor
        order = [*sorted(entries)[start:], *sorted(entries)[:start]]
        fetch = _Fetch(self, connections, {donor: entries[donor] for donor in order}, fragment, after, expected_bytes)
        return connections.call(fetch.run(rules.round_timeout_s))

    # Serving, in the control thread.

    async def _serve(self, request: Fetch, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection until it ends."""
        origins = self._connections.streams.origins(writer)
        if self._fetchers.is_full(origins):  # if newcomers replaced those before them, none would make progress
            await _write(writer, Refused(f"it is serving {MAX_OF_ONE} others from there"))
            return
        if (out := self._fetchers.enter(writer, origins)) is not None:
            out.transport.abort()  # its fetcher requests again what it has not received
        try:
            while True:
                await self._send_requested(request, writer, origins)
                async with asyncio.timeout(_IDLE_S):
                    request = await read_frame(reader, Fetch)
        except asyncio.IncompleteReadError:
            pass  # the fetcher has what it wants
        except BaseException:
            writer.transport.abort()  # as above
            raise
        finally:
            self._fetchers.leave(writer)

    async def _send_requested(self, request: Fetch, writer: asyncio.StreamWriter, origins: tuple[str, ...]) -> None:
        if not request.snapshot:
            await _write(writer, await self._offer(request.fragment, request.after))
            return
        snapshot, clock, start = self._snapshots.get(request.fragment), asyncio.get_running_loop(), request.offset
        if snapshot is None or snapshot.offer.snapshot != request.snapshot:
            await _write(writer, _MOVED)
            return
        size_bytes = snapshot.values.size_bytes
        if start >= size_bytes:
            raise TransportError(f"byte {start} of {size_bytes} was requested")
        while start < size_bytes:
            if self._snapshots.get(request.fragment) is not snapshot:
                await _write(writer, _MOVED)
                return
            snapshot.used_s = snapshot.leases[origins] = clock.time()
            data = snapshot.values.read(start, min(MAX_CHUNK_BYTES, size_bytes - start))
            await _write(writer, Chunk(start, data))
            start += len(data)
        snapshot.leases.pop(origins, None)

    async def _offer(self, fragment: int, after: int) -> WireMessage:
        try:
            snapshot = await self._snapshot(fragment)
        except Exception as error:  # maybe of the source
            words = str(error) if isinstance(error, TransportError) else f"{type(error).__name__}: {error}"
            return Refused(words, for_good=True)
        if snapshot is None:
            return Refused("it is still sending an earlier state")
        finished = snapshot.offer.finished_rounds
        if finished is not None and finished < after:
            return Refused(f"it has finished {finished} of {after} rounds")
        return snapshot.offer

    async def _snapshot(self, fragment: int) -> Snapshot | None:
        """Return a snapshot of the current state, copied if necessary; None while an earlier one is being sent."""
        clock = asyncio.get_running_loop()
        async with self._copying:
            source = self._source
            if source is None:
                raise TransportError("it has published nothing")
            version = (source, clock.time() // _FRESH_S if self._version is None else self._version(fragment))
            before = self._snapshots.get(fragment)
            if before is not None and before.version == version:
                before.used_s = clock.time()
                return before
            if before is not None and self._is_kept(before):
                return None
            offer, values = await clock.run_in_executor(None, lambda: describe(source(fragment)))
            least_s = min(_KEPT_S + offer.bytes / _LEAST_BYTES_PER_S, self._connections.rules.round_timeout_s)
            now_s = clock.time()
            is_first = fragment not in self._snapshots
            self._snapshots[fragment] = snapshot = Snapshot(version, offer, values, now_s + least_s, now_s)
            if is_first:
                self._drop_unused(fragment)
            return snapshot

    async def held(self, fragment: int, wanted: Offer) -> TensorBytes | None:
        """Return the bytes of an offered state that this replica began with, too, so that they need not travel."""
        if wanted.finished_rounds or self._source is None:
            return None
        mine = await self._snapshot(fragment)
        return mine.values if mine is not None and mine.offer.snapshot == wanted.snapshot else None

    def _is_kept(self, snapshot: Snapshot) -> bool:
        now_s = asyncio.get_running_loop().time()
        return now_s < snapshot.until_s and any(now_s - read_s < _KEPT_S for read_s in snapshot.leases.values())

    def _drop_unused(self, fragment: int) -> None:
        loop = asyncio.get_running_loop()
        if (left_s := self._snapshots[fragment].used_s + _KEPT_S - loop.time()) > 0:
            loop.call_later(left_s, self._drop_unused, fragment)  # it keeps no snapshot that is replaced meanwhile
        else:
            del self._snapshots[fragment]


async def _write(writer: asyncio.StreamWriter, message: WireMessage) -> None:
    writer.write(pack(message))
    async with asyncio.timeout(_STALLED_S):
        await writer.drain()


@dataclass(eq=False)
class _Fetch:
    """One fetch of a fragment's state."""

    transfer: StateTransfer  # counts the bytes that arrive
    connections: ConnectionManager
    donors: dict[int, Entry]  # by replica, in the order in which they are to send; those that are left
    fragment: int
    after: int
    expected_bytes: int | None  # a larger state is refused; None: `state_wire.MAX_STATE_BYTES`
    trouble: dict[int, str] = field(default_factory=dict)  # what each donor last failed at, or waits for
    failures: Counter[int] = field(default_factory=Counter)  # by donor, since it last sent something
    alone: bool = False  # whether one donor is to send everything, as one of several has sent wrong bytes
    until_s: float = math.inf  # by the loop's clock

    def __post_init__(self) -> None:
        self.trouble = dict.fromkeys(self.donors, "it has not answered")
        self.begin_pauses()

    def begin_pauses(self) -> None:
        self.pauses_s = pauses(*_PAUSES_S, seed=f"{os.getpid()} {self.fragment}")

    async def run(self, timeout_s: float) -> dict[str, Any]:
        """Return the state."""
        self.until_s = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(self.until_s):
                while True:
                    offers = await self._offers()
                    if (wanted := _choice(offers)) is not None:
                        holders = [donor for donor in self.donors if offers.get(donor) == wanted]
                        if (state := await self._receive(wanted, holders)) is not None:
                            return state
                    if not self.donors:
                        raise self._failed("none provided it")
                    await asyncio.sleep(next(self.pauses_s))
        except TimeoutError as error:
            raise self._failed(f"none provided it within {timeout_s:g} s") from error

    def _failed(self, what: str) -> TransportError:
        replicas = sorted(self.trouble)
        were = "were" if len(replicas) > 1 else "was"
        reasons = "; ".join(f"replica {donor}: {self.trouble[donor]}" for donor in replicas)
        return TransportError(
            f"{names_of(replicas)} {were} asked for fragment {self.fragment}, and {what} ({reasons}). Nothing was "
            "adopted. Another donor may have it.",
            replicas=replicas,
        )

    def _drop(self, donor: int, why: str) -> None:
        self.donors.pop(donor, None)
        self.trouble[donor] = why

    async def _visit(
        self, donor: int, act: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[T]]
    ) -> T | None:
        """Open a connection to a donor and do something over it. Take note of a failure and return None."""
        connections, entry = self.connections, self.donors[donor]
        try:
            async with asyncio.timeout(_SLOW_S):
                reader, writer = await connections.reach(connections.streams.locate(entry), entry.key)
            try:
                return await act(reader, writer)
            finally:
                writer.close()
        except (OSError, EOFError, TransportError, ValueError) as error:
            self.failures[donor] += 1
            silent = f"it sent nothing for {_SLOW_S:g} s" if isinstance(error, TimeoutError) else ""
            self.trouble[donor] = silent or str(error) or type(error).__name__
            if self.failures[donor] >= _MOST_FAILURES:
                self._drop(donor, self.trouble[donor])
        return None

    async def _offers(self) -> dict[int, Offer]:
        """Ask all donors that are left what they hold. Who takes long is not waited for if another one answers."""
        offers: dict[int, Offer] = {}

        async def visit(donor: int) -> None:
            if (offer := await self._visit(donor, partial(self._ask, donor))) is not None:
                offers[donor] = offer

        tasks = pending = {self.connections.begin(visit(donor)) for donor in self.donors}
        try:
            while pending:
                done, pending = await asyncio.wait(pending, timeout=_GRACE_S, return_when=asyncio.FIRST_COMPLETED)
                if not done and offers:
                    break
        finally:
            while waiting := [task for task in tasks if not task.done()]:
                for task in waiting:  # repeatedly, as a library may swallow a cancellation
                    task.cancel()
                await asyncio.wait(waiting, timeout=_CANCEL_AGAIN_S)
        return {donor: offer for donor, offer in offers.items() if donor in self.donors}

    async def _ask(self, donor: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Offer | None:
        question = Fetch(self.fragment, self.after)
        try:
            offer: Offer = await within(_SLOW_S, ask((reader, writer), question, Offer, MAX_MESSAGE_BYTES))
        except RefusedError as error:
            if error.for_good:
                raise
            self.failures[donor], self.trouble[donor] = 0, str(error)
            return None
        offer.check(self.expected_bytes)
        self.trouble[donor] = "it offered its state but has not sent all of it"
        finished = offer.finished_rounds
        if finished is not None and finished < self.after:
            self.trouble[donor] = f"it has finished {finished} of {self.after} rounds"
            return None
        return offer

    def _begin(self, wanted: Offer) -> None:
        """Begin to receive a snapshot."""
        try:
            self.state, self.values = wanted.allocate()
        except TransportError as error:
            raise self._failed(str(error)) from error
        self.offset, self.senders, self.digest = 0, set[int](), wanted.begin_digest()

    async def _receive(self, wanted: Offer, holders: Sequence[int]) -> dict[str, Any] | None:
        """Fetch a snapshot from one donor after the other. Return None if none of them has all of it any more."""
        self._begin(wanted)
        held = await self.transfer.held(self.fragment, wanted)
        while held is not None and (left := wanted.bytes - self.offset):
            self._write(held.read(self.offset, min(MAX_CHUNK_BYTES, left)))
            await asyncio.sleep(0)  # other work of the thread goes on
        waiting = deque(holders)
        while self.offset < wanted.bytes:
            if not waiting:
                return None
            donor, before = waiting.popleft(), self.offset
            moved = await self._visit(donor, partial(self._continue, donor, wanted))
            if moved is None and donor in self.donors:
                waiting.append(donor)
                if self.offset == before:
                    await asyncio.sleep(next(self.pauses_s))
            if self.alone and self.offset < wanted.bytes:
                self._begin(wanted)
        bad = await asyncio.get_running_loop().run_in_executor(None, not_finite, self.state)
        if self.digest.hexdigest() != wanted.snapshot:  # by the fault of a sender, not of all that hold the snapshot
            self.alone = len(self.senders) > 1
            for donor in () if self.alone else self.senders or holders:
                self._drop(donor, f"it does not match the digest {wanted.snapshot}")
            return None
        for donor in holders if bad else ():
            self._drop(donor, f"its {', '.join(bad)} hold NaN or infinity")
        return None if bad else self.state

    def _write(self, data: bytes) -> None:
        self.values.write(self.offset, data)
        self.digest.update(data)
        self.offset += len(data)

    async def _continue(
        self, donor: int, wanted: Offer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Receive what is missing. Return True if the donor no longer has the snapshot."""
        clock, began = asyncio.get_running_loop(), self.offset
        began_s = clock.time()
        writer.write(pack(Fetch(self.fragment, self.after, wanted.snapshot, began)))
        while left := wanted.bytes - self.offset:
            chunk = await within(_SLOW_S, read_frame(reader, Chunk | Refused, 2 * MAX_CHUNK_BYTES))
            if isinstance(chunk, Refused):
                self.failures[donor], self.trouble[donor] = 0, chunk.reason
                return True
            size = len(chunk.data)
            self.transfer.fetched_bytes += size
            if chunk.offset != self.offset or size > left:
                raise TransportError(f"{size} bytes at {chunk.offset} arrived where byte {self.offset} was next")
            self._write(chunk.data)
            self.senders.add(donor)
            self.failures[donor] = 0
            self.begin_pauses()
            lasted_s, rest_s = clock.time() - began_s, self.until_s - clock.time()
            if lasted_s > _SLOW_S and (left - size) * lasted_s > (self.offset - began) * rest_s:
                raise TransportError(f"it was too slow: {self.offset - began} bytes in {lasted_s:.1f} s")
        return False


def _choice(offers: Mapping[int, Offer]) -> Offer | None:
    """Return the snapshot that most of the donors offer, of several the one with more finished rounds, or None."""
    times = Counter(map(encode, offers.values()))
    ordered = [offer for _, offer in sorted(offers.items())]
    return max(ordered, key=lambda offer: (times[encode(offer)], offer.finished_rounds or 0), default=None)
