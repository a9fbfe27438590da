"""Who a peer is, and what peers say of themselves in the DHT.

A peer is a key pair of its machine. It signs its record in the DHT, which only says where to ask: whether a peer is
there, and what it does, it says itself when asked. No clock of one machine is compared with another's.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco.errors import ConfigurationError
from diloco.membership.founding import Looker
from diloco.membership.view import View
from diloco.protocol.fields import Fields, json_object
from diloco.transport.hivemind.engine import load_engine
from diloco.transport.hivemind.place import Admission

__all__ = [
    "MAX_RECORD_BYTES",
    "Identity",
    "PeerRecord",
    "load_identity",
    "make_subkey",
    "make_validator",
    "number_of",
    "owner_of",
]

MAX_RECORD_BYTES = 4096
_MAX_ADDRESSES = 16
_NO_BYTES = b"\xc4\x00"  # in MessagePack
_SHA2_256 = bytes((0x12, 32))  # what a multihash of that kind begins with: its code and its size


@dataclass(frozen=True)
class Identity:
    """A key pair."""

    path: Path  # file of the private key
    peer_id: str  # by which others know this peer: a hash of the public key, in base 58
    private_key: Any  # signs the records of this peer


def load_identity(path: Path) -> Identity:
    """The key at ``path``; made, readable by its owner alone, if there is none yet.

    Raises:
        ConfigurationError: if others can read it, or it is not a key.
    """
    engine = load_engine()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        key = engine.RSAPrivateKey()
        data = engine.crypto_pb2.PrivateKey(key_type=engine.crypto_pb2.RSA, data=key.to_bytes()).SerializeToString()
        half = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(half, path)
    if path.stat().st_mode & 0o077:
        raise ConfigurationError(
            f"the private key {path} can be read by others (mode {path.stat().st_mode & 0o777:o}). Run chmod 600 on it "
            "or choose another swarm.identity."
        )
    data = path.read_bytes()
    try:
        peer_id = str(engine.PeerID.from_identity(data))
        key = engine.RSAPrivateKey.__new__(engine.RSAPrivateKey)
        key.__setstate__({"_private_key": engine.crypto_pb2.PrivateKey.FromString(data).data})
    except Exception as error:  # whatever its parsers raise
        raise ConfigurationError(
            f"{path} holds no usable private key ({error}). Choose another swarm.identity, or remove the file, so that "
            "a key is made."
        ) from error
    return Identity(path, peer_id, key)


def number_of(peer_id: str) -> int:
    """The replica number of a peer that was given none: from its identity, so that it stays the same.

    >>> number_of("12D3KooWJrhzcn17yUmoHusNY4jT2mWtmrD7UtawBVTF1L1kTfMa")
    178120399
    """
    return int.from_bytes(hashlib.sha256(peer_id.encode()).digest()[:4], "big") >> 4


@dataclass(frozen=True)
class PeerRecord:
    """One peer of a run."""

    peer_id: str  # who
    number: int  # its replica number; -1 for one that does not train
    swarm: str = ""  # of which it is a member; "" while it looks for one
    held_step: int = -1  # the newest step that it could resume from; -1 for none
    addresses: tuple[str, ...] = field(default=())  # multiaddresses, ``/p2p/`` and its identity left out
    finished: bool = False  # whether it has done all steps of the run, and is leaving
    beat: int = 0  # grows each time that the record is stored
    was: str = ""  # of a peer that looks, the swarm that it was a member of
    last: View | None = None  # the newest view of that swarm that it was a member of, or had agreed to be
    proven: bool = True  # whether whoever has made the record knows the secret of the run

    def looker(self, swarm: str) -> Looker:
        """What it says, as a peer that looks, to those who were members of ``swarm``."""
        return Looker(self.number, self.held_step, self.last if swarm and swarm == self.was else None)

    def to_bytes(self, admission: Admission) -> bytes:
        """As it is stored, with a proof that whoever has made it knows the secret of the run."""
        addresses = list(self.addresses)[:_MAX_ADDRESSES]
        fields = {"number": self.number, "swarm": self.swarm, "held_step": self.held_step, "addresses": addresses}
        last = [] if self.last is None else [self.last.id, *self.last.members]
        fields |= {"finished": self.finished, "beat": self.beat, "was": self.was, "last": last}
        said = json.dumps(fields, sort_keys=True)
        return json.dumps(fields | {"proof": admission.of_record(self.peer_id, said)}).encode()

    @classmethod
    def from_bytes(cls, peer_id: str, data: bytes, admission: Admission) -> PeerRecord:
        """From what was stored; `ValueError` for anything else."""
        if len(data) > MAX_RECORD_BYTES:
            raise ValueError("it is too large")
        message = json_object(data)
        fields = Fields(message)
        last = fields.integers("last")
        said = json.dumps({name: value for name, value in message.items() if name != "proof"}, sort_keys=True)
        proof = admission.of_record(peer_id, said)
        return cls(
            peer_id,
            fields.rank("number", -1),
            fields.printable("swarm"),
            fields.integer("held_step", -1),
            fields.list_of_texts("addresses", _MAX_ADDRESSES),
            fields.flag("finished"),
            fields.integer("beat"),
            fields.printable("was"),
            View(last[0], last[1:]) if last else None,
            proven=hmac.compare_digest(fields.text("proof").encode(), proof.encode()),
        )


def owner_of(subkey: bytes) -> str:
    """The peer whose public key a record's subkey holds; only it can sign the record.

    Raises:
        ValueError: if there is no key in it.
    """
    from cryptography.hazmat.primitives import serialization

    engine = load_engine()
    prefix, suffix = engine.RSASignatureValidator.PUBLIC_KEY_FORMAT.split(b"_key_")
    if not subkey.startswith(prefix) or not subkey.endswith(suffix):
        raise ValueError("the subkey of a record names no owner")
    try:
        key = serialization.load_ssh_public_key(subkey[len(prefix) : -len(suffix)])
    except Exception as error:  # whatever its parsers raise
        raise ValueError("the subkey of a record holds no key") from error
    data = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    packed = engine.crypto_pb2.PublicKey(key_type=engine.crypto_pb2.RSA, data=data).SerializeToString()
    return str(engine.PeerID(_SHA2_256 + hashlib.sha256(packed).digest()))


def make_validator(private_key: Any) -> Any:
    """Signs what this peer stores, and accepts from others only what is small and signed by its owner."""
    engine = load_engine()

    class SmallAndOwned(engine.RecordValidatorBase):  # type: ignore[misc, name-defined]  # its base has no types
        """Runs before the signature is looked at."""

        priority = 20

        def validate(self, record: Any) -> bool:
            if len(record.value) > MAX_RECORD_BYTES or not record.subkey or len(record.subkey) > MAX_RECORD_BYTES:
                return False
            return engine.RSASignatureValidator.PUBLIC_KEY_FORMAT.split(b"_key_")[0] in record.subkey

        def merge_with(self, other: Any) -> bool:
            return isinstance(other, type(self))

    class OfBytes(engine.RecordValidatorBase):  # type: ignore[misc, name-defined]  # as above
        """Runs when the signature has been taken off. Hivemind never ends a search that finds what it can't unpack."""

        priority = 0

        def validate(self, record: Any) -> bool:
            return _is_bytes(record.value)

        def strip_value(self, record: Any) -> bytes:
            return bytes(record.value) if _is_bytes(record.value) else _NO_BYTES

        def merge_with(self, other: Any) -> bool:
            return isinstance(other, type(self))

    return engine.CompositeValidator([engine.RSASignatureValidator(private_key), SmallAndOwned(), OfBytes()])


def _is_bytes(packed: bytes) -> bool:
    r"""Whether MessagePack makes of it bytes, of which a record consists, and nothing else.

    >>> [_is_bytes(packed) for packed in (b"\xc4\x02hi", b"\xc4\x03hi", b"\xc5\x00\x02hi", b"\x91" * 3000, b"")]
    [True, False, True, False, False]
    """
    size = {0xC4: 1, 0xC5: 2, 0xC6: 4}.get(packed[0] if packed else 0, 0)
    return bool(size) and int.from_bytes(packed[1 : 1 + size], "big") == len(packed) - 1 - size


def make_subkey(identity: Identity) -> bytes:
    """The subkey under which only this identity can store."""
    key: bytes = load_engine().RSASignatureValidator(identity.private_key).local_public_key
    return key
