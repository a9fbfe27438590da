"""Makes the transport of a replica, over torch or in a swarm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.decentralised.peers import addresses_of, become_member, make_peer, wait_for_members
from benchmarks.decentralised.plan import Job as SwarmJob
from benchmarks.wan.counters import DEVICE
from benchmarks.wan.plan import Job
from diloco import Link as SenderLink
from diloco import connect_replica
from diloco.transport import Connected, PeerTransport, Transport

__all__ = ["Connector"]

PORT = 29400


class Connector:
    """Connects a replica to the others, with the package's defaults except for the method's options.

    ``swarm``: the hivemind transport instead of torch. ``streams``: the number of payload connections to each peer;
    absent or 0: the transport chooses. ``pace``: a sending rate as a share of the link's, for which the link must be
    known. ``no_pace``: no pacing; TCP decides. ``not_compressed``: payloads are sent as the codec encoded them.
    """

    def __init__(self, job: Job, replica: int) -> None:
        self._job = job
        self._replica = replica
        self._options = job.method.options
        self._open = ExitStack()
        self._founder: PeerTransport | None = None

    def prepare(self) -> dict[str, Any]:
        """Return what the others must know: the addresses of the swarm's founder."""
        if not self._options.get("swarm") or self._replica:
            return {}
        self._founder = self._make_peer([]).transport
        return {"addresses": addresses_of(self._founder)}

    def connect(self, known: Sequence[Mapping[str, Any]]) -> Transport:
        """Return a transport to all other replicas."""
        if not self._options.get("swarm"):
            return self._over_torch()
        peer = self._founder or become_member(self._make_peer(known[0]["addresses"]), self._job.timeout_s)
        wait_for_members(peer, self._job.num_replicas, self._job.timeout_s)
        peer.tick()  # the rounds of the last view begin one step after the last join
        return peer

    def close(self) -> None:
        self._open.close()

    def _over_torch(self) -> Transport:
        pace = self._options.get("pace")
        connecting = connect_replica(
            replica=self._replica,
            num_replicas=self._job.num_replicas,
            rendezvous=f"{self._job.addresses[0]}:{PORT}",
            interface=DEVICE,
            streams=self._options.get("streams", 0),
            round_timeout_s=self._job.timeout_s,
            pace=not self._options.get("no_pace"),
            compress=not self._options.get("not_compressed"),
            link=SenderLink(pace * self._job.rate_bits_per_s) if pace else None,
        )
        return self._open.enter_context(connecting)

    def _make_peer(self, known: Sequence[str]) -> Connected:
        folder = self._open.enter_context(TemporaryDirectory())
        job = SwarmJob(self._job.method, self._job.num_replicas, self._job.addresses, folder, self._job.timeout_s)
        connected = make_peer(job, self._replica, self._job.addresses[self._replica], known)
        self._open.callback(connected.transport.close)
        return connected
