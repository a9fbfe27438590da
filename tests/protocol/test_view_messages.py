"""Which senders count in a view, and what is no message; on the simulated network."""

from __future__ import annotations

import contextlib
import tracemalloc
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.algorithm import RoundId
from diloco.membership import Accepted, NextView, Report, View
from diloco.protocol import (
    Accept,
    Adopted,
    Announcement,
    Change,
    Entry,
    Excluded,
    FactsMessage,
    Header,
    Introduce,
    Join,
    Leaving,
    Message,
    MessageError,
    Propose,
    Refused,
    RoundVote,
    Welcome,
    decode,
    encode,
)
from tests.membership.network import LIMITS, NUMBERS, Limits, explore
from tests.protocol.simulated import assert_nothing, begin, check_agreement, rank, simulate, simulated

HEADER = Header(0, RoundId(1, 0), 2, 1.0, 1.0, "d", 3)
VOTE = RoundVote(0, RoundId(1, 0), "", "no", (1,))
NEXT = NextView(View(1, (0, 1)), View(0, (0, 1, 2)), 7, {(0, 1): ("d",)}, "because", (), frozenset({(-1, 3)}), (2,))
REPORT = Report(
    0,
    0,
    apart=frozenset({2}),
    gone=frozenset({2}),
    left=frozenset({2}),
    behind=frozenset({1}),
    unsteady=frozenset({1}),
    joining=frozenset({3}),
    step=1,
    commits={(0, 1): "d"},
    void=frozenset({(-1, 9)}),
    voted={(1, 1): "e"},
    ballot=3,
    number=4,
    accepted=Accepted(2, NEXT, again=True),
)
CHANGE = Change(REPORT, "replica 2 is lost")
PROPOSE = Propose(3, NEXT, {0: "d", 1: "e"})
ACCEPT = Accept(0, 3, "d")
ADOPTED = Adopted(NEXT)
LEAVING = Leaving(0, 3)
MESSAGES = [HEADER, VOTE, CHANGE, PROPOSE, ACCEPT, ADOPTED, LEAVING]
ENTRY = Entry(1, "simulated:1", {"a": "b"})
ALL = [
    *MESSAGES, Welcome(NEXT, b"note"), Excluded(3, "late"), Announcement("speed", 2.5), FactsMessage(ENTRY),
    Join(ENTRY), Introduce(ENTRY), Refused("late"),
]  # fmt: skip


def in_view(message: Any, view_id: int) -> Any:
    """Return the message as one about another view."""
    match message:
        case Change(report, why):
            return Change(replace(report, view_id=view_id), why)
        case Adopted() | Propose():
            following = message.following
            previous = View(view_id, following.previous.members)
            following = replace(following, previous=previous, view=View(view_id + 1, following.view.members))
            return msgspec.structs.replace(message, following=following)
        case _:
            return msgspec.structs.replace(message, view=view_id)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize("view_id", [0, 1])
def test_who_is_no_member_of_a_view_has_no_say_in_it(message: Any, view_id: int) -> None:
    """Neither in the current view, nor in the next one if it is no member of that."""
    network = simulated(3, Limits(ends=1), strangers=1)
    begin(network, 0, 1)
    if isinstance(message, Propose | Accept | Adopted):  # they count only while there is something to adopt
        rank(network, 0).lose(2, gone=False)
    assert_nothing(rank(network, 0).hear(3, in_view(message, view_id)))
    network.happen("ends", 2, 0, 0)
    explore(network, [])
    for number in (0, 1):
        assert rank(network, number).view == View(1, (0, 1))
        assert set(rank(network, number).outcomes.values()) == {True}
        assert all(each.contributors <= (0, 1) for each in rank(network, number).averages.values())


def test_a_process_in_a_members_place_has_no_say_before_it_is_one() -> None:
    network = simulated(3, Limits(ends=1, returns=1))
    begin(network, 0, 1)
    network.happen("ends", 2, 0, 0)
    network.happen("returns", 2, 0, 0)  # before the others have noticed that it had ended
    assert_nothing(rank(network, 0).hear(2, VOTE))
    explore(network, [])
    assert [rank(network, number).view.members for number in range(3)] == [(0, 1, 2)] * 3


@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_messages_say_what_was_meant(message: Any) -> None:
    assert decode(encode(message), Message) == message


