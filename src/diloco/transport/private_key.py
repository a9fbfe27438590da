"""The private key of a process, from which its identity follows, in a file of its run folder.

The file is that of libp2p, whose daemon reads it in a swarm: protobuf, with the key's type (RSA), the number of bytes
that follow, and the key as DER.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diloco.errors import ConfigurationError, DiLoCoError
from diloco.private_files import make_private_folder, read_private, replace_private

_RSA, _SIZE_BYTES = b"\x08\x00\x12", 2  # of 128 to 16,383 bytes
_LEAST_BITS = 2048  # TLS takes no shorter key


def load_key(path: Path) -> Any:
    """Return the key at ``path``, of the package ``cryptography``; create one that only its owner can read, if missing.

    Raises:
        ConfigurationError: if other users can read the file, or it is not a key.
        DiLoCoError: if it can't be written.
    """
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.hazmat.primitives.serialization import load_der_private_key

    if not path.exists():
        _create(path)
    data = read_private(path, f"The private key {path}")
    try:
        if not data.startswith(_RSA):
            raise ValueError("it does not begin as one")
        key = load_der_private_key(data[len(_RSA) + _SIZE_BYTES :], None)
        if not isinstance(key, RSAPrivateKey) or key.key_size < _LEAST_BITS or _packed(key) != data:
            raise ValueError(f"it is not an RSA key of at least {_LEAST_BITS} bits, as libp2p writes it")
        return key
    except Exception as error:  # the parser raises errors of many types
        raise ConfigurationError(
            f"{path} holds no usable private key ({error}). Choose another file, or remove it to have a new "
            "key created."
        ) from error


def _create(path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=_LEAST_BITS)
    try:
        make_private_folder(path.parent)
        replace_private(path, _packed(key))
    except OSError as error:
        raise DiLoCoError(f"The private key {path} can't be written: {error.strerror or error}.") from error


def _packed(key: Any) -> bytes:
    """Return a private key as its file has it."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    der = key.private_bytes(Encoding.DER, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    return _RSA + bytes([len(der) % 128 | 128, len(der) // 128]) + bytes(der)


def public_bytes(key: Any) -> bytes:
    """Return a public key as DER, of which an identity is a hash."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return bytes(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))
