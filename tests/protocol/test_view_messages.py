"""Which senders count in a view, and what is no message; on the simulated network."""

import contextlib
import tracemalloc
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.algorithm import RoundId
from diloco.membership import MOST_RANK, Accepted, NextView, Report, View
from diloco.protocol import (
    MAX_NAME,
    Accept,
    Adopted,
    Announcement,
    Ask,
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
    table_of,
)
from tests.protocol.network import LIMITS, NUMBERS, Limits, explore
from tests.protocol.simulated import assert_nothing, begin, check_agreement, simulate, simulated

VOTE = RoundVote(0, RoundId(1, 0), "", "no", (1,))
ENTRY = Entry(1, "simulated:1", "key", {"a": "b"})


def messages(view: int) -> list[Any]:
    """Return a message of each type about the end of a view, or about a round in it."""
    ended, following = View(view, (0, 1, 2)), View(view + 1, (0, 1))
    adopted = NextView(following, ended, 7, {(0, 1): ("d",)}, frozenset({(-1, 3)}), (2,))
    sets = {name: frozenset({2}) for name in ("apart", "gone", "left", "late", "unsteady")}
    report = Report(
        0,
        view,
        **sets,
        joining=frozenset({3}),
        step=1,
        commits={(0, 1): "d"},
        void=frozenset({(-1, 9)}),
        voted={(1, 1): "e"},
        ballot=3,
        number=4,
        accepted=Accepted(2, adopted, again=True),
    )
    return [
        Header(view, RoundId(1, 0), 2, 1.0, 1.0, "d", 3),
        msgspec.structs.replace(VOTE, view=view),
        Change(report, "replica 2 is lost", "ended"),
        Propose(3, adopted),
        Accept(view, 3),
        Adopted(adopted),
        Leaving(view, 3),
    ]


HEADER, _, CHANGE, PROPOSE, *_ = messages(0)
ALL = [
    *messages(0), Welcome(PROPOSE.following, b"note"), Excluded(3, "late"), Announcement("speed", 2.5),
    FactsMessage(ENTRY), Join(ENTRY), Introduce(ENTRY), Refused("late"),
]  # fmt: skip


@pytest.mark.parametrize("view", [0, 1])
def test_who_is_no_member_of_a_view_has_no_say_in_it(view: int) -> None:
    """Neither in the current view, nor in the next one if it is no member of that."""
    network = simulated(3, Limits(ends=1), strangers=1)
    begin(network, 0, 1)
    for message in messages(view):
        if isinstance(message, Propose):  # it counts only while there is something to adopt
            network[0].lose(2, gone=False)
        assert_nothing(network[0].hear(3, message))
    network.happen("ends", 2, 0, 0)
    explore(network)
    for number in (0, 1):
        assert network[number].view == View(1, (0, 1))
        assert set(network[number].outcomes.values()) == {True}
        assert all(each.contributors <= (0, 1) for each in network[number].averages.values())


def test_a_process_in_a_members_place_has_no_say_before_it_is_one() -> None:
    network = simulated(3, Limits(ends=1, returns=1))
    begin(network, 0, 1)
    network.happen("ends", 2, 0, 0)
    network.happen("returns", 2, 0, 0)  # before the others have noticed that it had ended
    assert_nothing(network[0].hear(2, VOTE))
    explore(network)
    assert [network[number].view.members for number in range(3)] == [(0, 1, 2)] * 3


@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_messages_say_what_was_meant(message: Any) -> None:
    assert decode(encode(message), Message) == message


def test_texts_from_others_print_and_are_cut() -> None:
    vote = RoundVote(0, (0, 0), "", "\x1b]0;owned\x07" * 500)
    reason = decode(encode(vote), Message).reason
    assert reason.isprintable()
    assert len(reason) <= 500


NO_ENTRY: list[dict[str, Any]] = [
    {"rank": -1},
    {"rank": MOST_RANK + 1},
    {"address": "\x1b[2Ja:1"},
    {"address": "a" * 301},
    {"facts": {"seed": 0}},
    {"facts": {str(n): "" for n in range(257)}},
    {"held_step": 1 << 60},
    {"places": [1]},
    {"name": "\x1b[2J"},
    {"name": "x" * (MAX_NAME + 1)},
]
OUT_OF_RANGE = [
    msgspec.structs.replace(HEADER, round=(-6, 0)),
    msgspec.structs.replace(HEADER, round=(0, 1 << 54)),
    msgspec.structs.replace(HEADER, numel=-1),
    msgspec.structs.replace(HEADER, buffers=1 << 60),
    msgspec.structs.replace(HEADER, weight="nan"),
    msgspec.structs.replace(VOTE, diverged=(-1,)),
    Announcement("speed", float("inf")),
    Announcement("speed", float("nan")),
    {"kind": "announcement", "topic": "another", "value": 1.0},
    Change(replace(CHANGE.report, rank=1 << 31), "why", "other"),
    Change(replace(CHANGE.report, ballot=-1), "why", "other"),
    {"kind": "welcome", "following": vars(PROPOSE.following) | {"view": None}},
    *({"kind": "facts", "entry": vars(ENTRY) | fields} for fields in NO_ENTRY),
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


def test_a_difference_shows_no_escapes_of_others() -> None:
    words = ENTRY.diff(replace(ENTRY, rank=0, facts={"a": "\x1b]0;title\x07" + "x" * 4000}))
    assert words.isprintable()
    assert len(words) < 700


def test_an_entry_with_as_many_facts_as_are_allowed_is_taken_from_a_stranger() -> None:
    """Else its owner would wait for an answer until its time is over."""
    facts = {f"file {n}": "x" * size for n, size in enumerate((4096, 4096, 4096, 983))}
    places = ("/ip4/100.100.100.100/tcp/31330/p2p/" + "x" * 100,) * 16
    entry = Entry(5, "x" * 60, "x" * 60, facts, 1 << 53, places, "n" * 32)
    assert len(encode(facts)) > (13 << 10) - 10
    assert len(encode(Ask(entry, (1 << 31) - 1))) < 1 << 14
    assert decode(encode(Ask(entry)), Ask).entry == entry


def test_the_table_of_a_thousand_ranks_fits_into_a_message() -> None:
    """Regression: each repeated the facts, of which the names of many buffers make kilobytes."""
    facts = {"buffers": "b" * 2000, "frozen parameters of these digests": "f" * 2000}
    assert len(encode(table_of(Entry(rank, "10.0.0.1:29400", "k" * 64, facts) for rank in range(128 * 8)))) < 1 << 18


@settings(max_examples=100, deadline=None)
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
        network[0].receive(data.draw(st.integers(1, 3)), bytes(message))


MALFORMED = st.sampled_from([each if isinstance(each, bytes) else encode(each) for each in OUT_OF_RANGE])


@settings(max_examples=60, deadline=None)
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
    through, asking = network[0], network[1]
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


def test_who_waits_and_hears_of_a_later_view_asks_what_has_ended_its_own() -> None:
    """Who told the others of it had no connection to this one, and these had its report before they heard of it."""
    network = simulated(5)
    begin(network, *range(5))
    waiting = network[4]
    for lost in (1, 2, 3):
        network.hang_up(4, lost)
        waiting.lose(lost, gone=False)
    while not waiting.waits:
        assert waiting.fire(of_round=False)
    waiting.sent.clear()
    heard = waiting.hear(0, RoundVote(1, RoundId(1, 0), "", "no", (1,)))
    assert [rank for rank, _ in heard.messages] == [0]
    assert [change.report.view_id for change in waiting.sent_of(Change)] == [0]
