"""Feeds every parser of messages and files with generated inputs. A parser may raise nothing but its refusal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from benchmarks.hostile.members import HEADER, VOTE
from diloco.data import Shares
from diloco.errors import DiLoCoError
from diloco.membership import Report, SignedVote, View
from diloco.protocol import (
    Entry,
    Faults,
    Header,
    RoundVote,
    change_message,
    faults_message,
    json_object,
    next_view,
    read,
    read_answer,
    read_faults,
    speed_of,
)
from diloco.transport import (
    Admission,
    Description,
    PeerRecord,
    PeerReport,
    SwarmTable,
    new_secret,
    owner_of,
    parse_address,
    read_frame,
    status_of,
)
from diloco.units import visible

__all__ = ["PARSERS", "feed", "fuzz"]

Parser = tuple[st.SearchStrategy[Any], Callable[[Any], object]]

_NUMBERS = (
    st.integers()
    | st.floats()
    | st.sampled_from(
        [0, -1, 1 << 31, (1 << 31) - 1, 1 << 53, 1 << 63, 10**400, 1e308, float("inf"), float("nan"), True]
    )
)
_TEXTS = st.text(max_size=20) | st.sampled_from(["", "\x1b[2J", "\u202e", "1e400", "nan", "x" * 300, "\ud800", "a:1"])
VALUES = st.recursive(
    st.none() | st.booleans() | _NUMBERS | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=2),
    max_leaves=6,
)
_BYTES = (
    st.binary(max_size=300)
    | VALUES.map(lambda value: json.dumps(value, ensure_ascii=True).encode())
    | st.text(alphabet='{}[]",:0123456789e.-+nulrtafsEN\\ud8', max_size=300).map(str.encode)
)

_VIEW = View(0, (0, 1, 2))
_REPORT = change_message(
    Report(
        1,
        0,
        unheard=frozenset({(0, 1)}),
        behind=frozenset({(1, 2)}),
        gone=frozenset({2}),
        joining=frozenset({5}),
        left=frozenset({(1, 2)}),
        left_commits=frozenset({(0, 1, "d")}),
        step=3,
        commits={(0, 1): "d"},
        void=frozenset({(-1, 3)}),
        voted={(0, 2): "d"},
        heard={0: "d"},
        shown=frozenset({SignedVote(0, (0, 2), True, "d", "s")}),
    ),
    "lost",
)
_ADOPTED = {
    "kind": "adopted",
    "view": 0,
    "members": [0, 1],
    "from_step": 3,
    "commits": [[0, 1, "d"]],
    "void": [],
    "reason": "x",
    "joined": [],
    "left": [[2, 4]],
}
_ENTRY = {"rank": 3, "address": "a:1", "facts": {"seed": "0"}, "held_step": -1, "places": ["/ip4/1.2.3.4"]}
_TABLE = {"swarm": "s", "entries": [_ENTRY], "members": [3], "step": 1, "founded_step": 0}
_OFFER = {
    "kind": "offer",
    "skeleton": {"dict": {"x": {"tensor": "x"}}},
    "tensors": {"x": ["torch.float32", [2]]},
    "bytes": 8,
    "blocks": ["0" * 16],
    "snapshot": "ecdc6f45db784be8",
}
_SHARES = {"chain": [[0, [0, 1], 0, []]], "aside": []}
_FAULTS = faults_message({3: Faults(spoilt=3, late=1)}, me=0)
_STATUS = {
    "kind": "status",
    "state": "training",
    "step": 3,
    "members": [0, 1],
    "sent_bytes": 5,
    "pace": 1.0,
    "faults": _FAULTS,
}
_ADMISSION = Admission("run", new_secret())
_RECORD = PeerRecord("Qm", 3, "swarm", 7, ("/ip4/10.0.0.1/tcp/4",), True, 2, "was", _VIEW)


def damaged(message: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for copies of a message with fields changed, added or removed."""
    changed = st.dictionaries(st.sampled_from(sorted(message)), VALUES, max_size=3)
    left_out = st.sets(st.sampled_from(sorted(message)), max_size=1)
    return st.builds(
        lambda fields, out: {name: value for name, value in (dict(message) | fields).items() if name not in out},
        changed,
        left_out,
    )


def _frame(data: bytes) -> object:
    async def reading() -> object:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        with contextlib.suppress(EOFError):
            return await read_frame(reader, 1 << 14, 1 << 12)
        return None

    return asyncio.run(reading())


