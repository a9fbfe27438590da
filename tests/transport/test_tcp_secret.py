"""A secret keeps out every peer that does not know it, before any of its messages is read."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from diloco.errors import RendezvousError
from diloco.protocol import Timing
from diloco.transport import (
    ConnectionManager,
    TcpStreams,
    TurnedAwayError,
    connect,
    examine,
    greet,
    new_secret,
    pack,
    proof,
    serve_probes,
)
from diloco.transport.connections import tcp_streams
from tests.transport.connection_managers import LIMIT_S, said_to, stranger_at
from tests.transport.contract import contribution, exchange
from tests.transport.nowhere import place, wire
from tests.transport.wires import Wires

SECRET = new_secret()


@contextmanager
def manager(rank: int, secret: str) -> Iterator[ConnectionManager]:
    connections = ConnectionManager(rank, Timing(0.1, LIMIT_S), TcpStreams(secret=secret))
    try:
        connections.listen("127.0.0.1", range(1), "127.0.0.1")
        serve_probes(connections)
        yield connections
    finally:
        connections.close()


def test_who_knows_the_secret_is_connected_and_nobody_else_hears_a_word() -> None:
    hello = pack({"kind": "hello", "rank": 1, "address": "127.0.0.1:1"})
    with manager(0, SECRET) as first, manager(1, SECRET) as second:
        second.call(second.connect(0, first.address), LIMIT_S)
        for data in (b"", hello, pack({"kind": "who"}), bytes(48), bytes(100_000)):
            assert said_to(first.address, data).startswith(b"DLC?")
            assert len(said_to(first.address, data)) == 20, "a nonce and nothing else"
        assert first.connected == {1}
        assert first.get(1) is not None
        assert second.connected == {0}, "it was not replaced"


@pytest.mark.parametrize("theirs", ["", new_secret()], ids=["none", "another"])
def test_who_has_another_secret_or_none_is_told_so(theirs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_streams, "PROOF_S", 0.3)  # a peer without a secret waits for a message instead of a proof
    with manager(0, SECRET) as first, manager(1, theirs) as second:
        for asking in (first, second):
            there = second.address if asking is first else first.address
            with pytest.raises(TurnedAwayError, match=r"a different secret or none|asks for a secret"):
                asking.call(asyncio.wait_for(greet(asking.streams, there, LIMIT_S), LIMIT_S), LIMIT_S)
        assert not first.connected


def test_a_proof_is_of_no_use_to_who_has_seen_it() -> None:
    """Each connection has its own nonces, and the proofs of its two ends differ."""
    with manager(0, SECRET) as first:
        with closing(stranger_at(first.address)) as one:
            asked = one.recv(20, socket.MSG_WAITALL)
            mine = bytes(16)
            good = mine + proof("tcp", SECRET, f"opens {mine.hex()}", f"listens {asked[4:].hex()}")
            one.sendall(good)
            answer = one.recv(32, socket.MSG_WAITALL)
            assert len(answer) == 32
        for replayed in (good, mine + answer):
            assert len(said_to(first.address, replayed)) == 20


def test_a_run_with_a_secret_trains_and_a_stranger_does_not_come_in(wires: Wires) -> None:
    first, second = wires.meet(2, secret=SECRET)
    averages = exchange([first, second], [contribution(m) for m in range(2)])
    assert averages[0].contributors == (0, 1)
    for rank in range(2):
        hello = pack({"kind": "hello", "rank": rank, "address": "127.0.0.1:1"})
        assert len(said_to(first.address, hello)) == 20
    with pytest.raises(RendezvousError, match=r"can't take part .* asks for a secret"):
        connect(place(1, 2, first.address), wire())
    assert [each.failure for each in (first, second)] == [None, None]
    exchange([first, second], [contribution(m, outer_step=1) for m in range(2)])


def test_without_a_secret_a_hello_in_the_name_of_a_living_rank_ends_nobody(wires: Wires) -> None:
    ranks = wires.meet(2)
    for each in ranks:
        for rank in range(4):
            said_to(each.address, pack({"kind": "hello", "rank": rank, "address": "127.0.0.1:1"}))
    assert [each.failure for each in ranks] == [None, None]
    averages = exchange(ranks, [contribution(m) for m in range(2)])
    assert averages[0].contributors == (0, 1)


@pytest.mark.parametrize(
    ("secret", "words"), [("", "asks for a secret"), (new_secret(), "different secret")], ids=["none", "another"]
)
def test_the_doctor_says_that_it_lacks_the_secret(secret: str, words: str) -> None:
    with manager(0, SECRET) as there:
        found = asyncio.run(examine(there.address, 1000, LIMIT_S, secret))
        assert words in found.problem
        assert "--secret-file" in found.advice
        assert asyncio.run(examine(there.address, 1000, LIMIT_S, SECRET)).ok


def test_a_secret_is_in_no_words() -> None:
    assert SECRET not in repr(wire(secret=SECRET))
