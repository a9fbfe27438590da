"""Handing a fragment's global parameters and outer state to who asks, over connections of their own.

So it does not stand in the way of votes, and the donor's training goes on: a copy is made in another thread, under the
lock of whoever changes the state, once for all askers; it is sent from there, no faster than the limit says.

::

    asker    {"kind": "fetch", "fragment", "after", "snapshot": ""}
    donor    {"kind": "offer", "skeleton", "tensors", "bytes", "blocks", "snapshot"}    see `state_wire`
    asker    {"kind": "fetch", "fragment", "after", "snapshot": digest, "offset", "size"}
    donor    {"kind": "chunk", "offset", "checksum"} and bytes, until ``size`` bytes are sent
             {"kind": "moved"}            that snapshot is no more
    or       {"kind": "later", "reason"}, {"kind": "refused", "reason"}

An asker may send several requests before the first is answered, and come again over another connection.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import xxhash

from diloco.errors import TransportError
from diloco.transport.base import SnapshotSource
from diloco.transport.peers.connection_manager import ConnectionManager
from diloco.transport.peers.frames import pack, read_frame
from diloco.transport.peers.state_shelf import Shelf, Snapshot
from diloco.transport.peers.state_wire import describe
from diloco.transport.shaping import TokenBucket

__all__ = ["MAX_CHUNK_BYTES", "StateService", "serve_state"]

MAX_CHUNK_BYTES = 1 << 18
MAX_ASKERS = 4

_LEAST_CHUNK_BYTES = 1 << 12
_CHUNK_S = 0.25
_IDLE_S = 30.0
_STALLED_S = 30.0
_FRESH_S = 0.5
_SWEEP_S = 5.0


class StateService:
    """Answers those who fetch state from this rank. In the control thread, but for its attributes.

    Attributes:
        source: fragment index -> its state, of which nobody changes a tensor afterwards; called in another thread.
            None: nothing is published.
        version: fragment index -> something that is another one after each change of its state; cheap, without a lock,
            called in the control thread. None: a snapshot counts as the present state for half a second.
        shelf: the snapshots held.

    Args:
        limit_bytes_per_s: of all answers together.
    """

    def __init__(self, limit_bytes_per_s: float | None = None) -> None:
        self.source: SnapshotSource | None = None
        self.version: Callable[[int], object] | None = None
        self.shelf = Shelf()
        limited = math.inf if limit_bytes_per_s is None else limit_bytes_per_s * _CHUNK_S
        self._chunk_bytes = int(min(MAX_CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, limited)))
        self._bucket = TokenBucket(limit_bytes_per_s, self._chunk_bytes)
        self._askers = 0
        self._copying = asyncio.Lock()  # one at a time, for the donor's memory
        self._sweeping = False

    async def serve(
        self, message: dict[str, Any], blob: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer one connection's requests until it ends: a `ConnectionManager` service."""
        if self._askers >= MAX_ASKERS:
            await _say(writer, {"kind": "later", "reason": f"it is serving {self._askers} others"})
            return
        self._askers += 1
        asker, broken = _Asker(self, writer), True
        try:
            while True:
                await asker.answer(message)
                async with asyncio.timeout(_IDLE_S):
                    message, _ = await read_frame(reader)
        except asyncio.IncompleteReadError as error:
            broken = bool(error.partial)
        except BaseException:
            writer.transport.abort()  # what the asker did not take by now it asks for again
            raise
        finally:
            self._askers -= 1
            asker.use(None, broken=broken)
            self._sweep()

    async def snapshot(self, fragment: int) -> Snapshot | None:
        """The present state, copied if it has not been yet; None: there is no room for it now.

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
            found = self.shelf.current(fragment, version)
            if found is not None:
                return found
            if not self.shelf.make_room(fragment, loop.time()):
                return None
            made = await loop.run_in_executor(None, _copy, source, fragment, version)
            return self.shelf.add(made, loop.time())

    async def send(self, writer: asyncio.StreamWriter, snapshot: Snapshot, offset: int, size_bytes: int) -> None:
        """Bytes of a snapshot, in chunks, as soon as the limit allows."""
        loop = asyncio.get_running_loop()
        while size_bytes:
            data = snapshot.values.read(offset, min(size_bytes, self._chunk_bytes))
            frame = pack({"kind": "chunk", "offset": offset, "checksum": xxhash.xxh3_64_hexdigest(data)}, data)
            wait_s = self._bucket.take(loop.time(), len(frame))
            if wait_s:
                await asyncio.sleep(wait_s)
            await _write(writer, frame)
            offset, size_bytes = offset + len(data), size_bytes - len(data)

    def _sweep(self) -> None:
        """Look through the shelf from time to time, as long as there is anything."""
        if not self._sweeping and self.shelf.snapshots:
            self._sweeping = True
            asyncio.get_running_loop().call_later(_SWEEP_S, self._swept)

    def _swept(self) -> None:
        self._sweeping = False
        self.shelf.sweep(asyncio.get_running_loop().time())
        self._sweep()


class _Asker:
    """One connection, and the snapshot that it is sent."""

    def __init__(self, service: StateService, writer: asyncio.StreamWriter) -> None:
        self._service = service
        self._writer = writer
        self._snapshot: Snapshot | None = None

    def use(self, snapshot: Snapshot | None, *, broken: bool = False) -> None:
        """Stay with this one from now on."""
        if self._snapshot is not None:
            self._service.shelf.leave(self._snapshot, asyncio.get_running_loop().time(), broken=broken)
        self._snapshot = snapshot
        if snapshot is not None:
            snapshot.users += 1

    async def answer(self, message: dict[str, Any]) -> None:
        fragment, after = _whole(message, "fragment"), _whole(message, "after")
        digest = message["snapshot"]
        if not digest:
            self.use(None)
            await _say(self._writer, await self._offer(fragment, after))
            return
        snapshot = self._service.shelf.named(fragment, str(digest))
        if snapshot is None:
            await _say(self._writer, {"kind": "moved"})
            return
        self.use(snapshot)
        offset, size_bytes = _whole(message, "offset"), _whole(message, "size")
        if not offset < offset + size_bytes <= snapshot.values.size_bytes:
            raise TransportError(f"bytes {offset} to {offset + size_bytes} of {snapshot.values.size_bytes} were asked")
        await self._service.send(self._writer, snapshot, offset, size_bytes)

    async def _offer(self, fragment: int, after: int) -> dict[str, Any]:
        try:
            snapshot = await self._service.snapshot(fragment)
        except TransportError as error:
            return {"kind": "refused", "reason": str(error)}
        except Exception as error:  # the source's own business; the asker hears of it
            return {"kind": "refused", "reason": f"{type(error).__name__}: {error}"}
        if snapshot is None:
            return {"kind": "later", "reason": "it is handing over two earlier states"}
        finished = snapshot.description.finished_rounds
        if finished is not None and finished < after:
            return {"kind": "later", "reason": f"it has finished {finished} rounds of {after}"}
        self.use(snapshot)
        return {"kind": "offer", **snapshot.description.to_message()}


def serve_state(connections: ConnectionManager, limit_bytes_per_s: float | None = None) -> StateService:
    """Answer ``fetch`` on ``connections`` with what the result's ``source`` gives.

    Args:
        connections: of the donor.
        limit_bytes_per_s: of all answers together; None: none.

    Raises:
        ConfigurationError: if the limit is no positive number.
    """
    service = StateService(limit_bytes_per_s)
    connections.services["fetch"] = service.serve
    return service


def _copy(source: SnapshotSource, fragment: int, version: object) -> Snapshot:
    return Snapshot(fragment, version, *describe(source(fragment)))


def _whole(message: dict[str, Any], name: str) -> int:
    value = message[name]
    if type(value) is not int or value < 0:
        raise TransportError(f"{name} = {str(value)[:40]!r} was asked for; a whole number would work")
    return value


async def _say(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    await _write(writer, pack(message))


async def _write(writer: asyncio.StreamWriter, frame: bytes) -> None:
    writer.write(frame)
    async with asyncio.timeout(_STALLED_S):
        await writer.drain()
