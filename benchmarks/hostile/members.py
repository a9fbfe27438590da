"""Attacks by a malicious member."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.hostile.attack import Attack, Outcome
from benchmarks.hostile.simulated import Forgery, attacked_by_member
from diloco.protocol import RoundVote
from tests.protocol.simulated_rank import secret_of

__all__ = ["ATTACKS"]

Message = Mapping[str, Any]
_OTHERS = [0, 1, 2]
"""The honest members; the attacker is replica 3."""


def instead(kind: str, **fields: Any) -> Forgery:
    """Replace these fields in each message of a kind; send the rest as an honest member would."""

    def forgery(receiver: int, message: Message) -> Iterable[Message]:
        yield {**message, **fields} if message["kind"] == kind else message

    return forgery


def honest(receiver: int, message: Message) -> Iterable[Message]:
    """Send every message unchanged."""
    yield message


def twice(receiver: int, message: Message) -> Iterable[Message]:
    yield from (message, message)


def replays() -> Forgery:
    """Repeat with each message everything sent so far, up to a hundred messages."""
    sent: list[Message] = []

    def forgery(receiver: int, message: Message) -> Iterable[Message]:
        sent.append(message)
        yield message
        yield from sent[:100]

    return forgery


def silent(kind: str) -> Forgery:
    def forgery(receiver: int, message: Message) -> Iterable[Message]:
        if message["kind"] != kind:
            yield message

    return forgery


def to_one(kind: str, **fields: Any) -> Forgery:
    """Replace these fields only in messages to replica 0."""

    def forgery(receiver: int, message: Message) -> Iterable[Message]:
        yield {**message, **fields} if message["kind"] == kind and receiver == 0 else message

    return forgery


def signs(to: Sequence[int], **vote: Any) -> Forgery:
    """Send the replicas ``to`` a different vote than the others, also signed."""

    def forgery(receiver: int, message: Message) -> Iterable[Message]:
        if message["kind"] == "vote" and receiver in to:
            view = message["view"]
            yield RoundVote.from_message({**message, **vote}).signed(view, secret_of(len(_OTHERS))).to_message(view)
        else:
            yield message

    return forgery


def two_headers(receiver: int, message: Message) -> Iterable[Message]:
    yield message
    if message["kind"] == "header":
        yield {**message, "weight": "3.0"}


def changes_often(receiver: int, message: Message) -> Iterable[Message]:
    yield message
    for n in range(10):
        yield change(message.get("view", 0), why=f"again {n}")


def change(view: int, **fields: Any) -> dict[str, Any]:
    """Return a report for a view change."""
    lists = ("unheard", "behind", "gone", "joining", "voted", "left", "left_commits", "heard", "shown")
    empty: dict[str, Any] = {name: [] for name in lists}
    more = {"step": 1, "commits": [], "void": [], "ready": False, "agreed": None, "why": "a lie"}
    return {"kind": "change", "view": view, **empty, **more, **fields}


def adopted(view: int, members: Sequence[int], **fields: Any) -> dict[str, Any]:
    """Return the message that a next view was adopted."""
    empty: dict[str, Any] = {name: [] for name in ("commits", "void", "joined", "left")}
    return {"kind": "adopted", "view": view, "members": list(members), "from_step": 1, "reason": "", **empty, **fields}


def entry(rank: int, *, address: str = "a:1", facts: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the fields with which a rank describes itself."""
    return {"rank": rank, "address": address, "facts": dict(facts or {}), "held_step": -1, "places": []}


VOTE = {
    "kind": "vote",
    "view": 0,
    "round": [0, 1],
    "ok": True,
    "digest": "d",
    "reason": "",
    "signature": "",
    "diverged": [],
    "donor": -1,
}
HEADER = {
    "kind": "header",
    "view": 0,
    "round": [0, 1],
    "numel": 2,
    "weight": "1.0",
    "base_weight": "1.0",
    "digest": "d",
    "buffers": None,
    "integers": None,
    "withdrawn": "",
    "taking_over": False,
    "key": "",
    "uplink_bits_per_s": 0,
    "uplink_full": False,
}
_DEEP: Any = []
for _ in range(30):
    _DEEP = [_DEEP]


