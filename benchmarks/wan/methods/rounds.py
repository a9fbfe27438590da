"""Rounds of this package and nothing else, of several sizes in turn, each after a pause: how long one takes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.decentralised.peers import addresses_of, become_member, make_peer, wait_for_members
from benchmarks.decentralised.plan import Job as SwarmJob
from benchmarks.wan.methods import base
from benchmarks.wan.methods.make_transport import make_transport
from benchmarks.wan.plan import Job
from diloco.algorithm.averaging import Contribution, RoundId
from diloco.algorithm.codec import make_codec
from diloco.transport.base import Transport
from diloco.transport.peers.connected import Connected
from diloco.transport.peers.transport import PeerTransport

__all__ = ["Program"]


class Program(base.Program):
    """``codec``; ``values`` of each size; ``repeats`` of all; ``pause_s`` before each; ``swarm``: over libp2p."""

    def __init__(self, job: Job, replica: int) -> None:
        super().__init__(job, replica)
        self.codec = make_codec(self.options["codec"])
        self.sizes: list[int] = self.options["values"]
        values = 1e-3 * torch.randn(max(self.sizes), generator=torch.Generator().manual_seed(1 + replica))
        self.payloads: list[Tensor] = [self.codec.encode(values[:size]) for size in self.sizes]
        self.warmup_steps = len(self.sizes)
        self.measured_steps = self.options["repeats"] * len(self.sizes)
        self._open = ExitStack()
        self._transport: Transport | None = None

    def prepare(self) -> Mapping[str, Any]:
        if not self.options.get("swarm"):
            return {}
        if self.replica:
            return {}
        self._transport = founder = self._make_peer([]).transport
        return {"addresses": addresses_of(founder)}

    def connect(self, known: Sequence[Mapping[str, Any]]) -> None:
        if not self.options.get("swarm"):
            self._transport = self._open.enter_context(make_transport(self.job, self.replica))
            return
        if self.replica:
            self._transport = become_member(self._make_peer(known[0]["addresses"]), self.job.timeout_s)
        assert isinstance(self._transport, PeerTransport)
        wait_for_members(self._transport, self.job.num_replicas, self.job.timeout_s)
        self._transport.tick()  # rounds of the last view begin one step after those who joined have come

    def step(self, step: int) -> None:
        assert self._transport is not None
        time.sleep(self.options["pause_s"])
        index = (step - 1) % len(self.sizes)
        started_s = time.perf_counter()
        pending = self._transport.average(
            Contribution(
                round=RoundId(index, (step - 1) // len(self.sizes) + 1),
                replica=self.replica,
                codec=self.codec,
                numel=self.sizes[index],
                payload=self.payloads[index],
            )
        )
        average = pending.wait()
        self.transfers_s.append(time.perf_counter() - started_s)
        self.waits_s.append(self.transfers_s[-1])
        self.payload_bytes += average.sent_bytes

    def digest(self) -> str:
        return ""

    def close(self) -> None:
        self._open.close()

    def _make_peer(self, known: Sequence[str]) -> Connected:
        folder = self._open.enter_context(TemporaryDirectory())
        job = SwarmJob(self.job.method, self.job.num_replicas, self.job.addresses, folder, self.job.timeout_s)
        connected = make_peer(job, self.replica, self.address, known)
        self._open.callback(connected.transport.close)
        return connected
