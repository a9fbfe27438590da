"""Every connection is TLS, in which both ends prove the secret: what observers, relays and other programs can do."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from diloco.errors import TransportError
from diloco.transport import Address, Credentials, TcpStreams, connect, derive_key, examine, new_secret
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


# Another program in the handshake.


_VERSION = b"\xa0\x03\x02\x01"  # of a certificate, in DER; its number follows
_ED25519 = bytes.fromhex("300506032b6570")  # the algorithm of a signature


def _der(tag: int, content: bytes) -> bytes:
    size = len(content)
    return bytes([tag, 0x82, *size.to_bytes(2, "big")]) + content


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A key, and a certificate of version 6, which there is not: OpenSSL takes it, and the parser does not."""
    signer = ed25519.Ed25519PrivateKey.from_private_bytes(derive_key("tls tcp", ""))
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "d")])
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "diloco")])
    span = datetime(2020, 1, 1), datetime(2120, 1, 1)
    made = x509.CertificateBuilder(issuer, name, key.public_key(), 7, *span).sign(signer, None)
    signed = made.tbs_certificate_bytes.replace(_VERSION + b"\x02", _VERSION + b"\x05", 1)
    certificate = _der(0x30, signed + _ED25519 + _der(0x03, b"\0" + signer.sign(signed)))
    form, no_password = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, form, no_password)
    (tmp_path / "odd.pem").write_bytes(pem + ssl.DER_cert_to_PEM_cert(certificate).encode())
    return tmp_path / "odd.pem"


def _context(protocol: int, shown: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(shown)
    return context


@contextmanager
def listener(context: ssl.SSLContext) -> Iterator[Address]:
    """An address at which another program speaks TLS."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError), listening.accept()[0] as accepted:
                accepted.settimeout(LIMIT_S)
                with context.wrap_socket(accepted, server_side=True) as secured:
                    secured.sendall(b"+")
                    secured.recv(1)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Address(*listening.getsockname())
    thread.join(LIMIT_S)


def test_a_certificate_that_can_not_be_read_is_the_other_ends_fault(odd: Path) -> None:
    """Before, it ended the process that had opened the connection, as an internal error of its own."""
    with (
        listener(_context(ssl.PROTOCOL_TLS_SERVER, odd)) as address,
        pytest.raises(TransportError, match="a certificate that can't be read"),
    ):
        asyncio.run(TcpStreams().open(address))


def test_payloads_go_to_nobody_else_at_the_address_of_a_rank(wires: Wires) -> None:
    """The key decides who is who, not the address."""
    first, second = wires.meet(2)
    opener, other = (first, second) if first.connections.peers[1].dials else (second, first)
    peer = opener.connections.peers[other.rules.rank]
    assert opener.connections.call(opener.links.open_stripe(peer))
    with answering_probes() as peer.address, pytest.raises(OSError, match="another process answers in place of"):
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


@pytest.mark.parametrize("before", [b"", b"a message"], ids=["nothing", "plain text"])
def test_nothing_that_came_before_the_handshake_is_read_in_the_name_of_who_made_it(before: bytes) -> None:
    """A member whom another one dialled passed on the handshake to a third one, after messages of its own.

    Over libp2p they were read as those of the one that had dialled.
    """

    async def run() -> str:
        here, there, end = Credentials("test", ""), Credentials("test", ""), asyncio.Event()
        ended = asyncio.get_running_loop().create_future()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()  # as from the daemon
            writer.write(b"?")
            try:
                await here.secure(reader, writer, listening=True)
                ended.set_result("secured")
                await end.wait()
            except TransportError as error:
                ended.set_result(str(error))
            finally:
                writer.close()

        async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"from somebody\n" + before)
            with suppress(OSError):
                assert await reader.readexactly(1) == b"?", "the other end is ready"
                await there.secure(reader, writer, listening=False)
            said = await asyncio.wait_for(ended, LIMIT_S)
            end.set()
            writer.close()
            return str(said)

    assert asyncio.run(run()) == ("the other side has sent data before the handshake" if before else "secured")
