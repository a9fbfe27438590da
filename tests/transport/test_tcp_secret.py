"""What an observer, a relay and a stranger can do: every connection is TLS, in which both ends prove the secret."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from contextlib import closing

import pytest

from diloco.transport import Address, Credentials, connect, examine, new_secret
from tests.transport.contract import contribution, exchange
from tests.transport.nowhere import failure, place, rules
from tests.transport.relays import Unit, frame, observed, plain_stranger_at, said_to, stranger_at
from tests.transport.wires import Wires, rendezvous

SECRET = new_secret()
LIMIT_S = 20.0


def test_a_run_with_a_secret_trains_and_nobody_else_hears_a_word(wires: Wires) -> None:
    first, second = wires.meet(2, secret=SECRET)
    for opening in (b"", frame({"kind": "who"}), frame({"kind": "hello", "rank": 1, "address": "a:1"}), bytes(100_000)):
        assert len(said_to(first.address, opening, plain=True)) < 100, "alerts of TLS and nothing else"
    for secret in ("", new_secret()):
        with pytest.raises(ssl.SSLCertVerificationError):
            stranger_at(first.address, secret)
        trusting = Credentials("tcp", secret).opening
        trusting.verify_mode = ssl.CERT_NONE
        stranger = trusting.wrap_socket(plain_stranger_at(first.address))
        with closing(stranger), contextlib.suppress(ssl.SSLError, ConnectionError):
            stranger.sendall(frame({"kind": "who"}))
            assert stranger.recv(1) == b""
    assert [each.failure for each in (first, second)] == [None, None]
    assert exchange([first, second], [contribution(m) for m in range(2)])[0].contributors == (0, 1)


@pytest.mark.parametrize("mine", ["", new_secret()], ids=["none", "another"])
def test_who_has_another_secret_or_none_is_told_so_and_so_is_the_doctor(mine: str) -> None:
    with rendezvous(2, secret=SECRET) as address:
        words = failure(connect, place(1, 2, address, secret=mine), rules(rendezvous_timeout_s=LIMIT_S))
        assert "different secret, or only one" in words
        finding = asyncio.run(examine(address, 1000, LIMIT_S, mine))
        assert "secret" in finding.problem
        assert "--secret-file" in finding.problem


@pytest.mark.parametrize("secret", ["", SECRET], ids=["no secret", "secret"])
def test_an_observer_on_the_wire_finds_nothing_that_is_sent(secret: str) -> None:
    """Neither a payload nor a name."""
    seen: list[bytes] = []

    def note(unit: Unit) -> bytes:
        seen.append(unit.data)
        return unit.data

    wires = Wires()
    with observed() as relays:
        relays.hook = note
        transports = wires.meet(2, secret=secret, facts={"a fact": "that nobody else may know"})
        given = [contribution(m) for m in range(2)]
        exchange(transports, given)
        wires.close()
    wire = b"".join(seen)
    assert len(wire) > sum(each.payload.numel() for each in given)
    for each in given:
        payload = bytes(each.payload.tolist())
        assert not any(payload[start : start + 32] in wire for start in range(0, len(payload) - 32, 32))
    assert b"nobody else" not in wire
    assert b"hello" not in wire


def test_a_byte_that_is_changed_on_the_wire_ends_the_connection_and_harms_nobody(wires: Wires) -> None:
    changed: list[int] = []

    def change(unit: Unit) -> bytes:
        if len(unit.data) > 1000 and not changed:
            changed.append(unit.number)
            return unit.data[:900] + bytes([unit.data[900] ^ 1]) + unit.data[901:]
        return unit.data

    with observed() as relays:
        transports = wires.meet(2)
        relays.hook = change
        averages = exchange(transports, [contribution(m) for m in range(2)])
        wires.close()
    assert changed
    assert {each.contributors for each in averages} == {(0, 1)}


def test_a_relay_that_does_not_know_the_secret_becomes_nobody() -> None:
    """It has got an honest process to dial it. Before, the proofs of both ends could be passed on."""
    with rendezvous(2, secret=SECRET) as address, rendezvous(2) as relay:  # one that can speak, without the secret
        assert "different secret" in failure(connect, place(1, 2, relay, secret=SECRET), rules())
        with pytest.raises(ssl.SSLCertVerificationError):
            stranger_at(address)


def test_a_relay_that_passes_all_on_can_not_speak_for_either_end() -> None:
    with observed() as relays, rendezvous(1, secret=SECRET) as address:
        relays.hook = lambda unit: unit.data + (frame({"kind": "who"}) if unit.number > 1 else b"")
        assert failure(connect, place(0, 1, address, secret=SECRET), rules())


def test_a_secret_is_in_no_words() -> None:
    assert SECRET not in repr(place(0, 1, Address("127.0.0.1", 0), secret=SECRET))
