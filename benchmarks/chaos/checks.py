"""What must be true of a run afterwards: pure functions of what its peers wrote; each gives the faults it finds."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.chaos.processes import Life

__all__ = [
    "Log",
    "evicted",
    "gaps",
    "half_applied",
    "pace",
    "recoveries",
    "repaired",
    "stalled",
]

Record = Mapping[str, Any]
Round = tuple[int, int]

LOOKS_FOR_OTHERS = "It looks for the others"
GONE_ON = "the others went on without replica"
IS_BACK = "is a member again"
TAKING_OVER = "is still taking over the state"
DIFFERS = "global parameters or outer state of replica"


@dataclass(frozen=True)
class Log:
    """What one process of a peer wrote, in order.

    Attributes:
        life: of the process.
        records: of its metrics.jsonl, each with ``time_s``.
    """

    life: Life
    records: tuple[Record, ...]

    @property
    def name(self) -> str:
        """To be told apart by."""
        return f"{self.life.name} from {self.life.started_s:.0f}"

    @property
    def replica(self) -> int | None:
        """Its number among the replicas; None where it has not had a part in any round."""
        return next((record["replica"] for record in self.records if record["event"] == "RoundSent"), None)

    def of(self, *events: str) -> list[Record]:
        """The records of some events."""
        return [record for record in self.records if record["event"] in events]

    def together(self) -> list[Record]:
        """Rounds that it committed with others, and contributed to."""
        committed = self.of("RoundCommitted")
        return [each for each in committed if len(each["contributors"]) > 1 and each["replica"] in each["contributors"]]


def gaps(times_s: Sequence[float], excluded: Iterable[tuple[float, float]] = ()) -> list[tuple[float, float]]:
    """Times between successive ones, and when each began, longest first; those that touch ``excluded`` are left out.

    >>> gaps([0.0, 1.0, 4.0, 9.0], [(3.0, 3.5)])
    [(5.0, 4.0), (1.0, 0.0)]
    """
    out = tuple(excluded)
    pairs = itertools.pairwise(times_s)
    kept = [(a, b) for a, b in pairs if not any(begin < b and a < end for begin, end in out)]
    return sorted(((b - a, a) for a, b in kept), reverse=True)


def recoveries(log: Log, back_s: float) -> tuple[list[tuple[float, float]], list[tuple[float, float]], list[str]]:
    """How long a process needed to take part again, after its start and after everything that befell it.

    Returns:
        (when it began, seconds from its end until a round had its part); the times in which it was disturbed or
        coming back; and the faults: what took longer than ``back_s``, or had not happened by the end.
    """
    committed_s = [record["time_s"] for record in log.together()]
    end_s = log.life.ended_s if log.life.ended_s is not None else max(committed_s, default=log.life.started_s)
    times: list[tuple[float, float]] = []
    busy: list[tuple[float, float]] = []
    faults: list[str] = []
    for begin_s, freed_s in [(log.life.started_s, log.life.started_s), *log.life.disturbed]:
        back = next((time_s for time_s in committed_s if time_s > freed_s), None)
        until_s = end_s if back is None else back
        busy.append((begin_s, until_s))
        if back is not None:
            times.append((begin_s, back - freed_s))
        if until_s - freed_s > back_s:
            what = "took part only" if back is not None else "took no part, though there were"
            faults.append(f"{log.name}: {what} {until_s - freed_s:.0f} s after it could (from {freed_s:.1f})")
    return times, busy, faults


def stalled(logs: Sequence[Log], limits_s: Mapping[str, float], back_s: float) -> tuple[dict[str, float], list[str]]:
    """The longest gap between two records of an event in a process that nothing befell meanwhile, and the faults.

    Args:
        logs: of all processes.
        limits_s: event -> the longest gap there may be.
        back_s: see `recoveries`.
    """
    longest = dict.fromkeys(limits_s, 0.0)
    faults: list[str] = []
    for log in logs:
        _, busy, late = recoveries(log, back_s)
        faults.extend(late)
        for event, limit_s in limits_s.items():
            times_s = [record["time_s"] for record in log.of(event)]
            by_itself = log.life.code and not log.life.ended_by
            if times_s and (log.life.ended_by == "kill" or by_itself):  # what it was waiting for when it ended
                times_s.append(log.life.ended_s or times_s[-1])
            elif times_s and log.life.ended_s is None:  # it hung
                faults.append(f"{log.name}: no {event} after {times_s[-1]:.1f}, and it had not ended when all was over")
            for seconds, since_s in gaps(times_s, busy):
                longest[event] = max(longest[event], seconds)
                if seconds > limit_s:
                    faults.append(f"{log.name}: no {event} for {seconds:.1f} s from {since_s:.1f}")
    return longest, faults


def pace(logs: Sequence[Log], stalls: Sequence[int], since_s: float, until_s: float, step_s: float) -> float:
    """The fraction of its steps that the slowest one took between two times, of those in whose way nothing was put.

    Args:
        logs: of all processes.
        stalls: peers that do not count.
        since_s, until_s: the times.
        step_s: what a step takes at least.
    """
    others = [log for log in logs if log.life.peer not in stalls and log.life.started_s < since_s]
    taken = [sum(since_s < each["time_s"] <= until_s for each in log.of("StepFinished")) for log in others]
    return min(taken, default=0) * step_s / (until_s - since_s)


def half_applied(logs: Sequence[Log]) -> list[str]:
    """Rounds that some applied and others did not, or not in the same way.

    A process whose round is void while others committed it must have found that they went on without it, and come back,
    before it takes part again; or be one that was still taking over their state.
    """
    faults: list[str] = []
    committed: dict[Round, dict[tuple[int, ...], list[str]]] = defaultdict(lambda: defaultdict(list))
    digests: dict[Round, dict[int, str]] = defaultdict(dict)
    for log in logs:
        for record in log.of("RoundSent"):
            digests[_round(record)][record["replica"]] = record["digest"]
        for record in log.of("RoundCommitted"):
            committed[_round(record)][tuple(record["contributors"])].append(log.name)
    for key, ways in sorted(committed.items()):
        if len(ways) > 1:
            told = "; ".join(f"{contributors} says {', '.join(names)}" for contributors, names in sorted(ways.items()))
            faults.append(f"round {key} was committed in {len(ways)} ways: {told}")
        for contributors in ways:
            states = {digests[key][m] for m in contributors if m in digests[key]}
            if len(states) > 1:
                faults.append(f"round {key}: its contributors {contributors} came from {len(states)} states")
    for log in logs:
        faults.extend(
            f"{log.name}: round {key} is void here ({reason}) and committed elsewhere, and it just went on"
            for key, reason in _continued_after_void(log)
            if key in committed
        )
    return faults


def _round(record: Record) -> Round:
    return record["fragment"], record["outer_step"]


def _continued_after_void(log: Log) -> list[tuple[Round, str]]:
    """Void rounds after which a process committed a round that it sent later, without coming back between.

    Those that are void because it comes back are told of while it does.
    """
    waiting: dict[Round, tuple[str, set[Round]]] = {}
    comes_back = False
    found: list[tuple[Round, str]] = []
    for record in log.records:
        event = record["event"]
        if event == "RoundVoid" and not comes_back and TAKING_OVER not in record["reason"]:
            waiting[_round(record)] = (record["reason"], set())
        elif event == "Note" and LOOKS_FOR_OTHERS in record["text"]:
            comes_back = True
            waiting.clear()
        elif event == "Note" and IS_BACK in record["text"]:
            comes_back = False
        elif event == "RoundSent":
            for _, sent in waiting.values():
                sent.add(_round(record))
        elif event == "RoundCommitted":
            gone_on = [key for key, (_, sent) in waiting.items() if _round(record) in sent]
            found.extend((key, waiting.pop(key)[0]) for key in gone_on)
    return found


def repaired(logs: Sequence[Log]) -> list[str]:
    """Members whose state was found to differ from the others': none should ever, so each is a fault."""
    return [
        f"{log.name}: round {_round(record)} was void at {record['time_s']:.1f}, as {record['reason']}"
        for log in logs
        for record in log.of("RoundVoid")
        if DIFFERS in record["reason"]
    ]


