"""Donors of state and a rank that fetches it, each with its own thread and connections, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import torch

from diloco.protocol import Timing
from diloco.transport import (
    MAX_BLOB_BYTES,
    MAX_JSON_BYTES,
    Address,
    ConnectionManager,
    DonorService,
    TcpStreams,
    describe,
    fetch_state,
    pack,
    read_frame,
)

LIMIT_S = 30.0
NUMEL = 1_600_000  # 12.8 MB with a slot of the same size: 32 blocks, each of two chunks


def state(seed: int = 0, *, finished: int = 1, numel: int = NUMEL) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "global_params": torch.randn(numel, generator=generator),
        "outer_step": 3,
        "slots": {"momentum": torch.randn(numel, generator=generator), "nothing": torch.empty(0)},
        "finished_rounds": finished,
        "rate": 0.1,
    }


class Donor:
    """A donor that serves the state ``held``."""

    def __init__(self, held: Mapping[str, Any] | None, limit_bytes_per_s: float | None = None) -> None:
        self.changes = 0
        self.held = held
        self.copies = 0
        self.requests: list[dict[str, Any]] = []
        self.connections = ConnectionManager(0, Timing(), TcpStreams())
        self.address = self.connections.listen("127.0.0.1", range(1), "127.0.0.1")
        self.service = DonorService(limit_bytes_per_s)
        self.connections.services["fetch"] = self.service.serve
        if held is not None:
            self.service.source = self.copied
        self.service.version = lambda fragment: self.changes

    @property
    def held(self) -> Mapping[str, Any] | None:
        return self._held

    @held.setter
    def held(self, held: Mapping[str, Any] | None) -> None:
        self._held = held
        self.changes += 1  # not `id`, which another object may reuse

    def copied(self, fragment: int) -> Mapping[str, Any]:
        self.copies += 1
        assert self.held is not None
        return {**self.held, "fragment": fragment}

    def served_by(self, serve: Callable[[dict[str, Any], Any, Any], Awaitable[None]]) -> None:
        """Let ``serve`` answer requests instead of the service."""

        async def first(message: dict[str, Any], blob: bytes, reader: Any, writer: Any) -> None:
            while True:
                await serve(message, reader, writer)
                message, _ = await read_frame(reader)

        self.connections.services["fetch"] = first


class Counting(TcpStreams):
    """Counts requests and chunks by port. ``hook`` sees every chunk and may damage it or raise."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[int] = []
        self.received: dict[int, int] = {}
        self.hook: Callable[[int, bytes], bytes] = lambda port, data: data

    async def open(self, address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await super().open(address)
        self.opened.append(address.port)
        read = reader.readexactly

        async def counted(n: int) -> bytes:
            data = await read(n)
            if n >= 4096:  # the size of the smallest chunk in these tests
                self.received[address.port] = self.received.get(address.port, 0) + n
                try:
                    data = self.hook(address.port, data)
                except OSError:
                    writer.transport.abort()
                    raise
            return data

        reader.readexactly = counted  # type: ignore[method-assign]
        return reader, writer


class Fetcher:
    def __init__(self) -> None:
        self.streams = Counting()
        self.connections = ConnectionManager(9, Timing(), self.streams)
        self.talks: list[Conversation] = []

    def close(self) -> None:
        for talk in self.talks:
            talk.end()
        self.connections.close()

    def fetch(self, donors: Mapping[int, Donor], fragment: int = 0, after: int = 0, **more: Any) -> dict[str, Any]:
        addresses = {replica: donor.address for replica, donor in donors.items()}
        more = {"timeout_s": LIMIT_S, **more}
        return self.connections.call(fetch_state(self.streams, addresses, fragment, after, **more), 2 * LIMIT_S)

    def start(self, donors: Mapping[int, Donor], **more: Any) -> Callable[[], dict[str, Any]]:
        """Start `fetch` in the background, and return a function that waits for its result."""
        addresses = {replica: donor.address for replica, donor in donors.items()}
        going = fetch_state(self.streams, addresses, more.pop("fragment", 0), more.pop("after", 0), LIMIT_S, **more)
        future = asyncio.run_coroutine_threadsafe(going, self.connections.loop)
        return lambda: future.result(2 * LIMIT_S)

    def received_from(self, donor: Donor) -> int:
        return self.streams.received.get(donor.address.port, 0)


MakeDonor = Callable[..., Donor]


def size_of(held: Mapping[str, Any]) -> int:
    return describe(held)[0].size_bytes


class Conversation:
    """One raw connection to a donor."""

    def __init__(self, fetcher: Fetcher, donor: Donor) -> None:
        self.fetcher = fetcher
        self.stream = fetcher.connections.call(fetcher.streams.open(donor.address), LIMIT_S)
        fetcher.talks.append(self)

    def say(self, fragment: Any = 0, snapshot: Any = "", **more: Any) -> None:
        message = {"kind": "fetch", "fragment": fragment, "after": 0, "snapshot": snapshot, **more}
        self.fetcher.connections.post(self.stream[1].write, pack(message))

    def hear(self) -> dict[str, Any]:
        return self.fetcher.connections.call(read_frame(self.stream[0], MAX_JSON_BYTES, MAX_BLOB_BYTES), LIMIT_S)[0]

    def end(self) -> None:
        self.fetcher.connections.post(self.stream[1].close)


def lying(donor: Donor, change: Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]) -> Donor:
    """Let ``change`` alter everything that the donor's service sends."""
    serve = donor.service.serve

    class Through:
        def __init__(self, writer: asyncio.StreamWriter) -> None:
            self.inner = writer
            self.drain = writer.drain
            self.transport = writer.transport

        def write(self, frame: bytes) -> None:
            reader = asyncio.StreamReader()
            reader.feed_data(frame)
            try:
                read_frame(reader, MAX_JSON_BYTES, MAX_BLOB_BYTES).send(None)
            except StopIteration as done:
                self.inner.write(pack(*change(*done.value)))

    async def lies(message: dict[str, Any], blob: bytes, reader: Any, writer: Any) -> None:
        await serve(message, blob, reader, Through(writer))  # type: ignore[arg-type]

    donor.connections.services["fetch"] = lies
    return donor