def _row(answer: dict[str, Any]) -> object:
    from diloco.cli.status import row

    cells = row(PeerReport("Qm", 3, status_of(answer)), "no answer")
    assert all(cell.isprintable() for cell in cells), "escapes"
    return cells


def _record(fields: dict[str, Any]) -> object:
    words = {name: value for name, value in fields.items() if name != "proof"}
    text = json.dumps(words, sort_keys=True)
    return PeerRecord.from_bytes(
        "Qm", json.dumps(words | {"proof": _ADMISSION.of_record("Qm", text)}).encode(), _ADMISSION
    )


def _visible(text: str) -> object:
    assert visible(text).isprintable(), "escapes"
    return None


PARSERS: dict[str, Parser] = {
    "JSON": (_BYTES, json_object),
    "a frame": (
        st.builds(lambda n, data: b"DLC1" + n.to_bytes(4, "big") + bytes(8) + data, st.integers(0, 400), _BYTES)
        | st.binary(max_size=64),
        _frame,
    ),
    "a text of another": (_TEXTS, _visible),
    "a report": (damaged(_REPORT), lambda message: read(1, message, _VIEW)),
    "what was agreed": (damaged(_ADOPTED).map(lambda a: _REPORT | {"agreed": [3, a]}), lambda m: read(1, m, _VIEW)),
    "a vote": (damaged(VOTE), lambda message: read(1, message, _VIEW)),
    "a vote alone": (damaged(VOTE), RoundVote.from_message),
    "a header": (damaged(HEADER), Header.from_message),
    "a leaving": (
        damaged({"kind": "leaving", "view": 0, "step": 3, "commits": [[0, 1, "d"]]}),
        lambda message: read(1, message, _VIEW),
    ),
    "what was adopted": (damaged(_ADOPTED), lambda message: next_view(message, _VIEW)),
    "a welcome": (damaged(_ADOPTED | {"note": {}}), lambda message: read_answer(message | {"kind": "welcome"}, _VIEW)),
    "a refusal": (damaged({"reason": "no", "for_good": True}), lambda m: read_answer(m | {"kind": "refused"}, _VIEW)),
    "a speed": (damaged({"steps_per_s": "2.5"}), speed_of),
    "an entry": (damaged(_ENTRY), Entry.from_message),
    "a table": (damaged(_TABLE), SwarmTable.from_message),
    "a record": (damaged(json.loads(_RECORD.to_bytes(_ADMISSION))), _record),
    "a record's bytes": (_BYTES, lambda data: PeerRecord.from_bytes("Qm", data, _ADMISSION)),
    "a record's owner": (st.binary(max_size=200), owner_of),
    "a status": (damaged(_STATUS) | st.dictionaries(_TEXTS, VALUES, max_size=5), _row),
    "faults of others": (damaged(_FAULTS), read_faults),
    "an offer of state": (damaged(_OFFER), lambda message: Description.from_message(message, 1 << 20)),
    "shares of the data": (damaged(_SHARES), Shares.from_message),
    "an address": (_TEXTS | st.text(alphabet="[]:0123456789abcdef.", max_size=30), parse_address),
}
"""Name -> the strategy for its inputs, and the parser."""


def fuzz(minutes: float, examples: int = 50) -> dict[str, Any]:
    """Feed all parsers in turn, with new examples each time.

    Returns:
        The minutes, the total number of examples, the number for each parser, and for each parser that failed what it
        raised other than a refusal, with the example. A parser that failed gets no more examples.
    """
    until_s, counts, failures = time.monotonic() + 60 * minutes, dict.fromkeys(PARSERS, 0), dict[str, str]()
    while time.monotonic() < until_s:
        for name, (strategy, parse) in PARSERS.items():
            if name not in failures and time.monotonic() < until_s:
                tried, failure = feed(strategy, parse, examples)
                counts[name] += tried
                if failure:
                    failures[name] = failure
    return {"minutes": minutes, "examples": sum(counts.values()), "parsers": counts, "failures": failures}


def feed(strategy: st.SearchStrategy[Any], parse: Callable[[Any], object], examples: int) -> tuple[int, str]:
    """Return the number of examples given to a parser, and what it raised other than a refusal, or an empty string."""
    tried, failures = 0, [""]

    @seed(random.getrandbits(64))
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def one(example: Any) -> None:
        nonlocal tried
        tried += 1
        try:
            with contextlib.suppress(ValueError, DiLoCoError):
                parse(example)
        except Exception as error:
            failures[0] = f"{type(error).__name__}: {visible(str(error))} of {visible(repr(example), 400)}"

    one()
    return tried, failures[0]
