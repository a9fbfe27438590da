"""The secret that all processes of a run share, and the keys that they derive from it with HKDF, one for each purpose.

A secret is one line, ``diloco-secret:HEX-CHECK``: 256 random bits in 64 hexadecimal digits, and the first 8 digits of
their SHA-256. Words of people would not do: whoever sees what was made with a key can try them until one matches.
"""

from __future__ import annotations

import functools
import hashlib
import re
import secrets
from pathlib import Path

from diloco.errors import ConfigurationError
from diloco.private_files import read_private

_FORM = "diloco-secret:"
_KEY_BYTES, _CHECK_DIGITS = 32, 8


class TurnedAwayError(OSError):
    """One side of a connection does not know the secret: the other side, or this one according to the other."""


def new_secret() -> str:
    """Return a new random secret.

    >>> new_secret() == new_secret(), len(new_secret())
    (False, 87)
    """
    digits = secrets.token_hex(_KEY_BYTES)
    return f"{_FORM}{digits}-{_check_of(digits)}"


def read_secret(path: Path | None, key: str) -> str:
    """Return the secret in a file, or "" if ``path`` is None.

    Raises:
        ConfigurationError: if others can read the file, it can't be read, or it holds no secret; it names the setting
            ``key``.
    """
    if path is None:
        return ""
    data = read_private(path, f"The secret {key}={path}")
    try:
        secret = data.decode("utf-8-sig").strip()
        _bits(secret)
    except ValueError as error:
        raise ConfigurationError(
            f"{key}={path} holds no secret: {error}. Create one with `diloco secret {path.with_name('run.secret')}`, "
            "and copy it to every machine of the run."
        ) from error
    return secret


def check_secret(secret: str) -> str:
    """Return ``secret`` without the white space around it, as in a file that is read whole; "" stands for none.

    Raises:
        ConfigurationError: if it has another form than a secret has.
    """
    try:
        if secret:
            _bits(secret)
    except ValueError as error:
        raise ConfigurationError(f"the secret can't be used: {error}. Take what `diloco secret` writes.") from error
    return secret.strip()


@functools.lru_cache(maxsize=256)
def derive_key(purpose: str, secret: str) -> bytes:
    """Return the 32 bytes that everybody who knows the secret derives from it for a purpose, and nobody else.

    >>> derive_key("a", new_secret()) == derive_key("a", new_secret()), derive_key("a", "") == derive_key("b", "")
    (False, False)
    """
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    derive = HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=None, info=f"diloco {purpose}".encode())
    return derive.derive(_bits(secret) if secret else bytes(_KEY_BYTES))


def _bits(secret: str) -> bytes:
    if not isinstance(secret, str):
        raise ValueError(f"it is a {type(secret).__name__} instead of a string")
    secret = secret.strip()
    if not secret.startswith(_FORM):
        raise ValueError(f"it does not begin with {_FORM!r}, as a secret from `diloco secret` does")
    digits, _, check = secret.removeprefix(_FORM).partition("-")
    if not re.fullmatch(rf"[0-9a-f]{{{2 * _KEY_BYTES}}}", digits) or check != _check_of(digits):
        raise ValueError("it was cut or changed on the way, as its checksum is wrong")
    return bytes.fromhex(digits)


def _check_of(digits: str) -> str:
    return hashlib.sha256(digits.encode()).hexdigest()[:_CHECK_DIGITS]
