"""One broken member among several: no other one ends, stalls, grows without bound, or applies another round.

It is a rank of the package's own classes whose messages are changed, so each fault is one row.
"""

import tracemalloc
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import pytest

from diloco.membership import NextView, View
from diloco.protocol import (
    Accept,
    Announcement,
    Beat,
    Header,
    Leaving,
    Propose,
    Refused,
    RoundVote,
    Welcome,
    WireMessage,
    encode,
)
from tests.protocol.broken import Instead, changed, check_whole, report, without
from tests.protocol.network import Network
from tests.protocol.simulated import LATE_S, TIMEOUT_S, Rank, simulated

MAX_MEMORY_BYTES = 64 << 20
STEPS = 9


def also(kind: type[WireMessage], times: int = 1, **fields: Any) -> Instead:
    """After each message of a type, send copies with these fields changed; a number n in ``fields`` counts up."""

    def more(receiver: int, message: Any) -> Iterable[Any]:
        yield message
        if isinstance(message, kind):
            for number in range(times):
                told = {key: value(number) if callable(value) else value for key, value in fields.items()}
                yield msgspec.structs.replace(message, **told)

    return more


def once(*messages: WireMessage | bytes, times: int = 1) -> Instead:
    """Send these messages once to each of the others, before the first header."""
    told: set[int] = set()

    def more(receiver: int, message: Any) -> Iterable[Any]:
        if isinstance(message, Header) and receiver not in told:
            told.add(receiver)
            yield from messages * times
        yield message

    return more


def both(first: Instead, second: Instead) -> Instead:
    return lambda receiver, message: [each for sent in first(receiver, message) for each in second(receiver, sent)]


LISTS = b"\x82\xa4kind\xa7welcome\xa4note\xdc\xea\x60" + b"\x90" * 60_000


def faults_of(broken: int) -> Mapping[str, Instead]:
    begins = once(report(broken))
    rounds = {(1, step): "d" * 64 for step in range(4000)}  # more than 300 kB
    return {
        "none": without(Announcement),
        "a far ballot": once(report(broken, ballot=1 << 50)),
        "it is far ahead": once(report(broken, step=1 << 50)),
        "32 strangers join": once(report(broken, joining=frozenset(range(10, 42)))),
        "4000 strangers join": once(report(broken, joining=frozenset(range(10, 4010)))),
        "reports full of rounds": once(*(report(broken, number=n, commits=rounds | {(n, 0): "d"}) for n in range(4))),
        "no acceptance": both(begins, without(Accept)),
        "no proposal": both(begins, without(Propose)),
        "it leaves at ever other steps": once(*(Leaving(0, n) for n in range(800))),
        "reports about a far view": once(report(broken, view_id=1 << 40, gone=frozenset(range(4000))), times=20),
        "reports about a later view": once(report(broken, view_id=9, commits=rounds), times=10),
        "a report nested 30 levels deep": once(encode(report(broken))[:-1] + b"\x91" * 30),
        "a welcome": once(Welcome(NextView(View(1, (3,)), View(0, (3,)), 1, {})), times=30),
        "welcomes full of lists": once(LISTS, times=30),
        "refusals": once(Refused("x" * 9000, for_good=True), times=50),
        "a stop that never comes": once(Announcement("stop", 1 << 53)),
        "an infinite speed": once(Announcement("speed", float("inf"))),
        "an unknown kind": once(encode({"kind": "k" * 60_000})),
        "no to every round": changed(RoundVote, digest="", reason="no"),
        "no vote": without(RoundVote),
        "another state": changed(Header, digest="another"),
        "a reason with escapes": changed(RoundVote, digest="", reason="\x1b]0;owned\x07" * 500),
        "votes on rounds that don't exist": also(RoundVote, times=40, round=lambda number: (0, number + 50)),
        "headers of rounds that don't exist": also(Header, times=40, round=lambda number: (0, number + 50)),
        "a round 2^50 ahead": also(Header, round=(0, 1 << 50)),
        "a second header": also(Header, weight=3.0),
        "a weight of 1e308": changed(Header, weight=1e308),
        "a negative weight": changed(Header, weight=-1.0),
        "2^53 values": changed(Header, numel=1 << 53),
        "2^60 buffers": changed(Header, buffers=1 << 60),
        "fetching the state for ever": changed(Header, taking_over=True),
        "no header": without(Header),
        "everything twice": lambda receiver, message: [message, message],
    }


FLOODS = {
    "4000 strangers join",
    "reports full of rounds",
    "it leaves at ever other steps",
    "reports about a far view",
    "reports about a later view",
    "a report nested 30 levels deep",
    "welcomes full of lists",
    "refusals",
    "an unknown kind",
    "a reason with escapes",
    "votes on rounds that don't exist",
    "headers of rounds that don't exist",
    "2^53 values",
    "2^60 buffers",
}
"""Faults of large or many messages or sizes. Tracing memory takes four times as long as the network."""


@pytest.mark.parametrize("name", faults_of(3))
def test_no_message_of_a_broken_member_harms_the_others(name: str) -> None:
    network, broken = simulated(4), 3
    network[broken].instead = faults_of(broken)[name]
    if name in FLOODS:
        tracemalloc.start()
    others, longest_s = run(network, broken)
    if name in FLOODS:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < MAX_MEMORY_BYTES
    assert longest_s <= TIMEOUT_S + 2 * LATE_S, "it costs a ballot, besides a round"
    shown = [str(each) for member in others for each in (*member.errors.values(), *(v.reason for v in member.changes))]
    assert all(text.isprintable() for text in shown)


def run(network: Network, broken: int) -> tuple[list[Rank], float]:
    """Let the others train, firing the earliest timer whenever all wait; return them, and the longest pause."""
    others = [network[number] for number in network.ranks if number != broken]
    for node in network.nodes.values():
        node.STEPS = STEPS
    longest_s = now_s = progress_s = 0.0
    decided, due_s = 0, dict[Any, float]()
    while sum(len(each.outcomes) for each in others) < STEPS * len(others):
        moved = False
        for what, one, other in network.choices():
            if network.can(what, one, other):
                network.happen(what, one, other, 0)
                moved = True
        moved = any([network.nodes[number].act() for number in sorted(network.alive)]) or moved
        if (count := sum(len(each.outcomes) for each in others)) > decided:
            decided, progress_s = count, now_s
        if moved:
            continue
        timers = [
            (due_s.setdefault((each.rank, timer), now_s + delay_s), each.rank, place, timer)
            for each in others
            for place, (delay_s, timer) in enumerate(each.timers)
        ]
        assert timers, "a round was never decided"
        at_s, number, place, timer = min(timers, key=lambda entry: entry[0])
        now_s = max(now_s, at_s)
        longest_s = max(longest_s, now_s - progress_s)
        del due_s[number, timer]
        for each in others:
            each.now_s = now_s
            for other in network.ranks:
                if other != each.rank:
                    network.send(other, each.rank, encode(Beat()))
        network.nodes[number].suffer("timers", place)
    check_whole(others)
    return others, longest_s
