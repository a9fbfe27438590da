"""Connects a replica of this package to the others, over TCP or in a swarm."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.wan.plan import Job
from diloco import connect_tcp
from diloco.protocol import Rules
from diloco.transport import (
    Admission,
    Directory,
    NodePlace,
    PeerStreams,
    PeerTransport,
    SwarmPlace,
    Transport,
    connect,
    join,
)

PORT = 29400


class Connector:
    """Connects with the package's defaults except for the method's options.

    ``swarm``: over libp2p instead of TCP. ``not_compressed``: payloads are sent as the codec encoded them.
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
        streams = self._founder.connections.streams
        assert isinstance(streams, PeerStreams)
        return {"addresses": list(self._founder.connections.call(streams.node.addresses()))}

    def connect(self, known: Sequence[Mapping[str, Any]]) -> Transport:
        """Return a transport to all other replicas.

        Raises:
            TimeoutError: if not all of them join the swarm in time.
        """
        if not self._options.get("swarm"):
            return self._over_tcp()
        transport = self._founder
        if transport is None:
            connected = self._make_peer(known[0]["addresses"])
            transport = connected.transport
            if connected.joining:
                join(connected, self._job.timeout_s)
        until_s = time.monotonic() + self._job.timeout_s
        while len(transport.view.members) < self._job.num_replicas:
            if time.monotonic() > until_s:
                raise TimeoutError(f"The swarm has {len(transport.view.members)} members after the time allowed.")
            time.sleep(0.01)
        transport.tick()  # the rounds of the last view begin one step after the last join
        return transport

    def close(self) -> None:
        self._open.close()

    def _over_tcp(self) -> Transport:
        connecting = connect_tcp(
            replica=self._replica,
            num_replicas=self._job.num_replicas,
            rendezvous=f"{self._job.addresses[0]}:{PORT}",
            round_timeout_s=self._job.timeout_s,
            compress=not self._options.get("not_compressed"),
        )
        return self._open.enter_context(connecting)

    def _make_peer(self, known: Sequence[str]) -> Directory:
        """Return a peer that contacts ``known`` peers; without any, it founds the swarm."""
        address = self._job.addresses[self._replica]
        place = SwarmPlace(
            identity=Path(self._open.enter_context(TemporaryDirectory())) / "peer.key",
            admission=Admission("benchmark"),
            node=NodePlace(join=tuple(known), listen=(f"/ip4/{address}/tcp/0",), map_ports=False),
            replica=self._replica,
        )
        limit_s = self._job.timeout_s
        rules = Rules(round_timeout_s=limit_s, rendezvous_timeout_s=limit_s, continue_without_lost=True)
        connected = connect(place, rules)
        self._open.callback(connected.transport.close)
        return connected
