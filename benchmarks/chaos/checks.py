"""Checks of a finished run. Each is a pure function of the peers' records and returns the faults that it finds."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.chaos.processes import Life

Record = Mapping[str, Any]
Round = tuple[int, int]

# Parts of the notes and reasons that the package records.
IS_BACK = "has rejoined"
TAKING_OVER = "is still fetching the state"
DIFFERS = "global parameters or outer state of replica"


@dataclass(frozen=True)
class Log:
    """The records of one process of a peer, in order.

    Attributes:
        life: the process.
        records: the records of its metrics.jsonl, each with ``time_s``.
    """

    life: Life
    records: tuple[Record, ...]

    @property
    def name(self) -> str:
        """A name that is unique among the processes of a run."""
        return f"{self.life.name} from {self.life.started_s:.0f}"

    @property
    def replica(self) -> int | None:
        """Its replica number, or None if it has not sent a contribution."""
        return next((record["replica"] for record in self.records if record["event"] == "RoundSent"), None)

    def of(self, *events: str) -> list[Record]:
        """Return the records of the given events."""
        return [record for record in self.records if record["event"] in events]

    def together(self) -> list[Record]:
        """Return the records of rounds that it committed with others and contributed to."""
        committed = self.of("RoundCommitted")
        return [each for each in committed if len(each["contributors"]) > 1 and each["replica"] in each["contributors"]]


def gaps(times_s: Sequence[float], excluded: Iterable[tuple[float, float]] = ()) -> list[tuple[float, float]]:
    """Return (length, begin) of the gaps between successive times, longest first, except those that touch ``excluded``.

    >>> gaps([0.0, 1.0, 4.0, 9.0], [(3.0, 3.5)])
    [(5.0, 4.0), (1.0, 0.0)]
    """
    out = tuple(excluded)
    pairs = itertools.pairwise(times_s)
    kept = [(a, b) for a, b in pairs if not any(begin < b and a < end for begin, end in out)]
    return sorted(((b - a, a) for a, b in kept), reverse=True)


def recoveries(log: Log, back_s: float) -> tuple[list[tuple[float, float]], list[tuple[float, float]], list[str]]:
    """Return how long a process took to contribute to a round after its start and after each disturbance.

    Returns:
        A list of (begin of the disturbance, seconds from its end to the next committed round with a contribution of the
        process); the spans in which the process was disturbed or recovering; and the faults: recoveries that took
        longer than ``back_s``, or had not happened by the end.
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
            what = "was in a round only after" if back is not None else "took no part in any round for"
            faults.append(f"{log.name}: {what} {until_s - freed_s:.0f} s, counted from {freed_s:.1f}")
    return times, busy, faults


def stalled(logs: Sequence[Log], limits_s: Mapping[str, float], back_s: float) -> tuple[dict[str, float], list[str]]:
    """Return the longest gap between two records of an event in an undisturbed process, and the faults.

    Args:
        logs: the logs of all processes.
        limits_s: event -> the longest gap allowed.
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
            if times_s and (log.life.ended_by == "kill" or by_itself):  # the gap up to its end counts
                times_s.append(log.life.ended_s or times_s[-1])
            elif times_s and log.life.ended_s is None:  # it hung
                faults.append(
                    f"{log.name}: no {event} after {times_s[-1]:.1f}, and it had not ended at the end of the run"
                )
            for seconds, since_s in gaps(times_s, busy):
                longest[event] = max(longest[event], seconds)
                if seconds > limit_s:
                    faults.append(f"{log.name}: no {event} for {seconds:.1f} s from {since_s:.1f}")
    return longest, faults


def half_applied(logs: Sequence[Log]) -> list[str]:
    """Return a fault for each round that some processes applied and others did not, or applied differently.

    A process may find a round void that others committed only if it was still adopting their state, or if it notices
    that they continued without it and rejoins before it contributes again.
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
            each = "; ".join(f"{contributors} by {', '.join(names)}" for contributors, names in sorted(ways.items()))
            faults.append(f"round {key} was committed in {len(ways)} ways, with the contributors {each}")
        for contributors in ways:
            states = {digests[key][m] for m in contributors if m in digests[key]}
            if len(states) > 1:
                faults.append(f"round {key}: its contributors {contributors} started from {len(states)} states")
    for log in logs:
        faults.extend(
            f"{log.name}: round {key} is void here ({reason}) and committed elsewhere, but it did not rejoin"
            for key, reason in _continued_after_void(log)
            if key in committed
        )
    return faults


def _round(record: Record) -> Round:
    return record["fragment"], record["outer_step"]


def _continued_after_void(log: Log) -> list[tuple[Round, str]]:
    """Return (round, reason) of the void rounds after which a process committed a round sent later without rejoining.

    Rounds that are void because the process rejoins are recorded while it does, and do not count.
    """
    waiting: dict[Round, tuple[str, set[Round]]] = {}
    rejoining = False
    found: list[tuple[Round, str]] = []
    for record in log.records:
        event = record["event"]
        if event == "RoundVoid" and not rejoining and TAKING_OVER not in record["reason"]:
            waiting[_round(record)] = (record["reason"], set())
        elif event == "Lost":
            rejoining = True
            waiting.clear()
        elif event == "Note" and IS_BACK in record["text"]:
            rejoining = False
        elif event == "RoundSent":
            for _, sent in waiting.values():
                sent.add(_round(record))
        elif event == "RoundCommitted":
            continued = [key for key, (_, sent) in waiting.items() if _round(record) in sent]
            found.extend((key, waiting.pop(key)[0]) for key in continued)
    return found


