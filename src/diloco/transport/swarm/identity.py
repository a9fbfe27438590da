"""The identities of peers, and the records that they store in the DHT.

A peer is identified by a key pair, with which it signs its record in the DHT. The record only tells others which peers
to ask; a peer reports its current state itself when asked. No machine's clock is compared with another's, except that a
record of another day is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from diloco.membership import MOST_RANK
from diloco.transport.private_key import load_key, public_bytes
from diloco.transport.secret import check_secret, derive_key
from diloco.transport.swarm.engine import load_engine
from diloco.waiting import described

MAX_RECORD_BYTES = 8192
RECORD_S = 1800.0
"""How long a record is kept, after which a peer that has ended is forgotten."""

DAY_S = 86_400.0
"""By how much the clocks of two machines may differ."""

_MAX_ADDRESSES = 16
_Name = Annotated[str, Meta(max_length=64)]
_NO_BYTES = b"\xc4\x00"  # empty bytes in MessagePack
_SHA2_256 = bytes((0x12, 32))  # the prefix of a SHA2-256 multihash: its code and its size


@dataclass(frozen=True)
class Identity:
    path: Path  # file of the private key
    peer_id: str  # the peer's public identity: a hash of the public key, in base 58
    private_key: Any  # the key that signs the peer's records
    tls_key: Any  # the same, as the package ``cryptography`` has it


def load_identity(path: Path) -> Identity:
    """Load the key at ``path``, as `load_key` does."""
    tls_key = load_key(path)
    peer_id = identity_of(public_bytes(tls_key.public_key()))
    return Identity(path, peer_id, load_engine().signing_key(tls_key), tls_key)


def number_of(peer_id: str) -> int:
    """Return the default replica number of a peer, which is derived from its identity and so stays the same.

    >>> number_of("12D3KooWJrhzcn17yUmoHusNY4jT2mWtmrD7UtawBVTF1L1kTfMa")
    178120399
    """
    return int.from_bytes(hashlib.sha256(peer_id.encode()).digest()[:4], "big") >> 4


class PeerRecord(msgspec.Struct, frozen=True, array_like=True):
    """The record of one peer of a run."""

    number: Annotated[int, Meta(ge=-1, le=MOST_RANK)]  # the peer's replica number; -1 if it does not train
    swarm: _Name = ""  # the swarm that the peer is a member of; "" while it is searching for one
    # multiaddresses without ``/p2p/`` and the identity
    addresses: Annotated[tuple[Annotated[str, Meta(max_length=1 << 10)], ...], Meta(max_length=_MAX_ADDRESSES)] = ()
    finished: bool = False  # whether the peer has finished all steps of the run and is leaving
    peer_id: str = ""  # the peer's identity; what it is stored under says it, and not the record itself
    age_s: float = 0.0  # for how long the finder has known this version of it

    def __post_init__(self) -> None:
        if not self.swarm.isprintable():
            raise ValueError("the name of a swarm must be printable")

    def to_bytes(self, subkey: bytes, admission: Admission) -> bytes:
        """Return the record as stored under a subkey, with a proof that its author knows the secret of the run."""
        content = msgspec.json.encode(replace(self, addresses=self.addresses[:_MAX_ADDRESSES], peer_id=""))
        # JSON, as Hivemind finds its signature in a stored record only if that is a line of text
        return msgspec.json.encode((content.decode(), admission.sign(subkey, content).hex()))

    @classmethod
    def from_bytes(cls, subkey: bytes, data: bytes, admission: Admission) -> PeerRecord:
        """Parse a record that is stored under a subkey.

        Raises:
            ValueError: if it is invalid, or its author does not know the secret of the run.
        """
        if len(data) > MAX_RECORD_BYTES:
            raise ValueError("it is too large")
        try:
            content, proof = msgspec.json.decode(data, type=described(tuple[str, str]))
            if not hmac.compare_digest(proof.encode(), admission.sign(subkey, content.encode()).hex().encode()):
                raise ValueError("its author does not know the secret")
            stored = msgspec.json.decode(content, type=described(cls))
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        return replace(stored, peer_id=owner_of(subkey))


def owner_of(subkey: bytes) -> str:
    """Return the peer whose public key is in a record's subkey; only that peer can sign the record.

    Raises:
        ValueError: if the subkey contains no key.
    """
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    prefix, suffix = load_engine().RSASignatureValidator.PUBLIC_KEY_FORMAT.split(b"_key_")
    if not subkey.startswith(prefix) or not subkey.endswith(suffix):
        raise ValueError("the subkey of a record names no owner")
    try:
        key = load_ssh_public_key(subkey[len(prefix) : -len(suffix)])
    except Exception as error:  # the parser raises errors of many types
        raise ValueError("the subkey of a record holds no key") from error
    if subkey != prefix + key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + suffix:  # such as a comment
        raise ValueError("the subkey of a record holds more than a key")
    return identity_of(public_bytes(key))


def identity_of(key: bytes) -> str:
    engine = load_engine()
    packed = engine.crypto_pb2.PublicKey(key_type=engine.crypto_pb2.RSA, data=key).SerializeToString()
    return str(engine.PeerID(_SHA2_256 + hashlib.sha256(packed).digest()))


def make_validator(private_key: Any, runs: Mapping[bytes, Admission] | None = None) -> Any:
    """Return a validator that signs this peer's records, and accepts only small records signed by their owners.

    Args:
        runs: place in the DHT -> the run whose records it holds. Only who knows the run's secret can store them.
    """
    engine = load_engine()

    class OfTheRun(engine.RecordValidatorBase):  # type: ignore[misc, name-defined]  # its base has no types
        """Checks size, day and secret, before any key is read and the signature is checked."""

        priority = 30

        def validate(self, record: Any) -> bool:
            if len(record.value) > MAX_RECORD_BYTES or not record.subkey or len(record.subkey) > MAX_RECORD_BYTES:
                return False
            if not abs(record.expiration_time - RECORD_S - engine.clock.now_s()) <= DAY_S:  # also if it isn't a number
                return False
            admission = (runs or {}).get(record.key)
            if admission is None:
                return True
            packed = engine.RSASignatureValidator.strip_value(engine.RSASignatureValidator, record)
            try:
                PeerRecord.from_bytes(_unpacked(record.subkey), _unpacked(packed), admission)
            except ValueError:
                return False
            return True

        def merge_with(self, other: Any) -> bool:
            return isinstance(other, type(self))

    class Owned(engine.RecordValidatorBase):  # type: ignore[misc, name-defined]  # as above
        """Checks that the record is stored under its owner's key and nothing else, so that each owner has one."""

        priority = 20

        def validate(self, record: Any) -> bool:
            try:
                owner_of(_unpacked(record.subkey))
            except ValueError:
                return False
            return True

        def merge_with(self, other: Any) -> bool:
            return isinstance(other, type(self))

    class OfBytes(engine.RecordValidatorBase):  # type: ignore[misc, name-defined]  # as above
        """Checks the type once the signature is removed; a search of Hivemind that can't unpack a value never ends."""

        priority = 0

        def validate(self, record: Any) -> bool:
            return _is_bytes(record.value)

        def strip_value(self, record: Any) -> bytes:
            return bytes(record.value) if _is_bytes(record.value) else _NO_BYTES

        def merge_with(self, other: Any) -> bool:
            return isinstance(other, type(self))

    return engine.CompositeValidator([engine.RSASignatureValidator(private_key), OfTheRun(), Owned(), OfBytes()])


