"""The tables of the chaos benchmark, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.chaos.plan import BOOTSTRAP

__all__ = ["MARK", "tables", "write_report"]

MARK = "<!-- what follows is written by python -m benchmarks.chaos -->"


def write_report(run: dict[str, Any], path: Path) -> None:
    """Put the tables behind the mark in ``path``; the prose before it stays."""
    prose = path.read_text(encoding="utf-8").split(MARK)[0]
    path.write_text(prose + MARK + "\n\n" + tables(run), encoding="utf-8")


def tables(run: dict[str, Any]) -> str:
    """What was checked, then what happened."""
    lines = [f"## `{run['command']}`", "", *_facts(run), "", *_checks(run), "", *_events(run["happened"])]
    return "\n".join(lines) + "\n"


def _facts(run: dict[str, Any]) -> list[str]:
    kinds = ", ".join(f"{number} {kind}" for kind, number in run["kinds"].items())
    back = run["back_s"] or [0.0]
    longest, limits = run["longest_s"], run["limits_s"]
    loss = "none" if run["heldout_loss"] is None else f"{run['heldout_loss']:.4f}"
    undisturbed = ", ".join(f"{each:.4f}" for each in run["undisturbed"]) or "not run"
    rows = [
        ("events", f"{len(run['happened'])} of {run['planned']} planned: {kinds}"),
        ("processes that trained", f"{run['processes']}, of which {run['ended_peers']} came to the end"),
        ("steps, tokens", f"{run['steps']:,}, {run['tokens']:,}"),
        ("views", f"{run['views']:,}"),
        ("rounds", f"{run['rounds']:,} committed, {run['void']} void for somebody"),
        ("longest time for a step", f"{longest['StepFinished']} s (bound: {limits['StepFinished']:g} s)"),
        ("longest time without a round", f"{longest['RoundCommitted']} s (bound: {limits['RoundCommitted']:g} s)"),
        (
            "from start, thaw or healing to a round with the peer's part",
            f"median {statistics.median(back):.1f} s, longest {max(back):.1f} s (bound: {run['back_limit_s']:g} s)",
        ),
        ("digests at the end", ", ".join(run["digests"]) or "none"),
        ("held-out loss, and undisturbed", f"{loss}; {undisturbed}"),
    ]
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def _checks(run: dict[str, Any]) -> list[str]:
    lines = ["| check | |", "|---|---|"]
    for name, faults in run["faults"].items():
        lines.append(f"| {name} | {'yes' if not faults else '**no**: ' + '; '.join(faults)} |")
    return lines


def _events(happened: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "| at (s) | peer | what | longest step of the others (s) | takes part again after (s) |",
        "|---|---|---|---|---|",
    ]
    for event in happened:
        peer = "standing" if event["peer"] == BOOTSTRAP else event["peer"]
        back = "" if event["back_after_s"] is None else event["back_after_s"]
        lines.append(f"| {event['at_s']} | {peer} | {event['what']} | {event['others_stood_still_s']} | {back} |")
    return lines
