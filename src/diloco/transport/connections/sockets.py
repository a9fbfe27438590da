"""Sockets between processes, all of them TLS 1.3, over which each end shows its key and that it knows the secret.

Everybody who knows the secret derives the same signing key from it, for each purpose another one. A process signs a
certificate of its own key with it, and accepts only certificates that are signed so. TLS proves to each end that the
other one has the key of its certificate, in a transcript that contains both certificates: a process without the secret
can neither read, nor change, nor relay what passes, nor become anybody. Without a secret everybody derives the signing
key, so that connections are encrypted, but anyone may take part.

The key of a process is its identity, which stands beside its address in the table of ranks. A replica that is started
again in its run folder keeps its key, and has another certificate: so the process that it replaces has ended.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import socket
import ssl
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

from diloco.errors import TransportError
from diloco.private_files import create_private
from diloco.protocol import Entry
from diloco.transport.address import Address, parse_address
from diloco.transport.connections.limits import origin_of
from diloco.transport.connections.streams import Accept, Stream, within
from diloco.transport.private_key import public_bytes
from diloco.transport.secret import TurnedAwayError, check_secret, derive_key

_HANDSHAKE_S = 10.0  # also for the connection before it: a machine that is off answers nothing
_ADMITTED = b"+"  # what the listening side says first
_VALID = datetime(1950, 1, 1), datetime(9999, 12, 31)  # whatever the clock of a machine says, even after its battery
_RAW: WeakKeyDictionary[asyncio.WriteTransport, asyncio.Transport] = WeakKeyDictionary()  # TLS -> what is below it


class Credentials:
    """The key of this process, in the TLS contexts that show it.

    Args:
        purpose: What the connections are for. Processes with another purpose are refused as with another secret.
        secret: The shared secret, see `diloco.transport.secret`; "": anybody may connect.
        key: The private key, as `load_key` returns it; None: a new one.
    """

    def __init__(self, purpose: str = "tcp", secret: str = "", key: Any = None) -> None:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519

        signer = ed25519.Ed25519PrivateKey.from_private_bytes(derive_key(f"tls {purpose}", check_secret(secret)))
        key = key or ec.generate_private_key(ec.SECP256R1())
        authority = _certificate("diloco", signer.public_key(), signer, is_authority=True)
        form, password = serialization.PrivateFormat.PKCS8, secrets.token_hex(32).encode()
        self.public_key = public_bytes(key.public_key())
        encryption = serialization.BestAvailableEncryption(password)  # ssl reads files only, and a kill leaves this one
        pem = key.private_bytes(serialization.Encoding.PEM, form, encryption)
        self.certificate = _certificate("a process of diloco", key.public_key(), signer, is_authority=False)
        self.opening, self.listening = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.TemporaryDirectory(prefix="diloco-") as folder:  # readable by this user only
            file = Path(folder) / "key-and-certificate.pem"
            create_private(file, pem + ssl.DER_cert_to_PEM_cert(self.certificate).encode())
            for context in (self.opening, self.listening):
                context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                context.load_verify_locations(cadata=authority)
                context.load_cert_chain(file, password=password)
        self.listening.num_tickets = 0

    async def secure(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, listening: bool) -> bytes:
        """Turn a connection into one of TLS, and return the public key of the other end, as DER.

        Nothing may have been read from the connection that belongs to TLS. What has already arrived was sent in plain
        text, maybe by a relay before it passes on the handshake of somebody else, in whose name it would be read.

        Raises:
            TurnedAwayError: One of the two ends has another secret or purpose.
            TransportError: The other end does not speak TLS, or shows a certificate that can't be read.
            OSError: The connection ended.
        """
        from cryptography import x509

        raw = cast(asyncio.Transport, writer.transport)
        if reader._buffer:  # type: ignore[attr-defined]  # nothing public says whether there is any
            raw.abort()
            raise TransportError("the other side has sent data before the handshake")
        try:
            await writer.start_tls(self.listening if listening else self.opening)
        except ssl.SSLError as error:
            raw.abort()
            if isinstance(error, ssl.SSLCertVerificationError):
                raise TurnedAwayError("it has a different secret, or only one of the two ends has one") from error
            raise TransportError("the other side does not use this version of diloco's protocol") from error
        except AttributeError as error:  # asyncio's, if the connection ends at the end of the handshake
            writer._transport = raw  # type: ignore[attr-defined]  # it has set it to None
            raise ConnectionResetError("it ended in the handshake") from error
        except BaseException:
            raw.abort()
            raise
        _RAW[writer.transport] = raw
        try:
            shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            return public_bytes(x509.load_der_x509_certificate(shown).public_key())
        except Exception as error:  # OpenSSL accepts more certificates than the parser, whose errors have many types
            raw.abort()
            raise TransportError(f"the other side shows a certificate that can't be read ({error})") from error


def raw_transport(writer: asyncio.StreamWriter) -> asyncio.WriteTransport:
    """Return the transport below TLS. Unlike that of TLS it can be aborted after it has been closed twice."""
    return _RAW.get(writer.transport, writer.transport)


def _certificate(name: str, key: Any, signer: Any, *, is_authority: bool) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    subject, issuer = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, each)]) for each in (name, "diloco"))
    constraints = x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None)
    builder = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number(), *_VALID)
    return bytes(builder.add_extension(constraints, critical=True).sign(signer, None).public_bytes(Encoding.DER))


async def stop_listening(server: asyncio.Server) -> None:
    """Close a server once every accepted connection is known to its protocol.

    If a server closes between accepting a connection and creating its transport, asyncio loses the connection and
    leaves it open.
    """
    for listening in server.sockets:
        asyncio.get_running_loop().remove_reader(listening)
    for _ in range(2):
        await asyncio.sleep(0)
    server.close()


class TcpStreams:
    """One listening port, and connections to those of other processes.

    Args:
        credentials: Of this process; None: those of a new key, and anybody may connect.
        kept: A socket that already listens, from `keep`. It is closed with these streams.
    """

    def __init__(self, credentials: Credentials | None = None, kept: socket.socket | None = None) -> None:
        self.credentials = credentials or Credentials()
        self._servers: list[asyncio.Server] = []
        self._kept = kept
        # of the other end, and the credentials with which it was admitted
        self._identities: WeakKeyDictionary[asyncio.StreamWriter, tuple[str, Credentials]] = WeakKeyDictionary()

    @property
    def me(self) -> str:
        return self.identity_of(self.credentials.public_key)

    def keep(self) -> socket.socket | None:
        """Return the listening socket, for streams that replace these. Its port refuses no connection meanwhile.

        A peer whose connection is refused would take this process for terminated. If these streams have already ended
        because of an internal error, that was right, and the port is opened again.

        Raises:
            OSError: Another process has taken the port since.
        """
        (server,) = self._servers
        if server.sockets:
            return server.sockets[0].dup()
        family, place = self._listened
        return socket.create_server(place, family=family)

    async def listen(self, accept: Accept, host: str, ports: range, advertised: str) -> Address:
        """Accept connections on the first free port of ``ports``.

        Args:
            accept: Called with each connection, which it takes over.
            host: An address of this machine; "": all of them.
            ports: The ports to try.
            advertised: The host that others are given.

        Raises:
            TransportError: No port is free, or the host is not an address of this machine.
        """
        if self._kept is not None:
            server = await asyncio.start_server(accept, sock=self._kept)
        else:
            server = await self._start(accept, host, ports)
        self._servers.append(server)
        place = server.sockets[0].getsockname()
        self._listened = server.sockets[0].family, place[:2]
        return Address(advertised, place[1])

    async def _start(self, accept: Accept, host: str, ports: range) -> asyncio.Server:
        why: Exception | None = None
        for port in ports:
            try:
                return await asyncio.start_server(accept, host or None, port)
            except (OSError, UnicodeError) as error:
                why = error
        tried = f"port {ports[0]}" if len(ports) == 1 else f"any port from {ports[0]} to {ports[-1]}"
        raise TransportError(
            f"can't listen on {host or 'this machine'} at {tried}: {why}. Choose another port or an address of this "
            "machine (network.listen)."
        ) from why

    async def open(self, address: Address) -> Stream:
        """Open a connection to the process that listens at ``address``.

        Raises:
            ConnectionRefusedError: Its machine reports that no process listens there.
            TurnedAwayError: One of the two does not admit the other one.
            TransportError: Another program listens there.
            OSError, EOFError, TimeoutError: It can't be reached.
        """
        try:
            reader, writer = await within(_HANDSHAKE_S, asyncio.open_connection(address.host, address.port))
        except UnicodeError as error:  # a peer may announce a name that no resolver takes
            raise OSError(f"{address} isn't a valid address: {error}") from error
        try:
            await within(_HANDSHAKE_S, self._introduce(reader, writer))
        except TurnedAwayError as error:
            raise TurnedAwayError(f"{address} rejected this process: {error}") from error
        return reader, writer

    async def _introduce(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take part in the handshake as the side that opened the connection, and wait until the other one admits it."""
        mine = self.credentials
        key = await mine.secure(reader, writer, listening=False)
        self._identities[writer] = self.identity_of(key), mine
        try:
            await reader.readexactly(len(_ADMITTED))
        except BaseException:
            writer.transport.abort()
            raise

    async def admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Return whether the process that opened a connection is admitted. Nothing else is read from it before.

        Nothing may be awaited between its arrival and this call. Errors are those of `Credentials.secure`.
        """
        mine = self.credentials
        key = await mine.secure(reader, writer, listening=True)
        self._identities[writer] = (identity := self.identity_of(key)), mine
        if not self.admits(identity):
            return False
        writer.write(_ADMITTED)
        return True

    def admits(self, identity: str) -> bool:
        """Return whether a process that knows the secret may connect."""
        return True

    def owns(self, identity: str, rank: int) -> bool:
        """Return whether a rank follows from an identity, so that no other process can prove it."""
        return False

    def identity_of(self, key: bytes) -> str:
        return hashlib.sha256(key).hexdigest()

    def identity(self, writer: asyncio.StreamWriter) -> str:
        """Return the identity that the other end has proved; "" before that."""
        return self._identities[writer][0] if writer in self._identities else ""

    def is_current(self, writer: asyncio.StreamWriter) -> bool:
        """Return whether the other end was admitted with the credentials of now."""
        return writer in self._identities and self._identities[writer][1] is self.credentials

    def process(self, writer: asyncio.StreamWriter) -> bytes:
        """Return what tells apart two processes with the same key: the `certificate`, of which each makes its own."""
        secured = writer.get_extra_info("ssl_object")
        return (secured and secured.getpeercert(binary_form=True)) or self.identity(writer).encode()

    def address(self, text: str, writer: asyncio.StreamWriter) -> Address:
        """Return where the other end of a connection listens, as its text says."""
        return parse_address(text)

    def locate(self, entry: Entry) -> Address:
        return parse_address(entry.address)

    def origins(self, writer: asyncio.StreamWriter) -> tuple[str, ...]:
        """Return the origins (peer and host) of a connection, of which `ConnectionLimit` admits only so many."""
        place = writer.get_extra_info("peername")
        return (origin_of(str(place[0])),) if place else ()

    async def refuse(self) -> None:
        for server in self._servers:
            await stop_listening(server)

    async def close(self) -> None:
        """Do nothing, as `refuse` has closed the servers."""