def forges(name: str, forgery: Forgery | Callable[[], Forgery], before: str = "", *, provable: bool = False) -> Attack:
    """Return a row for a member that changes its messages, among three honest ones."""

    def run() -> Outcome:
        return attacked_by_member(forgery() if forgery is replays else forgery)  # type: ignore[arg-type]

    return Attack(name=name, who="member", where="simulated", run=run, before=before, provable=provable)


def sends(name: str, messages: Sequence[Message], before: str = "", *, provable: bool = False) -> Attack:
    """Return a row for a member that follows the protocol and also sends these messages."""

    def run() -> Outcome:
        return attacked_by_member(honest, extra=messages)

    return Attack(name=name, who="member", where="simulated", run=run, before=before, provable=provable)


ATTACKS = [
    forges("no lie at all", honest, "no harm"),
    Attack(
        name="values of 1e37, which make each mean infinite",
        who="member",
        where="simulated",
        run=lambda: attacked_by_member(honest, unusable=True),
        before="all end with NaN",
        provable=True,
    ),
    # One message is enough.
    sends("it hears nobody any more", [change(0, unheard=[[3, m] for m in _OTHERS])], "all exit"),
    sends(
        "nobody hears anybody", [change(0, unheard=[[a, b] for a in range(4) for b in range(4) if a != b])], "all exit"
    ),
    sends("all others are gone", [change(0, gone=_OTHERS)], "all exit"),
    sends("all others are late", [change(0, behind=_OTHERS)]),
    sends("all others have left", [change(0, left=[[m, 3] for m in _OTHERS])]),
    sends("one other is gone", [change(0, gone=[0])]),
    sends("excluded by a huge view", [{"kind": "excluded", "view": 1 << 50, "reason": "go"}], "all exit"),
    sends("excluded from this view", [{"kind": "excluded", "view": 0, "reason": "go"}], "all exit"),
    sends("replaced", [{"kind": "replaced"}], "all exit"),
    sends(
        "a vote that all have diverged, donor me",
        [{**VOTE, "ok": False, "digest": "", "reason": "all", "diverged": _OTHERS, "donor": 3}],
        "48 of 48 rounds void, its state loaded",
    ),
    forges(
        "all have diverged, in every vote", instead("vote", ok=False, diverged=_OTHERS, donor=3), "its state loaded"
    ),
    forges("yes to one, no to the others", to_one("vote", ok=False, digest="", reason="no"), "digests differ"),
    forges("another digest to one", to_one("vote", digest="another"), "digests differ"),
    forges("a signed no to one", signs([0], ok=False, digest="", reason="no"), "digests differ", provable=True),
    forges("a signed no to two", signs([0, 1], ok=False, digest="", reason="no"), "digests differ", provable=True),
    forges("another signed digest to one", signs([0], digest="another"), "digests differ", provable=True),
    forges("another header to one", to_one("header", weight="7.0"), "all rounds void"),
    forges("two headers to all", two_headers, "all rounds void"),
    sends("the number 2^40 wants to join", [change(0, joining=[1 << 40])], "they throw each other out"),
    sends("the number -3 wants to join", [change(0, joining=[-3])], "registered"),
    sends("a thousand that are not there want to join", [change(0, joining=list(range(10, 1010)))]),
    sends(
        "votes on 3,000 rounds that don't exist", [{**VOTE, "round": [0, n]} for n in range(50, 3050)], "stands still"
    ),
    sends(
        "votes on 5,000 rounds that don't exist", [{**VOTE, "round": [0, n]} for n in range(50, 5050)], "stands still"
    ),
    sends(
        "votes on 2,000 fragments that don't exist",
        [{**VOTE, "round": [n, 0]} for n in range(50, 2050)],
        "stands still",
    ),
    sends("headers of 3,000 rounds that don't exist", [{**HEADER, "round": [0, n]} for n in range(50, 3050)]),
    sends("reports about a view far away, 500", [change(1 << 40, why="x" * 60_000)] * 500, "+772 MB"),
    sends("votes in a view far away, 5,000", [{**VOTE, "view": 1 << 40}] * 5000),
    sends(
        "meetings with long names",
        [{"kind": "meet", "name": str(n) * 20_000, "value": 1} for n in range(300)],
        "+789 MB",
    ),
    sends("meetings with many names", [{"kind": "meet", "name": str(n), "value": 1} for n in range(3000)], "+789 MB"),
    sends("a meeting to stop at step 2^53", [{"kind": "meet", "name": "stop", "value": 1 << 53}]),
    sends("a meeting to stop at step 2^70", [{"kind": "meet", "name": "stop", "value": 1 << 70}]),
    sends(
        "welcomes that nobody has asked for",
        [adopted(0, [3]) | {"kind": "welcome", "note": {"x": [[]] * 1000}}] * 200,
        "stalls of 5 to 8 s",
    ),
    sends("refusals that nobody has asked for", [{"kind": "refused", "reason": "x" * 9000, "for_good": True}] * 2000),
    # In every round.
    forges("no to each round", instead("vote", ok=False, reason="I do not like it"), "all rounds void", provable=False),
    forges("a reason with escapes", instead("vote", ok=False, reason="\x1b]0;owned\x07\x1b[2J"), "escapes printed"),
    forges("a reason of 60 kB", instead("vote", ok=False, reason="x" * 60_000), "60 kB in every log line"),
    forges("a reason that turns the writing", instead("vote", ok=False, reason="\u202e\u2066abc"), "printed"),
    forges("a weight of NaN", instead("header", weight="nan"), "all rounds void", provable=True),
    forges("a weight of infinity", instead("header", weight="inf"), "all rounds void", provable=True),
    forges("a weight below zero", instead("header", weight="-1.0"), "all rounds void", provable=True),
    forges("a weight of zero", instead("header", weight="0.0"), "", provable=True),
    forges("a weight of 1e18", instead("header", weight="1e18"), "loss 3.0 to 8.2"),
    forges("a weight of 1e308", instead("header", weight="1e308"), "NaN in all replicas"),
    forges("a weight in 60 kB of digits", instead("header", weight="1" * 60_000), "", provable=True),
    forges("a weight that is no text", instead("header", weight=1.0), "given up", provable=True),
    forges("another number of values", instead("header", numel=3), "all rounds void", provable=True),
    forges("2^53 values", instead("header", numel=1 << 53), "all rounds void", provable=True),
    forges("-1 values", instead("header", numel=-1), "given up", provable=True),
    forges("2^48 buffers", instead("header", buffers=1 << 48), "all rounds void", provable=True),
    forges("2^60 buffers", instead("header", buffers=1 << 60), "given up", provable=True),
    forges("buffers that no one else has", instead("header", buffers=4), "all rounds void", provable=True),
    forges("another state", instead("header", digest="another"), "all rounds void"),
    forges("a digest of 60 kB", instead("header", digest="x" * 60_000), "kept", provable=True),
    forges("each contribution is withdrawn", instead("header", withdrawn="\x1b[31mno"), "escapes printed"),
    forges("an uplink of 1 bit/s", instead("header", uplink_bits_per_s=1, uplink_full=True)),
    forges("an uplink of 2^62 bit/s", instead("header", uplink_bits_per_s=1 << 62, uplink_full=True)),
    forges("a full uplink of 0 bit/s", instead("header", uplink_bits_per_s=0, uplink_full=True)),
    forges("another uplink to one", to_one("header", uplink_bits_per_s=1, uplink_full=True)),
    forges("an uplink of -1 bit/s", instead("header", uplink_bits_per_s=-1), provable=True),
    forges("it is taking over, for ever", instead("header", taking_over=True)),
    forges("it never votes", silent("vote"), "all rounds void"),
    forges("it never contributes", silent("header"), "stalls"),
    forges("it never reports", silent("change")),
    forges("everything twice", twice),
    forges("everything again and again", replays),
    forges("a report ten times with each message", changes_often, "stalls of 2 to 10 s"),
    # Forged messages.
    sends("a view without the others was adopted", [adopted(0, [3])], "rounds void"),
    sends("a view that nobody is in was adopted", [adopted(0, [])], "rounds void"),
    sends("a view of descending members was adopted", [adopted(0, [3, 2, 1])], "rounds void"),
    sends("nobody goes on", [adopted(0, []) | {"members": None}], "rounds void"),
    sends(
        "rounds are committed that were not", [change(0, commits=[[0, 9, "x"], [1, 9, "x"]])], "forged commits taken"
    ),
    sends("rounds were void that were not", [change(0, void=[[0, n] for n in range(1, 9)])]),
    sends(
        "it leaves with forged commits",
        [{"kind": "leaving", "view": 0, "step": 1, "commits": [[0, 9, "x"]]}],
        "forged commits taken",
    ),
    sends("it leaves after step 2^53", [{"kind": "leaving", "view": 0, "step": 1 << 53, "commits": []}]),
    sends("it has agreed to a view of its own", [change(0, ready=True, agreed=[1 << 50, adopted(0, [3])])]),
    sends("a report without fields", [{"kind": "change", "view": 0}], "given up"),
    sends("a report with a list for a number", [change(0, step=[[1]])], "given up"),
    sends("a report nested 30 levels deep", [change(0, agreed=_DEEP)], "given up"),
    sends("a report in which all is text", [change(0, unheard="all", gone="all")], "given up"),
    sends("65,536 are missing", [change(0, gone=list(range(65_536)))]),
    sends("65,537 are missing", [change(0, gone=list(range(65_537)))]),
    sends("steps of 2^53", [change(0, step=1 << 53)]),
    sends("a vote that is no vote", [{"kind": "vote", "view": 0}], "given up"),
    sends("a vote with a number for ok", [{**VOTE, "ok": 1}], "given up"),
    sends("a vote on round -2", [{**VOTE, "round": [-2, 0]}], "given up"),
    sends("a header of no round", [{**HEADER, "round": []}], "given up"),
    sends("a donor that can't be", [{**VOTE, "ok": False, "diverged": [0], "donor": 1 << 40}], "given up"),
    sends("nothing known", [{"kind": "launch"}], "given up"),
    sends("a kind in 60 kB", [{"kind": "k" * 60_000}], "given up"),
    # Messages outside of rounds.
    sends("a speed of 1e308", [{"kind": "speed", "steps_per_s": "1e308"}], "the others idle"),
    sends("a speed of infinity", [{"kind": "speed", "steps_per_s": "inf"}], "given up"),
    sends("a speed below zero", [{"kind": "speed", "steps_per_s": "-1"}], "given up"),
    sends("a speed in 60 kB", [{"kind": "speed", "steps_per_s": "9" * 60_000}]),
    sends(
        "facts of another one",
        [{"kind": "facts", "answer": False, **entry(0)}],
        "given up",
    ),
    sends(
        "facts with escapes",
        [{"kind": "facts", "answer": False, **entry(3, facts={"seed": "\x1b[2J"})}],
        "escapes printed",
    ),
    sends(
        "300 facts",
        [{"kind": "facts", "answer": True, **entry(3, facts={str(n): "" for n in range(300)})}],
    ),
    sends("an introduction of nobody", [{"kind": "introduce", "entry": {"rank": 1 << 40}}], "given up"),
    sends(
        "it asks to join in the name of another one",
        [{"kind": "join", **entry(0), "connected": []}],
        "given up",
    ),
    sends(
        "it asks to join although it is a member, 300 times",
        [{"kind": "join", **entry(3, address="simulated:3"), "connected": [0, 1, 2, 3]}] * 300,
    ),
]
