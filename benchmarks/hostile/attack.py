"""One attack, and what the honest processes come to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from diloco.units import visible

__all__ = ["Attack", "Outcome", "Where"]

Where = Literal["simulated", "connection", "file", "swarm"]
"""``simulated``: machines of the protocol on a simulated network, whose time is that of the timers; ``connection``:
connections of a process on loopback; ``file``: what is read from a disk; ``swarm``: peers over libp2p."""

MOST_MEMORY_BYTES = 64 << 20
ROUND_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of the honest.

    Attributes:
        ended: honest processes that ended.
        stall_s: the longest time in which none of them came further.
        memory_bytes: by which one of them grew at most.
        void: rounds that were void; of all that were decided, ``rounds``.
        digests_equal: whether all that committed a round hold the same average.
        escapes: texts with characters that do not print, in what people would be shown.
        out_after: rounds until the liar was no member any more; None: it stayed, or never was one.
        refused: in what words, where the attack is to be refused.
    """

    ended: int = 0
    stall_s: float = 0.0
    memory_bytes: int = 0
    void: int = 0
    rounds: int = 0
    digests_equal: bool = True
    escapes: int = 0
    out_after: int | None = None
    refused: str = ""

    def harm(self, *, provable: bool = False) -> list[str]:
        """What is not as it should be; ``provable``: the liar is to be out within 3 rounds."""
        found = {
            f"{self.ended} ended": self.ended > 0,
            "digests differ": not self.digests_equal,
            f"stood still for {self.stall_s:.1f} s": self.stall_s > ROUND_TIMEOUT_S + 1.0,
            f"{self.memory_bytes >> 20} MiB more": self.memory_bytes > MOST_MEMORY_BYTES,
            f"{self.escapes} escapes": self.escapes > 0,
            "the liar is still there": provable and (self.out_after is None or self.out_after > 3),
        }
        return [words for words, is_so in found.items() if is_so]


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One row of the table.

    Attributes:
        name: in a few words.
        who: ``member``, ``joiner`` or ``stranger``, or ``file``.
        where: on what it is tried.
        run: tries it.
        before: what it did to version 0.5.0, in words; "" where nobody has tried.
        provable: whether what it does is a proof against the liar.
    """

    name: str
    who: str
    where: Where
    run: Callable[[], Outcome] = field(repr=False)
    before: str = ""
    provable: bool = False

    def row(self) -> dict[str, Any]:
        """Try it; one line of ``results.jsonl``."""
        try:
            outcome = self.run()
        except Exception as error:  # of an honest one, or of the benchmark: both are to be looked at
            outcome = Outcome(ended=1, refused=f"{type(error).__name__}: {visible(str(error))}")
        facts = {"name": self.name, "who": self.who, "where": self.where, "before": self.before}
        return {**facts, **asdict(outcome), "provable": self.provable, "harm": outcome.harm(provable=self.provable)}
