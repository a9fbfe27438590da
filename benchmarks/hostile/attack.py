"""One attack, and its effect on the honest processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from diloco.units import visible

__all__ = ["Attack", "Outcome", "Where"]

Where = Literal["simulated", "connection", "file", "swarm"]
"""``simulated``: protocol state machines on a simulated network, with the time of their timers; ``connection``: control
connections over loopback; ``file``: a file that a command reads; ``swarm``: peers over libp2p, their records and
answers."""

MOST_MEMORY_BYTES = 64 << 20
ROUND_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The effect of an attack on the honest processes.

    Attributes:
        ended: the number of honest processes that ended.
        stall_s: the longest time in which none of them made progress.
        memory_bytes: the most memory by which one of them grew.
        void: the number of void rounds.
        rounds: the number of decided rounds.
        digests_equal: whether all that committed a round hold the same average.
        escapes: the number of texts with non-printable characters among those that a user would see.
        out_after: the number of rounds until the attacker was no longer a member, or None if it stayed one.
        refused: the reason of the refusal, for attacks that are to be refused.
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
        """Return what violates the aims; with ``provable``, the attacker must be excluded within 3 rounds."""
        found = {
            f"{self.ended} ended": self.ended > 0,
            "digests differ": not self.digests_equal,
            f"stalled for {self.stall_s:.1f} s": self.stall_s > ROUND_TIMEOUT_S + 1.0,
            f"{self.memory_bytes >> 20} MiB more": self.memory_bytes > MOST_MEMORY_BYTES,
            f"{self.escapes} escapes": self.escapes > 0,
            "the attacker is still a member": provable and (self.out_after is None or self.out_after > 3),
        }
        return [words for words, is_so in found.items() if is_so]


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One row of the table.

    Attributes:
        name: a short description, unique among the attacks.
        who: ``member``, ``stranger`` (a peer that is not a member) or ``file``.
        where: the setting in which it is tried.
        run: tries the attack.
        before: its effect on version 0.5.0, or "" if it was not tried.
        provable: whether its messages prove that the attacker is at fault.
    """

    name: str
    who: str
    where: Where
    run: Callable[[], Outcome] = field(repr=False)
    before: str = ""
    provable: bool = False

    def row(self) -> dict[str, Any]:
        """Try it, and return a line of ``results.jsonl``."""
        try:
            outcome = self.run()
        except Exception as error:  # raised by an honest process or by the benchmark; either needs a look
            outcome = Outcome(ended=1, refused=f"{type(error).__name__}: {visible(str(error))}")
        facts = {"name": self.name, "who": self.who, "where": self.where, "before": self.before}
        return {**facts, **asdict(outcome), "provable": self.provable, "harm": outcome.harm(provable=self.provable)}
