"""The plan of a round follows from the uplinks in its headers, and is the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any

import torch

from diloco.algorithm import Contribution, Exchange, RoundId, Uplink, make_codec
from diloco.membership import View
from diloco.protocol import Machine, Submitted
from tests.protocol.simulated import rules_of

CODEC = make_codec("fp4")
VALUES = torch.ones(3 * 256)
RANKS = range(3)
SLOW, FAST = Uplink(10, full=True, window_s=1.0), Uplink(100, full=True, window_s=1.0)


class Ranks:
    """Three ranks whose messages arrive at once."""

    def __init__(self) -> None:
        self.machines = [Machine(replace(rules_of(), rank=rank)) for rank in RANKS]
        self.plans: list[Exchange | None] = []
        for rank, other in permutations(RANKS, 2):
            self.handle(rank, self.machines[rank].connect, other, 1, "simulated")
        for rank in RANKS:
            self.handle(rank, self.machines[rank].begin, View.of(3), member=True)

    def handle(self, rank: int, act: Callable[..., None], *arguments: Any, **more: Any) -> None:
        effects = self.machines[rank].handle(0.0, act, *arguments, **more)
        self.plans += [given.plan for given in effects.verdicts]
        for receiver, message in effects.messages:
            self.handle(receiver, self.machines[receiver].receive, rank, message)

    def contribute(self, rank: int, uplink: Uplink) -> None:
        given = Contribution(
            round=RoundId(0, 0),
            replica=rank,
            codec=CODEC,
            numel=len(VALUES),
            payload=CODEC.encode(VALUES),
            mean="auto",
        )
        self.handle(rank, self.machines[rank].rounds.submit, Submitted(given, 1, 0.0, uplink=uplink))


def plan_of(*uplinks: Uplink) -> Exchange:
    ranks = Ranks()
    for rank, uplink in enumerate(uplinks):
        assert not ranks.plans, "a rank plans before it has all headers"
        ranks.contribute(rank, uplink)
    one, *others = ranks.plans
    assert one is not None
    assert others == [one, one]
    return one


def test_all_ranks_plan_a_round_by_the_uplinks_in_its_own_headers() -> None:
    usual, one_slow = plan_of(Uplink(), Uplink(), Uplink()), plan_of(SLOW, FAST, FAST)
    assert one_slow.mean != usual.mean
    assert one_slow.shards != usual.shards
