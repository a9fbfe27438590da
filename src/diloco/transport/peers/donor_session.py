"""Serving a fragment's global parameters and outer state to fetching ranks, over connections of their own.

Votes therefore never queue behind a state, and the donor's training continues. The state is copied once for all
fetchers, in another thread and under the lock of the code that changes it, and sent from the copy within the rate
limit.

::

    fetcher  Fetch(fragment, after)
    donor    Offer(...)    see `state_wire`
    fetcher  Fetch(fragment, after, snapshot, offset, size)
    donor    Chunk(offset, checksum) and bytes, until ``size`` bytes are sent
             Moved()       the snapshot no longer exists
    or       Later(reason), Refused(reason)

A fetcher may send several requests before the first is answered, and may continue over another connection.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import xxhash

from diloco.errors import TransportError
from diloco.membership import Count, Digest, Words
from diloco.protocol import Refused, WireMessage
from diloco.transport.base import SnapshotSource
from diloco.transport.connections.limits import TokenBucket
from diloco.transport.connections.streams import pack, read_frame
from diloco.transport.peers.state_wire import Description, TensorBytes, describe

__all__ = [
    "MAX_CHUNK_BYTES",
    "MAX_FETCHERS",
    "Answer",
    "Chunk",
    "DonorService",
    "Fetch",
    "Later",
    "Moved",
    "Offer",
    "Snapshot",
    "SnapshotCache",
]

MAX_CHUNK_BYTES = 1 << 18
MAX_FETCHERS = 4

_LEAST_CHUNK_BYTES = 1 << 12
_CHUNK_S = 0.25
_IDLE_S = 30.0
_STALLED_S = 30.0
_FRESH_S = 0.5
_SWEEP_S = 5.0


class Fetch(WireMessage):
    """The question what a donor holds, or for a part of a snapshot."""

    fragment: Count
    after: Count  # rounds that the state must include
    snapshot: Digest = ""  # "": which one?
    offset: Count = 0
    size: Count = 0


class Offer(WireMessage):
    """A `Description` of a snapshot, which checks it."""

    skeleton: Any
    tensors: Any
    bytes: Any
    blocks: Any
    snapshot: Any


class Chunk(WireMessage):
    """A part of a snapshot, whose bytes follow."""

    offset: Count
    checksum: Digest


class Moved(WireMessage):
    """The snapshot no longer exists."""


class Later(WireMessage):
    """The donor can't answer now."""

    reason: Words


Answer = Offer | Chunk | Moved | Later | Refused


@dataclass(eq=False)
class Snapshot:
    """A copy of a fragment's state at one moment."""

    fragment: int  # index of the fragment
    version: object  # version of the donor's state when it was copied
    description: Description
    values: TensorBytes  # the bytes of its tensors, which never change
    users: int = 0  # connections over which it is being sent
    held_until_s: float = -math.inf  # reserved until then for a fetcher whose connection broke
    left_s: float = -math.inf  # when the last user left


class SnapshotCache:
    """At most two snapshots of each fragment: one that is being sent, and one of the newer state.

    With a single snapshot, a fetcher that arrives after the next round would have to wait for earlier fetchers or end
    their transfers. More than two would take more memory than twice the donor's state. A fetcher that needs a third one
    is told to try later.
    """

    PLACES = 2

    def __init__(self, held_s: float = 10.0, kept_s: float = 30.0) -> None:
        # how long a snapshot is reserved for a fetcher whose connection broke; it is not replaced meanwhile
        self.held_s = held_s
        self.kept_s = kept_s  # how long an unused snapshot is kept unless its place is needed
        self.snapshots: list[Snapshot] = []

    def named(self, fragment: int, digest: str) -> Snapshot | None:
        """Return the snapshot with this digest, or None."""
        found = (each for each in self.snapshots if (each.fragment, each.description.digest) == (fragment, digest))
        return next(found, None)

    def current(self, fragment: int, version: object) -> Snapshot | None:
        """Return the snapshot of this version, or None."""
        found = (each for each in self.snapshots if each.fragment == fragment and each.version == version)
        return next(found, None)

    def make_room(self, fragment: int, now_s: float) -> bool:
        """Drop unused snapshots of ``fragment`` until there is room for another. Return whether there is."""
        while len(there := [each for each in self.snapshots if each.fragment == fragment]) >= self.PLACES:
            idle = [each for each in there if not each.users and each.held_until_s <= now_s]
            if not idle:
                return False
            self.snapshots.remove(min(idle, key=lambda each: each.left_s))
        return True

    def add(self, snapshot: Snapshot, now_s: float) -> Snapshot:
        """Store a snapshot and return it, or return the stored one with the same content."""
        same = self.named(snapshot.fragment, snapshot.description.digest)
        if same is not None:
            same.version = snapshot.version
            return same
        snapshot.left_s = now_s
        self.snapshots.append(snapshot)
        return snapshot

    def leave(self, snapshot: Snapshot, now_s: float, *, broken: bool) -> None:
        """Record that a user has left. If its connection was ``broken``, it may come back."""
        snapshot.users -= 1
        snapshot.left_s = now_s
        if broken:
            snapshot.held_until_s = now_s + self.held_s

    def sweep(self, now_s: float) -> None:
        """Drop snapshots that have been unused for long."""
        self.snapshots = [
            each for each in self.snapshots if each.users or now_s < max(each.left_s + self.kept_s, each.held_until_s)
        ]


