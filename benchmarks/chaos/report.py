"""Reads the files of a run, applies all checks, and writes the tables."""

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.chaos import checks
from benchmarks.chaos.plan import BOOTSTRAP
from benchmarks.chaos.processes import Life
from benchmarks.chaos.run import HAPPENED, LIVES
from benchmarks.chaos.settings import Settings
from benchmarks.markdown import table, write_below

MARK = "<!-- what follows is written by python -m benchmarks.chaos -->"


def read(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file of JSON objects, which may be missing."""
    rows = []
    for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else []:
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def _logs(lives: Sequence[Life]) -> list[checks.Log]:
    """Return a log for each process. Processes that resumed in the same folder share a file, which is split by time."""
    logs = []
    for life in lives:
        later = [other.started_s for other in lives if other.folder == life.folder and other.started_s > life.started_s]
        until_s = min(later, default=float("inf"))
        records = read(Path(life.folder) / "metrics.jsonl")
        logs.append(checks.Log(life, tuple(each for each in records if life.started_s <= each["time_s"] < until_s)))
    return logs


def judge(folder: Path, planned: int, undisturbed: Sequence[float]) -> dict[str, Any]:
    """Return the figures of a run and the faults that the checks found.

    Args:
        folder: the folder of the run.
        planned: the number of planned events.
        undisturbed: the held-out losses of undisturbed runs; empty if there were none.
    """
    known = json.loads((folder / LIVES).read_text(encoding="utf-8"))
    settings, lives = Settings(**known["settings"]), [Life.from_record(record) for record in known["lives"]]
    happened, logs = read(folder / HAPPENED), _logs([life for life in lives if life.peer != BOOTSTRAP])
    summaries = {log.life.name: json.loads((Path(log.life.folder) / "summary.json").read_text(encoding="utf-8"))
                 for log in logs if not log.life.ended_by and log.life.code == 0}  # fmt: skip
    limits_s = {"StepFinished": settings.stall_limit_s, "RoundCommitted": settings.round_gap_limit_s}
    longest_s, still = checks.stalled(logs, limits_s, settings.recovery_limit_s)
    # any peer may evaluate, also the one that was frozen at the end
    final = [record for log in logs for record in log.of("Evaluated") if record["final"]]
    losses = [float(record["heldout_loss"]) for record in final if record["step"] == settings.steps]
    back = [seconds for log in logs for _, seconds in checks.recoveries(log, settings.recovery_limit_s)[0]]
    put_out = checks.evicted(logs, settings.recovery_limit_s, settings.silence_s)
    flaps = [(each["time_s"], each["time_s"] + each["seconds"]) for each in happened if each["kind"] == "flap"]
    faults = {
        "no undisturbed peer stalled beyond a bound, and all recovered in time": still,
        "all peers that finished have the same parameters": checks.unequal_ends(summaries),
        "no round was half applied": [*checks.half_applied(logs), *checks.repaired(logs)],
        "the final loss matches that of undisturbed runs": (
            checks.loss_differs(losses[0], undisturbed) if losses and undisturbed else []
        ) if losses else ["no peer evaluated at the end"],
        "no process ended by itself": checks.unexpected_ends(lives),
        "a flapping link evicts no other peer": [
            words for time_s, words in put_out if any(since <= time_s <= until for since, until in flaps)
        ],
        "no process printed a traceback or more than 50 lines": checks.tracebacks(lives),
    }  # fmt: skip
    void = {(each["fragment"], each["outer_step"]) for log in logs for each in log.of("RoundVoid")}
    return {
        "limits_s": limits_s,
        "longest_s": {event: round(seconds, 1) for event, seconds in longest_s.items()},
        "back_limit_s": settings.recovery_limit_s,
        "back_s": sorted(round(seconds, 1) for seconds in back),
        "back_by_kind": _back_by_kind(logs, happened, settings.recovery_limit_s),
        "processes": len(logs),
        "ended_peers": len(summaries),
        "steps": settings.steps,
        "tokens": max((each["tokens"] for each in summaries.values()), default=0),
        "digests": sorted({each["global_params_digest"] for each in summaries.values()}),
        "rounds": len({(each["fragment"], each["outer_step"]) for log in logs for each in log.of("RoundCommitted")}),
        "void": len(void),
        "views": max((record["view"] for log in logs for record in log.of("ViewChanged")), default=0),
        "put_out": [words for _, words in put_out],
        "heldout_loss": losses[0] if losses else None,
        "undisturbed": list(undisturbed),
        "kinds": dict(sorted(Counter(record["kind"] for record in happened).items())),
        "planned": planned,
        "faults": faults,
    }


def _back_by_kind(
    logs: Sequence[checks.Log], happened: Sequence[dict[str, Any]], limit_s: float
) -> dict[str, list[float]]:
    """Return kind of event -> seconds until its peer contributed to a round again, for each."""
    back: dict[str, list[float]] = {}
    for record in happened:
        times = [
            seconds
            for log in logs
            for begin_s, seconds in checks.recoveries(log, limit_s)[0]
            if log.life.peer in (record["peer"], *record["others"]) and -0.05 <= begin_s - record["time_s"] < 35.0
        ]
        if times:
            back.setdefault(record["kind"], []).append(round(max(times), 1))
    return back


def publish(run: dict[str, Any], folder: Path) -> None:
    """Add a run to results.jsonl, replacing an earlier run of the same command, and write all runs into the README."""
    path = folder / "results.jsonl"
    runs = {each["command"]: each for each in read(path)} | {run["command"]: run}
    path.write_text("".join(json.dumps(each) + "\n" for each in runs.values()), encoding="utf-8")
    write_below(MARK, tables([*runs.values()]), folder / "README.md")


def tables(runs: Sequence[dict[str, Any]]) -> str:
    """Return a row for each run, then what took how long by kind of event, over all runs."""
    rows, times, numbers = [], defaultdict[str, list[float]](list), Counter[str]()
    for run in runs:
        failed = [f"{name}: {'; '.join(found)}" for name, found in run["faults"].items() if found]
        back, longest = run["back_s"] or [0.0], run["longest_s"]
        rows.append(
            [
                f"`{run['command']}`",
                f"{sum(run['kinds'].values())} of {run['planned']}",
                f"{run['rounds']:,}, {run['void']}",
                len(run["put_out"]),
                f"{longest['StepFinished']}, {longest['RoundCommitted']}",
                f"{statistics.median(back):.1f}, {max(back):.1f}",
                f"**failed**: {' '.join(failed)}" if failed else "passed",
            ]
        )
        numbers.update(run["kinds"])
        for kind, back_s in run["back_by_kind"].items():
            times[kind] += back_s
    kinds = []
    for kind, number in sorted(numbers.items()):
        found = times[kind]
        kinds.append([kind, number, f"{statistics.median(found):.1f}, {max(found):.1f}" if found else ""])
    header = [
        "run", "events of those planned", "rounds committed, void for somebody", "undisturbed members evicted",
        "longest step, and time without a round, of an undisturbed peer (s)",
        "in a round again after (s): median, longest", "checks",
    ]  # fmt: skip
    of_kinds = ["event, in all runs", "number", "in a round again after (s): median, longest"]
    return f"{table(header, rows)}\n\n{table(of_kinds, kinds)}\n"
