"""The rounds of a run as a grid of fragments and outer steps, and the participation of each replica in them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from diloco.watch.records import Record, as_number, finite, number, numbers, text, whole

__all__ = ["MOST_FRAGMENTS", "Grid", "Participation", "ReportedRound"]

OUTER_STEPS = 64  # the number of newest outer steps that are kept per fragment
MOST_FRAGMENTS = 256

_MOST_REPLICAS = 1_024


@dataclass(slots=True)
class ReportedRound:
    """One round, as the replicas have reported it."""

    step: int = 0  # the step of its newest record
    # replicas that submitted a contribution -> digest of the state that it was computed from
    sent: dict[int, str] = field(default_factory=dict)
    merged: set[int] = field(default_factory=set)  # replicas that applied the mean
    contributors: tuple[int, ...] = ()  # replicas whose contributions are in the mean
    absent: tuple[int, ...] = ()  # members of the view whose contributions are not in the mean
    void: str = ""  # why no replica applied it; "" if it is not void or at least one replica merged it
    note: str = ""  # which replicas were left out, and why
    clipped: tuple[int, ...] = ()  # contributors whose contributions were scaled down
    wait_s: float | None = None  # the longest time that a replica waited for it
    last: int | None = None  # the contributor whose contribution arrived last
    last_after_s: float | None = None  # how long after the first contribution that was

    @property
    def state(self) -> str:
        """The state of the round: "sent", "merged" or "void"."""
        return "merged" if self.merged else "void" if self.void else "sent"

    def minority(self) -> tuple[int, ...]:
        """Return the replicas whose digests differ from the most frequent one; on a tie, the lowest replica's wins."""
        digests = {replica: digest for replica, digest in sorted(self.sent.items()) if digest}
        if len(set(digests.values())) < 2:
            return ()
        counted = list(digests.values())
        most = max(counted, key=counted.count)  # the first of the most frequent ones
        return tuple(replica for replica, digest in digests.items() if digest != most)

    def shown(self) -> dict[str, Any]:
        """Return the round as JSON-ready values for the page."""
        sent = sorted(self.sent)
        return {
            "state": self.state,
            "step": self.step,
            "sent": sent,
            "merged": sorted(self.merged),
            "by": list(self.contributors),
            "absent": list(self.absent),
            "why": self.void or self.note,
            "clipped": list(self.clipped),
            "wait_s": finite(self.wait_s),
            "last": self.last,
            "last_after_s": finite(self.last_after_s),
            "differ": list(self.minority()),
        }


@dataclass(slots=True)
class Participation:
    """The participation of one replica in the rounds."""

    sent: int = 0  # rounds that it contributed to
    counted: int = 0  # rounds with its contribution in the mean
    missed: int = 0  # consecutive rounds, up to the newest, that were merged without it
    weight: float | None = None  # the weight of its last contribution
    wait_s: float | None = None  # how long it waited for its last merged round
    late_s: float | None = None  # how long after the first contribution its last one arrived


