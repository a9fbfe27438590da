"""One malicious member among several: no other one ends, stalls, grows without bound, or applies another round.

The attacker is a rank of the package's own classes whose messages are changed, so each attack is one row.
"""

import tracemalloc
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import cycle, product
from typing import Any

import msgspec
import pytest

from diloco.membership import Accepted, NextView, Report, View
from diloco.protocol import (
    Accept,
    Adopted,
    Announcement,
    Beat,
    Change,
    Excluded,
    Header,
    Leaving,
    Propose,
    Refused,
    RoundVote,
    Welcome,
    WireMessage,
    digest_of,
    encode,
)
from tests.protocol.histories import Lie, check_honest, instead, report, without
from tests.protocol.network import Network
from tests.protocol.simulated import LATE_S, TIMEOUT_S, Rank, Stranger, begin, finish, simulated

MAX_MEMORY_BYTES = 64 << 20
STEPS = 9


def also(kind: type[WireMessage], times: int = 1, **fields: Any) -> Lie:
    """After each message of a type, send copies with these fields changed; a number n in ``fields`` counts up."""

    def lie(receiver: int, message: Any) -> Iterable[Any]:
        yield message
        if isinstance(message, kind):
            for number in range(times):
                told = {key: value(number) if callable(value) else value for key, value in fields.items()}
                yield msgspec.structs.replace(message, **told)

    return lie


def once(*messages: WireMessage | bytes, times: int = 1) -> Lie:
    """Send these messages once to each of the others, before the first header."""
    told: set[int] = set()

    def lie(receiver: int, message: Any) -> Iterable[Any]:
        if isinstance(message, Header) and receiver not in told:
            told.add(receiver)
            yield from messages * times
        yield message

    return lie


def both(first: Lie, second: Lie) -> Lie:
    return lambda receiver, message: [each for told in first(receiver, message) for each in second(receiver, told)]


def ballots(receiver: int, message: Any) -> Iterable[Any]:
    """Report the next ballot after each report."""
    yield message
    if isinstance(message, Change):
        mine = message.report
        yield Change(replace(mine, ballot=mine.ballot + 1, number=mine.number + 1), "")


def another_for_each(receiver: int, message: Any) -> Iterable[Any]:
    if isinstance(message, Propose):
        message = msgspec.structs.replace(message, following=replace(message.following, silent=(receiver,)))
    yield message


LISTS = b"\x82\xa4kind\xa7welcome\xa4note\xdc\xea\x60" + b"\x90" * 60_000


def lies_of(liar: int, size: int) -> Mapping[str, Iterable[WireMessage]]:
    """Return false messages by what they claim: the others are lost, or another view follows."""
    others, view = frozenset(range(size)) - {liar}, View.of(size)
    alone = NextView(View(1, (liar,)), view, 1, {})
    commits = {(fragment, step): "mean" for fragment in range(3) for step in range(3)}
    digests = {liar: digest_of(Report(liar, 0, gone=others))}
    late = Excluded(0, "late")
    return {
        "all others have ended": [report(liar, gone=others)],
        "it hears nobody": [report(liar, apart=others)],
        "no other member has contributed": [report(liar, behind=others)],
        "all others are unsteady": [report(liar, unsteady=others)],
        "all others leave": [report(liar, left=others, gone=others)],
        "an absent replica joins": [report(liar, joining=frozenset({99}))],
        "one of them joins": [report(liar, joining=others)],
        "it has accepted a view of its own": [report(liar, ballot=2, accepted=Accepted(1, alone, again=True))],
        "a far ballot": [report(liar, ballot=1 << 50)],
        "ballot after ballot": [report(liar, ballot=number, number=number) for number in range(1, 40)],
        "it proposes itself": [report(liar, gone=others), Propose(0, alone, digests)],
        "it proposes itself again": [report(liar, gone=others), Propose(0, alone, {})],
        "it has accepted something else": [report(liar), *(Accept(0, number, "else") for number in range(3))],
        "all rounds are committed": [report(liar, commits=commits)],
        "it is far ahead": [report(liar, step=1 << 50)],
        "others went on alone": [late, Excluded(1 << 50, "late")],
        "it has adopted a view of its own": [report(liar), Adopted(alone)],
    }


