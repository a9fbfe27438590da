"""Serving a fragment's global parameters and outer state to those who ask, over connections of their own.

So votes never wait behind it, and the donor's training goes on: the state is copied once for all askers, in another
thread, under the lock of whoever changes it, and sent from the copy, no faster than the limit says.

::

    asker    {"kind": "fetch", "fragment", "after", "snapshot": ""}
    donor    {"kind": "offer", "skeleton", "tensors", "bytes", "blocks", "snapshot"}    see `state_wire`
    asker    {"kind": "fetch", "fragment", "after", "snapshot": digest, "offset", "size"}
    donor    {"kind": "chunk", "offset", "checksum"} and bytes, until ``size`` bytes are sent
             {"kind": "moved"}            that snapshot is gone
    or       {"kind": "later", "reason"}, {"kind": "refused", "reason"}

An asker may send several requests before the first is answered, and may continue over another connection.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import xxhash

from diloco.errors import TransportError
from diloco.protocol.fields import Fields
from diloco.transport.base import SnapshotSource
from diloco.transport.connections.streams import pack, read_frame
from diloco.transport.peers.state_wire import Description, TensorBytes, describe
from diloco.transport.shaping import TokenBucket

__all__ = ["MAX_ASKERS", "MAX_CHUNK_BYTES", "DonorService", "Snapshot", "SnapshotCache"]

MAX_CHUNK_BYTES = 1 << 18
MAX_ASKERS = 4

_LEAST_CHUNK_BYTES = 1 << 12
_CHUNK_S = 0.25
_IDLE_S = 30.0
_STALLED_S = 30.0
_FRESH_S = 0.5
_SWEEP_S = 5.0


@dataclass(eq=False)
class Snapshot:
    """A fragment's state at one moment."""

    fragment: int  # its index
    version: object  # of the donor's state, when the copy was made
    description: Description  # what it consists of
    values: TensorBytes  # the bytes of its tensors, which nobody changes
    users: int = 0  # connections over which it is sent
    held_until_s: float = -math.inf  # until then somebody whose connection broke may come back for it
    left_s: float = -math.inf  # when the last user left


class SnapshotCache:
    """At most two snapshots of each fragment: one that is being sent, and one of what the state has become since.

    With one, an asker that comes after the next round would wait for the askers before it, or end their transfers; more
    than two would take more memory than twice the donor's own state. An asker that needs a third is told to come later.
    """

    PLACES = 2

    def __init__(self, held_s: float = 10.0, kept_s: float = 30.0) -> None:
        # how long a snapshot is kept for somebody whose connection broke; nothing takes its place meanwhile
        self.held_s = held_s
        self.kept_s = kept_s  # how long an unused one is kept while its place isn't needed
        self.snapshots: list[Snapshot] = []

    def named(self, fragment: int, digest: str) -> Snapshot | None:
        """The snapshot with this digest."""
        found = (each for each in self.snapshots if (each.fragment, each.description.digest) == (fragment, digest))
        return next(found, None)

    def current(self, fragment: int, version: object) -> Snapshot | None:
        """The snapshot of this version."""
        found = (each for each in self.snapshots if each.fragment == fragment and each.version == version)
        return next(found, None)

    def make_room(self, fragment: int, now_s: float) -> bool:
        """Drop unused snapshots of ``fragment`` until there is a place for another; False if there is none."""
        while len(there := [each for each in self.snapshots if each.fragment == fragment]) >= self.PLACES:
            idle = [each for each in there if not each.users and each.held_until_s <= now_s]
            if not idle:
                return False
            self.snapshots.remove(min(idle, key=lambda each: each.left_s))
        return True

    def add(self, snapshot: Snapshot, now_s: float) -> Snapshot:
        """Keep it, or the one that is there already and holds the same."""
        same = self.named(snapshot.fragment, snapshot.description.digest)
        if same is not None:
            same.version = snapshot.version
            return same
        snapshot.left_s = now_s
        self.snapshots.append(snapshot)
        return snapshot

    def leave(self, snapshot: Snapshot, now_s: float, *, broken: bool) -> None:
        """One of its users is gone; if the connection broke, that user may come back."""
        snapshot.users -= 1
        snapshot.left_s = now_s
        if broken:
            snapshot.held_until_s = now_s + self.held_s

    def sweep(self, now_s: float) -> None:
        """Drop what nobody has used for long."""
        self.snapshots = [
            each for each in self.snapshots if each.users or now_s < max(each.left_s + self.kept_s, each.held_until_s)
        ]


