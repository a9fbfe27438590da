"""How a machine treats messages: which ones wait for a view, and on whose behalf a sender may act."""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.algorithm import RoundId
from diloco.errors import TransportError
from diloco.membership import NextView, Policy, Report, View, Vote
from diloco.protocol import (
    Entry,
    Header,
    Loss,
    Machine,
    MessageError,
    Policies,
    RoundVote,
    Rules,
    actions,
    adopted_message,
    change_message,
    events,
    facts_message,
    json_object,
    room_bytes,
    speed_message,
)

VIEW = View(3, (0, 1))
ENTRY = Entry(5, "host:5")
WELCOME = adopted_message(NextView(View(5, (0, 1, 2)), View(4, (1, 2)), 7, {}, "because", (0,))) | {
    "kind": "welcome",
    "note": {},
}
REFUSED = {"kind": "refused", "reason": "late", "for_good": False}
HEADER = Header(
    RoundId(0, 0), 2, 1.0, base_weight=1.0, digest="d", buffers=None, integers=None, withdrawn="", taking_over=False
).to_message(3)
MEET = {"kind": "meet", "name": "end", "value": 7}


class Rank:
    """Rank 0 of replicas of two ranks each, connected to ranks 1 to 5; its actions are not carried out."""

    def __init__(self) -> None:
        policies = Policies(Policy(), continue_without_lost=True, raise_on_loss=False, streams=1, connect_timeout_s=1.0)
        self.machine = Machine(Rules(0, 0, 2, None, 10.0, 1 << 19), policies)
        for rank in range(1, 6):
            self.handle(events.ConnectionMade(rank, 10 + rank, f"host:{rank}"))

    def handle(self, event: Any) -> list[actions.Action]:
        return self.machine.handle(event, 0.0)

    def hear(self, sender: int, message: dict[str, Any]) -> list[actions.Action]:
        return self.handle(events.Received(sender, message))


@pytest.fixture
def rank() -> Rank:
    return Rank()


@pytest.fixture
def member(rank: Rank) -> Rank:
    """A member of a view of replicas 0 and 1."""
    assert rank.handle(events.Begin(VIEW, member=True)) == [actions.OpenLinks(VIEW)]
    return rank


def test_before_there_are_views_what_is_about_them_waits_and_nothing_else_does(rank: Rank) -> None:
    excluded = {"kind": "excluded", "view": 3, "reason": "late"}
    assert not rank.hear(2, excluded)
    assert rank.machine.views.failure is None
    rank.hear(2, MEET)
    assert rank.machine.barriers.values("end") == {2: 7}
    rank.handle(events.Begin(VIEW, member=True))
    assert "the others continued without replica 0: late" in str(rank.machine.views.failure)


def test_nobody_can_fill_the_memory_before_there_are_views(rank: Rank) -> None:
    for _ in range(1000):
        assert not rank.hear(2, {"kind": "vote"})
    with pytest.raises(ValueError, match="exceeded the hold-back limit"):
        rank.hear(2, {"kind": "vote"})
    assert not rank.hear(3, {"kind": "vote"}), "the limit is per sender"


@pytest.mark.parametrize("sender", [2, 3, 4, 5])
def test_only_members_have_a_say(member: Rank, sender: int) -> None:
    """Ranks 2 and 3 belong to replica 1; 4 and 5 to a replica that is no member."""
    has_a_say = sender < 4
    member.hear(sender, MEET)
    assert member.machine.barriers.values("end") == ({sender: 7} if has_a_say else {})
    introduced = member.hear(sender, {"kind": "introduce", "entry": ENTRY.to_message()})
    assert introduced == ([actions.Introduce(ENTRY)] if has_a_say else [])
    member.hear(sender, speed_message(2.0))
    assert member.machine.speeds == ({1: 2.0} if has_a_say else {})
    assert bool(member.hear(sender, {"kind": "replaced"})) == has_a_say
    assert (member.machine.views.failure is not None) == has_a_say


def test_what_others_did_in_a_view_that_is_over_excludes_nobody(member: Rank) -> None:
    assert not member.hear(2, {"kind": "excluded", "view": 2, "reason": "late"})
    assert member.machine.views.failure is None
    parted = member.hear(2, {"kind": "excluded", "view": 4, "reason": "late"})
    assert [action.rank for action in parted if isinstance(action, actions.HangUp)] == [1, 2, 3]
    assert "late" in str(member.machine.views.failure)


