"""Signatures that prove to third parties what the owner of a key has signed (Ed25519, RFC 8032)."""

from __future__ import annotations

from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

__all__ = ["KEY_CHARACTERS", "SECRET_BYTES", "SIGNATURE_CHARACTERS", "is_signed", "public_key", "sign"]

SECRET_BYTES = 32
KEY_CHARACTERS, SIGNATURE_CHARACTERS = 64, 128
"""Keys and signatures are sent as hexadecimal digits."""

_private = lru_cache(128)(Ed25519PrivateKey.from_private_bytes)


@lru_cache(128)
def public_key(secret: bytes) -> str:
    """Return the key that verifies signatures made with ``secret``, 32 random bytes.

    >>> key, signature = public_key(bytes(32)), sign(bytes(32), "yes")
    >>> is_signed(key, "yes", signature), is_signed(key, "no", signature), is_signed(key, "yes", "it is so")
    (True, False, False)
    """
    return _private(secret).public_key().public_bytes_raw().hex()


def sign(secret: bytes, message: str) -> str:
    """Return the signature of ``message``."""
    return _private(secret).sign(message.encode()).hex()


@lru_cache(4096)
def is_signed(key: str, message: str, signature: str) -> bool:
    """Return whether the owner of ``key`` has signed ``message``; malformed arguments give False."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(bytes.fromhex(signature), message.encode())
    except (InvalidSignature, ValueError):
        return False
    return True
