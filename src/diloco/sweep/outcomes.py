"""The outcomes of the runs of a study: a JSON line for each, and a table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco.checkpoint import write_whole
from diloco.errors import ConfigurationError
from diloco.events import json_ready
from diloco.sweep.study import Run
from diloco.units import format_bytes

__all__ = ["Outcomes", "table"]

SEED = "seed"

Outcome = Mapping[str, Any]
"""``run`` (the name), ``identity`` (see `Run.identity`), ``varied`` and ``settings`` (key -> value), ``status`` ("done"
or "failed"), ``error``, and for a run that is done the entries of its summary."""


class Outcomes:
    """The file ``results.jsonl`` with the last outcome of everything that was run. It is rewritten after each run.

    Raises:
        ConfigurationError: if a line of the file is not an outcome.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[str, Outcome] = {}
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                outcome = json.loads(line)
                self._rows[outcome["identity"]] = outcome
            except (ValueError, KeyError, TypeError):
                raise ConfigurationError(
                    f"line {number} of {path} is not an outcome as this version of `diloco sweep` writes it. Delete "
                    "the line, and its run is run again, or move the file away."
                ) from None

    def of_all(self, runs: Sequence[Run]) -> list[Outcome]:
        """Return the outcomes of those of ``runs`` that were run with these settings and these files, in their order.

        They name the runs and the varied settings as this study does.
        """
        ended = [(run, self._rows[identity]) for run in runs if (identity := run.identity()) in self._rows]
        return [{**row, "run": run.name, "varied": run.varied} for run, row in ended]

    def is_done(self, run: Run) -> bool:
        """Return whether ``run`` has finished successfully."""
        return any(outcome["status"] == "done" for outcome in self.of_all([run]))

    def add(self, run: Run, identity: str, summary: Mapping[str, Any] | None, error: str = "") -> None:
        """Store the outcome of what was run: its summary, or the error if it has none."""
        self._rows[identity] = {
            "run": run.name,
            "identity": identity,
            "varied": json_ready(run.varied),
            "settings": json_ready(run.settings),
            "status": "failed" if summary is None else "done",
            "error": error,
            **(summary or {}),
        }
        write_whole(self._path, "".join(json.dumps(each) + "\n" for each in self._rows.values()))


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table with a row for each point of the axes. Runs that differ only in their seed share a row.

    >>> one = {"varied": {"sync.codec": "fp4", "seed": 0}, "status": "done", "heldout_loss": 1.5,
    ...        "sent_bytes_per_replica": 2_000_000, "tokens_per_s": 100.0, "wall_s": 9.0}
    >>> print(table([one, one | {"varied": {"sync.codec": "fp4", "seed": 1}, "heldout_loss": 1.7}]))
    | sync.codec | held-out loss | lowest, highest | runs | sent by a replica | tokens/s |
    |---|---|---|---|---|---|
    | fp4 | 1.6000 | 1.5000, 1.7000 | 2 | 2.0 MB | 100 |
    """
    keys = [key for key in dict.fromkeys(key for each in outcomes for key in each["varied"]) if key != SEED]
    header = [*keys, "held-out loss", "lowest, highest", "runs", "sent by a replica", "tokens/s"]
    points: dict[tuple[str, ...], list[Outcome]] = {}
    for outcome in outcomes:
        points.setdefault(tuple(str(outcome["varied"].get(key, "")) for key in keys), []).append(outcome)
    rows = [[*point, *_cells(alike)] for point, alike in points.items()]
    return "\n".join([_row(header), "|" + "---|" * len(header), *map(_row, rows)])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |"


def _cells(alike: Sequence[Outcome]) -> list[str]:
    done = [each for each in alike if each["status"] == "done"]
    losses = [each["heldout_loss"] for each in done if each["heldout_loss"] is not None]
    failed = [str(each["error"]) for each in alike if each["status"] != "done"]
    runs = f"{len(done)}" + (f", {len(failed)} failed: {failed[0]}" if failed else "")
    if not losses:
        return ["", "", runs, "", ""]
    spread = f"{min(losses):.4f}, {max(losses):.4f}" if len(losses) > 1 else ""
    sent = format_bytes(int(statistics.fmean(each["sent_bytes_per_replica"] for each in done)))
    speed = statistics.fmean(each["tokens_per_s"] for each in done)
    return [f"{statistics.fmean(losses):.4f}", spread, runs, sent, f"{speed:,.0f}"]
