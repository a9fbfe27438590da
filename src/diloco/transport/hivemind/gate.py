"""Who may talk to this peer at all: pure checks, made before anything else of a stream is read."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

__all__ = ["PROOF_BYTES", "Gate"]

PROOF_BYTES = 32


@dataclass(frozen=True)
class Gate:
    """What a peer must be and know.

    libp2p proves who is at the other end of a stream, and encrypts it. A proof is bound to both ends, so one that
    somebody else gets to see is of no use to him.

    Attributes:
        run: name of the run; peers of another one are turned away.
        secret: shared by all peers of the run; "": anybody who knows the run's name may come.
        allowed: peers that may come; empty: whoever has the secret.
    """

    run: str
    secret: str = ""
    allowed: frozenset[str] = frozenset()

    def proof(self, prover: str, verifier: str) -> bytes:
        """What ``prover`` says to ``verifier``, both peer identities: ``(32,)`` bytes.

        >>> Gate("r", "s").proof("a", "b") == Gate("r", "t").proof("a", "b")
        False
        """
        key = hashlib.sha256(f"diloco\0{self.run}\0{self.secret}".encode()).digest()
        return hmac.digest(key, f"{prover}\0{verifier}".encode(), "sha256")

    def admits(self, peer: str) -> bool:
        """Whether ``peer`` is on the list, where there is one."""
        return not self.allowed or peer in self.allowed

    def accepts(self, proof: bytes, prover: str, verifier: str) -> bool:
        """Whether ``proof`` is what ``prover`` has to say."""
        return hmac.compare_digest(proof, self.proof(prover, verifier))
