"""``python -m benchmarks.chaos.cases --wan SCRIPT``: one disturbance at a time, each of which once ended a run.

Each case is a run of its own, of about two minutes. With ``--publish LABEL`` the figures are put into cases.json under
that label, and into the table of the README. Ends with exit code 1 where a check found a fault.
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
from benchmarks.chaos.report import table, write_between
from benchmarks.chaos.run import Conductor
from benchmarks.chaos.settings import Settings
from benchmarks.chaos.verdict import judge

__all__ = ["CASES", "Case", "found"]

HERE = Path(__file__).parent
MARK = "<!-- python -m benchmarks.chaos.cases writes what follows -->"

_BEGIN_S = 10.0
_OBSERVED_S = 60.0  # after the last event is over
_STEP_S = 0.2
_HEARTBEAT_S = 0.25
"""Often: of a link that is mute one way, the deaf end notices first, as its TCP still sends a little."""


@dataclass(frozen=True)
class Case:
    """A run in which one thing happens.

    Attributes:
        name: of the case, the same for all transports.
        transport: ``hivemind`` or ``torch``.
        peers: that train; replica m is the peer m.
        events: what happens.
    """

    name: str
    transport: str
    peers: int
    events: tuple[Event, ...]

    @property
    def key(self) -> str:
        """To be chosen by."""
        return f"{self.transport}-{self.peers}-{self.name}"

    @property
    def settings(self) -> Settings:
        """Of its run, which goes on for a while after the last event."""
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
    """The figures of a case, as JSON."""
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
    """Put figures into cases.json under ``label``, beside those of other cases, and all into the README."""
    path = HERE / "cases.json"
    held = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    held[label] = held.get(label, {}) | rows
    path.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")
    write_between(MARK, cases_table(held) + "\n", HERE / "README.md")


def cases_table(held: dict[str, dict[str, dict[str, Any]]]) -> str:
    """A row for each case and label.

    Args:
        held: label -> key of a case -> its figures.
    """
    rows: list[tuple[object, ...]] = [
        (
            "case",
            "code",
            "ended by themselves (peer: exit code)",
            "came to the end",
            "longest step of one to which nothing was done (s)",
            "steps that the others took meanwhile",
            "put out for nothing",
            "takes part again after (s)",
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
            failed = "; ".join(row["faults"]) or "none"
            pace = "" if row["pace"] is None else f"{row['pace']:.0%}"
            still = row["stood_still_s"]
            rows.append((case.key, label, codes or "none", reached, still, pace, row["put_out"], back, failed))
    return table(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos.cases", description=__doc__)
    parser.add_argument("--wan", type=Path, required=True, help="script that makes a network; as root")
    parser.add_argument("--case", action="append", choices=[case.key for case in CASES], help="default: all")
    parser.add_argument("--transport", choices=("hivemind", "torch"), help="only those of a transport")
    parser.add_argument("--out", type=Path, help="folder for what the runs leave behind; default: a temporary one")
    parser.add_argument("--report", action="store_true", help="only look at what is in --out")
    parser.add_argument("--publish", metavar="LABEL", help="write README.md and cases.json")
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
