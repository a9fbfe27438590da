"""Malicious donors that a joiner asks for the state along with honest ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from benchmarks.hostile.attack import Attack, Outcome
from benchmarks.hostile.doors import frame, memory_bytes
from tests.same import same_values
from tests.transport.state_donors import Donor, Fetcher, lying, state
from tests.transport.test_state_lies import LIES

__all__ = ["ATTACKS"]

_NUMEL = 200_000
Change = Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]


def with_honest_donors(
    name: str, make: Callable[[], Donor], before: str = "", *, honest: int = 1, **fetch: Any
) -> Attack:
    """Return the attack: a joiner asks this donor and ``honest`` honest ones, and must adopt the honest state."""

    def run() -> Outcome:
        held, fetcher = state(numel=_NUMEL), Fetcher()
        made = [make(), *(Donor(state(numel=_NUMEL)) for _ in range(honest))]
        began_s, before_bytes, ended = time.monotonic(), memory_bytes(), 0
        try:
            same = same_values(fetcher.fetch(dict(enumerate(made)), **fetch), {**held, "fragment": 0})
        except Exception as error:
            same, ended = not isinstance(error, AssertionError), 1
        finally:
            took_s = time.monotonic() - began_s
            fetcher.close()
            for each in made:
                each.connections.close()
        grown = max(0, memory_bytes() - before_bytes)
        return Outcome(ended=ended, stall_s=round(took_s, 2), memory_bytes=grown, digests_equal=bool(same))

    return Attack(name=f"a donor: {name}", who="member", where="connection", run=run, before=before)


def answering(answer: Callable[[dict[str, Any]], bytes | None]) -> Donor:
    """Return a donor that replies to each request with ``answer(request)``, or not at all if that is None."""
    donor = Donor(None)

    async def serve(message: dict[str, Any], reader: Any, writer: asyncio.StreamWriter) -> None:
        reply = answer(message)
        if reply is None:
            await asyncio.sleep(60.0)
        else:
            writer.write(reply)
            await writer.drain()

    donor.served_by(serve)
    return donor


def _not_finite() -> Donor:
    held = state(numel=_NUMEL)
    held["slots"]["momentum"][7] = float("nan")
    return Donor(held)


def _slow() -> Donor:
    return Donor(state(numel=_NUMEL), limit_bytes_per_s=20_000.0)


def _tampering(change: Change) -> Callable[[], Donor]:
    return lambda: lying(Donor(state(numel=_NUMEL)), change)


def _offer(**fields: Any) -> Change:
    def change(message: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        return ({**message, **fields} if message["kind"] == "offer" else message), blob

    return change


_DEEP: Any = {"dict": {}}
for _ in range(12):
    _DEEP = {"dict": {"x": _DEEP}}

ATTACKS = [
    *(with_honest_donors(change.__name__.replace("_", " "), _tampering(change)) for change, _ in LIES),
    with_honest_donors("NaN in its state", _not_finite, "refused"),
    with_honest_donors("20 kB a second", _slow, slow_s=2.0),
    with_honest_donors("silent", lambda: answering(lambda message: None), slow_s=0.5),
    with_honest_donors("no JSON", lambda: answering(lambda message: frame(b"{"))),
    with_honest_donors(
        "JSON with 1e400", lambda: answering(lambda message: frame(b'{"kind": "offer", "bytes": 1e400}'))
    ),
    with_honest_donors(
        "JSON 10,000 levels deep", lambda: answering(lambda message: frame(b'{"kind":' + b"[" * 10_000))
    ),
    with_honest_donors(
        "a refusal with escapes",
        lambda: answering(lambda message: frame(b'{"kind": "refused", "reason": "\\u001b[2J"}')),
    ),
    with_honest_donors("a skeleton 12 levels deep", _tampering(_offer(skeleton=_DEEP))),
    with_honest_donors("a skeleton that is a list", _tampering(_offer(skeleton=[[]]))),
    with_honest_donors("2^60 bytes", _tampering(_offer(bytes=1 << 60))),
    with_honest_donors("blocks that are none", _tampering(_offer(blocks=["\x1b[2J"]))),
    with_honest_donors("tensors that are none", _tampering(_offer(tensors={"\x1b[2J": ["torch.float32", [1]]}))),
    with_honest_donors("another state of fewer rounds", lambda: Donor(state(7, numel=_NUMEL, finished=0))),
    with_honest_donors("another state of as many rounds, beside two", lambda: Donor(state(7, numel=_NUMEL)), honest=2),
    with_honest_donors(
        "another state of 2^50 rounds, beside two",
        lambda: Donor(state(7, numel=_NUMEL, finished=1 << 50)),
        honest=2,
    ),
]
