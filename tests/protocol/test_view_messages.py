"""Which senders count in a view, and how malformed messages are handled; on the simulated network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.algorithm import RoundId
from diloco.membership import Agreed, NextView, Policy, Report, View, Vote
from diloco.protocol import (
    Fields,
    Header,
    Leaving,
    MessageError,
    RoundVote,
    actions,
    adopted_message,
    change_message,
    events,
    next_view,
    read,
    view_of,
)
from tests.membership.network import LIMITS, NUMBERS, Limits, explore
from tests.protocol.simulated import begin, check_agreement, rank, simulate, simulated
from tests.protocol.simulated_rank import Rank

HEADER = Header(RoundId(1, 0), 2, 1.0, 1.0, "d", 3, None, "", False).to_message(0)
VOTE = RoundVote(RoundId(1, 0), Vote(False, reason="no"), (1,), 0).to_message(0)
CHANGE = change_message(
    Report(0, 0, frozenset({(0, 2)}), gone=frozenset({2}), step=1, commits={(0, 1): "d"}, void=frozenset({(1, 0)})),
    "replica 2 is lost",
)
NEXT = NextView(View(1, (0, 1)), View(0, (0, 1, 2)), 7, {(0, 1): "d"}, "because", (), frozenset({(-1, 3)}), ((2, 5),))
ADOPTED = adopted_message(NEXT)
LEAVING = Leaving(3, {(1, 2): "d"}).to_message(0)
MESSAGES = [HEADER, VOTE, CHANGE, ADOPTED, LEAVING]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message["kind"])
@pytest.mark.parametrize("view_id", [0, 1])
def test_who_is_no_member_of_a_view_has_no_say_in_it(message: Mapping[str, Any], view_id: int) -> None:
    """Neither in the current view, nor in the next one if it is no member of that."""
    network = simulated(3, Limits(ends=1), strangers=1)
    begin(network, 0, 1)
    if message["kind"] == "adopted":  # it counts only while there is something to adopt
        rank(network, 0).lose(2, gone=False)
    assert not rank(network, 0).handle(events.Received(3, message | {"view": view_id}))
    network.happen("ends", 2, 0, 0)
    explore(network, [])
    for number in (0, 1):
        assert rank(network, number).view == View(1, (0, 1))
        assert set(rank(network, number).outcomes.values()) == {True}
        assert all(each.contributors <= (0, 1) for each in rank(network, number).averages.values())


def test_a_process_in_a_members_place_has_no_say_before_it_is_one() -> None:
    network = simulated(3, Limits(ends=1, returns=1))
    begin(network, 0, 1)
    network.make = lambda number: Rank(network, number, 3, 1, rank(network, 0).policies, joining=True)
    network.happen("ends", 2, 0, 0)
    network.happen("returns", 2, 0, 0)  # before the others have noticed that it had ended
    assert not rank(network, 0).handle(events.Received(2, VOTE))
    assert not rank(network, 0).handle(events.Received(2, {"kind": "vote"})), "nor can it make itself lost"
    explore(network, [])
    assert [rank(network, number).view.members for number in range(3)] == [(0, 1, 2)] * 3


def test_messages_say_what_was_meant() -> None:
    view = View(0, (0, 1, 2))
    assert read(1, HEADER, view) == (0, Header(RoundId(1, 0), 2, 1.0, 1.0, "d", 3, None, "", False))
    assert read(1, VOTE, view) == (0, RoundVote(RoundId(1, 0), Vote(False, reason="no"), (1,), 0))
    assert read(1, LEAVING, view) == (0, Leaving(3, {(1, 2): "d"}))
    assert next_view(json.loads(json.dumps(ADOPTED)), view) == NEXT
    known = {"gone": frozenset({2}), "joining": frozenset({3})}
    known |= {"behind": frozenset({(1, 2)}), "unheard": frozenset({(0, 2)}), "left": frozenset({(2, 8)})}  # type: ignore[dict-item]
    known |= {"unsteady": frozenset({(1, 0)})}  # type: ignore[dict-item]
    known |= {"agreed": Agreed(3, NEXT, frozenset({(0, 1), (1, 2)})), "ready": True}  # type: ignore[dict-item]
    known |= {"voted": {(1, 1): "e"}}  # type: ignore[dict-item]
    report = Report(1, 4, **known, step=9, commits={(0, 1): "d"}, void=frozenset({(-1, 9)}))  # type: ignore[arg-type]
    view_id, said = read(1, json.loads(json.dumps(change_message(report, "why"))), view)
    assert (view_id, said.report, said.why) == (4, report, "why")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("agreed", "last"),
    [
        ([1, {**ADOPTED, "quorums": [[number, 0] for number in range(33)]}], [3, 1, 0]),
        ([1, {**ADOPTED, "quorums": [], "members": [2, 2]}], [3]),
    ],
)
def test_what_fits_no_view_is_the_fault_of_its_sender(agreed: object, last: object) -> None:
    """Regression: any other error ends the transport of the receiver, so one message of a member ended all of them."""
    with pytest.raises(MessageError, match=r"quorums|members"):
        read(1, change_message(Report(1, 0), "why") | {"agreed": agreed}, View.of(3))
    with pytest.raises(MessageError, match="last"):
        view_of(Fields({"last": last}), "last")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 3)
    | st.sampled_from([10**400, 1 << 63, float("nan"), float("inf"), -0.5])
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=3,
)


def is_what_it_should_be(name: str, value: Any) -> bool:
    """Return whether ``value`` is valid as the field ``name`` of a message."""
    try:
        for message in MESSAGES:
            if name in message:
                read(1, message | {name: value}, View.of(3))
                return True
    except ValueError:
        pass
    return False


@st.composite
def malformed(draw: st.DrawFn) -> dict[str, Any]:
    """Return a message with a missing or wrong field, or an arbitrary object."""
    message = dict(draw(st.sampled_from(MESSAGES)))
    name = draw(st.sampled_from(sorted(message)))
    if draw(st.booleans()):
        del message[name]
        return message
    value = draw(JSON)
    if is_what_it_should_be(name, value):
        value = [[None]]  # valid for no field
    if draw(st.booleans()):
        return message | {name: value}
    return {"kind": draw(st.sampled_from(["header", "vote", "change", "adopted", "leaving", "?"])), name: value}


NAMED = r"^field '.*' (is missing|must be |is invalid: )|^the message kind .* is unknown|^a view needs"


@settings(max_examples=100, deadline=None)
@given(malformed())
def test_what_is_no_message_names_its_field_and_raises_nothing_else(message: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=NAMED):
        read(1, message, View.of(3))


@settings(max_examples=100, deadline=None)
@given(NUMBERS, st.integers(2, 4), LIMITS, st.lists(malformed(), min_size=1, max_size=3), st.integers(1, 2))
def test_what_is_no_message_costs_its_sender_the_view_and_nothing_else(
    numbers: list[int], replicas: int, limits: Limits, garbage: list[dict[str, Any]], size: int
) -> None:
    """Property: nothing raises, and the ranks that continue commit every round."""
    limits = Limits(limits.ends, limits.machines, limits.cuts, own={"garbage": 2})
    check_agreement(simulate(limits, numbers, replicas=replicas, size=size, garbage=garbage), whole=True)


@pytest.mark.parametrize(
    ("quorum", "members"), [(Policy(), (0, 1)), (Policy(min_replicas=3), None)], ids=["two continue", "none continues"]
)
def test_who_is_still_in_a_view_that_has_ended_elsewhere_is_told_how(
    quorum: Policy, members: tuple[int, ...] | None
) -> None:
    """Also if none continues, so that both the asking and the answering rank are still in that view."""
    network = simulated(3, quorum=quorum)
    begin(network, 0, 1, 2)
    through, asking = rank(network, 0), rank(network, 1)
    for each in (through, asking):
        network.hang_up(each.rank, 2)
        each.lose(2, gone=False)
    while not through.changes:  # the asking rank receives everything last
        network.happen(*max(network.choices(), key=lambda choice: choice[2] == through.rank), 0)
    assert asking.changes == []
    (following,) = through.changes
    assert (following.view and following.view.members) == members
    answers = through.machine.handle(events.Received(asking.rank, asking.sent_of("change")[-1]), 0.0)
    assert answers == [actions.SendMessage(asking.rank, adopted_message(following))]
    done = asking.machine.handle(events.Received(through.rank, answers[0].message), 0.0)
    assert [action.following.view for action in done if isinstance(action, actions.Adopt)] == [following.view]
    assert (asking.failure is None) == (through.failure is None) == (members is not None)


def test_a_member_that_says_what_is_no_message_is_lost_and_named() -> None:
    network = simulated(3)
    begin(network, 0, 1)
    rank(network, 0).handle(events.Received(2, HEADER | {"numel": -1}))
    explore(network, [])
    words = "replica 2 sent a malformed message: field 'numel' must be an integer from 0 to"
    assert rank(network, 2).left.startswith(f"the others continued without replica 2: {words}")
    assert [rank(network, number).view.members for number in (0, 1)] == [(0, 1)] * 2


def test_nobody_can_fill_the_memory_with_views_to_come() -> None:
    network = simulated(3)
    for _ in range(1000):
        assert not rank(network, 0).handle(events.Received(2, VOTE | {"view": 9}))
    rank(network, 0).handle(events.Received(2, VOTE | {"view": 9}))
    assert "rank 2 exceeded the hold-back limit" in rank(network, 0).sent_of("change")[0]["why"]
    explore(network, [])
    assert [rank(network, number).view.members for number in (0, 1)] == [(0, 1)] * 2