def test_who_was_lost_while_all_began_is_told_so_when_it_begins_after_all(member: Rank) -> None:
    """It was suspended then, say, and had no connection whose end it could notice."""
    told = {"kind": "excluded", "view": 3, "reason": ""}
    assert member.hear(4, HEADER | {"view": 2}) == [actions.SendMessage(4, told)]


def test_who_is_no_member_may_ask_to_be_one_in_its_own_name(member: Rank) -> None:
    for rank in (4, 5):
        entry = Entry(rank, f"host:{rank}")
        wanted = member.hear(rank, {"kind": "join", **entry.to_message(), "connected": [0, 1, 2, 3]})
        assert wanted[0] == actions.Register(entry)
        assert bool(wanted[1:]) == (rank == 5), "all its ranks have to ask"
    assert {action.message["kind"] for action in wanted[1:] if isinstance(action, actions.SendMessage)} == {"change"}


@pytest.mark.parametrize("entry", [Entry(4, "host:5"), Entry(5, "elsewhere:5")])
def test_nobody_joins_in_the_name_of_another_one(member: Rank, entry: Entry) -> None:
    with pytest.raises(ValueError, match="names another rank or address"):
        member.hear(5, {"kind": "join", **entry.to_message(), "connected": []})
    assert not member.hear(5, {"kind": "beat"}), "nothing is left to do"


@pytest.mark.parametrize(
    "answer",
    [
        {"kind": "welcome"},
        WELCOME | {"members": None},
        WELCOME | {"members": []},
        WELCOME | {"members": [3, 1 << 31]},
        WELCOME | {"note": [[]] * 100},
        {"kind": "refused"},
        REFUSED | {"for_good": "yes"},
        REFUSED | {"reason": 7},
    ],
    ids=str,
)
def test_what_is_no_answer_is_refused(rank: Rank, answer: dict[str, Any]) -> None:
    rank.handle(events.Announce({"kind": "join", **ENTRY.to_message()}))
    with pytest.raises(ValueError, match=r"^field '|^a view needs|without members"):
        rank.hear(2, answer)
    assert not rank.machine.answers


# Bounds on what is kept of others' messages.


def heaviest(kept: object) -> int:
    """Return the bytes of memory held by an object and everything that it refers to."""
    seen: set[int] = set()
    todo, num_bytes = [kept], 0
    while todo:
        each = todo.pop()
        if id(each) not in seen and not isinstance(each, type):
            seen.add(id(each))
            num_bytes += sys.getsizeof(each)
            todo += gc.get_referents(each) if not hasattr(each, "__globals__") else []
    return num_bytes


