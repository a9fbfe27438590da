"""The secret that all processes of a run share, and the keys that they derive from it.

A secret is one line of text in one of two forms::

    diloco-secret:HEX-CHECK     256 random bits in 64 hexadecimal digits, and the first 8 digits of their SHA-256
    passphrase:WORDS            at least 16 characters, from which scrypt derives 256 bits (n = 2^17, r = 8, p = 1)

Whoever sees what was made with a key can try secrets until one matches, so only the first form is beyond guessing. HKDF
derives another key for each purpose.
"""

from __future__ import annotations

import functools
import hashlib
import re
import secrets
import unicodedata
from pathlib import Path

from diloco.errors import ConfigurationError
from diloco.private_files import read_private

_RANDOM, _PASSPHRASE = "diloco-secret:", "passphrase:"
_KEY_BYTES, _CHECK_DIGITS = 32, 8
_FEWEST_CHARACTERS = 16  # of a passphrase
_SALT = b"diloco passphrase"  # the same for all, so that all derive the same key
_SCRYPT = {"n": 1 << 17, "r": 8, "p": 1, "maxmem": 1 << 28}  # takes 128 MiB and about half a second


class TurnedAwayError(OSError):
    """One side of a connection does not know the secret: the other side, or this one according to the other."""


def new_secret() -> str:
    """Return a new random secret.

    >>> new_secret() == new_secret(), len(new_secret())
    (False, 87)
    """
    digits = secrets.token_hex(_KEY_BYTES)
    return f"{_RANDOM}{digits}-{_check_of(digits)}"


def read_secret(path: Path | None, key: str) -> str:
    """Return the secret in a file, or "" if ``path`` is None.

    Args:
        path: path of the file, or None.
        key: the setting that names the file, for errors.

    Raises:
        ConfigurationError: if others can read the file, it can't be read, or it holds no secret.
    """
    if path is None:
        return ""
    data = read_private(path, f"The secret {key}={path}")
    try:
        secret = data.decode("utf-8-sig").strip()
        _root(secret)
    except ValueError as error:
        raise ConfigurationError(
            f"{key}={path} holds no secret: {error}. Create one with `diloco secret {path.with_name('run.secret')}`, "
            "and copy it to every machine of the run."
        ) from error
    return secret


def check_secret(secret: str) -> str:
    """Return ``secret``, which may be "" for none.

    Raises:
        ConfigurationError: if it has another form than a secret has.
    """
    try:
        if secret:
            _root(secret)
    except ValueError as error:
        raise ConfigurationError(f"the secret can't be used: {error}. Take what `diloco secret` writes.") from error
    return secret


@functools.lru_cache(maxsize=256)
def derive_key(purpose: str, secret: str) -> bytes:
    """Return the 32 bytes that everybody who knows the secret derives from it for a purpose, and nobody else.

    >>> derive_key("a", new_secret()) == derive_key("a", new_secret()), derive_key("a", "") == derive_key("b", "")
    (False, False)
    """
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    derive = HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=None, info=f"diloco {purpose}".encode())
    return derive.derive(_root(secret) if secret else bytes(_KEY_BYTES))


@functools.lru_cache(maxsize=16)
def _root(secret: str) -> bytes:
    if not isinstance(secret, str):
        raise ValueError(f"it is a {type(secret).__name__} instead of a string")
    if secret.startswith(_RANDOM):
        digits, _, check = secret.removeprefix(_RANDOM).partition("-")
        if not re.fullmatch(rf"[0-9a-f]{{{2 * _KEY_BYTES}}}", digits) or check != _check_of(digits):
            raise ValueError("it was cut or changed on the way, as its checksum is wrong")
        return bytes.fromhex(digits)
    if not secret.startswith(_PASSPHRASE):
        raise ValueError(
            f"it begins neither with {_RANDOM!r}, as a secret from `diloco secret`, nor with {_PASSPHRASE!r}, as words "
            "of your own"
        )
    words = unicodedata.normalize("NFC", secret.removeprefix(_PASSPHRASE).strip())
    if len(words) < _FEWEST_CHARACTERS or not words.isprintable():
        raise ValueError(
            f"a passphrase must be one line of at least {_FEWEST_CHARACTERS} printable characters, got {len(words)}"
        )
    return hashlib.scrypt(words.encode(), salt=_SALT, dklen=_KEY_BYTES, **_SCRYPT)


def _check_of(digits: str) -> str:
    return hashlib.sha256(digits.encode()).hexdigest()[:_CHECK_DIGITS]