def test_texts_from_others_print_and_are_cut() -> None:
    vote = RoundVote(0, (0, 0), "", "\x1b]0;owned\x07" * 500)
    reason = decode(encode(vote), Message).reason
    assert reason.isprintable()
    assert len(reason) <= 500


OUT_OF_RANGE = [
    msgspec.structs.replace(HEADER, round=(-4, 0)),
    msgspec.structs.replace(HEADER, round=(0, 1 << 54)),
    msgspec.structs.replace(HEADER, numel=-1),
    msgspec.structs.replace(HEADER, buffers=1 << 60),
    msgspec.structs.replace(HEADER, weight="nan"),
    msgspec.structs.replace(VOTE, diverged=(-1,)),
    Announcement("speed", float("inf")),
    Announcement("speed", float("nan")),
    Change(replace(REPORT, rank=1 << 31), "why"),
    Change(replace(REPORT, ballot=-1), "why"),
    {
        "kind": "welcome",
        "following": {**msgspec.to_builtins(msgspec.structs.asdict(ADOPTED)["following"]), "view": None},
    },
    {"kind": "excluded", "view": 3, "reason": "", "more": 1},
    {"kind": "excluded", "view": 3},
    {"kind": "unknown"},
    {"view": 3},
    [],
    b"",
    b"\xff",
    b"\x82\xa4kind\xa7adopted\xa9following" + b"\x91" * 100_000,
    encode(HEADER) + b"x",
]


@pytest.mark.parametrize("message", OUT_OF_RANGE, ids=range(len(OUT_OF_RANGE)))
def test_what_is_no_message_says_why(message: Any) -> None:
    with pytest.raises(MessageError, match=r".") as caught:
        decode(message if isinstance(message, bytes) else encode(message), Message)
    assert str(caught.value).isprintable()


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_whatever_bytes_say_only_their_sender_is_at_fault_and_they_take_no_memory(data: st.DataObject) -> None:
    """Property: for bytes that are changed anywhere, and sizes that are announced and not there.

    Any other error would count as one of this process, and end it.
    """
    network = simulated(3, strangers=1)
    if data.draw(st.booleans()):
        begin(network, 0, 1)
    for _ in range(3):
        message = bytearray(encode(data.draw(st.sampled_from(ALL))))
        for _ in range(data.draw(st.integers(0, 4))):
            place = data.draw(st.integers(0, len(message)))
            huge = st.sampled_from(
                [b"\xdd\x7f\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xc6\x7f\xff\xff\xff", b"\xdb\x7f\0\0\0"]
            )
            message[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4) | huge)
        tracemalloc.start()
        with contextlib.suppress(MessageError):
            decoded = decode(bytes(message), Message)
            assert decode(encode(decoded), Message) == decoded or "nan" in repr(decoded)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < 100_000
        rank(network, 0).receive(data.draw(st.integers(1, 3)), bytes(message))


MALFORMED = st.sampled_from([each if isinstance(each, bytes) else encode(each) for each in OUT_OF_RANGE])


@settings(max_examples=100, deadline=None)
@given(NUMBERS, st.integers(2, 4), LIMITS, st.lists(MALFORMED, min_size=1, max_size=3), st.integers(1, 2))
def test_what_is_no_message_costs_its_sender_the_view_and_nothing_else(
    numbers: list[int], replicas: int, limits: Limits, garbage: list[bytes], size: int
) -> None:
    """Property: nothing raises, and the ranks that continue commit every round."""
    limits = Limits(limits.ends, limits.machines, limits.cuts, own={"garbage": 2})
    check_agreement(simulate(limits, numbers, replicas=replicas, size=size, garbage=garbage), whole=True)


def test_who_is_still_in_a_view_that_has_ended_elsewhere_is_told_how() -> None:
    network = simulated(3)
    begin(network, 0, 1, 2)
    through, asking = rank(network, 0), rank(network, 1)
    for each in (through, asking):
        network.hang_up(each.rank, 2)
        each.lose(2, gone=False)
    while not through.changes:  # the asking rank receives everything last
        network.happen(*max(network.choices(), key=lambda choice: choice[2] == through.rank), 0)
    assert asking.changes == []
    (following,) = through.changes
    assert following.view.members == (0, 1)
    answers = through.hear(asking.rank, asking.sent_of(Change)[-1])
    assert answers.messages == [(asking.rank, Adopted(following))]
    done = asking.hear(through.rank, answers.messages[0][1])
    assert [adopted.view for adopted, _, _ in done.adopted] == [following.view]
