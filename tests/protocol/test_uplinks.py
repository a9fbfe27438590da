"""How the plan of a fragment's next round follows from the uplinks in the headers of its last one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from diloco.algorithm import UNKNOWN_UPLINK, Contribution, Exchange, Mean, RoundId, Uplink, make_codec
from diloco.membership import Policy, View, Vote
from diloco.protocol import (
    Action,
    Begin,
    Commit,
    Computed,
    ConnectionMade,
    Event,
    ExchangeEnded,
    Header,
    Machine,
    Policies,
    Received,
    RoundState,
    RoundVote,
    Rules,
    SendMessage,
    StartExchange,
    Submitted,
    header_of,
    public_key,
)

VIEW, NUMEL = View(3, (0, 1, 2)), 12
CODEC = make_codec("float32")
SLOW, FAST = Uplink(20_000_000, full=True), Uplink(100_000_000, full=True)
EQUAL, WITHOUT_1 = ((0, 4), (4, 8), (8, 12)), ((0, 6), (6, 6), (6, 12))


def contribution(replica: int, round_id: RoundId) -> Contribution:
    payload = CODEC.encode(torch.ones(NUMEL))
    return Contribution(round=round_id, replica=replica, codec=CODEC, numel=NUMEL, payload=payload, digest="d")


def header(rank: int, round_id: RoundId, uplink: Uplink) -> Header:
    bare = header_of(contribution(rank, round_id))
    return replace(bare, key=public_key(bytes([rank] * 32)), uplink=uplink)


class Member:
    """Rank 0 of three replicas. ``uplinks`` are those that the headers of the three name."""

    def __init__(self, *uplinks: Uplink) -> None:
        policies = Policies(Policy(), continue_without_lost=True, raise_on_loss=False, streams=1, connect_timeout_s=1.0)
        self.machine = Machine(Rules(0, 0, 1, None, 10.0, 1 << 19, bytes(32)), policies)
        self.uplinks = uplinks
        for rank in (1, 2):
            self.handle(ConnectionMade(rank, 10 + rank, f"host:{rank}"))
        self.handle(Begin(VIEW, member=True))

    def handle(self, event: Event) -> list[Action]:
        return self.machine.handle(event, 0.0)

    def begin(self, round_id: RoundId) -> tuple[Exchange, dict[str, Any]]:
        """Contribute to a round, to which the others do, too. Return its plan and this rank's header."""
        actions = self.handle(Submitted(contribution(0, round_id), 5, 0.0, uplink=self.uplinks[0]))
        (plan,) = [each.plan for each in actions if isinstance(each, StartExchange)]
        sent = [each.message for each in actions if isinstance(each, SendMessage) and each.message["kind"] == "header"]
        for rank in (1, 2):
            self.handle(Received(rank, header(rank, round_id, self.uplinks[rank]).to_message(VIEW.id)))
        return plan, sent[0]

    def end(self, round_id: RoundId, *, uplinks_of_2: tuple[Uplink, ...] = ()) -> list[Action]:
        """Let all vote for a round. Rank 2 votes for headers with other uplinks if these are given."""
        mean = Mean(values=torch.ones(NUMEL), contributors=(0, 1, 2), weight=3.0)
        actions = self.handle(Computed(VIEW.id, round_id, mean, "mean")) + self.handle(ExchangeEnded(VIEW.id, round_id))
        for rank, uplinks in ((1, self.uplinks), (2, uplinks_of_2 or self.uplinks)):
            state = RoundState(round_id, headers={each: header(each, round_id, uplinks[each]) for each in VIEW.members})
            vote = RoundVote(round_id, Vote(True, state.sealed_digest("mean"))).signed(VIEW.id, bytes([rank] * 32))
            actions += self.handle(Received(rank, vote.to_message(VIEW.id)))
        return actions


def test_a_slow_uplink_owns_nothing_from_the_fragments_second_round_on() -> None:
    member = Member(FAST, SLOW, FAST)
    plan, sent = member.begin(RoundId(0, 4))
    assert plan.shards == EQUAL
    assert (sent["uplink_bits_per_s"], sent["uplink_full"]) == (FAST.bits_per_s, True)
    assert any(isinstance(each, Commit) for each in member.end(RoundId(0, 4)))
    assert member.begin(RoundId(0, 5))[0].shards == WITHOUT_1
    assert member.begin(RoundId(1, 5))[0].shards == EQUAL, "another fragment has had no round"


def test_a_round_that_was_not_committed_in_this_view_says_nothing() -> None:
    member = Member(FAST, SLOW, FAST)
    member.begin(RoundId(0, 4))
    void = RoundVote(RoundId(0, 4), Vote(False, reason="no")).signed(VIEW.id, bytes([1] * 32))
    member.handle(Received(1, void.to_message(VIEW.id)))
    assert member.begin(RoundId(0, 5))[0].shards == EQUAL
    member.end(RoundId(0, 5))
    assert member.begin(RoundId(0, 6))[0].shards == WITHOUT_1
    member.end(RoundId(0, 6))
    assert member.begin(RoundId(0, 8))[0].shards == EQUAL, "the one before was not in this view"


def test_a_rank_that_names_two_uplinks_can_not_make_plans_differ() -> None:
    """Votes cover the uplinks, so the round in which they differ is not committed."""
    member = Member(FAST, SLOW, FAST)
    member.begin(RoundId(0, 4))
    ended = member.end(RoundId(0, 4), uplinks_of_2=(FAST, UNKNOWN_UPLINK, FAST))
    assert not any(isinstance(each, Commit) for each in ended)
    assert any(isinstance(each, SendMessage) and each.message["kind"] == "change" for each in ended)


@pytest.mark.parametrize("wrong", [{"uplink_bits_per_s": -1}, {"uplink_bits_per_s": 1.5}, {"uplink_full": 1}])
def test_an_uplink_is_a_rate_and_a_flag(wrong: dict[str, Any]) -> None:
    message = header(1, RoundId(0, 4), SLOW).to_message(VIEW.id)
    assert Header.from_message(message).uplink == SLOW
    with pytest.raises(ValueError, match=f"field '{next(iter(wrong))}' must be"):
        Header.from_message(message | wrong)
