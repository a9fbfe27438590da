"""Ranks connected by process groups of gloo, each with its own groups and threads, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from diloco.transport import ProcessGroupTransport, RollCall
from tests.transport.wires import at_once


class Groups:
    """Makes and closes the transports of ranks."""

    def __init__(self) -> None:
        self.transports: list[ProcessGroupTransport] = []
        self._store, self._made = dist.HashStore(), 0

    def meet(self, num_replicas: int, *, silence_s: float = 6.0) -> Sequence[ProcessGroupTransport]:
        """Return the transports of so many replicas of one rank."""
        self._made += 1
        store = dist.PrefixStore(str(self._made), self._store)
        ranks = range(num_replicas)

        def one(rank: int) -> ProcessGroupTransport:
            group = dist.ProcessGroup(store, rank, num_replicas)
            gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, num_replicas, timedelta(seconds=60))
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            roll = RollCall(dist.PrefixStore("roll", store), rank, num_replicas, silence_s=silence_s)
            return ProcessGroupTransport(group, group, ranks, roll, ranks)

        made = at_once([lambda rank=rank: one(rank) for rank in ranks])
        for each in made:
            if isinstance(each, Exception):
                raise each
        self.transports += made
        return made

    def close(self) -> None:
        at_once([transport.close for transport in self.transports])
