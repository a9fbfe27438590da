"""The rounds of a run as a grid of fragments and outer steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from diloco.events import RoundCommitted, RoundSent, RoundVoid

OUTER_STEPS = 64  # the number of newest outer steps that are kept per fragment
MAX_FRAGMENTS = 256
MAX_RECENT = 256  # rounds
MAX_BYTES = 64 << 20  # of all rounds, if they are not trusted


@dataclass(slots=True)
class Round:
    """One round, as the replicas have reported it."""

    step: int = 0  # the step of its newest record
    expected: tuple[int, ...] = ()  # replicas that should take part in it
    sent: dict[int, tuple[str, float]] = field(default_factory=dict)  # replica -> digest and weight of its contribution
    contributors: tuple[int, ...] = ()  # replicas whose contributions are in the mean
    clipped: tuple[int, ...] = ()  # those whose contributions were scaled down
    waits_s: dict[int, float] = field(default_factory=dict)  # replica that applied the mean -> how long it waited
    late_s: dict[int, float] = field(default_factory=dict)
    """Contributor -> seconds after the first one, as seen by the replica that saw the longest such time."""
    void: bool = False  # whether a replica has reported that it did not apply it
    times_void: int = 0  # a void round may be repeated under its outer step
    why: str = ""  # why it is void, or why replicas are not in the mean

    @property
    def state(self) -> str:
        """The state of the round: "sent", "merged" if at least one replica merged it, or "void"."""
        return "merged" if self.waits_s else "void" if self.void else "sent"

    @property
    def absent(self) -> list[int]:
        """The expected replicas whose contributions are not in the mean."""
        return sorted({*self.expected} - {*self.contributors}) if self.waits_s else []

    @property
    def size_bytes(self) -> int:
        """About the memory that it takes."""
        numbers = len(self.contributors) + len(self.clipped) + 3 * len(self.late_s) + 3 * len(self.waits_s)
        digests = sum(200 + 4 * len(digest) for digest, _ in self.sent.values())
        return 500 + 4 * len(self.why) + 40 * numbers + digests

    def minority(self) -> list[int]:
        """Return the replicas whose digests differ from the most frequent one; on a tie, the lowest replica's wins."""
        digests = {replica: digest for replica, (digest, _) in sorted(self.sent.items()) if digest}
        most = Counter(digests.values()).most_common(1)
        return [replica for replica, digest in digests.items() if digest != most[0][0]]

    def shown(self) -> dict[str, Any]:
        """Return the round for the page."""
        last = max(self.late_s, key=lambda replica: self.late_s[replica], default=None)
        return {
            **{name: getattr(self, name) for name in ("state", "step", "contributors", "absent", "why", "clipped")},
            "sent": sorted(self.sent),
            "merged": sorted(self.waits_s),
            "wait_s": max(self.waits_s.values(), default=None),
            "last": last,
            "last_after_s": None if last is None else self.late_s[last],
            "differ": self.minority(),
        }


class Grid:
    """The newest rounds of every fragment, built from the events of all replicas in any order among replicas."""

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int], Round] = {}  # (fragment, outer step) -> round
        self.merged = self.void = 0  # numbers of rounds so far that a replica merged, and that were void
        self.newest: dict[int, int] = {}  # fragment -> its newest outer step, as the following are set by `prune`
        self._reached: dict[int, dict[int, int]] = {}  # fragment -> replica -> its newest outer step

    def recent(self) -> list[Round]:
        """Return the newest rounds of all fragments, the newest first."""
        keys = sorted(self.cells, key=lambda key: (self.cells[key].step, *key), reverse=True)
        return [self.cells[key] for key in keys[:MAX_RECENT]]

    def of_fragment(self, fragment: int) -> list[Round]:
        """Return the rounds of a fragment that are kept, the newest first."""
        return [self.cells[key] for key in sorted(self.cells, reverse=True) if key[0] == fragment]

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
        fragment, outer_step = key = event.fragment, event.outer_step
        if fragment >= MAX_FRAGMENTS or outer_step <= self.newest.get(fragment, 0) - OUTER_STEPS:
            return
        reached = self._reached.setdefault(fragment, {})
        reached[event.replica] = max(outer_step, reached.get(event.replica, 0))
        cell = self.cells.setdefault(key, Round())
        cell.step = max(cell.step, event.step)
        match event:
            case RoundSent():
                if event.replica in cell.sent and cell.void:  # it is repeated
                    cell.sent, cell.void = {}, False
                cell.sent[event.replica] = event.digest, event.weight
            case RoundCommitted():
                if not cell.waits_s:
                    self.merged += 1
                    self.void -= cell.void  # replicas that missed the commit have reported it as void
                    cell.expected, cell.contributors = expected, event.contributors
                cell.waits_s[event.replica] = event.wait_s
                cell.clipped, cell.why = cell.clipped or event.clipped, event.note or cell.why
                if max(event.late_s, default=-1.0) > max(cell.late_s.values(), default=-1.0):
                    cell.late_s = dict(zip(event.contributors, event.late_s, strict=False))
            case RoundVoid():
                if not cell.void and not cell.waits_s:
                    self.void += 1
                    cell.times_void += 1
                cell.void, cell.why = True, cell.why or event.reason or "no reason was given"

    def forget(self, replicas: Collection[int], step: int) -> None:
        """Forget what ``replicas`` have reported about rounds after ``step``, which a resumption has superseded."""
        for key, cell in [*self.cells.items()]:
            if cell.step > step:
                state = cell.state
                for replica in replicas:
                    cell.sent.pop(replica, None)
                    cell.waits_s.pop(replica, None)
                if not cell.sent and not cell.waits_s:
                    self.merged -= state == "merged"
                    self.void -= state == "void"
                    del self.cells[key]
        for reached in self._reached.values():
            for replica in replicas:
                reached.pop(replica, None)
        self.newest = {}

    def prune(self, members: Collection[int] | None = None) -> None:
        """Forget all but the newest rounds.

        If ``members`` are given, no single one of them can set the newest outer step, nor fill the memory: if there is
        too much, what the fewest have reported goes first, and then what is large.
        """
        for fragment, reached in self._reached.items():
            known = sorted([reached[each] for each in members or () if each in reached] or reached.values())
            if known:
                self.newest[fragment] = known[-1] if members is None else known[-2:][0]
        for key in [key for key in self.cells if abs(key[1] - self.newest.get(key[0], 0)) >= OUTER_STEPS]:
            del self.cells[key]
        reporters = {key: len(cell.sent.keys() | cell.waits_s.keys()) for key, cell in self.cells.items()}
        sizes = {key: cell.size_bytes for key, cell in self.cells.items()} if members is not None else {}
        room = MAX_BYTES
        for key in sorted(sizes, key=lambda key: (-reporters[key], sizes[key])):
            room -= sizes[key]
            if room < 0:
                del self.cells[key]
