"""How ranks find the rendezvous, and how that fails: always in time, with the address and the reason."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from diloco.protocol import Entry, Registry, Timing
from diloco.transport import (
    PROTOCOL,
    Address,
    ConnectionManager,
    TcpStreams,
    ask,
    connect,
    greet,
    pack,
    read_frame,
    serve,
    share_text,
)
from diloco.transport.torch_distributed import connect as torch_connect
from tests.transport.connection_managers import stranger_at
from tests.transport.nowhere import PATIENCE_S, diloco_threads, failure, free_address, nobody_at, place, wire
from tests.transport.wires import at_once, rendezvous

# No listener, no route, or another program.


def test_where_nobody_answers_the_address_and_the_ways_out_are_named() -> None:
    before = diloco_threads()
    with nobody_at() as address:
        words = failure(connect, place(1, 2, address), wire())
    assert words.startswith(f"rank 1 found no rendezvous at {address} within 1 s (")
    assert "nothing listens there (connection refused). Start replica 0 there, open that port" in words
    assert diloco_threads() <= before, "nothing stays open"


def test_a_name_that_does_not_resolve_is_named(connections: ConnectionManager) -> None:
    address = Address("replica-0.invalid", 29400)
    assert "there is no route to the rendezvous 'replica-0.invalid'" in failure(connect, place(1, 2, address), wire())
    words = failure(ask, connections, address, Entry(1, "x:1"), PATIENCE_S)
    assert "no rendezvous at replica-0.invalid:29400 within 1 s" in words
    assert "its name does not resolve" in words


def test_somebody_who_accepts_and_says_nothing_costs_no_more_than_the_time_out(connections: ConnectionManager) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = Address("127.0.0.1", server.getsockname()[1])
        assert f"no rendezvous at {address} within 1 s (1 attempts): no answer." in failure(
            ask, connections, address, Entry(1, "x:1"), PATIENCE_S
        )


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not use this version of diloco's protocol"),
        (b"", r"0 bytes read|reset"),
        (struct.pack(">4sIQ", PROTOCOL, 2, 1 << 40), "was announced"),
        (struct.pack(">4sIQ", PROTOCOL, 2, 0) + b"{}", "without a valid kind"),
    ],
    ids=["http", "hangs up", "huge", "no kind"],
)
def test_somebody_else_on_that_port_is_told_apart(connections: ConnectionManager, answer: bytes, words: str) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4)
        writer.write(answer)
        writer.close()

    async def start() -> asyncio.Server:
        return await asyncio.start_server(speak, "127.0.0.1", 0)

    async def stop(server: asyncio.Server) -> None:
        server.close()

    server = connections.call(start())
    address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
    try:
        said = failure(ask, connections, address, Entry(1, "x:1"), PATIENCE_S)
    finally:
        connections.call(stop(server))
    assert f"no rendezvous at {address}" in said
    assert re.search(words, said)


def test_replica_0_may_come_last(connections: ConnectionManager) -> None:
    """A rank that comes first retries until the rendezvous listens."""
    address = free_address()
    entries = [Entry(rank, f"127.0.0.1:{rank + 1}") for rank in range(2)]
    asked = threading.Thread(target=lambda: tables.append(ask(connections, address, entries[1], 20.0)))
    tables: list[Any] = []
    asked.start()
    late = ConnectionManager(0, Timing(), TcpStreams())
    try:
        serve(late, Registry(2))
        late.listen(address.host, range(address.port, address.port + 1), address.host)
        tables.append(ask(late, address, entries[0], 20.0))
        asked.join()
    finally:
        late.close()
    assert [table.running for table in tables] == [False, False]
    assert tables[0].entries == tables[1].entries == dict(enumerate(entries))


def test_the_rank_that_answers_at_the_rendezvous_is_never_the_one_that_does_not_fit(
    connections: ConnectionManager,
) -> None:
    """Its end would end the rendezvous, and the others would not learn why."""
    serve(connections, Registry(2), host=0)
    address = connections.listen("127.0.0.1", range(1), "127.0.0.1")

    async def both() -> list[dict[str, Any]]:
        answers = []
        for rank, codec in ((1, "int8"), (0, "fp4")):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            entry = Entry(rank, f"x:{rank + 1}", {"codec": codec})
            writer.write(pack({"kind": "register", "patience_s": 0.2, **entry.to_message()}))
            await greet(connections.streams, address, PATIENCE_S)  # the one before has arrived
            answers.append((reader, writer))
        found = [(await read_frame(reader))[0] for reader, _ in answers]
        for _, writer in answers:
            writer.close()
        return found

    assert [answer["kind"] for answer in connections.call(both())] == ["refused", "incomplete"]


# A rendezvous port that is in use.


@contextlib.contextmanager
def another_program(answer: bytes | None) -> Iterator[Address]:
    """Listen, answer every connection with these bytes, and close it; with None, send nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as callers:

        def serve_all() -> None:
            with contextlib.suppress(OSError):
                while True:
                    caller = callers.enter_context(server.accept()[0])
                    if answer is not None:
                        caller.recv(4)
                        caller.sendall(answer)
                        caller.shutdown(socket.SHUT_RDWR)

        serving = threading.Thread(target=serve_all)
        serving.start()
        yield Address("127.0.0.1", server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)
        serving.join()


