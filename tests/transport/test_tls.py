"""Every connection is TLS, in which both ends prove the secret: what observers, relays and other programs can do."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import closing, suppress

import pytest
from cryptography import x509

from diloco.errors import TransportError
from diloco.transport import Address, Credentials, TcpStreams, connect, examine, new_secret
from tests.transport.contract import contribution, exchange
from tests.transport.nowhere import failure, place, rules
from tests.transport.relays import Unit, frame, observed, plain_stranger_at, said_to, stranger_at
from tests.transport.wires import Wires, answering_probes, rendezvous

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
        with closing(stranger), suppress(ssl.SSLError, ConnectionError):
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
    """It finds neither a payload nor a name, and what it changes ends one connection."""
    seen, changed, wires = list[bytes](), list[int](), Wires()

    def note(unit: Unit) -> bytes:
        seen.append(unit.data)
        return unit.data

    def change(unit: Unit) -> bytes:
        data = note(unit)
        if len(data) < 1000 or changed:
            return data
        changed.append(unit.number)
        return data[:900] + bytes([data[900] ^ 1]) + data[901:]

    given = [contribution(m) for m in range(2)]
    with observed() as relays:
        relays.hook = note
        transports = wires.meet(2, secret=secret, facts={"a fact": "that nobody else may know"})
        relays.hook = change
        averages = exchange(transports, given)
        wires.close()
    assert changed
    assert {each.contributors for each in averages} == {(0, 1)}
    wire = b"".join(seen)
    assert len(wire) > sum(each.payload.numel() for each in given)
    for each in given:
        payload = bytes(each.payload.tolist())
        assert not any(payload[start : start + 32] in wire for start in range(0, len(payload) - 32, 32))
    assert b"nobody else" not in wire
    assert b"hello" not in wire


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


def test_a_certificate_that_can_not_be_read_is_the_other_ends_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenSSL takes version 6, which there is not. It ended the process that had opened the connection."""

    def refuse(shown: bytes) -> None:
        raise x509.InvalidVersion("5 is not a valid X509 version", 5)

    monkeypatch.setattr(x509, "load_der_x509_certificate", refuse)
    with answering_probes() as address, pytest.raises(TransportError, match="a certificate that can't be read"):
        asyncio.run(TcpStreams().open(address))


def test_payloads_go_to_nobody_else_at_the_address_of_a_rank(wires: Wires) -> None:
    """The key decides who is who, not the address."""
    first, second = wires.meet(2)
    opener, other = (first, second) if first.connections.peers[1].link.dials else (second, first)
    peer = opener.connections.peers[other.rules.rank]
    assert opener.connections.call(opener.links.open_stripe(peer))
    with answering_probes() as peer.address, pytest.raises(TransportError, match="a process with another key"):
        opener.connections.call(opener.links.open_stripe(peer))


def test_no_clock_is_too_early_or_too_late_for_a_certificate() -> None:
    """As that of a machine without a battery, which starts in 1970, or one that is set to another century."""
    with answering_probes() as address:
        stranger = TcpStreams().credentials.opening.wrap_socket(plain_stranger_at(address))
        with closing(stranger):
            shown = stranger.getpeercert(binary_form=True)
    assert shown is not None
    certificate = x509.load_der_x509_certificate(shown)
    assert certificate.not_valid_before_utc.year < 1970
    assert certificate.not_valid_after_utc.year > 2999


def test_nothing_that_came_before_the_handshake_is_read_in_the_name_of_who_made_it() -> None:
    """A member whom another one dialled passed on the handshake to a third one, after messages of its own.

    Over libp2p they were read as those of the one that had dialled.
    """
    here, there = socket.socketpair()
    there.sendall(b"the line of the daemon\na message")

    async def admit() -> None:
        reader, writer = await asyncio.open_connection(sock=here)
        await reader.readline()
        await Credentials("test", "").secure(reader, writer, listening=True)

    with there:
        with pytest.raises(TransportError, match="the other side has sent data before the handshake"):
            asyncio.run(admit())
        assert there.recv(1) == b""