def evicted(logs: Sequence[Log], back_s: float, noticed_s: float) -> list[tuple[float, str]]:
    """Members that the others went on without though nothing was done to them; when, and who, in order.

    Args:
        logs: of all processes; what those say that were disturbed themselves, or had not come back, does not count.
        back_s: see `recoveries`.
        noticed_s: what is true may be said so much later; what is said twice within it is counted once.
    """
    explained: dict[int | None, list[tuple[float, float]]] = defaultdict(list)
    busy = {log.name: recoveries(log, back_s)[1] for log in logs}
    for log in logs:
        last_s = max((record["time_s"] for record in log.of("StepFinished")), default=log.life.started_s)
        explained[log.replica] += [(since, until + noticed_s) for since, until in busy[log.name]]
        explained[log.replica].append((last_s, last_s + back_s))
    said: list[tuple[float, int, str]] = []
    for log in logs:
        for record in log.of("ViewChanged", "Note"):
            if _within(record["time_s"], busy[log.name]):
                continue
            said.extend((record["time_s"], replica, f"{log.name}: {why}") for replica, why in _evictions(log, record))
    found: list[tuple[float, str]] = []
    counted: dict[int, float] = {}
    for time_s, replica, words in sorted(said):
        alone = time_s - counted.get(replica, -noticed_s) >= noticed_s
        if alone and not _within(time_s, explained[replica]):
            counted[replica] = time_s
            found.append((time_s, f"replica {replica} was put out at {time_s:.1f}, says {words}"))
    return found


def _evictions(log: Log, record: Record) -> list[tuple[int, str]]:
    """Whom a record says to be out of the view, and why."""
    if record["event"] == "ViewChanged":
        return [(replica, record["reason"]) for replica in record["left"] if replica != record["replica"]]
    alone = LOOKS_FOR_OTHERS in record["text"] or GONE_ON in record["text"]
    return [(log.replica, record["text"])] if alone and log.replica is not None else []


def _within(time_s: float, spans: Iterable[tuple[float, float]]) -> bool:
    return any(since <= time_s <= until for since, until in spans)
