"""Attacks on a swarm over libp2p by a non-member that has the secret and opens streams to one of two members."""

from __future__ import annotations

import atexit
import json
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from benchmarks.hostile.attack import Attack, Outcome
from benchmarks.hostile.doors import memory_bytes
from diloco.transport import new_secret
from tests.transport.swarms import Swarms
from tests.transport.test_swarm_strangers import AFTER_HELLO, OPENINGS, Live, Stranger, frame, hello

__all__ = ["ATTACKS"]

_SECRET = new_secret()


@cache
def live() -> Live:
    """Return the swarm that all rows share."""
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    swarms = Swarms(folder)
    members = swarms.meet(2, secret=_SECRET)
    stranger = Stranger(folder / "stranger.key", _SECRET, swarms.addresses_of(members[0]))
    atexit.register(swarms.close)
    atexit.register(stranger.close)
    return Live(members, stranger)


def stream(name: str, opening: bytes, before: str = "", *, proof: bool = True) -> Attack:
    """Return a row for a stream that begins with ``opening``, after a valid proof or without one."""

    def run() -> Outcome:
        there = live()
        before_bytes, began_s, ended, equal = memory_bytes(), time.monotonic(), 0, True
        there.stranger.say(there.target, opening, proof=proof)
        try:
            there.still_works()  # both must commit a round
        except AssertionError:
            equal = False
        except Exception:
            ended = 1
        return Outcome(
            ended=ended + sum(member.failure is not None for member in there.members),
            stall_s=round(time.monotonic() - began_s, 2),
            memory_bytes=max(0, memory_bytes() - before_bytes),
            rounds=1,
            void=ended,
            digests_equal=equal,
        )

    return Attack(name=f"libp2p: {name}", who="stranger", where="swarm", run=run, before=before)


def _attacks() -> Iterator[Attack]:
    for name, opening in OPENINGS.items():
        yield stream(name, opening)
    for name, message in AFTER_HELLO.items():
        yield stream(f"{name}, after a hello", hello(9) + frame(json.dumps(message).encode()))
    yield stream("nothing that proves anything", b"", proof=False)
    yield stream("31 bytes instead of a proof", bytes(31), proof=False)
    yield stream("a wrong proof", bytes(32), "turned away", proof=False)
    yield stream("1 MiB instead of a proof", bytes(1 << 20), "turned away", proof=False)


ATTACKS = list(_attacks())
