"""The tables of the chaos benchmark, in Markdown."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["CHECKS", "MARK", "publish", "table", "tables", "write_between"]

MARK = "<!-- python -m benchmarks.chaos writes what follows -->"

CHECKS = {
    "nobody stood still for longer": "no undisturbed peer stalled beyond a bound, and all recovered in time",
    "all ended with the same parameters": "all peers that finished have the same parameters",
    "the loss is that of an undisturbed run": "the final loss matches that of undisturbed runs",
    "the loss was found at the end (and compared with nothing)": "the final loss was evaluated (not compared)",
    "a link that flaps costs the others at most its own peer": "a flapping link evicts no other peer",
    "what is said is said in a few sentences": "no process printed a traceback or more than 50 lines",
    "nobody was put out to whom nothing was done": "no undisturbed peer was evicted",
}
"""Name of a check in the results -> its wording in the tables, where that differs."""


def publish(run: dict[str, Any], folder: Path) -> None:
    """Add a run to results.json, replacing an earlier run of the same command, and write all runs into the README."""
    path = folder / "results.json"
    runs = {each["command"]: each for each in json.loads(path.read_text(encoding="utf-8"))} if path.exists() else {}
    runs[run["command"]] = run
    path.write_text(json.dumps(list(runs.values()), indent=1) + "\n", encoding="utf-8")
    write_between(MARK, tables(list(runs.values())), folder / "README.md")


def write_between(mark: str, text: str, path: Path) -> None:
    """Replace the text between ``mark`` and the next comment, or the end of the file, by ``text``."""
    before, rest = path.read_text(encoding="utf-8").split(mark)
    _, *after = rest.split("<!-- ", 1)
    path.write_text("<!-- ".join([f"{before}{mark}\n\n{text}\n", *after]), encoding="utf-8")


def table(rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table whose first row is the header.

    >>> print(table([["a", "b"], [1, 2]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def tables(runs: Sequence[dict[str, Any]]) -> str:
    """Return the tables of each run: its figures, its checks, and the effects of each kind of event."""
    return "\n".join(_of_one(run) for run in runs)


def _of_one(run: dict[str, Any]) -> str:
    checked = [
        (CHECKS.get(name, name), "yes" if not faults else f"**no**: {'; '.join(faults)}")
        for name, faults in run["faults"].items()
    ]
    parts = (table([("", ""), *_facts(run)]), table([("check", ""), *checked]), table(_kinds(run)))
    return f"### `{run['command']}`\n\n" + "\n\n".join(parts) + "\n"


def _facts(run: dict[str, Any]) -> list[tuple[str, str]]:
    back = run["back_s"] or [0.0]
    longest, limits = run["longest_s"], run["limits_s"]
    loss = "none" if run["heldout_loss"] is None else f"{run['heldout_loss']:.4f}"
    undisturbed = ", ".join(f"{each:.4f}" for each in run["undisturbed"]) or "not run"
    return [
        ("events", f"{len(run['happened'])} of {run['planned']} planned"),
        ("processes that trained", f"{run['processes']}, of which {run['ended_peers']} finished"),
        ("steps, tokens", f"{run['steps']:,}, {run['tokens']:,}"),
        ("views", f"{run['views']:,}"),
        ("rounds", f"{run['rounds']:,} committed, {run['void']} void for at least one replica"),
        ("undisturbed members evicted", f"{len(run['put_out'])}"),
        (
            "longest step of an undisturbed peer",
            f"{longest['StepFinished']} s (bound: {limits['StepFinished']:g} s)",
        ),
        (
            "longest time of an undisturbed peer without a round",
            f"{longest['RoundCommitted']} s (bound: {limits['RoundCommitted']:g} s)",
        ),
        (
            "from start, thaw or healing to a round with the peer's contribution",
            f"median {statistics.median(back):.1f} s, longest {max(back):.1f} s (bound: {run['back_limit_s']:g} s)",
        ),
        ("digests at the end", ", ".join(run["digests"]) or "none"),
        ("held-out loss; undisturbed", f"{loss}; {undisturbed}"),
    ]


def _kinds(run: dict[str, Any]) -> list[tuple[object, ...]]:
    """Return the rows of the table of events, one for each kind."""
    rows: list[tuple[object, ...]] = [
        ("event", "number", "longest step of the others (s)", "in a round again after (s): median", "longest")
    ]
    for kind, number in run["kinds"].items():
        of_kind = [each for each in run["happened"] if each["kind"] == kind]
        back = [each["back_after_s"] for each in of_kind if each["back_after_s"] is not None]
        still = max(each["others_stood_still_s"] for each in of_kind)
        times = (f"{statistics.median(back):.1f}", f"{max(back):.1f}") if back else ("", "")
        rows.append((kind, number, still, *times))
    return rows
