"""The rounds of a run as a grid of fragments and outer steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from diloco.events import RoundCommitted, RoundSent, RoundVoid

__all__ = ["MAX_FRAGMENTS", "Grid", "Round"]

OUTER_STEPS = 64  # the number of newest outer steps that are kept per fragment
MAX_FRAGMENTS = 256
MAX_RECENT = 256  # rounds


@dataclass(slots=True)
class Round:
    """One round, as the replicas have reported it."""

    step: int = 0  # the step of its newest record
    expected: tuple[int, ...] = ()  # replicas that should take part in it
    sent: dict[int, RoundSent] = field(default_factory=dict)  # replica -> its contribution
    merged: dict[int, RoundCommitted] = field(default_factory=dict)  # replica that applied the mean -> its report
    void: bool = False  # whether a replica has reported that it did not apply it
    times_void: int = 0  # a void round may be repeated under its outer step
    why: str = ""  # why it is void, or why replicas are not in the mean

    @property
    def state(self) -> str:
        """The state of the round: "sent", "merged" if at least one replica merged it, or "void"."""
        return "merged" if self.merged else "void" if self.void else "sent"

    @property
    def contributors(self) -> tuple[int, ...]:
        """The replicas whose contributions are in the mean."""
        return next((report.contributors for report in self.merged.values()), ())

    @property
    def absent(self) -> list[int]:
        """The expected replicas whose contributions are not in the mean."""
        return sorted({*self.expected} - {*self.contributors}) if self.merged else []

    def minority(self) -> list[int]:
        """Return the replicas whose digests differ from the most frequent one; on a tie, the lowest replica's wins."""
        digests = {replica: report.digest for replica, report in sorted(self.sent.items()) if report.digest}
        most = Counter(digests.values()).most_common(1)
        return [replica for replica, digest in digests.items() if digest != most[0][0]]

    def late_s(self) -> dict[int, float]:
        """Return contributor -> seconds after the first one, as seen by the replica that waited longest."""
        latest = max(self.merged.values(), key=lambda report: max(report.late_s, default=0.0), default=None)
        return dict(zip(latest.contributors, latest.late_s, strict=False)) if latest else {}

    def shown(self) -> dict[str, Any]:
        """Return the round for the page."""
        late_s, reports = self.late_s(), self.merged.values()
        last = max(late_s, key=lambda replica: late_s[replica], default=None)
        return {
            "state": self.state,
            "step": self.step,
            "sent": sorted(self.sent),
            "merged": sorted(self.merged),
            "contributors": self.contributors,
            "absent": self.absent,
            "why": self.why,
            "clipped": next((report.clipped for report in reports if report.clipped), ()),
            "wait_s": max((report.wait_s for report in reports), default=None),
            "last": last,
            "last_after_s": None if last is None else late_s[last],
            "differ": self.minority(),
        }


class Grid:
    """The newest rounds of every fragment, built from the events of all replicas in any order among replicas."""

    def __init__(self) -> None:
        # (fragment, outer step) -> round, for the newest `OUTER_STEPS` of every fragment
        self.cells: dict[tuple[int, int], Round] = {}
        self.merged = self.void = 0  # numbers of rounds so far that a replica merged, and that were void
        self.newest: dict[int, int] = {}  # fragment -> its newest outer step

    def recent(self) -> list[Round]:
        """Return the newest rounds of all fragments, the newest first."""
        keys = sorted(self.cells, key=lambda key: (self.cells[key].step, *key), reverse=True)
        return [self.cells[key] for key in keys[:MAX_RECENT]]

    def of_fragment(self, fragment: int) -> list[Round]:
        """Return the rounds of a fragment that are kept, the newest first."""
        newest = self.newest[fragment]
        keys = [(fragment, newest - age) for age in range(OUTER_STEPS)]
        return [self.cells[key] for key in keys if key in self.cells]

    def participation(self) -> tuple[Counter[int], Counter[int]]:
        """Return replica -> in how many recent means it is, and how many it has missed since the last of them."""
        counted, missed = Counter[int](), Counter[int]()
        for cell in reversed(self.recent()):
            counted.update(cell.contributors)
            missed.update(cell.absent)
            missed.update({replica: -missed[replica] for replica in cell.contributors})
        return counted, missed

    def take(self, event: RoundSent | RoundCommitted | RoundVoid, expected: tuple[int, ...]) -> None:
        """Process an event of a round; ``expected`` are the replicas that should take part in it."""
        cell = self._cell(event.fragment, event.outer_step)
        if cell is None:
            return
        cell.step = max(cell.step, event.step)
        match event:
            case RoundSent():
                if event.replica in cell.sent and cell.void:  # it is repeated
                    cell.sent, cell.void = {}, False
                cell.sent[event.replica] = event
            case RoundCommitted():
                if not cell.merged:
                    self.merged += 1
                    self.void -= cell.void  # replicas that missed the commit have reported it as void
                    cell.expected = expected
                cell.merged[event.replica], cell.why = event, event.note or cell.why
            case RoundVoid():
                if not cell.void and not cell.merged:
                    self.void += 1
                    cell.times_void += 1
                cell.void, cell.why = True, cell.why or event.reason or "no reason was given"

    def forget(self, replicas: Collection[int], step: int) -> None:
        """Forget what ``replicas`` have reported about rounds after ``step``, which a resumption has superseded."""
        for key, cell in [*self.cells.items()]:
            if cell.step > step:
                state = cell.state
                cell.sent = {replica: report for replica, report in cell.sent.items() if replica not in replicas}
                cell.merged = {replica: report for replica, report in cell.merged.items() if replica not in replicas}
                if not cell.sent and not cell.merged:
                    self.merged -= state == "merged"
                    self.void -= state == "void"
                    del self.cells[key]
        self.newest = {}
        for fragment, outer_step in self.cells:
            self.newest[fragment] = max(outer_step, self.newest.get(fragment, 0))

    def _cell(self, fragment: int, outer_step: int) -> Round | None:
        """Return the cell of a round, which may be new, or None if the round is too old to be kept."""
        if fragment not in self.newest and len(self.newest) >= MAX_FRAGMENTS:
            return None
        newest = self.newest[fragment] = max(outer_step, self.newest.get(fragment, 0))
        if outer_step <= newest - OUTER_STEPS:
            return None
        if (fragment, outer_step) not in self.cells:
            self.cells[fragment, outer_step] = Round()
            for old in [key for key in self.cells if key[0] == fragment and key[1] <= newest - OUTER_STEPS]:
                del self.cells[old]
        return self.cells[fragment, outer_step]
