"""Who a peer is: a key pair of this machine, and what follows from it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.errors import ConfigurationError
from diloco.transport.hivemind.engine import load_engine

__all__ = ["Identity", "load_identity", "number_of"]


@dataclass(frozen=True)
class Identity:
    """A key pair.

    Attributes:
        path: where the private key lies.
        peer_id: what others know this peer by: a hash of the public key, in base 58.
        private_key: signs what this peer says of itself.
    """

    path: Path
    peer_id: str
    private_key: Any


def load_identity(path: Path) -> Identity:
    """The key at ``path``; made, readable for its owner alone, where there is none yet.

    Raises:
        ConfigurationError: if others can read it, or it is no key.
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
            f"the private key {path} can be read by others (mode {path.stat().st_mode & 0o777:o}); chmod 600 would "
            "work, or another swarm.identity. Nothing was started."
        )
    data = path.read_bytes()
    try:
        peer_id = str(engine.PeerID.from_identity(data))
        key = engine.RSAPrivateKey.__new__(engine.RSAPrivateKey)
        key.__setstate__({"_private_key": engine.crypto_pb2.PrivateKey.FromString(data).data})
    except Exception as error:  # whatever its parsers raise
        raise ConfigurationError(
            f"{path} holds no private key that can be used ({error}); another swarm.identity, or none there, so "
            "that one is made, would work. Nothing was started."
        ) from error
    return Identity(path, peer_id, key)


def number_of(peer_id: str) -> int:
    """The replica number of a peer that was given none: from its identity, so that it has it whenever it comes.

    >>> number_of("12D3KooWJrhzcn17yUmoHusNY4jT2mWtmrD7UtawBVTF1L1kTfMa")
    178120399
    """
    return int.from_bytes(hashlib.sha256(peer_id.encode()).digest()[:4], "big") >> 4
