"""One donor as seen by an asker of state: connect, ask what it holds, receive the blocks that it is asked for.

`donor_session` is the other side, and describes the protocol.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from diloco.errors import TransportError
from diloco.transport.address import Address
from diloco.transport.connections.streams import Streams, pack, read_frame
from diloco.transport.peers.block_assembly import Assembly, Block
from diloco.transport.peers.state_wire import Description
from diloco.units import visible

__all__ = ["Donor", "FetchContext", "Meter"]

_MOST_FAILURES = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


@dataclass
class Meter:
    """Counts the bytes that have come, in any fetch."""

    num_bytes: int = 0


@dataclass(eq=False)
class FetchContext:
    """What the donors of one fetch share: what is asked for, and how far it has come. In one event loop."""

    streams: Streams  # of the network
    fragment: int  # its index
    after: int  # rounds that must be in the state
    expected_bytes: int | None  # a larger state is refused; None: `state_wire.MAX_STATE_BYTES`
    slow_s: float  # as for `fetch_state`
    agree_by_s: float  # until then, by the loop's clock, more donors than could lie are to offer the same
    meter: Meter  # counts the bytes that come
    donors: list[Donor] = field(default_factory=list)  # all of them
    assembly: Assembly | None = None  # of the chosen snapshot; None while none is chosen
    defect: Exception | None = None  # an error of the package itself, which ends the fetch
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds, which is looked at after every `notify`."""
        while not condition():
            if self.defect is not None:
                raise self.defect
            await self._changed.wait()

    def notify(self) -> None:
        """Something has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    def ask_again(self) -> None:
        """What the donors have offered is not used."""
        for donor in self.left:
            donor.offer, donor.answered = None, False
        self.notify()

    @property
    def left(self) -> list[Donor]:
        """The donors that have not been dropped."""
        return [donor for donor in self.donors if not donor.dropped]

    def sources(self, assembly: Assembly) -> list[Donor]:
        """The donors that hold what is being fetched."""
        return [donor for donor in self.left if donor.offer == assembly.description]


class _DropError(Exception):
    """Why a donor is not asked again."""


class Donor:
    """One donor, and the connections to it."""

    def __init__(self, fetch: FetchContext, replica: int, address: Address) -> None:
        self.fetch = fetch
        self.replica = replica
        self.address = address
        self.offer: Description | None = None  # the snapshot that it holds, as far as is known
        self.answered = False  # whether it has answered, or could not be asked, since the last choice
        self.trouble = "it has not been heard"  # what went wrong last, or what it waits for
        self.dropped = False  # whether it is not asked again
        self.asked: deque[Block] = deque()  # the blocks that it is to send, in order
        self.idle_since_s = 0.0  # when it finished its last block, or was asked for the first one
        self._task: asyncio.Task[None] | None = None
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S

    def start(self) -> asyncio.Task[None]:
        """Ask it, in a task that ends once it is dropped."""
        self._task = asyncio.create_task(self._run())
        return self._task

    def drop(self, why: str, *, at_once: bool = False) -> None:
        """Do not ask this donor again; ``at_once``: do not wait for what it was asked for either."""
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
        except Exception as error:  # a defect of the package
            self.fetch.defect = error
        finally:
            self.fetch.notify()

    async def _pause(self, seen: Assembly | None) -> None:
        """Until it is time to ask again, or another snapshot is chosen."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._pause_s):
                await self.fetch.until(lambda: self.fetch.assembly is not seen)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    async def _visit(self) -> None:
        """One connection, for as long as it is of use."""
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
            self.trouble = f"it said nothing for {slow_s:g} s" if isinstance(error, TimeoutError) else words
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
        """Whether it holds what is being fetched."""
        return self.fetch.assembly is not None and self.offer == self.fetch.assembly.description

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Description | None:
        """What the donor holds now; None: it is to be asked again."""
        writer.write(pack(self._request("")))
        message, _ = await self._read(reader)
        if message["kind"] != "offer":
            self._excuse(message)
            return None
        try:
            offer = Description.from_message(message, self.fetch.expected_bytes)
        except TransportError as error:
            raise _DropError(str(error)) from error
        if offer.finished_rounds is not None and offer.finished_rounds < self.fetch.after:
            self.trouble = f"it has finished {offer.finished_rounds} rounds of {self.fetch.after}"
            return None
        self._failures = 0
        self.trouble = "it offered its state and has not sent all of it"
        return offer

    def _request(self, snapshot: str, **part: int) -> dict[str, Any]:
        """For an offer; or for ``part``, an offset and a size, of a snapshot."""
        fetch = self.fetch
        return {"kind": "fetch", "fragment": fetch.fragment, "after": fetch.after, "snapshot": snapshot, **part}

    def _excuse(self, message: Mapping[str, Any]) -> None:
        """Note why an answer holds no state."""
        reason = visible(str(message.get("reason", f"it answered {message['kind']!r}")), 500)
        if message["kind"] != "later":
            raise _DropError(reason)
        self._failures = 0
        self.trouble = reason

    async def _receive(self, assembly: Assembly, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Blocks, until another snapshot is chosen."""
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
        """The next bytes of a block; False: the donor sends no more of it now."""
        message, data = await self._read(reader)
        if message["kind"] != "chunk":
            if message["kind"] == "moved":
                self.offer = None
                self.trouble = "its state has moved on meanwhile"
            else:
                self._excuse(message)
            return False
        block.check(message, data)
        self.fetch.meter.num_bytes += len(data)
        try:
            assembly.put(block, data, self.replica)
        except TransportError as error:
            if error.replicas == (self.replica,):
                raise _DropError(str(error)) from error
            raise  # several donors have sent parts of it, and which of them is wrong is not known
        self._failures, self._pause_s = 0, _FIRST_PAUSE_S
        return True

    async def _wait_for_others(self, assembly: Assembly) -> None:
        """No block is left to ask for: wait for the others, and drop those that take too long."""
        fetch = self.fetch
        try:
            async with asyncio.timeout(fetch.slow_s):
                await fetch.until(lambda: fetch.assembly is not assembly or bool(assembly.waiting))
        except TimeoutError:
            for other in fetch.sources(assembly):
                lasted_s = asyncio.get_running_loop().time() - other.idle_since_s
                if other.asked and lasted_s >= fetch.slow_s:
                    other.drop(f"it was too slow: a block had not come after {lasted_s:.1f} s", at_once=True)

    async def _read(self, reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
        async with asyncio.timeout(self.fetch.slow_s):
            return await read_frame(reader)
