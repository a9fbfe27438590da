"""What the founder of a swarm orders while it runs: who is ejected, and the secret that is used from then on.

The name of a swarm begins with the identity of its founder, so whoever takes part knows it, and an order is signed with
the founder's key. A member that gets one which is newer than the last follows it at once, passes it on to the other
members, and drops the ejected peers. The others do the same, so the next view is agreed on without them. Whoever
connects later needs the new secret, which no ejected peer is told.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from diloco.errors import ConfigurationError, EjectedError
from diloco.private_files import read_private, replace_private
from diloco.protocol import WireMessage, decode, encode
from diloco.transport.private_key import public_bytes
from diloco.transport.swarm.identity import Admission, Identity, identity_of
from diloco.units import visible

_MOST = 64  # so that an order fits into a message to a peer that has just connected
_PEER = r"^[1-9A-HJ-NP-Za-km-z]{1,100}\Z"  # base 58, as identities are: it is shown to users
_Peers = Annotated[tuple[Annotated[str, Meta(pattern=_PEER)], ...], Meta(max_length=_MOST)]
_Keys = Annotated[tuple[Annotated[str, Meta(max_length=100)], ...], Meta(max_length=_MOST)]


class Order(WireMessage):
    """An order of the founder. It repeats what the earlier ones said, so the last one is enough."""

    run: Annotated[str, Meta(max_length=200)]
    version: Annotated[int, Meta(ge=1, le=_MOST)]  # one more than that of the order before
    ejected: _Peers  # identities of peers
    replaced: _Keys  # `Admission.dht_key` of each secret that no longer counts
    dht_key: Annotated[str, Meta(max_length=100)]  # of the new one
    key: Annotated[bytes, Meta(max_length=1 << 10)]  # the founder's public key, as DER
    signature: Annotated[bytes, Meta(max_length=1 << 10)] = b""
    # the new secret; "" where an ejected peer is told
    secret: Annotated[str, Meta(max_length=100, pattern="^(diloco-secret:.*)?$")] = ""

    @classmethod
    def sign(cls, identity: Identity, admission: Admission, peer: str, secret: str, before: Order | None) -> Order:
        """Return the order, after ``before``, to eject ``peer`` and to use ``secret`` instead of that of ``admission``.

        Raises:
            ConfigurationError: ``peer`` is the founder itself or no identity, or there were too many orders.
        """

        ejected, replaced = (before.ejected, before.replaced) if before else ((), ())
        if peer == identity.peer_id:
            raise ConfigurationError(f"{peer} is the founder, whose key signs the order. It can't eject itself.")
        if not re.fullmatch(_PEER, peer):
            raise ConfigurationError(
                f"--eject {visible(peer, 80)} isn't the identity of a peer; `diloco status` shows those."
            )
        if before and before.version >= _MOST:
            raise ConfigurationError(f"the run has changed its secret {_MOST} times, the most. Begin another run.")
        order = cls(
            admission.run,
            1 + (before.version if before else 0),
            tuple(dict.fromkeys((*ejected, peer))),
            (*replaced, admission.dht_key),
            Admission(admission.run, secret).dht_key,
            public_bytes(identity.tls_key.public_key()),
            secret=secret,
        )
        return replace(order, signature=identity.tls_key.sign(order._content, *_scheme()))

    @property
    def founder(self) -> str:
        return identity_of(self.key)

    @property
    def _content(self) -> bytes:
        fields = (self.run, self.version, self.ejected, self.replaced, self.dht_key)
        return b"diloco order " + msgspec.msgpack.encode(fields)

    def forgery(self, run: str, founder: str) -> str:
        """Return why the order is not one that ``founder`` has given in a run; or "". The secret is not looked at."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
        from cryptography.hazmat.primitives.serialization import load_der_public_key

        if self.founder != founder:
            return f"it is signed by {self.founder}, and the founder is {founder or 'unknown'}"
        try:
            cast(RSAPublicKey, load_der_public_key(self.key)).verify(self.signature, self._content, *_scheme())
        except InvalidSignature:
            return "it was changed after it had been signed"
        if self.run != run:  # the founder may have founded other runs with the same key
            return f"it is for run {visible(self.run, 80)}"
        return ""

    def problem(self, run: str, founder: str, me: str) -> str:
        """Return why the peer ``me`` of a run whose swarm ``founder`` has founded can't follow the order; or ""."""
        if why := self.forgery(run, founder):
            return why
        try:
            whole = bool(self.secret) and Admission(self.run, self.secret).dht_key == self.dht_key
        except ConfigurationError:
            whole = False
        return "" if whole or me in self.ejected else "its secret is not the signed one"

    def is_after(self, other: Order | None) -> bool:
        """Return whether this order counts, and ``other`` of the same founder no longer does."""
        return other is None or (self.version, self.dht_key) > (other.version, other.dht_key)

    @property
    def public(self) -> Order:
        """The order without the secret, for those who are ejected."""
        return replace(self, secret="")

    def applied(self, admission: Admission, before: Order | None = None) -> Admission:
        """Return the rules by which peers are admitted from now on.

        A secret stays that the order does not replace. That of ``before`` does not, which may have been signed at the
        same time.
        """
        old = admission.dht_key in self.replaced or (before is not None and admission.secret == before.secret)
        secret = self.secret if old else admission.secret
        return Admission(admission.run, secret, admission.allowed, frozenset(self.ejected))

    def error(self, peer: str) -> EjectedError:
        return EjectedError(
            f"{peer} was ejected from run {self.run!r} by its founder {self.founder} (order {self.version}). The "
            "others continue with another secret."
        )


class Govern(WireMessage):
    """A member is asked to follow an order and to pass it on, or only for the last one."""

    order: Order | None = None


class Governed(WireMessage):
    """The last order, without its secret."""

    order: Order | None


def founder_of(swarm: str) -> str:
    """Return the identity of the peer that has founded a swarm with this name, or "".

    >>> founder_of("QmXoyp.0123456789abcdef"), founder_of("0123456789abcdef")
    ('QmXoyp', '')
    """
    return swarm.rpartition(".")[0]


def load_order(identity: Path, run: str) -> Order | None:
    """Return the last order that the peer with this key file has followed in a run, or None.

    Raises:
        ConfigurationError: the file can't be read, or holds no order.
    """
    path = identity.with_suffix(".order")
    if not path.exists():
        return None
    try:
        order = decode(read_private(path, f"The order {path}"), Order)
    except ValueError as error:
        raise ConfigurationError(f"{path} holds no order of a founder: {error}. Remove it.") from error
    return order if order.run == run else None


def save_order(identity: Path, order: Order) -> None:
    replace_private(identity.with_suffix(".order"), encode(order))


def _scheme() -> tuple[Any, Any]:
    """Return the padding and the hash of signatures."""
    from cryptography.hazmat.primitives.asymmetric.padding import MGF1, PSS
    from cryptography.hazmat.primitives.hashes import SHA256

    return PSS(MGF1(SHA256()), PSS.DIGEST_LENGTH), SHA256()