def repaired(logs: Sequence[Log]) -> list[str]:
    """Return a fault for each member whose state was found to differ from that of the others."""
    return [
        f"{log.name}: round {_round(record)} was void at {record['time_s']:.1f}: {record['reason']}"
        for log in logs
        for record in log.of("RoundVoid")
        if DIFFERS in record["reason"]
    ]


def evicted(logs: Sequence[Log], back_s: float, noticed_s: float) -> list[tuple[float, str]]:
    """Return the time and a description of each eviction of an undisturbed member, in order.

    Args:
        logs: the logs of all processes. Records of a process that was disturbed or recovering do not count.
        back_s: see `recoveries`.
        noticed_s: how much later than the disturbance an eviction may be recorded. Records of the same eviction within
            this time count once.
    """
    explained: dict[int | None, list[tuple[float, float]]] = defaultdict(list)
    busy = {log.name: recoveries(log, back_s)[1] for log in logs}
    for log in logs:
        last_s = max((record["time_s"] for record in log.of("StepFinished")), default=log.life.started_s)
        explained[log.replica] += [(since, until + noticed_s) for since, until in busy[log.name]]
        explained[log.replica].append((last_s, last_s + back_s))
    reports: list[tuple[float, int, str]] = []
    for log in logs:
        for record in log.of("ViewChanged", "Lost"):
            if _within(record["time_s"], busy[log.name]):
                continue
            reports.extend(
                (record["time_s"], replica, f"{log.name}: {why}") for replica, why in _evictions(log, record)
            )
    found: list[tuple[float, str]] = []
    counted: dict[int, float] = {}
    for time_s, replica, words in sorted(reports):
        alone = time_s - counted.get(replica, -noticed_s) >= noticed_s
        if alone and not _within(time_s, explained[replica]):
            counted[replica] = time_s
            found.append((time_s, f"replica {replica} was evicted at {time_s:.1f}, according to {words}"))
    return found


def _evictions(log: Log, record: Record) -> list[tuple[int, str]]:
    """Return the replicas that, according to a record, are out of the view, each with the reason."""
    if record["event"] == "ViewChanged":
        return [(replica, record["reason"]) for replica in record["left"] if replica != record["replica"]]
    return [(log.replica, record["reason"])] if log.replica is not None else []


def _within(time_s: float, spans: Iterable[tuple[float, float]]) -> bool:
    return any(since <= time_s <= until for since, until in spans)


_SCREEN = 50  # lines


def unequal_ends(summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a fault if peers ended with different global parameters; ``summaries`` maps a name to its summary."""
    by_digest: dict[str, list[str]] = defaultdict(list)
    for name, summary in summaries.items():
        by_digest[summary["global_params_digest"]].append(name)
    if not by_digest:
        return ["no peer finished"]
    if len(by_digest) == 1:
        return []
    each = "; ".join(f"{digest} in {', '.join(names)}" for digest, names in sorted(by_digest.items()))
    return [f"they ended with {len(by_digest)} different global parameters: {each}"]


_CODES: Mapping[str, tuple[int, ...]] = {
    "": (0,),
    "kill": (-9, 0, 130),
    "kill bootstrap": (-9,),
    "leave": (130, 0),
    "group SIGINT": (130, 0),
    "group SIGTERM": (130, 0),
    "thaw at the end": (0, 1, 130),
}
"""The kind of the event that ended a process -> its allowed exit codes. A process that thaws as the others finish may
have missed the end of the run."""


def unexpected_ends(lives: Sequence[Life]) -> list[str]:
    """Return a fault for each process whose exit code does not match the event that ended it."""
    faults = []
    for life in lives:
        expected = _CODES[life.ended_by]
        if life.code not in expected:
            ended = "was still running at the end of the run" if life.code is None else f"ended with {life.code}"
            cause = f" after {life.ended_by}" if life.ended_by else ""
            faults.append(f"{life.name}, started at {life.started_s:.1f}, {ended}{cause}, not with {expected[0]}")
    return faults


def tracebacks(lives: Sequence[Life]) -> list[str]:
    """Return a fault for each process that printed a traceback, or more than 50 lines, instead of a short message."""
    faults = []
    for life in lives:
        raw, lines = "Traceback (most recent call last)" in life.words, len(life.words.splitlines())
        if raw or lines > _SCREEN:
            what = "a traceback" if raw else f"{lines} lines"
            faults.append(f"{life.name}, started at {life.started_s:.1f}, printed {what}")
    return faults


def loss_differs(loss: float, undisturbed: Sequence[float], least_tolerance: float = 0.02) -> list[str]:
    """Return a fault if ``loss`` exceeds the mean of undisturbed runs by more than the tolerance.

    The tolerance is three times the distance between the best and the worst of them, or ``least_tolerance`` times their
    mean if that is larger.

    >>> loss_differs(1.5, [1.48, 1.50, 1.49]), len(loss_differs(1.6, [1.48, 1.50, 1.49]))
    ([], 1)
    """
    mean = sum(undisturbed) / len(undisturbed)
    tolerance = max(3 * (max(undisturbed) - min(undisturbed)), least_tolerance * mean)
    if loss <= mean + tolerance:
        return []
    return [f"the held-out loss is {loss:.4f}; without disturbance it is {mean:.4f} +- {tolerance:.4f}"]
