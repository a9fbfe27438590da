"""Where a peer is, whom it knows, and which run it takes part in. Values only."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from diloco.membership.view import View
from diloco.transport.hivemind.status import PeerStatus
from diloco.transport.secret import is_proof, proof

__all__ = ["Admission", "NodePlace", "SwarmPlace", "same_port"]


@dataclass(frozen=True)
class Admission:
    """Who may talk to a peer; checked before anything else of a stream is read.

    libp2p proves who is at the other end of a stream, and encrypts it. A proof is bound to both ends, so it is of no
    use to anybody else who sees it.
    """

    run: str  # name of the run; peers of another one are turned away
    secret: str = ""  # shared by all peers of the run; "": the run's name is enough
    allowed: frozenset[str] = frozenset()  # peers that may come; empty: all that have the secret

    def proof(self, prover: str, verifier: str) -> bytes:
        """What ``prover`` says to ``verifier``, both peer identities: ``(32,)`` bytes.

        >>> Admission("r", "s").proof("a", "b") == Admission("r", "t").proof("a", "b")
        False
        """
        return proof(self.run, self.secret, prover, verifier)

    def admits(self, peer: str) -> bool:
        """Whether ``peer`` is on the list, if there is one."""
        return not self.allowed or peer in self.allowed

    def accepts(self, given: bytes, prover: str, verifier: str) -> bool:
        """Whether a proof is right."""
        return is_proof(given, self.run, self.secret, prover, verifier)

    def of_record(self, peer: str, said: str) -> str:
        """What ``peer`` adds to its record in the DHT, which says ``said``: only who has the secret can make it."""
        return self.proof(f"the record of {peer}", said).hex()


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """Where a peer is, and whom it knows."""

    join: tuple[str, ...] = ()  # multiaddresses of peers, each with its ``/p2p/`` identity; empty for the first one
    # multiaddresses to listen at; empty: none, as behind a router that lets nothing in
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()  # multiaddresses to tell others instead
    map_ports: bool = True  # ask the router to let others in (UPnP)
    relay: bool = True  # be reached through others where nothing else works, and carry the streams of others
    # whether payloads go over direct streams where a peer can be reached ("auto"), have to, or never do
    direct: Literal["auto", "only", "never"] = "auto"
    direct_port: int = 0  # at which direct streams are listened for; 0: any
    insists: bool = True  # whether one of ``join`` must answer at the start; else `Node.enter` tries again later


@dataclass(frozen=True, kw_only=True)
class SwarmPlace:
    """Which peer this is, and which run it wants to take part in."""

    identity: Path  # file of its private key
    admission: Admission  # the run's name, and who may take part in it
    node: NodePlace = field(default_factory=NodePlace)  # where this peer is, and whom it knows
    replica: int | None = None  # its number; None: one that follows from its identity
    swarm: str = ""  # the swarm that it was a member of before; "": none
    # the newest view of that swarm that it was a member of, or had agreed to be; None for a new process
    last: View | None = None
    # how long it looks for the others; None: as long as a wire's ``rendezvous_timeout_s``
    patience_s: float | None = None
    held_swarm: str = ""  # the swarm in which it reached the newest step that it could resume from; "": unknown
    # a peer that finds no member waits this long for others that look, too, before one founds a swarm
    join_window_s: float = 3.0
    status: PeerStatus = field(default_factory=PeerStatus)  # what people that look are told of this peer
    closed: str = ""  # why nobody can join at first; "": all can


def same_port(listen: tuple[str, ...], listened: tuple[str, ...]) -> tuple[str, ...]:
    """Where to listen so that others find this peer where it was: "any port" becomes the one that it had.

    >>> same_port(("/ip4/0.0.0.0/tcp/0",), ("/ip4/10.0.0.7/tcp/31330/p2p/Qm", "/ip4/127.0.0.1/tcp/31330/p2p/Qm"))
    ('/ip4/0.0.0.0/tcp/31330',)
    """
    own = [found[1] for each in listened if "/p2p-circuit" not in each and (found := re.search(r"/tcp/(\d+)", each))]
    return tuple(re.sub(r"/tcp/0\b", f"/tcp/{own[-1]}", each) for each in listen) if own else listen
