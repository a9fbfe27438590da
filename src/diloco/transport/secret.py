"""The words that all processes of a run share, and how one proves to another that it knows them without saying them."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from diloco.errors import ConfigurationError

__all__ = ["PROOF_BYTES", "TurnedAwayError", "is_proof", "proof", "read_secret"]

PROOF_BYTES = 32
_SHORTEST_SECRET = 16


class TurnedAwayError(OSError):
    """The other side of a connection does not know the secret, or says that this one does not."""


def proof(run: str, secret: str, prover: str, verifier: str) -> bytes:
    """What ``prover`` says to ``verifier``: ``(32,)`` bytes, which are of no use to anybody else who sees them.

    Args:
        run: name of the run, or of what else the secret is for.
        secret: what both know.
        prover, verifier: names of the two ends of a connection, which no other connection has.

    >>> proof("r", "s", "a", "b") == proof("r", "t", "a", "b")
    False
    """
    key = hashlib.sha256(f"diloco\0{run}\0{secret}".encode()).digest()
    return hmac.digest(key, f"{prover}\0{verifier}".encode(), "sha256")


def is_proof(given: bytes, run: str, secret: str, prover: str, verifier: str) -> bool:
    """Whether ``given`` is the `proof` of these."""
    return hmac.compare_digest(given, proof(run, secret, prover, verifier))


def read_secret(path: Path | None, key: str) -> str:
    """What the file holds; "" for none.

    Args:
        path: of the file, or None.
        key: the setting that names it, for errors.

    Raises:
        ConfigurationError: if it can't be read, or is too short to keep anybody out.
    """
    if path is None:
        return ""
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{key}={path} can't be read: {error}. All peers need a file with the same words."
        ) from error
    if len(secret) < _SHORTEST_SECRET:
        raise ConfigurationError(
            f"{key}={path} holds {len(secret)} characters, and a secret needs at least {_SHORTEST_SECRET}. "
            "`openssl rand -hex 32` makes one."
        )
    return secret
