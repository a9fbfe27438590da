"""Malicious records of the DHT and answers of swarm peers, parsed without a network."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

from benchmarks.hostile.attack import Attack, Outcome
from benchmarks.hostile.doors import memory_bytes
from diloco.cli.status import row
from diloco.protocol import json_object
from diloco.transport import Admission, PeerRecord, PeerReport, SwarmTable, new_secret, status_of

__all__ = ["ATTACKS"]

ADMISSION = Admission("run")
SECRET = Admission("run", new_secret())
RECORD = PeerRecord("Qm", 3, "swarm", 7, ("/ip4/10.0.0.1/tcp/4",))


def reading(name: str, read: Callable[[], Any], before: str = "", who: str = "stranger") -> Attack:
    """Return the attack: parsing may raise nothing but `ValueError`, and its result must be printable."""

    def run() -> Outcome:
        began_s, before_bytes, ended, shown = time.monotonic(), memory_bytes(), 0, ""
        try:
            with contextlib.suppress(ValueError):
                shown = str(read())
        except Exception:  # would end a joiner or `diloco status`
            ended = 1
        return Outcome(
            ended=ended,
            stall_s=round(time.monotonic() - began_s, 2),
            memory_bytes=max(0, memory_bytes() - before_bytes),
            escapes=int(not shown.isprintable()),
        )

    return Attack(name=name, who=who, where="swarm", run=run, before=before)


def record(**fields: Any) -> Callable[[], Any]:
    """Return a reader of a record with these fields, proven with the name of the run."""

    def read() -> str:
        words = json.loads(RECORD.to_bytes(ADMISSION)) | fields
        del words["proof"]
        proof = ADMISSION.of_record("Qm", json.dumps(words, sort_keys=True))
        return str(PeerRecord.from_bytes("Qm", json.dumps(words | {"proof": proof}).encode(), ADMISSION))

    return read


def raw(data: bytes) -> Callable[[], Any]:
    return lambda: str(PeerRecord.from_bytes("Qm", data, ADMISSION))


def forged() -> str:
    """Read a record made without the secret, which must not count as proven."""
    found = PeerRecord.from_bytes("Qm", RECORD.to_bytes(ADMISSION), SECRET)
    assert not found.proven, "the forged record counts as proven"
    return ""


def status(**fields: Any) -> Callable[[], Any]:
    return lambda: " ".join(row(PeerReport("Qm", 3, status_of({"kind": "status", "step": 3} | fields)), "no answer"))


def table(**fields: Any) -> Callable[[], Any]:
    entry = {"rank": 3, "address": "Qm", "facts": {}, "held_step": -1, "places": []}
    whole = {"swarm": "s", "entries": [entry], "members": [3], "step": 1, "founded_step": 0}
    return lambda: SwarmTable.from_message(json_object(json.dumps(whole | fields).encode()))


_BEFORE = "a joiner and `diloco status` end"
ATTACKS = [
    reading("a record with 1e400", raw(b'{"number": 1e400}'), _BEFORE),
    reading("a record 3,000 levels deep", raw(b'{"number": ' + b"[" * 1900 + b"]" * 1900 + b"}"), _BEFORE),
    reading("a record of 60 kB", raw(b'{"swarm": "' + b"x" * 60_000 + b'"}')),
    reading("a record that is no JSON", raw(b"\xff\xfe")),
    reading("a record with the number 2^40", record(number=1 << 40), "registered"),
    reading("a record with the number -3", record(number=-3), "registered"),
    reading("a record with escapes in its swarm", record(swarm="\x1b[2J"), "escapes printed"),
    reading("a record with a view that is none", record(last=[1, 3, 2])),
    reading("a record with addresses that are none", record(addresses=[1, []])),
    reading("a forged record, with a secret", forged, "the secret doesn't cover the DHT"),
    reading("a status with escapes", status(state="\x1b]0;owned\x07\x1b[2J"), "escapes printed", "member"),
    reading("a status with sent_bytes 'x'", status(sent_bytes="x"), "`diloco status` raises", "member"),
    reading("a status with a speed that is a list", status(tokens_per_s=[]), "`diloco status` raises", "member"),
    reading("a status with 1e300 bytes", status(sent_bytes=1e300), "", "member"),
    reading("a status with an integer of 400 digits", status(step=10**400), "`diloco status` raises", "member"),
    reading("a status with members that are none", status(members={"a": 1}), "`diloco status` raises", "member"),
    reading("a status of 60 kB", status(state="x" * 60_000), "printed whole", "member"),
    reading("a table with the number 2^40", table(members=[1 << 40]), "they throw each other out", "member"),
    reading("a table without members", table(members=[]), "", "member"),
    reading("a table with members that are not in it", table(members=[4]), "", "member"),
    reading("a table of lists", table(entries=[[]], members=[[]]), "", "member"),
    reading("a table with escapes", table(swarm="\x1b[2J"), "escapes printed", "member"),
]
