"""Faults to inject into the rounds of the in-process transport, given as data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from diloco.algorithm import Contribution, RoundId, Verdict, judge
from diloco.errors import RoundVoidError
from diloco.protocol import Average
from diloco.transport import InProcessTransport

FaultKind = Literal["drop", "truncate", "non-finite", "miss-commit"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of one replica in one round.

    ``drop``: its contribution never arrives; ``truncate``: its last byte is missing; ``non-finite``: its bytes decode
    to NaN or are not a valid payload; ``miss-commit``: it never receives the commit and continues without it.
    """

    kind: FaultKind
    replica: int
    round: RoundId


class FaultyTransport(InProcessTransport):
    """An in-process transport whose rounds have faults."""

    def __init__(self, num_replicas: int, *, faults: Sequence[Fault] = (), **more: Any) -> None:
        super().__init__(num_replicas, **more)
        self.faults = tuple(faults)

    def judge(self, contributions: Mapping[int, Contribution]) -> Verdict:
        arrived, absent = dict(contributions), dict[int, str]()
        for fault in self.faults:
            given = contributions[fault.replica]
            if given.round != fault.round:
                continue
            if fault.kind == "drop":
                absent[fault.replica] = "sent nothing"
            elif fault.kind == "truncate":
                arrived[fault.replica] = replace(given, payload=given.payload[:-1])
            elif fault.kind == "non-finite":
                arrived[fault.replica] = replace(given, payload=torch.full_like(given.payload, 0xFF))
        arrived = {replica: each.checked() for replica, each in arrived.items() if replica not in absent}
        return judge(arrived, members=self.view.members, min_contributors=self.min_contributors, absent=absent)

    def take(self, replica: int, round_id: RoundId) -> Average:
        average = super().take(replica, round_id)
        if any((fault.kind, fault.replica, fault.round) == ("miss-commit", replica, round_id) for fault in self.faults):
            raise RoundVoidError("no commit was received", round=str(round_id), replicas=[replica])
        return average
