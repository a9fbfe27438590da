"""What a machine makes of messages: what waits for views, who has a say, and in whose name somebody may speak."""

from __future__ import annotations

from typing import Any

import pytest

from diloco.membership.quorum import Policy
from diloco.membership.view import View
from diloco.protocol.actions import Action, HangUp, Introduce, OpenLinks, Register, SendMessage
from diloco.protocol.events import Begin, ConnectionEnded, ConnectionMade, Lost, Received, Say
from diloco.protocol.failure_detector import Loss
from diloco.protocol.machine import Machine
from diloco.protocol.messages import facts_message, speed_message
from diloco.protocol.registry import Entry
from diloco.protocol.rules import Policies, Rules

VIEW = View(3, (0, 1))
ENTRY = Entry(5, "host:5")
MEET = {"kind": "meet", "name": "end", "value": 7}


class Rank:
    """Rank 0 of replicas of two ranks each, connected to ranks 1 to 5; it does nothing of what it wants to do."""

    def __init__(self) -> None:
        policies = Policies(Policy(), go_on=True, raise_on_loss=False, streams=1, connect_timeout_s=1.0)
        self.machine = Machine(Rules(0, 0, 2, None, 10.0, 1 << 19), policies)
        for rank in range(1, 6):
            self.handle(ConnectionMade(rank, 10 + rank, f"host:{rank}"))

    def handle(self, event: Any) -> list[Action]:
        return self.machine.handle(event, 0.0)

    def hear(self, sender: int, message: dict[str, Any]) -> list[Action]:
        return self.handle(Received(sender, message))


@pytest.fixture
def rank() -> Rank:
    return Rank()


@pytest.fixture
def member(rank: Rank) -> Rank:
    """Of a view of replicas 0 and 1."""
    assert rank.handle(Begin(VIEW, member=True)) == [OpenLinks(VIEW)]
    return rank


def test_before_there_are_views_what_is_about_them_waits_and_nothing_else_does(rank: Rank) -> None:
    excluded = {"kind": "excluded", "view": 3, "reason": "late"}
    assert not rank.hear(2, excluded)
    assert rank.machine.views.failure is None
    rank.hear(2, MEET)
    assert rank.machine.barriers.said("end") == {2: 7}
    rank.handle(Begin(VIEW, member=True))
    assert "the others went on without replica 0: late" in str(rank.machine.views.failure)


def test_what_waited_is_about_the_first_view_or_costs_its_sender_that_view(rank: Rank) -> None:
    rank.hear(2, {"kind": "join", "rank": "?"})
    sent = [each.message for each in rank.handle(Begin(VIEW, member=True)) if isinstance(each, SendMessage)]
    assert "replica 1 sent what is no message" in sent[0]["why"]


def test_nobody_can_fill_the_memory_before_there_are_views(rank: Rank) -> None:
    for _ in range(1000):
        assert not rank.hear(2, {"kind": "vote"})
    with pytest.raises(ValueError, match="too much to somebody who is not ready"):
        rank.hear(2, {"kind": "vote"})
    assert not rank.hear(3, {"kind": "vote"}), "that is another one's doing"


@pytest.mark.parametrize("sender", [2, 3, 4, 5])
def test_only_members_have_a_say(member: Rank, sender: int) -> None:
    """Ranks 2 and 3 are replica 1's; 4 and 5 are of nobody who is a member."""
    has_a_say = sender < 4
    member.hear(sender, MEET)
    assert member.machine.barriers.said("end") == ({sender: 7} if has_a_say else {})
    introduced = member.hear(sender, {"kind": "introduce", "entry": ENTRY.to_message()})
    assert introduced == ([Introduce(ENTRY)] if has_a_say else [])
    member.hear(sender, speed_message(2.0))
    assert member.machine.speeds == ({1: 2.0} if has_a_say else {})
    assert bool(member.hear(sender, {"kind": "replaced"})) == has_a_say
    assert (member.machine.views.failure is not None) == has_a_say


def test_what_others_did_in_a_view_that_is_over_excludes_nobody(member: Rank) -> None:
    assert not member.hear(2, {"kind": "excluded", "view": 2, "reason": "late"})
    assert member.machine.views.failure is None
    parted = member.hear(2, {"kind": "excluded", "view": 4, "reason": "late"})
    assert [action for action in parted if isinstance(action, HangUp)] == [HangUp(1), HangUp(2), HangUp(3)]
    assert "late" in str(member.machine.views.failure)


def test_who_is_no_member_may_ask_to_be_one_in_its_own_name(member: Rank) -> None:
    for rank in (4, 5):
        entry = Entry(rank, f"host:{rank}")
        wanted = member.hear(rank, {"kind": "join", **entry.to_message(), "connected": [0, 1, 2, 3]})
        assert wanted[0] == Register(entry)
        assert bool(wanted[1:]) == (rank == 5), "all its ranks have to ask"
    assert {action.message["kind"] for action in wanted[1:] if isinstance(action, SendMessage)} == {"change"}


