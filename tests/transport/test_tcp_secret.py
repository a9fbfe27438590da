"""A secret keeps out every peer that does not know it, before any of its messages is read."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import closing

import pytest

from diloco.errors import RendezvousError
from diloco.transport import Address, connect, examine, new_secret, proof
from tests.transport.contract import contribution, exchange
from tests.transport.nowhere import failure, place, rules
from tests.transport.relays import frame, said_to, stranger_at
from tests.transport.wires import Wires, rendezvous

SECRET = new_secret()
LIMIT_S = 20.0


def test_a_run_with_a_secret_trains_and_nobody_else_hears_a_word(wires: Wires) -> None:
    first, second = wires.meet(2, secret=SECRET)
    for opening in (
        b"",
        frame({"kind": "who"}),
        *(frame({"kind": "hello", "rank": rank, "address": "127.0.0.1:1"}) for rank in range(2)),
        frame({"kind": "link", "key": "0/0-1/0", "connection": 0, "rank": 0}),
        bytes(48),
        bytes(100_000),
    ):
        heard = said_to(first.address, opening)
        assert heard.startswith(b"DLC?")
        assert len(heard) == 20, "a nonce and nothing else"
    with pytest.raises(RendezvousError, match=r"can't take part .* asks for a secret"):
        connect(place(1, 2, first.address), rules())
    assert [each.failure for each in (first, second)] == [None, None]
    assert exchange([first, second], [contribution(m) for m in range(2)])[0].contributors == (0, 1)


@pytest.mark.parametrize("mine", ["", new_secret()], ids=["none", "another"])
def test_who_has_another_secret_or_none_is_told_so_and_so_is_the_doctor(mine: str) -> None:
    with rendezvous(2, secret=SECRET) as address:
        words = failure(connect, place(1, 2, address, secret=mine), rules(rendezvous_timeout_s=LIMIT_S))
        assert "a different secret or none" in words or "asks for a secret" in words
        found = asyncio.run(examine(address, 1000, LIMIT_S, mine))
        assert "secret" in found.problem
        assert "--secret-file" in found.advice


def test_nothing_is_said_to_a_listener_that_can_not_prove_that_it_knows_the_secret() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        heard: list[bytes] = []

        def pretend() -> None:
            caller, _ = server.accept()
            with caller:
                caller.sendall(b"DLC?" + bytes(16))
                caller.recv(48, socket.MSG_WAITALL)
                caller.sendall(bytes(32))
                heard.append(caller.recv(1))

        thread = threading.Thread(target=pretend)
        thread.start()
        found = asyncio.run(examine(Address(*server.getsockname()), 1000, LIMIT_S, SECRET))
        thread.join(LIMIT_S)
    assert heard == [b""]
    assert "a different secret or none" in found.problem


def test_a_proof_is_of_no_use_to_who_has_seen_it() -> None:
    """Each connection has its own nonces, and the proofs of its two ends differ."""
    with rendezvous(2, secret=SECRET) as address:
        with closing(stranger_at(address)) as one:
            asked = one.recv(20, socket.MSG_WAITALL)
            mine = bytes(16)
            good = mine + proof("tcp", SECRET, f"opens {mine.hex()}", f"listens {asked[4:].hex()}")
            one.sendall(good)
            answer = one.recv(32, socket.MSG_WAITALL)
            assert len(answer) == 32
        for replayed in (good, mine + answer):
            assert len(said_to(address, replayed)) == 20


def test_a_secret_is_in_no_words() -> None:
    assert SECRET not in repr(place(0, 1, None, secret=SECRET))
