"""Signatures made of nothing but a hash function, each of one message alone (Winternitz, one key for each vote).

Who has the key of a message and its signature knows that the signer said it, and can show it to others. A key must not
sign two messages: whoever sees both can sign more.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b, sha256

__all__ = ["KEY_CHARACTERS", "SIGNATURE_CHARACTERS", "is_signed", "public_key", "secret_for", "sign"]

_LENGTH = 16
"""Bytes of a link of a chain: 128 bits."""

_LAST = 15
"""Each hexadecimal digit of a message is shown by how far a chain of so many links was followed."""

_DIGITS = 24
_CHAINS = _DIGITS + 3
"""24 digits of the message's hash, and three of a sum that falls where a digit rises."""

_PREFIXES = [[bytes((chain, link)) for link in range(_LAST)] for chain in range(_CHAINS)]

KEY_CHARACTERS = 2 * _LENGTH
SIGNATURE_CHARACTERS = _CHAINS * _LENGTH // 3 * 4


def secret_for(secret: bytes, what: str) -> bytes:
    """A secret of one's own for one message alone, from one that stays; ``what`` names the message."""
    return blake2b(what.encode(), key=secret, digest_size=_LENGTH).digest()


@lru_cache(1024)
def public_key(secret: bytes) -> str:
    """What others check a signature with.

    >>> key = public_key(secret_for(bytes(32), "a vote"))
    >>> signature = sign(secret_for(bytes(32), "a vote"), "yes")
    >>> is_signed(key, "yes", signature), is_signed(key, "no", signature)
    (True, False)
    """
    return _key(_follow(start, chain, 0, _LAST) for chain, start in enumerate(_starts(secret)))


def sign(secret: bytes, message: str) -> str:
    """That one has said ``message``, as text."""
    starts = _starts(secret)
    links = (_follow(starts[chain], chain, 0, digit) for chain, digit in enumerate(_digits(message)))
    return base64.b64encode(b"".join(links)).decode()


@lru_cache(4096)
def is_signed(key: str, message: str, signature: str) -> bool:
    """Whether the owner of ``key`` has signed ``message`` so; any text will do, and none raises."""
    try:
        links = base64.b64decode(signature, validate=True)
    except (binascii.Error, ValueError):
        return False
    if len(links) != _CHAINS * _LENGTH:
        return False
    parts = (links[at : at + _LENGTH] for at in range(0, len(links), _LENGTH))
    ends = (
        _follow(part, chain, digit, _LAST)
        for (chain, digit), part in zip(enumerate(_digits(message)), parts, strict=True)
    )
    return _key(ends) == key


def _key(ends: Iterable[bytes]) -> str:
    return sha256(b"".join(ends)).hexdigest()[:KEY_CHARACTERS]


def _starts(secret: bytes) -> list[bytes]:
    return [sha256(secret + bytes((chain,))).digest()[:_LENGTH] for chain in range(_CHAINS)]


def _follow(link: bytes, chain: int, start: int, end: int) -> bytes:
    for prefix in _PREFIXES[chain][start:end]:
        link = sha256(prefix + link).digest()[:_LENGTH]
    return link


def _digits(message: str) -> list[int]:
    digits = [int(each, 16) for each in blake2b(message.encode(), digest_size=_DIGITS // 2).hexdigest()]
    falls = sum(_LAST - digit for digit in digits)
    return [*digits, falls >> 8, falls >> 4 & _LAST, falls & _LAST]
