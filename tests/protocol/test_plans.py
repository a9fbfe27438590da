"""The plan of a round follows from the uplinks in the headers of an earlier one, and is the same on all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import permutations
from typing import Any

import torch

from diloco.algorithm import Contribution, Exchange, Mean, MeanEncoding, RoundId, Uplink, make_codec
from diloco.membership import View
from diloco.protocol import Machine, Submitted
from tests.protocol.simulated import rules_of

CODEC = make_codec("fp4")
VALUES = torch.ones(3 * 256)
RANKS = range(3)
UPLINKS = [Uplink(rate, full=True, window_s=1.0) for rate in (10, 100, 100)]


class Ranks:
    """Three ranks whose messages arrive at once."""

    def __init__(self) -> None:
        self.machines = [Machine(replace(rules_of(), rank=rank)) for rank in RANKS]
        self.plans: dict[RoundId, list[Exchange]] = defaultdict(list)
        for rank, other in permutations(RANKS, 2):
            self.handle(rank, self.machines[rank].connect, other, 1, "simulated")
        for rank in RANKS:
            self.handle(rank, self.machines[rank].begin, View.of(3), member=True)

    def handle(self, rank: int, act: Callable[..., None], *arguments: Any, **more: Any) -> None:
        effects = self.machines[rank].handle(0.0, act, *arguments, **more)
        for started in effects.exchanges:
            self.plans[started.contribution.round].append(started.plan)
        for receiver, message in effects.messages:
            self.handle(receiver, self.machines[receiver].receive, rank, message)

    def contribute(
        self, round_id: RoundId, after: RoundId | None, *, withdrawn: str = "", ranks: Iterable[int] = RANKS
    ) -> None:
        for rank in ranks:
            given = Contribution(
                round=round_id,
                replica=rank,
                codec=CODEC,
                numel=len(VALUES),
                payload=CODEC.encode(VALUES),
                withdrawn=withdrawn,
                mean=MeanEncoding.of("auto"),
            )
            submitted = Submitted(given, 1, 0.0, uplink=UPLINKS[rank], after=after)
            self.handle(rank, self.machines[rank].rounds.submit, submitted)

    def commit(self, round_id: RoundId, *, still_sending: Iterable[int] = ()) -> None:
        mean = Mean(values=VALUES, contributors=(0, 1, 2), weight=3.0)
        for rank in RANKS:
            self.handle(rank, self.machines[rank].rounds.compute, 0, round_id, mean, "mean")
        for rank in {*RANKS}.difference(still_sending):
            self.handle(rank, self.machines[rank].rounds.end_exchange, 0, round_id)


def test_ranks_plan_alike_though_one_still_sends_what_others_have() -> None:
    """A void round in between does not change that, nor the uplinks by which the next one is planned."""
    ranks, first = Ranks(), RoundId(0, 0)
    ranks.contribute(first, None)
    ranks.commit(first, still_sending=[0])
    ranks.contribute(RoundId(0, 1), first, withdrawn="it is not finite")
    ranks.contribute(RoundId(0, 2), first)
    one, *others = ranks.plans[RoundId(0, 2)]
    assert others == [one, one]
    assert one == ranks.plans[RoundId(0, 1)][0]
    before = ranks.plans[first][0]
    assert one.shards != before.shards
    assert one.mean != before.mean


def test_ranks_plan_alike_though_one_has_already_committed_the_round_after() -> None:
    """Fragment 1 is planned by the last average taken, that of fragment 0, whose next round is in flight."""
    ranks, first, second = Ranks(), RoundId(0, 0), RoundId(0, 1)
    ranks.contribute(first, None)
    ranks.commit(first)
    ranks.contribute(second, first)
    ranks.contribute(RoundId(1, 0), first, ranks=[0])
    ranks.commit(second)
    ranks.contribute(RoundId(1, 0), first, ranks=[1, 2])
    one, *others = ranks.plans[RoundId(1, 0)]
    assert others == [one, one]
