"""The door of a peer: what it tells anybody who has its address, so that who can't join learns why.

It is a stream of libp2p of its own: encrypted, and with the identities of both ends proved. A relay has a door, too. A
stranger learns whether this peer trains a run of the name that the stranger gives, and whether it has a secret.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from diloco.protocol import PROTOCOL_VERSION, WireMessage
from diloco.transport.connections.limits import ArrivalLimit, ConnectionLimit, origin_of
from diloco.transport.connections.streams import ANSWER_S, Stream, ask, read_frame, say
from diloco.transport.secret import derive_key
from diloco.transport.swarm.identity import Admission

_NONCE_BYTES = 32
_MAX_KNOCKS, _KNOCKS_S = 64, 16.0  # of one peer in this time
_MAX_INSIDE, _MAX_INSIDE_OF_ONE = 64, 8  # streams at a time, each of which takes a descriptor


class Knock(WireMessage):
    run: Annotated[str, Meta(max_length=1 << 12)]  # name of the run that the asking peer wants to join
    nonce: Annotated[bytes, Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]


class Doorplate(WireMessage):
    version: Annotated[int, Meta(ge=0)]  # of the protocol between ranks
    trains: bool  # whether it takes part in a run; a relay does not
    same_run: bool = False  # whether that run has the name that was given
    has_secret: bool = False
    proof: bytes = b""  # made with the nonce, by a key that follows from its secret
    admits: bool = False  # whether its list and the founder's order let the asking peer in
    seen_at: Annotated[str, Meta(max_length=100)] = ""  # host from which the asking peer comes; "": a relay's

    def __post_init__(self) -> None:
        if self.seen_at and "%" in str(ipaddress.ip_address(self.seen_at)):  # what it says becomes part of a command
            raise ValueError("a host must be an IP address without a zone")


@dataclass(frozen=True)
class Visit:
    """What a peer has learnt at another one's door."""

    is_relay: bool  # whether nothing is trained there
    same_run: bool  # whether a run of the same name is
    objection: str  # why this peer can't join there, and what to do; "": nothing is known that is against it
    seen_at: str  # the host from which this peer comes, as the other one sees it; "": unknown


def _proof(secret: str, nonce: bytes) -> bytes:
    return hmac.digest(derive_key("door", secret), nonce, "sha256")


class Door:
    """Answers whoever asks at the door, few at a time; ``admission()`` is None for a relay."""

    def __init__(self, admission: Callable[[], Admission | None]) -> None:
        self._admission = admission
        self._knocks = ArrivalLimit(_MAX_KNOCKS, _KNOCKS_S)
        self._inside = ConnectionLimit[asyncio.StreamWriter](_MAX_INSIDE, _MAX_INSIDE_OF_ONE)

    async def answer(self, peer_id: str, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a peer that has opened a stream from ``host`` ("": unknown), and close the stream."""
        origins = [peer_id, *filter(None, [origin_of(host)])]
        try:
            if not self._knocks.admits([peer_id], asyncio.get_running_loop().time()):
                return
            if (replaced := self._inside.enter(writer, origins)) is not None:
                replaced.transport.abort()
            await _answer_knock((reader, writer), self._admission(), peer_id, host)
        finally:
            self._inside.leave(writer)
            writer.close()


async def _answer_knock(stream: Stream, admission: Admission | None, peer_id: str, host: str) -> None:
    async with asyncio.timeout(ANSWER_S):
        knock = await read_frame(stream[0], Knock)
    plate = Doorplate(PROTOCOL_VERSION, trains=False, seen_at=host)
    if admission is not None:
        plate = Doorplate(
            PROTOCOL_VERSION,
            trains=True,
            same_run=knock.run == admission.run,
            has_secret=bool(admission.secret),
            proof=_proof(admission.secret, knock.nonce),
            admits=admission.admits(peer_id),
            seen_at=host,
        )
    await say(plate, *stream)


async def knock(stream: Stream, admission: Admission, me: str) -> Visit:
    """Ask at the door of the peer to which ``stream`` leads, as the peer ``me``.

    Raises:
        OSError, EOFError, TransportError: it does not answer.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    try:
        async with asyncio.timeout(ANSWER_S):
            plate = await ask(stream, Knock(admission.run, nonce), Doorplate)
    finally:
        stream[1].close()
    return Visit(not plate.trains, plate.same_run, _objection(plate, admission, nonce, me), plate.seen_at)


def _objection(plate: Doorplate, admission: Admission, nonce: bytes, me: str) -> str:
    if plate.version != PROTOCOL_VERSION:
        return (
            f"it uses version {plate.version} of the protocol, and this peer version {PROTOCOL_VERSION}. Install the "
            "same diloco on both machines"
        )
    if not plate.trains:
        return ""
    if not plate.same_run:
        return f"it trains another run than {admission.run!r}. Give the name of its run with --run"
    if plate.has_secret and not admission.secret:
        return "its run has a secret. Give a copy of its file with --secret-file"
    if admission.secret and not plate.has_secret:
        return "its run has no secret. Leave out --secret-file"
    if not hmac.compare_digest(plate.proof, _proof(admission.secret, nonce)):
        return "its run has another secret. Give a copy of its file with --secret-file"
    if not plate.admits:
        return f"it does not admit this peer, {me}: its network.allow does not list it, or the founder has ejected it"
    return ""