class DonorService:
    """Answers those who fetch state from this rank. In the control thread, but for its attributes.

    Raises:
        ConfigurationError: if the limit is not a positive number.
    """

    def __init__(self, limit_bytes_per_s: float | None = None) -> None:
        # fragment index -> its state, whose tensors nobody changes; called in another thread. None: nothing is
        # published.
        self.source: SnapshotSource | None = None
        # fragment index -> a value that differs after each change of its state; cheap, without a lock, called in the
        # control thread. None: a snapshot counts as current for half a second.
        self.version: Callable[[int], object] | None = None
        self.cache = SnapshotCache()  # the snapshots kept
        limited = math.inf if limit_bytes_per_s is None else limit_bytes_per_s * _CHUNK_S
        self.chunk_bytes = int(min(MAX_CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, limited)))
        self.bucket = TokenBucket(limit_bytes_per_s, self.chunk_bytes)
        self._askers = 0
        self._copying = asyncio.Lock()  # one copy at a time, for the donor's memory
        self._sweeping = False

    async def serve(
        self, message: dict[str, Any], blob: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer one connection's requests until it ends."""
        if self._askers >= MAX_ASKERS:
            await _write(writer, pack({"kind": "later", "reason": f"it is serving {self._askers} others"}))
            return
        self._askers += 1
        session, broken = _DonorSession(self, writer), True
        try:
            while True:
                await session.answer(message)
                async with asyncio.timeout(_IDLE_S):
                    message, _ = await read_frame(reader)
        except asyncio.IncompleteReadError as error:
            broken = bool(error.partial)
        except BaseException:
            writer.transport.abort()  # the asker asks again for what it has not received
            raise
        finally:
            self._askers -= 1
            session.use(None, broken=broken)
            self._sweep()

    async def snapshot(self, fragment: int) -> Snapshot | None:
        """The current state, copied unless it has been; None: there is no room for it now.

        Raises:
            Exception: whatever the source raises.
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
        """Sweep the cache from time to time, as long as it holds anything."""
        if not self._sweeping and self.cache.snapshots:
            self._sweeping = True
            asyncio.get_running_loop().call_later(_SWEEP_S, self._swept)

    def _swept(self) -> None:
        self._sweeping = False
        self.cache.sweep(asyncio.get_running_loop().time())
        self._sweep()


class _DonorSession:
    """One connection of an asker, and the snapshot that is sent over it."""

    def __init__(self, service: DonorService, writer: asyncio.StreamWriter) -> None:
        self._service = service
        self._writer = writer
        self._snapshot: Snapshot | None = None

    def use(self, snapshot: Snapshot | None, *, broken: bool = False) -> None:
        """Send this one from now on."""
        if self._snapshot is not None:
            self._service.cache.leave(self._snapshot, asyncio.get_running_loop().time(), broken=broken)
        self._snapshot = snapshot
        if snapshot is not None:
            snapshot.users += 1

    async def answer(self, message: dict[str, Any]) -> None:
        fields = Fields(message)
        fragment, after, digest = fields.integer("fragment"), fields.integer("after"), fields.text("snapshot")
        if not digest:
            self.use(None)
            await self._say(await self._offer(fragment, after))
            return
        snapshot = self._service.cache.named(fragment, digest)
        if snapshot is None:
            await self._say({"kind": "moved"})
            return
        self.use(snapshot)
        offset, size_bytes = fields.integer("offset"), fields.integer("size")
        if not offset < offset + size_bytes <= snapshot.values.size_bytes:
            raise TransportError(f"bytes {offset} to {offset + size_bytes} of {snapshot.values.size_bytes} were asked")
        await self._send(snapshot, offset, size_bytes)

    async def _offer(self, fragment: int, after: int) -> dict[str, Any]:
        try:
            snapshot = await self._service.snapshot(fragment)
        except TransportError as error:
            return {"kind": "refused", "reason": str(error)}
        except Exception as error:  # of the source
            return {"kind": "refused", "reason": f"{type(error).__name__}: {error}"}
        if snapshot is None:
            return {"kind": "later", "reason": "it is handing over two earlier states"}
        finished = snapshot.description.finished_rounds
        if finished is not None and finished < after:
            return {"kind": "later", "reason": f"it has finished {finished} rounds of {after}"}
        self.use(snapshot)
        return {"kind": "offer", **snapshot.description.to_message()}

    async def _send(self, snapshot: Snapshot, offset: int, size_bytes: int) -> None:
        """Bytes of a snapshot, in chunks, as soon as the limit allows."""
        loop, end = asyncio.get_running_loop(), offset + size_bytes
        for start in range(offset, end, self._service.chunk_bytes):
            data = snapshot.values.read(start, min(end - start, self._service.chunk_bytes))
            frame = pack({"kind": "chunk", "offset": start, "checksum": xxhash.xxh3_64_hexdigest(data)}, data)
            if wait_s := self._service.bucket.take(loop.time(), len(frame)):
                await asyncio.sleep(wait_s)
            await _write(self._writer, frame)

    async def _say(self, message: dict[str, Any]) -> None:
        await _write(self._writer, pack(message))


async def _write(writer: asyncio.StreamWriter, frame: bytes) -> None:
    writer.write(frame)
    async with asyncio.timeout(_STALLED_S):
        await writer.drain()
