"""Donors that hand over what nobody should take, beside an honest one; and askers that ask too much."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from benchmarks.hostile.attack import Attack, Outcome
from benchmarks.hostile.doors import frame, memory_bytes
from tests.same import same_values
from tests.transport.state_donors import Asker, Donor, lying, state
from tests.transport.test_state_lies import LIES

__all__ = ["ATTACKS"]

_NUMEL = 200_000
Change = Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]


def beside_an_honest_one(
    name: str, make: Callable[[], Donor], before: str = "", *, honest: int = 1, **fetch: Any
) -> Attack:
    """A joiner asks both, or one more honest one, for the state, and must get the honest one's."""

    def run() -> Outcome:
        held, asker = state(numel=_NUMEL), Asker()
        made = [make(), *(Donor(state(numel=_NUMEL)) for _ in range(honest))]
        began_s, before_bytes, ended = time.monotonic(), memory_bytes(), 0
        try:
            same = same_values(asker.fetch(dict(enumerate(made)), **fetch), {**held, "fragment": 0})
        except Exception as error:
            same, ended = not isinstance(error, AssertionError), 1
        finally:
            took_s = time.monotonic() - began_s
            asker.close()
            for each in made:
                each.connections.close()
        grown = max(0, memory_bytes() - before_bytes)
        return Outcome(ended=ended, stall_s=round(took_s, 2), memory_bytes=grown, digests_equal=bool(same))

    return Attack(name=f"a donor: {name}", who="member", where="connection", run=run, before=before)


def answering(answer: Callable[[dict[str, Any]], bytes | None]) -> Donor:
    """One that says what ``answer`` makes of a request, or nothing."""
    donor = Donor(None)

    async def serve(message: dict[str, Any], reader: Any, writer: asyncio.StreamWriter) -> None:
        said = answer(message)
        if said is None:
            await asyncio.sleep(60.0)
        else:
            writer.write(said)
            await writer.drain()

    donor.served_by(serve)
    return donor


def _not_finite() -> Donor:
    held = state(numel=_NUMEL)
    held["slots"]["momentum"][7] = float("nan")
    return Donor(held)


def _slow() -> Donor:
    return Donor(state(numel=_NUMEL), limit_bytes_per_s=20_000.0)


def _lie(change: Change) -> Callable[[], Donor]:
    return lambda: lying(Donor(state(numel=_NUMEL)), change)


def _offer(**fields: Any) -> Change:
    def change(message: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        return ({**message, **fields} if message["kind"] == "offer" else message), blob

    return change


_DEEP: Any = {"dict": {}}
for _ in range(12):
    _DEEP = {"dict": {"x": _DEEP}}

ATTACKS = [
    *(beside_an_honest_one(change.__name__.replace("_", " "), _lie(change)) for change, _ in LIES),
    beside_an_honest_one("NaN in its state", _not_finite, "refused"),
    beside_an_honest_one("20 kB a second", _slow, slow_s=2.0),
    beside_an_honest_one("silent", lambda: answering(lambda message: None), slow_s=0.5),
    beside_an_honest_one("no JSON", lambda: answering(lambda message: frame(b"{"))),
    beside_an_honest_one(
        "JSON with 1e400", lambda: answering(lambda message: frame(b'{"kind": "offer", "bytes": 1e400}'))
    ),
    beside_an_honest_one(
        "JSON 10,000 levels deep", lambda: answering(lambda message: frame(b'{"kind":' + b"[" * 10_000))
    ),
    beside_an_honest_one(
        "a refusal with escapes",
        lambda: answering(lambda message: frame(b'{"kind": "refused", "reason": "\\u001b[2J"}')),
    ),
    beside_an_honest_one("a skeleton 12 levels deep", _lie(_offer(skeleton=_DEEP))),
    beside_an_honest_one("a skeleton that is a list", _lie(_offer(skeleton=[[]]))),
    beside_an_honest_one("2^60 bytes", _lie(_offer(bytes=1 << 60))),
    beside_an_honest_one("blocks that are none", _lie(_offer(blocks=["\x1b[2J"]))),
    beside_an_honest_one("tensors that are none", _lie(_offer(tensors={"\x1b[2J": ["torch.float32", [1]]}))),
    beside_an_honest_one("another state of fewer rounds", lambda: Donor(state(7, numel=_NUMEL, finished=0))),
    beside_an_honest_one(
        "another state of as many rounds, beside two", lambda: Donor(state(7, numel=_NUMEL)), honest=2
    ),
    beside_an_honest_one(
        "another state of 2^50 rounds, beside two",
        lambda: Donor(state(7, numel=_NUMEL, finished=1 << 50)),
        honest=2,
    ),
]