def _is_bytes(packed: bytes) -> bool:
    r"""Return whether ``packed`` is exactly one MessagePack value of type bytes, as a record is.

    >>> [_is_bytes(packed) for packed in (b"\xc4\x02hi", b"\xc4\x03hi", b"\xc5\x00\x02hi", b"\x91" * 3000, b"")]
    [True, False, True, False, False]
    """
    size = {0xC4: 1, 0xC5: 2, 0xC6: 4}.get(packed[0] if packed else 0, 0)
    return bool(size) and int.from_bytes(packed[1 : 1 + size], "big") == len(packed) - 1 - size


def _unpacked(packed: bytes) -> bytes:
    """Return the bytes in MessagePack; there is one way to pack them."""
    value: bytes = packed[1 + {0xC4: 1, 0xC5: 2}.get(packed[0] if packed else 0, 4) :]
    if not _is_bytes(packed) or msgspec.msgpack.encode(value) != packed:
        raise ValueError("they aren't bytes")
    return value


@dataclass(frozen=True)
class Admission:
    """The rules by which a peer admits others, applied before anything else in a stream is read."""

    run: str  # name of the run; peers of other runs are rejected
    # secret that all peers of the run share, see `diloco.transport.secret`; "": the run's name is enough
    secret: str = field(default="", repr=False)
    allowed: frozenset[str] = frozenset()  # identities of the admitted peers; empty: all peers with the secret
    ejected: frozenset[str] = frozenset()  # identities of peers that are not admitted any more

    def __post_init__(self) -> None:
        object.__setattr__(self, "secret", check_secret(self.secret))

    def admits(self, peer: str) -> bool:
        """Return whether ``peer`` is on the list of allowed peers, or there is no list, and it was not ejected."""
        return peer not in self.ejected and (not self.allowed or peer in self.allowed)

    def sign(self, subkey: bytes, content: bytes) -> bytes:
        """Return the proof in a peer's record in the DHT, stored under its subkey; making it takes the secret."""
        key = derive_key(f"record {self.run}", self.secret)
        return hmac.digest(key, len(subkey).to_bytes(4, "big") + subkey + content, "sha256")

    @property
    def dht_key(self) -> str:
        """The key of the run's records in the DHT, which only those can derive who know the secret."""
        return f"diloco/2/{derive_key(f'dht {self.run}', self.secret).hex()}"


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """The addresses of a peer, and the peers that it knows."""

    join: tuple[str, ...] = ()  # multiaddresses of peers, each with its ``/p2p/`` identity; empty for the first peer
    # multiaddresses to listen at; empty: none, as behind a router that blocks incoming connections
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()  # multiaddresses to announce instead of those listened at
    map_ports: bool = True  # whether to ask the router to forward ports (UPnP)
    public: bool = False  # whether others surely reach it, so that it relays for them from the start
    direct_port: int = 0  # TCP port for incoming direct streams; 0: any
    insists: bool = True  # whether a peer of ``join`` must answer at the start; otherwise `Node.enter` retries later


def same_port(listen: tuple[str, ...], listened: tuple[str, ...]) -> tuple[str, ...]:
    """Return where to listen so that others find this peer again: "any port" becomes the port that it had.

    >>> same_port(("/ip4/0.0.0.0/tcp/0",), ("/ip4/10.0.0.7/tcp/31330/p2p/Qm", "/ip4/127.0.0.1/tcp/31330/p2p/Qm"))
    ('/ip4/0.0.0.0/tcp/31330',)
    """
    own = [found[1] for each in listened if "/p2p-circuit" not in each and (found := re.search(r"/tcp/(\d+)", each))]
    return tuple(re.sub(r"/tcp/0\b", f"/tcp/{own[-1]}", each) for each in listen) if own else listen
