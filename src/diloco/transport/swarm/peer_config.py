"""Values that describe a peer: its addresses, the peers that it knows, and the run that it takes part in."""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass, field
from pathlib import Path

from diloco.membership import LastViews
from diloco.transport.secret import check_secret, derive_key
from diloco.transport.swarm.status import PeerStatus

__all__ = ["Admission", "NodePlace", "SwarmPlace", "same_port"]


@dataclass(frozen=True)
class Admission:
    """The rules by which a peer admits others, applied before anything else in a stream is read."""

    run: str  # name of the run; peers of other runs are rejected
    # secret that all peers of the run share, see `diloco.transport.secret`; "": the run's name is enough
    secret: str = field(default="", repr=False)
    allowed: frozenset[str] = frozenset()  # identities of the admitted peers; empty: all peers with the secret

    def __post_init__(self) -> None:
        check_secret(self.secret)

    def admits(self, peer: str) -> bool:
        """Return whether ``peer`` is on the list of allowed peers, or there is no list."""
        return not self.allowed or peer in self.allowed

    def sign(self, subkey: bytes, content: bytes) -> bytes:
        """Return the proof in a peer's record in the DHT, stored under its subkey; making it takes the secret."""
        key = derive_key(f"record {self.run}", self.secret)
        return hmac.digest(key, len(subkey).to_bytes(4, "big") + subkey + content, "sha256")

    @property
    def dht_key(self) -> str:
        """The key of the run's records in the DHT, which only those can derive who know the secret."""
        return f"diloco/2/{derive_key(f'dht {self.run}', self.secret).hex()}"


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """The addresses of a peer, and the peers that it knows."""

    join: tuple[str, ...] = ()  # multiaddresses of peers, each with its ``/p2p/`` identity; empty for the first peer
    # multiaddresses to listen at; empty: none, as behind a router that blocks incoming connections
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()  # multiaddresses to announce instead of those listened at
    map_ports: bool = True  # whether to ask the router to forward ports (UPnP)
    relay: bool = True  # whether to use other peers as relays where nothing else works, and to relay for them
    direct: bool = True  # whether payloads may use streams over TCP beside libp2p
    direct_port: int = 0  # TCP port for incoming direct streams; 0: any
    insists: bool = True  # whether a peer of ``join`` must answer at the start; otherwise `Node.enter` retries later


@dataclass(frozen=True, kw_only=True)
class SwarmPlace:
    """A peer and the run that it wants to take part in."""

    identity: Path  # file of the peer's private key
    admission: Admission  # the run's name, and the rules for admission
    node: NodePlace = field(default_factory=NodePlace)  # the peer's addresses, and the peers that it knows
    replica: int | None = None  # the replica number; None: derived from the identity
    name: str = ""  # what people call the replica, at most `MAX_NAME` characters that print; "": its number
    swarm: str = ""  # the swarm that the peer was a member of before; "": none
    views: LastViews | None = None  # what the peer has been and promised in that swarm; None for a new process
    # how long the peer searches for the others; None: the rules' ``rendezvous_timeout_s``
    patience_s: float | None = None
    held_swarm: str = ""  # the swarm in which the peer reached the newest step it could resume from; "": unknown
    # how long a peer that finds no member waits for other searching peers before one of them founds a swarm
    join_window_s: float = 3.0
    status: PeerStatus = field(default_factory=PeerStatus)  # what the peer reports to observers
    closed: str = ""  # why no peer may join at first; "": all may


def same_port(listen: tuple[str, ...], listened: tuple[str, ...]) -> tuple[str, ...]:
    """Return where to listen so that others find this peer again: "any port" becomes the port that it had.

    >>> same_port(("/ip4/0.0.0.0/tcp/0",), ("/ip4/10.0.0.7/tcp/31330/p2p/Qm", "/ip4/127.0.0.1/tcp/31330/p2p/Qm"))
    ('/ip4/0.0.0.0/tcp/31330',)
    """
    own = [found[1] for each in listened if "/p2p-circuit" not in each and (found := re.search(r"/tcp/(\d+)", each))]
    return tuple(re.sub(r"/tcp/0\b", f"/tcp/{own[-1]}", each) for each in listen) if own else listen
