"""Rounds of one rank, driven event by event: which votes count, what it sends once a view ends, the remaining time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch

from diloco.algorithm import Contribution, Mean, RoundId, make_codec
from diloco.membership import NextView, Policy, View, Vote
from diloco.protocol import (
    Action,
    Begin,
    Commit,
    Computed,
    ConnectionMade,
    Enter,
    Event,
    ExchangeEnded,
    Header,
    Loss,
    Lost,
    Machine,
    Policies,
    Received,
    RoundState,
    RoundVote,
    Rules,
    SendMessage,
    SetTimer,
    StartExchange,
    Submitted,
    header_of,
    public_key,
)

VIEW, ROUND = View(3, (0, 1, 2)), RoundId(0, 4)
TIMEOUT_S = 10.0
CODEC = make_codec("float32")
A = TypeVar("A", bound=Action)


def contribution(replica: int = 0, round_id: RoundId = ROUND, digest: str = "d") -> Contribution:
    payload = CODEC.encode(torch.ones(2))
    return Contribution(
        round=round_id, replica=replica, codec=CODEC, numel=2, payload=payload, weight=1.0, digest=digest
    )


def signing_header(rank: int, round_id: RoundId = ROUND, digest: str = "d") -> Header:
    return replace(header_of(contribution(rank, round_id, digest)), key=public_key(bytes([rank] * 32)))


class Member:
    """Rank 0 of three replicas, in a view with the others; its actions are not carried out.

    Args:
        joins: whether the others were in an earlier view, in which they have trained.
    """

    def __init__(self, *, joins: bool = False) -> None:
        policies = Policies(Policy(), continue_without_lost=True, raise_on_loss=False, streams=1, connect_timeout_s=1.0)
        self.machine = Machine(Rules(0, 0, 1, None, TIMEOUT_S, 1 << 19, bytes(32)), policies)
        for rank in (1, 2):
            self.handle(ConnectionMade(rank, 10 + rank, f"host:{rank}"))
        self.handle(Begin(View(-1, (0,)) if joins else VIEW, member=not joins))
        if joins:
            following = NextView(VIEW, View(2, (1, 2)), from_step=5, commits={}, reason="", joined=(0,))
            self.handle(Enter(following, {1: 11, 2: 12}))

    def handle(self, event: Event, now_s: float = 0.0) -> list[Action]:
        return self.machine.handle(event, now_s)

    def submit(self, round_id: RoundId = ROUND, *, now_s: float = 0.0, sent_s: float = 0.0) -> list[Action]:
        given = contribution(0, round_id)
        return self.handle(Submitted(given, 5, sent_s), now_s)

    def header(self, rank: int, round_id: RoundId = ROUND, digest: str = "d", *, now_s: float = 0.0) -> list[Action]:
        return self.hear(rank, signing_header(rank, round_id, digest), now_s=now_s)

    def vote(self, rank: int, digest: str = "mean", reason: str = "") -> list[Action]:
        """Receive the vote of an honest rank whose mean has this digest."""
        state = RoundState(ROUND, headers={member: signing_header(member) for member in VIEW.members})
        sealed = "" if reason else state.sealed_digest(digest)
        return self.hear(rank, RoundVote(ROUND, Vote(not reason, sealed, reason)).signed(VIEW.id, bytes([rank] * 32)))

    def hear(self, rank: int, said: Header | RoundVote, *, now_s: float = 0.0) -> list[Action]:
        return self.handle(Received(rank, said.to_message(self.machine.views.view.id)), now_s)

    def compute(self) -> list[Action]:
        return self.handle(
            Computed(VIEW.id, ROUND, Mean(values=torch.ones(2), contributors=(0, 1, 2), weight=3.0), "mean")
        )


def of(kind: type[A], actions: list[Action]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def messages(kind: str, actions: list[Action]) -> dict[int, Any]:
    return {each.rank: each.message for each in of(SendMessage, actions) if each.message["kind"] == kind}


@pytest.fixture
def member() -> Member:
    """A member of a view in which all have contributed to the round."""
    member = Member()
    (start,) = of(StartExchange, member.submit())
    assert start.contribution.round == ROUND
    for rank in (1, 2):
        member.header(rank)
    return member


def test_a_round_is_committed_once_all_votes_are_there(member: Member) -> None:
    assert messages("vote", member.compute()).keys() == {1, 2}
    assert not of(Commit, member.vote(1))
    (commit,) = of(Commit, member.vote(2))
    assert (commit.average.round, commit.average.contributors) == (ROUND, (0, 1, 2))


def test_with_a_commit_goes_how_late_everybody_was() -> None:
    member = Member()
    member.header(2, now_s=1.0)
    member.submit(now_s=1.25, sent_s=1.25)
    member.header(1, now_s=4.0)
    member.compute()
    member.vote(1)
    (commit,) = of(Commit, member.vote(2))
    assert commit.average.late_s == (0.25, 3.0, 0.0)


def test_only_the_first_vote_of_a_rank_counts(member: Member) -> None:
    """Others may have committed the round by it."""
    member.vote(1)
    assert not member.vote(1, reason="it has changed its mind")
    member.compute()
    assert of(Commit, member.vote(2))


@pytest.mark.parametrize("failure", ["", "it was too large"])
def test_once_a_view_ends_nothing_is_voted_for_any_more(member: Member, failure: str) -> None:
    """The rank must keep to its report: the survivors may find the round void, so a lost rank must not commit it."""
    ends = messages("change", member.handle(Lost(2, Loss("silent", "nothing came"))))
    assert ends.keys() >= {1}
    late = member.handle(ExchangeEnded(VIEW.id, ROUND, failure)) if failure else member.compute()
    assert not messages("vote", late)
    member.vote(1)
    assert not of(Commit, member.vote(2))


def test_what_is_left_of_a_rounds_time_goes_along_into_the_next_view(member: Member) -> None:
    timers = of(SetTimer, member.submit(RoundId(1, 4), now_s=7.0, sent_s=3.0))
    assert [timer.delay_s for timer in timers if timer.timer.kind == "expire"] == [TIMEOUT_S - 4.0]


def test_a_contribution_that_comes_twice_is_refused_and_told_of(member: Member) -> None:
    member.header(1)
    member.compute()
    member.vote(1)
    (commit,) = of(Commit, member.vote(2))
    assert "a contribution of replica 1" in commit.average.note
    assert "it had contributed already" in commit.average.note


def test_averages_that_differ_end_the_view(member: Member) -> None:
    member.compute()
    member.vote(1)
    ended = member.vote(2, digest="another")
    assert not of(Commit, ended)
    (report,) = {each["why"] for each in messages("change", ended).values()}
    assert report == "fragment 0, outer step 4 is disputed: rank 2 holds a different average than rank 0"


@pytest.mark.parametrize("others", ["d", "another"])
def test_who_joins_has_a_say_about_a_fragment_once_its_state_is_the_others(others: str) -> None:
    member = Member(joins=True)
    assert messages("header", member.submit())[1]["taking_over"]
    for rank in (1, 2):
        member.header(rank, digest=others)
    again = messages("header", member.submit(RoundId(0, 5)))[1]
    assert again["taking_over"] == (others != "d")
    assert messages("header", member.submit(RoundId(1, 4)))[1]["taking_over"], "for each fragment separately"
