"""One malicious member among four: no other one ends, stalls, grows without bound, or applies another round.

The attacker is a rank of the package's own classes whose messages are changed, so each attack is one row.
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from diloco.membership import Policy, Report
from diloco.protocol import Policies, change_message
from tests.membership.network import Limits, Network
from tests.protocol.simulated_rank import TIMEOUT_S, Rank

Message = Mapping[str, Any]
Forgery = Callable[[int, Message], Iterable[Message]]
"""(receiver, message of an honest member) -> the messages that the attacker sends instead."""

HONEST = (0, 1, 2)
LIAR = 3
MAX_MEMORY_BYTES = 64 << 20
POLICIES = Policies(Policy(), continue_without_lost=True, raise_on_loss=False, connect_timeout_s=1.0)


class Member(Rank):
    """A member that drops the sender of a malformed message, as the connections of a process do."""

    STEPS = 9

    def receive(self, sender: int, message: str) -> None:
        self.hear_garbage(sender, json.loads(message))


def instead(kind: str, to: Iterable[int] = HONEST, **fields: Any) -> Forgery:
    """Change these fields in each message of a kind to some of the others."""
    return lambda receiver, message: [{**message, **fields} if message["kind"] == kind and receiver in to else message]


def also(kind: str, times: int = 1, **fields: Any) -> Forgery:
    """After each message of a kind, send copies with these fields changed; a number n in ``fields`` counts up."""

    def forgery(receiver: int, message: Message) -> Iterable[Message]:
        yield message
        if message["kind"] == kind:
            for number in range(times):
                yield {**message, **{key: value(number) if callable(value) else value for key, value in fields.items()}}

    return forgery


def once(*messages: Message, times: int = 1) -> Forgery:
    """Send these messages once to each of the others, before the first header."""
    unsent = {*HONEST}

    def forgery(receiver: int, message: Message) -> Iterable[Message]:
        if message["kind"] == "header" and receiver in unsent:
            unsent.remove(receiver)
            for _ in range(times):
                yield from messages
        yield message

    return forgery


def without(kind: str) -> Forgery:
    return lambda receiver, message: [] if message["kind"] == kind else [message]


def report(**facts: Any) -> Message:
    """A report that begins a view change."""
    return change_message(Report(LIAR, 0, **facts), "a lie")


LISTS = {"x": [[]] * 3000}
NO = {"ok": False, "digest": "", "reason": "no"}
ATTACKS: dict[str, Callable[[], Forgery]] = {
    "none": lambda: without(""),
    "one is gone": lambda: once(report(gone=frozenset({0}))),
    "all others are gone": lambda: once(report(gone=frozenset(HONEST))),
    "nobody hears anybody": lambda: once(report(unheard=frozenset((a, b) for a in HONEST for b in HONEST if a != b))),
    "200 strangers join": lambda: once(report(joining=frozenset(range(10, 210)))),
    "reports about a far view": lambda: once({**report(), "view": 1 << 40, "why": "x" * 60_000}, times=200),
    "a report nested 30 levels deep": lambda: once({**report(), "agreed": json.loads("[" * 30 + "]" * 30)}),
    "exclusion": lambda: once({"kind": "excluded", "view": 0, "reason": "go"}),
    "replacement": lambda: once({"kind": "replaced"}),
    "welcomes full of lists": lambda: once({"kind": "welcome", "view": 0, "members": [3], "note": LISTS}, times=30),
    "refusals": lambda: once({"kind": "refused", "reason": "x" * 9000, "for_good": True}, times=50),
    "meetings with many names": lambda: once(*({"kind": "meet", "name": str(n), "value": 1} for n in range(1000))),
    "an early stop": lambda: once({"kind": "meet", "name": "stop", "value": 1}),
    "an infinite speed": lambda: once({"kind": "speed", "steps_per_s": "inf"}),
    "an unknown kind": lambda: once({"kind": "k" * 60_000}),
    "no to every round": lambda: instead("vote", **NO),
    "no to one, yes to the others": lambda: instead("vote", to=[0], **NO),
    "another digest to one": lambda: instead("vote", to=[0], digest="another"),
    "all have diverged": lambda: instead("vote", ok=False, diverged=[*HONEST], donor=LIAR),
    "a reason with escapes": lambda: instead("vote", ok=False, digest="", reason="\x1b]0;owned\x07" * 500),
    "votes on rounds that don't exist": lambda: also("vote", times=40, round=lambda number: [0, number + 50]),
    "headers of rounds that don't exist": lambda: also("header", times=40, round=lambda number: [0, number + 50]),
    "another header to one": lambda: instead("header", to=[0], weight="7.0"),
    "a second header": lambda: also("header", weight="3.0"),
    "a weight of NaN": lambda: instead("header", weight="nan"),
    "a weight of 1e308": lambda: instead("header", weight="1e308"),
    "a negative weight": lambda: instead("header", weight="-1.0"),
    "2^53 values": lambda: instead("header", numel=1 << 53),
    "2^60 buffers": lambda: instead("header", buffers=1 << 60),
    "another state": lambda: instead("header", digest="another"),
    "fetching the state for ever": lambda: instead("header", taking_over=True),
    "no header": lambda: without("header"),
    "no vote": lambda: without("vote"),
    "everything twice": lambda: lambda receiver, message: [message, message],
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_a_malicious_member_harms_nobody(name: str) -> None:
    network = Network(range(4), Limits())
    honest = [Member(network, rank, 4, 1, POLICIES) for rank in HONEST]
    liar = Member(network, LIAR, 4, 1, POLICIES)
    liar.lie = ATTACKS[name]()
    network.nodes.update(enumerate([*honest, liar]))
    tracemalloc.start()
    longest_s = run(network, honest)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [each.left for each in honest] == ["", "", ""]
    assert [len(each.outcomes) for each in honest] == [Member.STEPS] * 3, "a round was never decided"
    assert len({tuple(sorted(each.outcomes.items())) for each in honest}) == 1, "a round was applied by some"
    for step in honest[0].averages:
        assert len({each.averages[step].contributors for each in honest}) == 1
    assert longest_s <= TIMEOUT_S + 1.0
    assert peak_bytes < MAX_MEMORY_BYTES
    shown = [str(each) for member in honest for each in (*member.errors.values(), *(v.reason for v in member.changes))]
    assert all(text.isprintable() for text in shown)


def run(network: Network, honest: list[Member]) -> float:
    """Run until nothing is left to do, firing the earliest timer whenever all wait; return the longest pause."""
    longest_s = now_s = progress_s = 0.0
    decided, due_s = 0, dict[Any, float]()
    while sum(len(each.outcomes) for each in honest) < Member.STEPS * len(honest):
        moved = False
        for what, one, other in network.choices():
            if network.can(what, one, other):
                network.happen(what, one, other, 0)
                moved = True
        moved = any([network.nodes[rank].act() for rank in sorted(network.alive)]) or moved
        if (count := sum(len(each.outcomes) for each in honest)) > decided:
            decided, progress_s = count, now_s
        if moved:
            continue
        timers = [(due_s.setdefault((each.rank, timer), now_s + delay_s), each.rank, number, timer)
                  for each in honest for number, (delay_s, timer) in enumerate(each.timers)]  # fmt: skip
        if not timers:
            break
        at_s, rank, number, timer = min(timers, key=lambda entry: entry[0])
        now_s = max(now_s, at_s)
        longest_s = max(longest_s, now_s - progress_s)
        del due_s[rank, timer]
        for each in honest:
            each.now_s = now_s
            for other in network.ranks:
                if other != each.rank:
                    network.send(other, each.rank, json.dumps({"kind": "beat"}))
        honest[rank].suffer("timers", number)
    return longest_s