def attacks_of(liar: int, size: int) -> Mapping[str, Lie]:
    others, begins = tuple(each for each in range(size) if each != liar), once(report(liar))
    rounds = {(1, step): "d" * 64 for step in range(4000)}  # more than 300 kB
    return {name: once(*lies) for name, lies in lies_of(liar, size).items()} | {
        "none": without(Announcement),
        "32 strangers join": once(report(liar, joining=frozenset(range(10, 42)))),
        "4000 strangers join": once(report(liar, joining=frozenset(range(10, 4010)))),
        "reports full of rounds": once(*(report(liar, number=n, commits=rounds | {(n, 0): "d"}) for n in range(4))),
        "ballots that end as they begin": both(begins, ballots),
        "no acceptance": both(begins, without(Accept)),
        "accepts something else": both(begins, instead(Accept, digest="else")),
        "no proposal": both(begins, without(Propose)),
        "another proposal for each": both(begins, another_for_each),
        "it leaves at ever other steps": once(*(Leaving(0, n) for n in range(800))),
        "reports about a far view": once(report(liar, view_id=1 << 40, gone=frozenset(range(4000))), times=20),
        "reports about a later view": once(report(liar, view_id=9, commits=rounds), times=10),
        "a report nested 30 levels deep": once(encode(report(liar))[:-1] + b"\x91" * 30),
        "a welcome": once(Welcome(NextView(View(1, (3,)), View(0, (3,)), 1, {})), times=30),
        "welcomes full of lists": once(LISTS, times=30),
        "refusals": once(Refused("x" * 9000, for_good=True), times=50),
        "a stop that never comes": once(Announcement("stop", 1 << 53)),
        "an infinite speed": once(Announcement("speed", float("inf"))),
        "an unknown kind": once(encode({"kind": "k" * 60_000})),
        "no to every round": instead(RoundVote, digest="", reason="no"),
        "no vote": without(RoundVote),
        "another state": instead(Header, digest="another"),
        "all have diverged": instead(RoundVote, digest="", diverged=others),
        "a reason with escapes": instead(RoundVote, digest="", reason="\x1b]0;owned\x07" * 500),
        "votes on rounds that don't exist": also(RoundVote, times=40, round=lambda number: (0, number + 50)),
        "headers of rounds that don't exist": also(Header, times=40, round=lambda number: (0, number + 50)),
        "a round 2^50 ahead": also(Header, round=(0, 1 << 50)),
        "a second header": also(Header, weight=3.0),
        "a weight of 1e308": instead(Header, weight=1e308),
        "a negative weight": instead(Header, weight=-1.0),
        "2^53 values": instead(Header, numel=1 << 53),
        "2^60 buffers": instead(Header, buffers=1 << 60),
        "fetching the state for ever": instead(Header, taking_over=True),
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
"""Attacks of large or many messages or sizes. Tracing memory takes four times as long as the network."""


@pytest.mark.parametrize("name", attacks_of(3, 4))
def test_a_malicious_member_harms_nobody(name: str) -> None:
    network, liar, size = simulated(4), 3, 4
    network[liar].lie = attacks_of(liar, size)[name]
    if name in FLOODS:
        tracemalloc.start()
    honest, longest_s = run(network, liar)
    if name in FLOODS:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < MAX_MEMORY_BYTES
    assert name not in lies_of(liar, size) or {*honest[0].outcomes.values()} == {True}, "it is about members alone"
    assert longest_s <= TIMEOUT_S + 2 * LATE_S, "a liar costs a ballot, besides a round"
    shown = [str(each) for member in honest for each in (*member.errors.values(), *(v.reason for v in member.changes))]
    assert all(text.isprintable() for text in shown)


@pytest.mark.parametrize(("name", "size"), [*zip(lies_of(0, 3), cycle([3, 5]), strict=False)])
def test_what_the_first_one_says_of_all_others_ends_none_of_them(name: str, size: int) -> None:
    """The proposer of the first ballot. With n > 2 f, at most the liar is excluded."""
    network = simulated(size)
    begin(network, *range(size))
    for other, message in product(range(1, size), lies_of(0, size)[name]):
        network.send(0, other, encode(message))
    finish(network)
    honest = [network[number] for number in range(1, size)]
    check_honest(honest)
    assert all({*each.outcomes.values()} == {True} for each in honest)


def run(network: Network, liar: int) -> tuple[list[Rank], float]:
    """Let the honest ones train, firing the earliest timer whenever all wait; return them, and the longest pause."""
    honest = [network[number] for number in network.ranks if number != liar]
    for node in network.nodes.values():
        node.STEPS = STEPS
    longest_s = now_s = progress_s = 0.0
    decided, due_s = 0, dict[Any, float]()
    while sum(len(each.outcomes) for each in honest) < STEPS * len(honest):
        moved = False
        for what, one, other in network.choices():
            if network.can(what, one, other):
                network.happen(what, one, other, 0)
                moved = True
        moved = any([network.nodes[number].act() for number in sorted(network.alive)]) or moved
        if (count := sum(len(each.outcomes) for each in honest)) > decided:
            decided, progress_s = count, now_s
        if moved:
            continue
        timers = [
            (due_s.setdefault((each.rank, timer), now_s + delay_s), each.rank, place, timer)
            for each in honest
            for place, (delay_s, timer) in enumerate(each.timers)
        ]
        assert timers, "a round was never decided"
        at_s, number, place, timer = min(timers, key=lambda entry: entry[0])
        now_s = max(now_s, at_s)
        longest_s = max(longest_s, now_s - progress_s)
        del due_s[number, timer]
        for each in honest:
            each.now_s = now_s
            for other in network.ranks:
                if other != each.rank:
                    network.send(other, each.rank, encode(Beat()))
        network.nodes[number].suffer("timers", place)
    check_honest(honest)
    return honest, longest_s


def accepts_else(size: int, *, mute: bool) -> Lie:
    """Accept in each ballot what nobody has proposed, as far as all but the proposer see.

    ``mute``: do not report to the proposer, which waits for that; otherwise accept the proposal there.
    """

    def lie(receiver: int, message: Any) -> Iterable[Any]:
        if isinstance(message, Accept):
            return [message] if receiver == message.ballot % size and not mute else []
        if not isinstance(message, Change):
            return []
        ballot = message.report.ballot
        if receiver == ballot % size:
            return [] if mute else [message]
        told = [message, Accept(0, ballot, "else")]
        return told if ballot == 0 else told[::-1]  # so that it comes before any proposal

    return lie


class Hasty(Stranger):
    """A member that reports ballot after ballot, each to one other member alone: to the first one, or in turn."""

    ballot = -1

    def __init__(self, network: Network, rank: int, *, in_turn: bool) -> None:
        self.network, self.rank, self.in_turn = network, rank, in_turn

    def act(self) -> bool:
        if self.ballot == 200:
            return False
        self.ballot += 1
        for other in range(self.rank) if self.ballot == 0 else [self.ballot % self.rank if self.in_turn else 0]:
            reported = report(self.rank, ballot=self.ballot, number=self.ballot + 1)
            self.network.send(self.rank, other, encode(reported))
        return True


@pytest.mark.parametrize(("replicas", "mute"), [(3, True), (4, False), (4, True), (5, False)])
def test_a_member_that_accepts_what_nobody_has_proposed_puts_nobody_out(replicas: int, mute: bool) -> None:
    network = simulated(replicas)
    liar = network[replicas - 1]
    liar.lie = accepts_else(replicas, mute=mute)
    liar.machine.views.end("a lie")
    _, longest_s = run(network, liar.rank)
    assert longest_s <= 4 * TIMEOUT_S


@pytest.mark.parametrize(("replicas", "in_turn"), [(3, True), (4, False), (5, True)])
def test_who_follows_the_ballots_of_a_liar_is_not_taken_for_one(replicas: int, in_turn: bool) -> None:
    network = simulated(replicas)
    network.nodes[replicas - 1] = Hasty(network, replicas - 1, in_turn=in_turn)
    honest, _ = run(network, replicas - 1)
    assert honest[0].view.members == tuple(range(replicas - 1))
