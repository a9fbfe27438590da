"""The secret that all processes of a run share, and proofs that a process knows it, which do not reveal it."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from diloco.errors import ConfigurationError

__all__ = ["PROOF_BYTES", "TurnedAwayError", "is_proof", "proof", "read_secret"]

PROOF_BYTES = 32
_SHORTEST_SECRET = 16


class TurnedAwayError(OSError):
    """One side of a connection does not know the secret: the other side, or this one according to the other."""


def proof(run: str, secret: str, prover: str, verifier: str) -> bytes:
    """Return the 32 bytes by which ``prover`` shows ``verifier`` that it knows the secret.

    A third party that observes the proof can't use it.

    Args:
        run: name of the run, or of another purpose of the secret.
        secret: the shared secret.
        prover, verifier: names of the two ends of a connection; no other connection may use the same names.

    >>> proof("r", "s", "a", "b") == proof("r", "t", "a", "b")
    False
    """
    key = hashlib.sha256(f"diloco\0{run}\0{secret}".encode()).digest()
    return hmac.digest(key, f"{prover}\0{verifier}".encode(), "sha256")


def is_proof(given: bytes, run: str, secret: str, prover: str, verifier: str) -> bool:
    """Return whether ``given`` equals the `proof` for the other arguments, in constant time."""
    return hmac.compare_digest(given, proof(run, secret, prover, verifier))


def read_secret(path: Path | None, key: str) -> str:
    """Return the secret in a file, or "" if ``path`` is None.

    Args:
        path: path of the file, or None.
        key: the setting that names the file, for errors.

    Raises:
        ConfigurationError: if the file can't be read, or holds fewer than 16 characters.
    """
    if path is None:
        return ""
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{key}={path} can't be read: {error}. Every peer needs a file with the same secret."
        ) from error
    if len(secret) < _SHORTEST_SECRET:
        raise ConfigurationError(
            f"The secret in {key}={path} must have at least {_SHORTEST_SECRET} characters, got {len(secret)}. "
            "Create one with `openssl rand -hex 32`."
        )
    return secret
