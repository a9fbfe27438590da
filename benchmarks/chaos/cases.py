"""``python -m benchmarks.chaos.cases --wan SCRIPT``: one disturbance at a time, each of which once ended a run.

Each case is a separate run of about two minutes. ``--publish LABEL`` adds the figures to cases.json under that label,
and to the table of the README. The exit code is 1 if a check found a fault.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos import checks
from benchmarks.chaos.events import BOOTSTRAP, Event
from benchmarks.chaos.network import Loopback, Wan
from benchmarks.chaos.records import RunRecords
from benchmarks.chaos.report import CHECKS, table, write_between
from benchmarks.chaos.run import Conductor
from benchmarks.chaos.settings import Settings
from benchmarks.chaos.verdict import judge

__all__ = ["CASES", "Case", "found"]

HERE = Path(__file__).parent
MARK = "<!-- python -m benchmarks.chaos.cases writes what follows -->"

_BEGIN_S = 10.0
_OBSERVED_S = 60.0  # of training after the last event
_STEP_S = 0.2
_HEARTBEAT_S = 0.25
"""Short, so that on a link that is mute in one direction the receiver notices first: its TCP still sends a little."""


@dataclass(frozen=True)
class Case:
    """A run with one disturbance.

    Attributes:
        name: name of the case, the same for all transports.
        transport: ``hivemind`` or ``torch``.
        peers: number of peers that train; peer m is replica m.
        events: the events of the disturbance.
    """

    name: str
    transport: str
    peers: int
    events: tuple[Event, ...]

    @property
    def key(self) -> str:
        """The name by which ``--case`` selects it."""
        return f"{self.transport}-{self.peers}-{self.name}"

    @property
    def settings(self) -> Settings:
        """The settings of its run, which outlasts the last event."""
        lasts_s = max(event.at_s + event.seconds for event in self.events) + _OBSERVED_S
        return Settings(
            transport=self.transport,
            peers=self.peers,
            steps=round(lasts_s / _STEP_S),
            step_s=_STEP_S,
            heartbeat_s=_HEARTBEAT_S,
            rendezvous_timeout_s=60.0,
            straggler="wait",
            numbered=self.transport == "hivemind",
        )


_ACCUSED = {
    "accused-with-lowest": (Event(_BEGIN_S, "accused", 3, 14.0, others=(0, 1)),),
    "accused-without-lowest": (Event(_BEGIN_S, "accused", 3, 14.0, others=(1, 2)),),
}
_ONE = _ACCUSED | {
    "pair": (Event(_BEGIN_S, "pair", 1, 14.0, others=(2,)),),
    "flap": (Event(_BEGIN_S, "flap", 2, 180.0),),
    "thaw-at-the-end": (Event(_BEGIN_S, "thaw at the end", 2, with_daemon=True),),
}
_SWARM = _ONE | {
    "group-SIGINT": (Event(_BEGIN_S, "group SIGINT", 2),),
    "group-SIGTERM": (Event(_BEGIN_S, "group SIGTERM", 2),),
    "clock": (Event(_BEGIN_S, "clock", 1, 50.0, clock_s=3600.0), Event(_BEGIN_S + 5, "cut", 2, 12.0)),
    "clock-of-one-who-comes": (
        Event(_BEGIN_S, "kill", 2, with_daemon=True),
        Event(_BEGIN_S + 5, "join", 2, clock_s=600.0),
    ),
}

CASES = (
    *(Case(name, "hivemind", 4, events) for name, events in _SWARM.items()),
    *(Case(name, "torch", 4, events) for name, events in _ONE.items()),
    *(Case(name, "torch", 5, events) for name, events in _ACCUSED.items()),
)


def found(case: Case, records: RunRecords) -> dict[str, Any]:
    """Return the figures of a case, as JSON."""
    run = judge(records, case.events, ())
    checked = run["faults"] | {"nobody was put out to whom nothing was done": run["put_out"]}
    paces = {}
    for record, event in zip(records.happened, case.events, strict=False):
        if event.timetable:
            until_s = record["time_s"] + event.seconds
            paces[event.kind] = checks.pace(
                records.logs, event.stalls, record["time_s"], until_s, records.settings.step_s
            )
    lives = [life for life in records.lives if life.peer != BOOTSTRAP]
    codes = {
        str(life.peer): life.code if life.code is not None and life.code >= 0 else None
        for life in lives
        if not life.ended_by and life.code != 0
    }
    return {
        "what": "; ".join(f"{event.peer}: {event.text}" for event in case.events),
        "ended_by_themselves": codes,
        "came_to_the_end": len(records.summaries),
        "stood_still_s": run["longest_s"]["StepFinished"],
        "bound_s": run["limits_s"]["StepFinished"],
        "pace": round(min(paces.values()), 2) if paces else None,
        "put_out": len(run["put_out"]),
        "back_s": max((each["back_after_s"] or 0.0 for each in run["happened"]), default=0.0) or None,
        "rounds": run["rounds"],
        "faults": {name: faults for name, faults in checked.items() if faults},
    }


def publish(label: str, rows: dict[str, dict[str, Any]]) -> None:
    """Add the figures of some cases to cases.json under ``label``, and write all figures into the README."""
    path = HERE / "cases.json"
    held = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    held[label] = held.get(label, {}) | rows
    path.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")
    write_between(MARK, cases_table(held) + "\n", HERE / "README.md")


def cases_table(held: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return the table, with a row for each case and label.

    Args:
        held: label -> key of a case -> its figures.
    """
    rows: list[tuple[object, ...]] = [
        (
            "case",
            "code",
            "ended by themselves (peer: exit code)",
            "finished",
            "longest step of an undisturbed peer (s)",
            "pace of the others meanwhile",
            "undisturbed peers evicted",
            "in a round again after (s)",
            "checks that failed",
        )
    ]
    for case in CASES:
        for label, figures in held.items():
            if case.key not in figures:
                continue
            row = figures[case.key]
            ended = row["ended_by_themselves"]
            codes = ", ".join(f"{peer}: {'hangs' if code is None else code}" for peer, code in ended.items())
            back = "" if row["back_s"] is None else row["back_s"]
            reached = f"{row['came_to_the_end']} of {case.peers}"
            failed = "; ".join(CHECKS.get(name, name) for name in row["faults"]) or "none"
            pace = "" if row["pace"] is None else f"{row['pace']:.0%}"
            still = row["stood_still_s"]
            rows.append((case.key, label, codes or "none", reached, still, pace, row["put_out"], back, failed))
    return table(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos.cases", description=__doc__)
    parser.add_argument("--wan", type=Path, required=True, help="script that makes a network; needs root")
    parser.add_argument(
        "--case", action="append", choices=[case.key for case in CASES], help="case to run; default: all"
    )
    parser.add_argument("--transport", choices=("hivemind", "torch"), help="run only the cases of one transport")
    parser.add_argument("--out", type=Path, help="folder for the files of the runs; default: a temporary folder")
    parser.add_argument("--report", action="store_true", help="only check the files in --out")
    parser.add_argument("--publish", metavar="LABEL", help="update README.md and cases.json under this label")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out = given.out or Path(tempfile.mkdtemp(prefix="diloco-cases-"))
    wanted = [case for case in CASES if given.case is None or case.key in given.case]
    rows = {}
    for case in wanted:
        if given.transport not in (None, case.transport):
            continue
        print(f"{case.key}, in {out / case.key}", flush=True)
        network: Loopback = Wan(given.wan, os.environ.get("WAN_PREFIX", "k"))
        if not given.report:
            Conductor(case.settings, out / case.key, network, lambda text: print(text, flush=True)).run(case.events)
        rows[case.key] = found(case, RunRecords(out / case.key))
        print(json.dumps(rows[case.key], indent=1), flush=True)
    if given.publish:
        publish(given.publish, rows)
    return 1 if any(row["faults"] for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