class DonorService:
    """Answers ranks that fetch state from this one. Its methods run in the control thread.

    Raises:
        ConfigurationError: The limit is not a positive number.
    """

    def __init__(self, limit_bytes_per_s: float | None = None) -> None:
        # fragment index -> its state, whose tensors must not change; called in another thread. None: nothing is
        # published.
        self.source: SnapshotSource | None = None
        # fragment index -> a value that differs after each change of the state; called in the control thread, so it
        # must be cheap and take no lock. None: a snapshot counts as current for half a second.
        self.version: Callable[[int], object] | None = None
        self.cache = SnapshotCache()
        limited = math.inf if limit_bytes_per_s is None else limit_bytes_per_s * _CHUNK_S
        self.chunk_bytes = int(min(MAX_CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, limited)))
        self.bucket = TokenBucket(limit_bytes_per_s, self.chunk_bytes)
        self._fetchers = 0
        self._copying = asyncio.Lock()  # one copy at a time, to limit the donor's memory
        self._sweeping = False

    async def serve(self, asked: Fetch, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection until it ends."""
        if self._fetchers >= MAX_FETCHERS:
            await _write(writer, pack(Later(f"it is serving {self._fetchers} others")))
            return
        self._fetchers += 1
        session, broken = _DonorSession(self, writer), True
        try:
            while True:
                await session.answer(asked)
                async with asyncio.timeout(_IDLE_S):
                    asked, _ = await read_frame(reader, Fetch)
        except asyncio.IncompleteReadError as error:
            broken = bool(error.partial)
        except BaseException:
            writer.transport.abort()  # the fetcher requests again what it has not received
            raise
        finally:
            self._fetchers -= 1
            session.use(None, broken=broken)
            self._sweep()

    async def snapshot(self, fragment: int) -> Snapshot | None:
        """Return a snapshot of the current state, copied if necessary, or None if there is no room for one.

        Raises:
            TransportError: Nothing is published.
            Exception: Any error that the source raises.
        """
        loop = asyncio.get_running_loop()
        async with self._copying:
            source = self.source
            if source is None:
                raise TransportError("it has published nothing")
            state_version = loop.time() // _FRESH_S if self.version is None else self.version(fragment)
            version = (source, state_version)
            found = self.cache.current(fragment, version)
            if found is not None:
                return found
            if not self.cache.make_room(fragment, loop.time()):
                return None
            made = await loop.run_in_executor(None, lambda: describe(source(fragment)))
            return self.cache.add(Snapshot(fragment, version, *made), loop.time())

    def _sweep(self) -> None:
        """Sweep the cache at intervals as long as it holds anything."""
        if not self._sweeping and self.cache.snapshots:
            self._sweeping = True
            asyncio.get_running_loop().call_later(_SWEEP_S, self._swept)

    def _swept(self) -> None:
        self._sweeping = False
        self.cache.sweep(asyncio.get_running_loop().time())
        self._sweep()


class _DonorSession:
    """One connection of a fetcher, and the snapshot that is sent over it."""

    def __init__(self, service: DonorService, writer: asyncio.StreamWriter) -> None:
        self._service = service
        self._writer = writer
        self._snapshot: Snapshot | None = None

    def use(self, snapshot: Snapshot | None, *, broken: bool = False) -> None:
        """Use ``snapshot`` from now on, and leave the one before."""
        if self._snapshot is not None:
            self._service.cache.leave(self._snapshot, asyncio.get_running_loop().time(), broken=broken)
        self._snapshot = snapshot
        if snapshot is not None:
            snapshot.users += 1

    async def answer(self, asked: Fetch) -> None:
        if not asked.snapshot:
            self.use(None)
            await self._reply(await self._offer(asked.fragment, asked.after))
            return
        snapshot = self._service.cache.named(asked.fragment, asked.snapshot)
        if snapshot is None:
            await self._reply(Moved())
            return
        self.use(snapshot)
        offset, size_bytes = asked.offset, asked.size
        if not offset < offset + size_bytes <= snapshot.values.size_bytes:
            raise TransportError(
                f"bytes {offset} to {offset + size_bytes} of {snapshot.values.size_bytes} were requested"
            )
        await self._send(snapshot, offset, size_bytes)

    async def _offer(self, fragment: int, after: int) -> WireMessage:
        try:
            snapshot = await self._service.snapshot(fragment)
        except TransportError as error:
            return Refused(str(error))
        except Exception as error:  # of the source
            return Refused(f"{type(error).__name__}: {error}")
        if snapshot is None:
            return Later("it is still sending two earlier states")
        finished = snapshot.description.finished_rounds
        if finished is not None and finished < after:
            return Later(f"it has finished {finished} of {after} rounds")
        self.use(snapshot)
        return Offer(**snapshot.description.to_message())

    async def _send(self, snapshot: Snapshot, offset: int, size_bytes: int) -> None:
        """Send a range of a snapshot in chunks, within the rate limit."""
        loop, end = asyncio.get_running_loop(), offset + size_bytes
        for start in range(offset, end, self._service.chunk_bytes):
            data = snapshot.values.read(start, min(end - start, self._service.chunk_bytes))
            frame = pack(Chunk(start, xxhash.xxh3_64_hexdigest(data)), data)
            if wait_s := self._service.bucket.take(loop.time(), len(frame)):
                await asyncio.sleep(wait_s)
            await _write(self._writer, frame)

    async def _reply(self, message: WireMessage) -> None:
        await _write(self._writer, pack(message))


async def _write(writer: asyncio.StreamWriter, frame: bytes) -> None:
    writer.write(frame)
    async with asyncio.timeout(_STALLED_S):
        await writer.drain()
