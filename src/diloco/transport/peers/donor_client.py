"""The connection of a fetching rank to one donor: ask for an offer, then request and receive blocks.

`donor_session` is the donor's end and describes the protocol.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from diloco.errors import TransportError
from diloco.protocol import Refused
from diloco.transport.address import Address
from diloco.transport.connections.backoff import Backoff
from diloco.transport.connections.streams import MAX_MESSAGE_BYTES, Streams, pack, read_frame
from diloco.transport.peers.block_assembly import Assembly, Block
from diloco.transport.peers.donor_session import MAX_CHUNK_BYTES, Answer, Chunk, Fetch, Later, Moved, Offer
from diloco.transport.peers.state_wire import Description

__all__ = ["Donor", "FetchContext", "Meter"]

_MOST_FAILURES = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


@dataclass
class Meter:
    """Counts the bytes received in all fetches."""

    num_bytes: int = 0


@dataclass(eq=False)
class FetchContext:
    """State shared by the donors of one fetch, in one event loop: the request and the progress."""

    streams: Streams
    fragment: int  # index of the fragment
    after: int  # rounds that the state must include
    expected_bytes: int | None  # a larger state is refused; None: `state_wire.MAX_STATE_BYTES`
    slow_s: float  # see `fetch_state`
    agree_by_s: float  # loop time until which more donors than could be faulty must offer the same snapshot
    meter: Meter  # counts the received bytes
    donors: list[Donor] = field(default_factory=list)  # all donors, dropped ones included
    assembly: Assembly | None = None  # the chosen snapshot; None while none is chosen
    defect: Exception | None = None  # an internal error, which ends the fetch
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds. It is evaluated after each `notify`."""
        while not condition():
            if self.defect is not None:
                raise self.defect
            await self._changed.wait()

    def notify(self) -> None:
        """Wake all waiters, as the state has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    def discard_offers(self) -> None:
        """Discard the offers of all donors and ask again."""
        for donor in self.left:
            donor.offer, donor.answered = None, False
        self.notify()

    @property
    def left(self) -> list[Donor]:
        """The donors that have not been dropped."""
        return [donor for donor in self.donors if not donor.dropped]

    def sources(self, assembly: Assembly) -> list[Donor]:
        """Return the donors that hold the snapshot that is being fetched."""
        return [donor for donor in self.left if donor.offer == assembly.description]


class _DropError(Exception):
    """The reason for dropping a donor."""


class Donor:
    """One donor and the connections to it."""

    def __init__(self, fetch: FetchContext, replica: int, address: Address) -> None:
        self.fetch = fetch
        self.replica = replica
        self.address = address
        self.offer: Description | None = None  # the snapshot that it last offered
        self.answered = False  # whether it has answered, or failed to, since the last choice
        self.trouble = "it has not answered"  # the last failure, or what the donor waits for
        self.dropped = False  # whether it is no longer used
        self.asked: deque[Block] = deque()  # requested blocks, in order
        self.idle_since_s = 0.0  # when its last block was complete, or the first one was requested
        self._task: asyncio.Task[None] | None = None
        self._failures = 0
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, seed=f"{os.getpid()} {fetch.fragment} {replica}")

    def start(self) -> asyncio.Task[None]:
        """Start a task that fetches from the donor until it is dropped."""
        self._task = asyncio.create_task(self._run())
        return self._task

    def drop(self, why: str, *, at_once: bool = False) -> None:
        """Stop using this donor. With ``at_once``, do not wait for the blocks that were requested from it."""
        self.dropped, self.trouble, self.offer = True, why, None
        self.fetch.notify()
        if at_once and self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            while not self.dropped:
                seen = self.fetch.assembly
                await self._visit()
                self.fetch.notify()
                await self._pause(seen)
        except Exception as error:  # a defect of this package
            self.fetch.defect = error
        finally:
            self.fetch.notify()

    async def _pause(self, seen: Assembly | None) -> None:
        """Wait until it is time to ask again or another snapshot is chosen."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._backoff.next_s()):
                await self.fetch.until(lambda: self.fetch.assembly is not seen)

    async def _visit(self) -> None:
        """Use one connection for as long as possible."""
        slow_s = self.fetch.slow_s
        try:
            async with asyncio.timeout(slow_s):
                reader, writer = await self.fetch.streams.open(self.address)
            try:
                await self._talk(reader, writer)
            finally:
                writer.close()
        except _DropError as error:
            self.drop(str(error))
        except (OSError, EOFError, TransportError, ValueError) as error:
            self._failures += 1
            self.answered = True
            words = str(error) or type(error).__name__
            self.trouble = f"it sent nothing for {slow_s:g} s" if isinstance(error, TimeoutError) else words
            if self._failures == _MOST_FAILURES:
                self.drop(f"{self.trouble} (at {self.address})")

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fetch = self.fetch
        if not self._is_source():
            self.offer = None
            self.offer = await self._ask(reader, writer)
            self.answered = True
            fetch.notify()
            if self.offer is not None:
                await fetch.until(lambda: fetch.assembly is not None or self.offer is None)
        if (assembly := fetch.assembly) is not None and self._is_source():
            await self._receive(assembly, reader, writer)

    def _is_source(self) -> bool:
        """Return whether it holds the snapshot that is being fetched."""
        return self.fetch.assembly is not None and self.offer == self.fetch.assembly.description

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Description | None:
        """Ask what the donor holds. Return None if the caller should ask again later."""
        writer.write(pack(self._request("")))
        message, _ = await self._read(reader)
        if not isinstance(message, Offer):
            self._note_reason(message)
            return None
        try:
            offer = Description.from_message(msgspec.structs.asdict(message), self.fetch.expected_bytes)
        except TransportError as error:
            raise _DropError(str(error)) from error
        if offer.finished_rounds is not None and offer.finished_rounds < self.fetch.after:
            self.trouble = f"it has finished {offer.finished_rounds} of {self.fetch.after} rounds"
            return None
        self._failures = 0
        self.trouble = "it offered its state but has not sent all of it"
        return offer

    def _request(self, snapshot: str, **part: int) -> Fetch:
        """Return the request for an offer, or for ``part`` (an offset and a size) of a snapshot."""
        return Fetch(self.fetch.fragment, self.fetch.after, snapshot, **part)

    def _note_reason(self, message: Answer) -> None:
        """Process an answer that holds no state: note its reason, or drop the donor."""
        if not isinstance(message, Later):
            words = message.reason if isinstance(message, Refused) else f"it answered {type(message).__name__}"
            raise _DropError(words)
        self._failures = 0
        self.trouble = message.reason

    async def _receive(self, assembly: Assembly, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receive blocks until another snapshot is chosen."""
        fetch, clock = self.fetch, asyncio.get_running_loop()
        try:
            while fetch.assembly is assembly:
                if not self.asked:
                    self.idle_since_s = clock.time()
                while (block := assembly.take(self.asked, max(1, len(fetch.sources(assembly))))) is not None:
                    self.asked.append(block)
                    asked = self._request(assembly.description.digest, offset=block.offset, size=block.missing_bytes)
                    writer.write(pack(asked))
                if not self.asked:
                    await self._wait_for_others(assembly)
                    continue
                block = self.asked[0]
                if not await self._receive_chunk(assembly, block, reader):
                    return
                if not block.missing_bytes:
                    self.asked.popleft()
                    self.idle_since_s = clock.time()
                    fetch.notify()
        finally:
            assembly.give_back(self.asked)
            self.asked.clear()
            fetch.notify()

    async def _receive_chunk(self, assembly: Assembly, block: Block, reader: asyncio.StreamReader) -> bool:
        """Receive the next bytes of a block. Return False if the donor sends no more of it at present."""
        message, data = await self._read(reader)
        if not isinstance(message, Chunk):
            if isinstance(message, Moved):
                self.offer = None
                self.trouble = "its state has changed in the meantime"
            else:
                self._note_reason(message)
            return False
        block.check(message.offset, message.checksum, data)
        self.fetch.meter.num_bytes += len(data)
        try:
            assembly.put(block, data, self.replica)
        except TransportError as error:
            if error.replicas == (self.replica,):
                raise _DropError(str(error)) from error
            raise  # several donors have sent parts of it, and the faulty one is unknown
        self._failures = 0
        self._backoff.reset()
        return True

    async def _wait_for_others(self, assembly: Assembly) -> None:
        """Wait for the other donors when no block is left to request, and drop those that take too long."""
        fetch = self.fetch
        try:
            async with asyncio.timeout(fetch.slow_s):
                await fetch.until(lambda: fetch.assembly is not assembly or bool(assembly.waiting))
        except TimeoutError:
            for other in fetch.sources(assembly):
                lasted_s = asyncio.get_running_loop().time() - other.idle_since_s
                if other.asked and lasted_s >= fetch.slow_s:
                    other.drop(f"it was too slow: a block was incomplete after {lasted_s:.1f} s", at_once=True)

    async def _read(self, reader: asyncio.StreamReader) -> tuple[Answer, bytes]:
        async with asyncio.timeout(self.fetch.slow_s):
            return await read_frame(reader, Answer, MAX_MESSAGE_BYTES, MAX_CHUNK_BYTES)