class Grid:
    """The newest rounds of every fragment, built from the records of all replicas in any order among replicas."""

    def __init__(self) -> None:
        # (fragment, outer step) -> round, for the newest `OUTER_STEPS` of every fragment
        self.cells: dict[tuple[int, int], ReportedRound] = {}
        self.parts: dict[int, Participation] = {}  # replica -> its participation
        self.merged = self.void = 0  # numbers of rounds so far that a replica merged, and that were void
        self.void_in_a_row: dict[int, int] = {}  # fragment -> number of consecutive void rounds up to the newest
        self.newest: dict[int, int] = {}  # fragment -> its newest outer step

    @property
    def fragments(self) -> tuple[int, ...]:
        """The fragments that have rounds."""
        return tuple(sorted(self.newest))

    def part(self, replica: int) -> Participation:
        """Return the participation of a replica, which may be new."""
        if replica not in self.parts and len(self.parts) >= _MOST_REPLICAS:
            return Participation()
        return self.parts.setdefault(replica, Participation())

    def take(self, record: Record, expected: Iterable[int]) -> None:
        """Process a ``RoundSent``, ``RoundCommitted`` or ``RoundVoid``.

        Args:
            record: the record; it is ignored if it does not name its round.
            expected: the replicas that should take part in the round.
        """
        replica, fragment, outer_step = (whole(record, name) for name in ("replica", "fragment", "outer_step"))
        if replica is None or fragment is None or outer_step is None:
            return
        cell = self._cell(fragment, outer_step)
        if cell is None:
            return
        cell.step = max(cell.step, int(record["step"]))
        match record["event"]:
            case "RoundSent":
                self._sent(cell, replica, record)
            case "RoundCommitted":
                self._merged(cell, replica, fragment, record, expected)
            case "RoundVoid" if not cell.merged:
                if not cell.void:
                    self.void += 1
                    self.void_in_a_row[fragment] = self.void_in_a_row.get(fragment, 0) + 1
                cell.void = text(record, "reason") or "no reason was given"
            case _:
                cell.note = cell.note or text(record, "reason")

    def _sent(self, cell: ReportedRound, replica: int, record: Record) -> None:
        if replica in cell.sent and cell.void:  # a void round is repeated under its outer step
            cell.sent, cell.void = {}, ""
        cell.sent[replica] = sys.intern(text(record, "digest"))  # nearly all digests are equal
        part = self.part(replica)
        part.sent += 1
        part.weight = number(record, "weight")

    def _merged(
        self, cell: ReportedRound, replica: int, fragment: int, record: Record, expected: Iterable[int]
    ) -> None:
        wait_s = number(record, "wait_s")
        self.part(replica).wait_s = wait_s
        if wait_s is not None:
            cell.wait_s = max(wait_s, cell.wait_s or 0.0)
        cell.note = text(record, "note") or cell.note
        cell.clipped = numbers(record, "clipped") or cell.clipped
        self._late(cell, record)
        first = not cell.merged
        cell.merged.add(replica)
        if not first:
            return
        if cell.void:  # replicas that missed the commit have reported the round as void
            cell.void, cell.note = "", cell.note or cell.void
            self.void -= 1
        self.void_in_a_row[fragment] = 0
        self.merged += 1
        cell.contributors = numbers(record, "contributors")
        for each in cell.contributors:
            part = self.part(each)
            part.counted, part.missed = part.counted + 1, 0
        cell.absent = tuple(sorted({*expected} - {*cell.contributors}))
        for each in cell.absent:
            self.part(each).missed += 1

    def _late(self, cell: ReportedRound, record: Record) -> None:
        """Record how late each contribution arrived, according to the replica that waited longest."""
        given = record.get("late_s")
        if not given or not isinstance(given, list | tuple):
            return
        both = zip(numbers(record, "contributors"), map(as_number, given), strict=False)
        late_s = {replica: by_s for replica, by_s in both if by_s is not None and math.isfinite(by_s)}
        last = max(late_s, key=lambda each: late_s[each], default=None)
        if last is not None and late_s[last] >= (cell.last_after_s or 0.0):
            cell.last, cell.last_after_s = last, late_s[last]
            for each, by_s in late_s.items():
                self.part(each).late_s = by_s

    def _cell(self, fragment: int, outer_step: int) -> ReportedRound | None:
        """Return the cell of a round, which may be new, or None if the round is too old to be kept."""
        if fragment not in self.newest and len(self.newest) >= MOST_FRAGMENTS:
            return None
        newest = self.newest[fragment] = max(outer_step, self.newest.get(fragment, 0))
        if outer_step <= newest - OUTER_STEPS:
            return None
        if (fragment, outer_step) not in self.cells:
            self.cells[fragment, outer_step] = ReportedRound()
            for old in [key for key in self.cells if key[0] == fragment and key[1] <= newest - OUTER_STEPS]:
                del self.cells[old]
        return self.cells[fragment, outer_step]
