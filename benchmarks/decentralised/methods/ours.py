"""Rounds of this package over libp2p."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from benchmarks.decentralised.methods import base
from benchmarks.decentralised.peers import addresses_of, become_member, make_peer, wait_for_members
from benchmarks.decentralised.plan import Job
from diloco.algorithm import Contribution, MeanEncoding, RoundId, make_codec

__all__ = ["Program"]


class Program(base.Rounds):
    """The options ``codec`` and ``mean_codec`` name codecs of this package."""

    def __init__(self, job: Job, replica: int) -> None:
        super().__init__(job, replica)
        self.codec = make_codec(self.options["codec"])
        self.mean = MeanEncoding.of(self.options.get("mean_codec", "float32"))

    def prepare(self) -> Mapping[str, Any]:
        if self.replica:
            return {}
        self.transport = make_peer(self.job, 0, self.address, []).transport
        return {"addresses": addresses_of(self.transport)}

    def connect(self, known: Sequence[Mapping[str, Any]]) -> None:
        if self.replica:
            connected = make_peer(self.job, self.replica, self.address, known[0]["addresses"])
            self.transport = become_member(connected, self.job.timeout_s)
        wait_for_members(self.transport, self.job.num_replicas, self.job.timeout_s)
        self.transport.tick()  # the rounds of the last view begin one step after the last join

    def average(self, number: int, begin: base.Begin) -> tuple[dict[str, Any], Tensor]:
        began_s = begin()
        base.sleep_until(began_s)
        started_s = time.monotonic()
        payload = self.codec.encode(self.values)
        submitted_s = time.monotonic()
        pending = self.transport.average(
            Contribution(
                round=RoundId(0, number),
                replica=self.replica,
                codec=self.codec,
                numel=self.values.numel(),
                payload=payload,
                mean=self.mean,
            )
        )
        average = pending.wait()
        had_s = time.monotonic()
        record = {
            "began_s": began_s,
            "had_s": had_s,
            "encode_s": submitted_s - started_s,
            "handed_in_s": submitted_s,
            "sent_bytes": average.sent_bytes,
            "received_bytes": average.received_bytes,
        }
        self.transport.tick()
        return record, average.values

    def close(self) -> None:
        self.transport.close()