def test_who_does_not_know_all_members_is_to_look_again(member: Rank) -> None:
    _, answer = member.hear(5, {"kind": "join", **ENTRY.to_message(), "connected": [0, 1, 2]})
    assert isinstance(answer, SendMessage)
    assert (answer.rank, answer.message["kind"], answer.message["for_good"]) == (5, "refused", False)


@pytest.mark.parametrize("entry", [Entry(4, "host:5"), Entry(5, "elsewhere:5")])
def test_nobody_joins_in_the_name_of_another_one(member: Rank, entry: Entry) -> None:
    with pytest.raises(ValueError, match="in the name of another one"):
        member.hear(5, {"kind": "join", **entry.to_message(), "connected": []})
    assert not member.hear(5, {"kind": "beat"}), "nothing is left to be done"


def test_an_answer_says_who_was_connected_when_it_came(rank: Rank) -> None:
    rank.handle(ConnectionEnded(3))
    asked = rank.handle(Say({"kind": "join", **ENTRY.to_message()}))
    assert [action.rank for action in asked if isinstance(action, SendMessage)] == [1, 2, 4, 5]
    welcome = {"kind": "welcome", "view": 4}
    assert not rank.hear(2, welcome)
    for reason in ("late", "later"):
        rank.hear(1, {"kind": "refused", "reason": reason})
    assert rank.machine.take_answer() == (welcome, {1: 11, 2: 12, 4: 14, 5: 15}), "which counts more than a refusal"
    assert rank.machine.take_answer() is None, "an answer is taken once"
    for reason in ("late", "later"):
        rank.hear(1, {"kind": "refused", "reason": reason})
    assert rank.machine.take_answer() == ({"kind": "refused", "reason": "later"}, {1: 11, 2: 12, 4: 14, 5: 15})


def test_facts_are_told_to_all_and_answered_once(rank: Rank) -> None:
    mine, theirs = Entry(0, "host:0", {"codec": "fp4"}), Entry(2, "host:2", {"codec": "int8"})
    told = facts_message(theirs)
    assert not rank.hear(2, told), "it has nothing to say yet"
    assert len(rank.handle(Say(facts_message(mine)))) == 5
    (answer,) = rank.hear(2, told)
    assert answer == SendMessage(2, facts_message(mine, answer=True))
    assert not rank.hear(2, {**told, "answer": True})
    assert rank.machine.agreement.awaited({0, 1, 2}) == {1}
    words = "replica 0 (host:0) has codec = fp4 and replica 1 (host:2) has codec = int8"
    assert rank.machine.agreement.refusal({0, 1, 2}) == words
    with pytest.raises(ValueError, match="the facts of another one"):
        rank.hear(3, told)


def test_all_are_told_of_a_stop_and_of_a_barrier_once_there_is_a_view(member: Rank) -> None:
    member.machine.views.contributions.step = 6
    to_all = [1, 2, 3]
    stop = {"kind": "meet", "name": "stop"}
    for message in ({"kind": "meet", "name": "end", "value": 3}, speed_message(2.0), stop):
        told = member.handle(Say(message))
        assert [action.rank for action in told if isinstance(action, SendMessage)] == to_all
    assert member.machine.barriers.said("stop") == {0: 6}
    assert not member.handle(Say(stop)), "once"
    member.hear(2, {"kind": "meet", "name": "stop", "value": 7})
    assert member.machine.barriers.awaited("stop", member.machine.present()) == {1, 3}


@pytest.mark.parametrize("second", ["gone", "cut"])
def test_nobody_stops_before_it_is_known_what_has_become_of_all_whose_connections_ended(second: str) -> None:
    """Two of three end in one moment: the third is no smaller side of them, unless one may be going on."""
    policies = Policies(Policy(), go_on=True, raise_on_loss=False, streams=1, connect_timeout_s=1.0)
    machine = Machine(Rules(0, 0, 1, None, 10.0, 1 << 19), policies)
    for rank in (1, 2):
        machine.handle(ConnectionMade(rank, 10 + rank, f"host:{rank}"), 0.0)
    machine.handle(Begin(View.of(3), member=True), 0.0)
    machine.handle(ConnectionEnded(1), 1.0)
    machine.handle(ConnectionEnded(2), 1.0)
    machine.handle(Lost(1, Loss("gone", "it ended")), 1.1)
    assert machine.views.failure is None
    assert machine.views.view == View.of(3)
    machine.handle(Lost(2, Loss(second, "it ended, or not")), 1.2)  # type: ignore[arg-type]  # one of the kinds
    if second == "gone":
        assert machine.views.failure is None
        assert machine.views.view.members == (0,)
    else:
        assert "smaller side" in str(machine.views.failure)
