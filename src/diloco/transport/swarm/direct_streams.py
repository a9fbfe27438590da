"""Streams between peers without libp2p: TLS 1.3 over TCP, several in parallel for one payload link.

Each peer creates its own unsigned certificate when it starts. It sends the certificate's digest and a key for one other
peer to that peer over the control connection, where libp2p has authenticated both ends and the run's secret was
checked. The connecting peer therefore verifies the listener before it sends anything, and proves itself with the key.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import ssl
import tempfile
from collections.abc import MutableMapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from diloco.errors import TransportError
from diloco.membership import Digest
from diloco.private_files import create_private
from diloco.protocol import WireMessage
from diloco.transport.address import Address, parse_address
from diloco.transport.connections.streams import Accept, Stream
from diloco.transport.connections.tcp_streams import dial, stop_listening
from diloco.units import visible

__all__ = ["DirectOffer", "DirectStreams", "hosts_in"]

_PROOF_BYTES = 32
_PROOF_S = 10.0
_MOST_UNPROVEN = 64  # connections that have not proved themselves yet; while there are this many, new ones are refused
_MOST_PLACES = 16
_REACH_S = 10.0
_HOST = re.compile(r"/(?:ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/")
_VALID = datetime(2020, 1, 1), datetime(2120, 1, 1)


class DirectOffer(WireMessage):
    """What a peer needs to open streams to another one."""

    places: Annotated[tuple[Annotated[str, Meta(max_length=300)], ...], Meta(max_length=_MOST_PLACES)]
    certificate: Digest  # of the certificate that the other one shows
    key: Annotated[bytes, Meta(max_length=64)]  # proves to it who opens the stream


class DirectStreams:
    """The direct streams of one peer.

    Args:
        peer_id: identity of this peer.
        proven: receives the identity of the other end of every incoming stream.
    """

    def __init__(self, peer_id: str, proven: MutableMapping[asyncio.StreamWriter, str]) -> None:
        self.port = 0  # the port at which this peer listens; 0: none
        self._me = peer_id
        self._proven = proven
        self._certificate = b""
        self._keys: dict[str, bytes] = {}  # peer -> the key that was sent to it
        self._unproven = 0
        self._servers: list[asyncio.Server] = []

    async def listen(self, hosts: Sequence[str], port: int, accept: Accept) -> None:
        """Listen for streams, and pass each one whose other end has proved itself to ``accept``.

        Args:
            hosts: addresses of this machine to listen at; none if empty.
            port: port to listen at; 0 for any.
            accept: called with each proven stream.

        Raises:
            TransportError: if this peer can't listen there.
        """
        context = self._server_context()

        async def arrive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if await self._admit(reader, writer, context):
                await accept(reader, writer)

        for host in hosts:
            try:
                self._servers.append(await asyncio.start_server(arrive, host, self.port or port))
            except OSError as error:
                raise TransportError(
                    f"this peer can't listen for direct streams at port {self.port or port} of {host}: {error}. Choose "
                    "another one as LAST of network.listen HOST:FIRST-LAST."
                ) from error
            self.port = self._servers[0].sockets[0].getsockname()[1]

    def offer(self, peer_id: str, hosts: Sequence[str]) -> DirectOffer | None:
        """Return what ``peer_id`` needs to open streams to this peer at ``hosts``; no other peer may receive it."""
        if not self.port or not hosts:
            return None
        key = self._keys.setdefault(peer_id, secrets.token_bytes(_PROOF_BYTES))
        places = tuple(str(Address(host, self.port)) for host in hosts[:_MOST_PLACES])
        return DirectOffer(places, _digest(self._certificate), key)

    async def open(self, offer: DirectOffer) -> Stream:
        """Open a stream to the peer that made an offer, at the first of its addresses that answers.

        Raises:
            OSError: if no address can be reached, the offer is invalid, or another program listens there.
        """
        try:
            places = [parse_address(each) for each in offer.places]
        except ValueError as error:
            raise OSError(f"its offer of direct streams is invalid ({visible(str(error))})") from error
        dialing = [asyncio.ensure_future(_dial(each, offer.certificate)) for each in places]
        why: BaseException | None = None
        try:
            for each in asyncio.as_completed(dialing, timeout=_REACH_S):
                try:
                    reader, writer = await each
                except (OSError, EOFError, TimeoutError) as error:
                    why = error
                    continue
                writer.write(_proof(offer.key, self._me))
                _close_others(dialing, writer)
                return reader, writer
        except BaseException:
            _close_others(dialing, None)
            raise
        reason = str(why) or f"no answer within {_REACH_S:g} s"
        raise OSError(f"no direct connection to {', '.join(map(str, places)) or 'it'}: {reason}")

    async def refuse(self) -> None:
        """Stop accepting streams."""
        for server in self._servers:
            await stop_listening(server)

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: ssl.SSLContext) -> bool:
        """Return whether the other end proves to be a peer that has an offer of this one; abort the stream if not."""
        found: str | None = None
        if self._unproven >= _MOST_UNPROVEN:
            writer.close()
            return False
        self._unproven += 1
        try:
            async with asyncio.timeout(_PROOF_S):
                await writer.start_tls(context)
                proof = await reader.readexactly(_PROOF_BYTES)
            for peer, key in self._keys.items():
                if hmac.compare_digest(proof, _proof(key, peer)):
                    found = peer
                    self._proven[writer] = peer
        except (OSError, EOFError, TimeoutError):
            pass  # an unauthenticated peer
        finally:
            self._unproven -= 1
            if found is None:
                writer.transport.abort()
        return found is not None

    def _server_context(self) -> ssl.SSLContext:
        context = _context(ssl.PROTOCOL_TLS_SERVER)
        key, self._certificate = _make_certificate()
        with tempfile.TemporaryDirectory(prefix="diloco-") as folder:  # readable by this user only
            file = Path(folder) / "key-and-certificate.pem"
            create_private(file, key + ssl.DER_cert_to_PEM_cert(self._certificate).encode())
            context.load_cert_chain(file)
        return context


def hosts_in(addresses: Sequence[str]) -> list[str]:
    """Return the hosts in multiaddresses that reach a peer without a relay; loopback addresses come last.

    >>> hosts_in(["/ip4/127.0.0.1/tcp/4/p2p/Qm", "/ip4/10.0.0.7/tcp/4/p2p/Qm", "/ip4/9.9.9.9/tcp/1/p2p/Q/p2p-circuit"])
    ['10.0.0.7', '127.0.0.1']
    """
    found = [match[1] for each in addresses if "/p2p-circuit" not in each and (match := _HOST.match(each))]
    return sorted(dict.fromkeys(found), key=lambda host: host.startswith("127.") or host == "::1")


async def _dial(place: Address, certificate: str) -> Stream:
    reader, writer = await dial(place, ssl=_context(ssl.PROTOCOL_TLS_CLIENT))
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    if not hmac.compare_digest(_digest(shown), certificate):
        writer.transport.abort()
        raise OSError(f"another program listens at {place}")
    return reader, writer


def _close_others(dialing: Sequence[asyncio.Future[Stream]], kept: asyncio.StreamWriter | None) -> None:
    for task in dialing:
        task.cancel()
        if task.done() and not task.cancelled() and task.exception() is None:
            _, writer = task.result()
            if writer is not kept:
                writer.transport.abort()


def _context(side: int) -> ssl.SSLContext:
    """Return a TLS context that does not verify certificates, as they are unsigned and compared by digest instead."""
    context = ssl.SSLContext(side)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _make_certificate() -> tuple[bytes, bytes]:
    """Return a private key (PEM) and a certificate of it (DER)."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "diloco")])
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), *_VALID)
    encoding, form = serialization.Encoding, serialization.PrivateFormat
    pem = key.private_bytes(encoding.PEM, form.PKCS8, serialization.NoEncryption())
    return pem, made.sign(key, hashes.SHA256()).public_bytes(encoding.DER)


def _digest(certificate: bytes) -> str:
    return hashlib.sha256(certificate).hexdigest()


def _proof(key: bytes, peer_id: str) -> bytes:
    return hmac.digest(key, f"diloco direct\0{peer_id}".encode(), "sha256")
