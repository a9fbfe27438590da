"""Run folders with artificial events, and the content of the page for them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diloco.events import Event, json_ready, to_record
from diloco.watch import FollowedFolder, FollowedSwarm, page_data

NOW_S = 1_000_000.0


def write(folder: Path, told: Iterable[Event], *, end_s: float = NOW_S, **fields: Any) -> Path:
    """Append events that were written one second apart, the last one at ``end_s``, as a run does."""
    folder.mkdir(parents=True, exist_ok=True)
    told = list(told)
    records = [{**to_record(event), "time_s": end_s - len(told) + 1 + n, **fields} for n, event in enumerate(told)]
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(json_ready(record)) + "\n" for record in records)
    return folder


def shown(*followed: FollowedFolder | FollowedSwarm | Path, now_s: float = NOW_S) -> list[dict[str, Any]]:
    """Return what the page shows of runs, of folders after reading them to their ends."""
    runs = [FollowedFolder(each) if isinstance(each, Path) else each for each in followed]
    for each in runs:
        while isinstance(each, FollowedFolder) and each.read():
            pass
    page: dict[str, Any] = json.loads(page_data([each.run for each in runs], now_s))
    assert not any("can't be" in problem for run in page["runs"] for problem in run["problems"])
    return list(page["runs"])


def curve(run: dict[str, Any], name: str, process: str = "", kind: str = "StepFinished") -> list[list[float | None]]:
    """Return (step, value) of a curve."""
    line = run["lines"][process][kind]
    column = line["columns"].index(name)
    return [[row[0], row[column]] for row in line["rows"]]