FAR = {"kind": "change", "view": 99, "why": "x" * 60_000, "gone": [[]] * 100}
FLOODS: dict[str, Callable[[int], dict[str, Any]]] = {
    "welcomes": lambda n: WELCOME | {"note": {"x": [[]] * 100}},
    "meetings": lambda n: {"kind": "meet", "name": f"{n}".rjust(64), "value": n},
    "meetings with long names": lambda n: {"kind": "meet", "name": f"{n}" * 1000, "value": n},
    "changes of a view far away": lambda n: FAR,
    "votes on rounds that no rank begins": lambda n: RoundVote(RoundId(0, n), Vote(False)).to_message(3),
    "votes on fragments that do not exist": lambda n: RoundVote(RoundId(n, 0), Vote(False)).to_message(3),
    "headers of rounds that no rank begins": lambda n: HEADER | {"round": [0, n]},
    "facts": lambda n: facts_message(Entry(n, "host:2", {"x": "x" * 4000})),
    "speeds": lambda n: speed_message(1.0 + n),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
@pytest.mark.parametrize("sender", [2, 5], ids=["a member", "a stranger"])
def test_nobody_can_fill_the_memory(member: Rank, flood: Callable[[int], dict[str, Any]], sender: int) -> None:
    before_bytes = heaviest(member.machine)
    began_s = time.process_time()
    with contextlib.suppress(ValueError):  # which ends the connection
        for n in range(1500):  # 90 MB of the longest message
            text = json.dumps(flood(n)).encode()
            member.handle(events.Received(sender, json_object(text), num_bytes=room_bytes(text)))
            if sender not in member.machine.roster.connections:
                break  # it was dropped
    assert heaviest(member.machine) - before_bytes < 64 << 20
    assert time.process_time() - began_s < 10.0


def test_strangers_together_can_not_fill_the_memory_either(member: Rank) -> None:
    before_bytes = heaviest(member.machine)
    for stranger in range(100, 300):
        member.handle(events.ConnectionMade(stranger, 1000 + stranger, f"host:{stranger}"))
        member.hear(stranger, facts_message(Entry(stranger, f"host:{stranger}", {"x": "y" * 4000})))
        with contextlib.suppress(ValueError):
            for _ in range(20):
                message = {"kind": "change", "view": 99, "why": "x" * 10_000}
                member.handle(events.Received(stranger, message, num_bytes=10_000))
        member.handle(events.ConnectionEnded(stranger))
        member.handle(events.Lost(stranger, Loss("gone", "it ended")))
    assert heaviest(member.machine) - before_bytes < 4 << 20


def test_a_rank_that_fails_stops_its_own_replica_and_no_other(member: Rank) -> None:
    """Its process ends after an error in training, say, before any other rank has lost it."""
    ends = member.handle(events.Close(TransportError("it ends")))
    assert [each.rank for each in ends if isinstance(each, actions.HangUp)] == [2, 3]
    told = [(each.rank, each.message) for each in ends if isinstance(each, actions.SendMessage)]
    assert told == [(1, {"kind": "meet", "name": "stop", "value": 0})]


@pytest.mark.parametrize("second", ["gone", "cut"])
def test_nobody_stops_before_it_is_known_what_has_become_of_all_whose_connections_ended(second: str) -> None:
    """Two of three end at once: the third is no smaller side, unless one of them may be continuing."""
    policies = Policies(Policy(), continue_without_lost=True, raise_on_loss=False, streams=1, connect_timeout_s=1.0)
    machine = Machine(Rules(0, 0, 1, None, 10.0, 1 << 19), policies)
    for rank in (1, 2):
        machine.handle(events.ConnectionMade(rank, 10 + rank, f"host:{rank}"), 0.0)
    machine.handle(events.Begin(View.of(3), member=True), 0.0)
    machine.handle(events.ConnectionEnded(1), 1.0)
    machine.handle(events.ConnectionEnded(2), 1.0)
    machine.handle(events.Lost(1, Loss("gone", "it ended")), 1.1)
    assert machine.views.failure is None
    assert machine.views.view == View.of(3)
    machine.handle(events.Lost(2, Loss(second, "it ended, or not")), 1.2)  # type: ignore[arg-type]  # one of the kinds
    if second == "gone":
        assert machine.views.failure is None
        assert machine.views.view.members == (0,)
    else:
        assert "smaller side" in str(machine.views.failure)


CHANGE = change_message(Report(2, 3, gone=frozenset({1}), step=3, commits={(0, 1): "d"}), "lost")
KINDS = [
    MEET,
    REFUSED,
    WELCOME,
    HEADER,
    CHANGE,
    facts_message(ENTRY),
    speed_message(2.0),
    {"kind": "join", **ENTRY.to_message(), "connected": [1]},
    {"kind": "introduce", "entry": ENTRY.to_message()},
    {"kind": "excluded", "view": 3, "reason": "late"},
    {"kind": "adopted", **{name: value for name, value in WELCOME.items() if name not in ("kind", "note")}, "view": 3},
    {"kind": "leaving", "view": 3, "step": 1, "commits": []},
    RoundVote(RoundId(0, 0), Vote(True, digest="d")).to_message(3),
]
ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 6)
    | st.sampled_from([1 << 40, 1 << 70, 1.5, "", "d", "nan", "x" * 5000]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["a", "rank"]), inner, max_size=2),
    max_leaves=8,
)


@given(st.data())
def test_whatever_a_message_says_only_its_sender_is_at_fault(data: st.DataObject) -> None:
    """Any other error would count as one of this process, and end it."""
    rank = Rank()
    rank.handle(events.Announce({"kind": "join", **Entry(0, "host:0").to_message()}))
    if data.draw(st.booleans()):
        rank.handle(events.Begin(VIEW, member=data.draw(st.booleans())))
    for _ in range(3):
        message = dict(data.draw(st.sampled_from(KINDS)))
        for name in data.draw(st.sets(st.sampled_from(sorted(message.keys() - {"kind"})), max_size=2)):
            message[name] = data.draw(ODD)
        with contextlib.suppress(MessageError):
            rank.hear(data.draw(st.integers(1, 5)), message)