@pytest.mark.parametrize(
    ("answer", "does"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "did not answer as a diloco does"),
        (b"", "does not answer as a diloco does"),
        (None, "does not answer as a diloco does"),
    ],
    ids=["http", "hangs up", "says nothing"],
)
def test_rank_0_says_at_once_that_another_program_has_the_port(
    monkeypatch: pytest.MonkeyPatch, answer: bytes | None, does: str
) -> None:
    monkeypatch.setattr(torch_connect, "PORT_TIMEOUT_S", 1.0)
    began_s, before = time.monotonic(), diloco_threads()
    with another_program(answer) as address:
        words = failure(connect, place(0, 2, address), wire(rendezvous_timeout_s=300.0))
    assert time.monotonic() - began_s < 20, "far from the time-out"
    assert words.startswith(f"port {address.port} of 127.0.0.1, the rendezvous at which replica 0 was to listen")
    assert f"in use by another program, which {does}" in words
    assert diloco_threads() <= before


def test_the_others_say_so_too_of_one_that_never_answers(connections: ConnectionManager) -> None:
    began_s = time.monotonic()
    with another_program(None) as address:
        words = failure(ask, connections, address, Entry(1, "x:1"), 300.0, 0.2)
    assert time.monotonic() - began_s < 20
    assert f"port {address.port} there is in use by another program, which does not answer." in words


def test_rank_0_listens_once_what_had_the_port_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica 0 of a run that has just been stopped may do so, and closes the connection when it is asked."""
    monkeypatch.setattr(torch_connect, "PORT_TIMEOUT_S", 30.0)
    with contextlib.ExitStack() as ending:
        address = ending.enter_context(another_program(b""))
        greeted = torch_connect.greet

        async def end_it(*arguments: Any) -> None:
            ending.close()
            await greeted(*arguments)

        monkeypatch.setattr(torch_connect, "greet", end_it)
        connected = connect(place(0, 1, address), wire())
    assert not connected.joining
    assert connected.transport.address == address
    connected.transport.close()


# Unknown programs.


@pytest.mark.parametrize("patience_s", [-1.0, float("1e9"), "soon", None])
def test_a_stranger_who_registers_nonsense_harms_nobody(patience_s: object) -> None:
    with rendezvous(1) as address:
        with closing(stranger_at(address)) as stranger:
            message = {"kind": "register", "patience_s": patience_s, **Entry(0, "x:1").to_message()}
            stranger.sendall(pack(message))
            assert stranger.recv(1) == b"", "the connection is closed and nothing is registered"
        connected = connect(place(0, 1, address), wire())
        assert not connected.joining
        connected.transport.close()


# The store of torchrun.


def test_rank_0_leaves_a_word_in_torchruns_store_and_the_others_read_it() -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs lack it

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    master = Address("127.0.0.1", store.port)
    words = at_once(
        [lambda mine=mine: share_text(master, mine, 20.0, "address") for mine in (None, "10.0.0.1:7", None)]
    )
    assert words == ["10.0.0.1:7"] * 3


def test_a_store_that_gives_no_word_is_named_in_time() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as frozen:  # accepts but is silent, like a frozen agent
        master = Address("127.0.0.1", frozen.getsockname()[1])
        words = failure(share_text, master, None, PATIENCE_S, "address")
    assert words.startswith(f"the store of torchrun at {master} gave no address of rank 0 within 1 s: ")
    assert "--master-addr" in words


def test_answers_are_read_as_frames(connections: ConnectionManager) -> None:
    """The test queries a server directly to see what a client receives."""
    with rendezvous(2) as address:

        async def by_hand() -> dict[str, Any]:
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(pack({"kind": "register", "patience_s": 0.01, **Entry(5, "x:1").to_message()}))
            answer, _ = await read_frame(reader)
            writer.close()
            return answer

        assert connections.call(by_hand())["kind"] == "refused"
