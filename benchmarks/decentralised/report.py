"""The tables of the benchmark, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.decentralised.plan import CASES, SETTINGS, Case, Setting
from benchmarks.decentralised.tables import joiner_table, view_table
from benchmarks.markdown import write_below
from benchmarks.wan.plan import Link

__all__ = ["write_report"]

Row = dict[str, Any]
MARK = "<!-- what follows is written by python -m benchmarks.decentralised -->"
HEAD = (
    "| method | values to mean on all peers: median (all rounds), s | with matchmaking, s | "
    "transfer, s | floor, s | transfer / floor | moved per peer: payload, wire (MB) | "
    "CPU of all peers per round, s | same bits | relative error | CPU: workers, all |"
)


def write_report(results: Sequence[Row], path: Path) -> None:
    """Write the tables below the mark in ``path``."""
    write_below(MARK, tables(results), path)


def tables(results: Sequence[Row]) -> str:
    """Return the tables of rounds by setting, of views, and of joiners."""
    lines: list[str] = []
    for setting in SETTINGS:
        found = _rows(results, "round", [setting])
        if found:
            lines += [f"## Rounds: {setting.name}", "", HEAD, "|---" * (HEAD.count("|") - 1) + "|"]
            lines += [describe_rounds(row, case, setting) for _, case, row in found] + [""]
    views, joiners = _rows(results, "view", SETTINGS), _rows(results, "joiner", SETTINGS)
    if views:
        lines += ["## Views", "", *view_table([(setting, row) for setting, _, row in views]), ""]
    if joiners:
        lines += ["## Joiners", "", *joiner_table([(f"{s.name}, {c.method.name}", row) for s, c, row in joiners]), ""]
    return "\n".join(lines)


def describe_rounds(row: Row, case: Case, setting: Setting) -> str:
    """Return a line of the table; for an unfinished run, with the reason."""
    name = case.method.name
    if row["outcome"] != "finished":
        return f"| {name} | {row['outcome']}: {row['reason']} |" + " |" * (HEAD.count("|") - 3)
    rounds = [list(each) for each in zip(*(replica["rounds"] for replica in row["replicas"]), strict=True)]
    whole = [max(record["had_s"] for record in each) - each[0]["began_s"] for each in rounds]
    transfers = [
        max(record["had_s"] for record in each) - min(record.get("handed_in_s", record["began_s"]) for record in each)
        for each in rounds
    ]
    matched = [max(record.get("matchmaking_s", 0.0) for record in each) for each in rounds]
    with_matching = [a + b for a, b in zip(whole, matched, strict=True)]
    records = [record for each in rounds for record in each]
    failures = sum(bool(record.get("failed")) for record in records)
    same = sum(len({record["digest"] for record in each}) == 1 for each in rounds)
    transfer_s = statistics.median(transfers)
    cells = [
        name,
        f"{statistics.median(whole):.2f} ({', '.join(f'{each:.2f}' for each in whole)})",
        f"{statistics.median(with_matching):.2f}" if any(matched) else "",
        f"{transfer_s:.2f}",
        *_against_floor(transfer_s, records, setting.link),
        _moved(records, setting.link),
        f"{statistics.median(sum(record['cpu_s'] for record in each) for each in rounds):.2f}",
        ("yes" if same == len(rounds) else f"{same} of {len(rounds)}") + (f", {failures} failed" if failures else ""),
        f"{max(record['error'] for record in records):.2g}",
        f"{row['cpu_workers']:.0%}, {row['cpu_busy']:.0%}",
    ]
    return "| " + " | ".join(cells) + " |"


def _against_floor(transfer_s: float, records: Sequence[Row], link: Link | None) -> tuple[str, str]:
    if link is None:
        return "", ""
    floor_s = link.transfer_s(_busiest(records))
    return f"{floor_s:.2f}", f"{transfer_s / floor_s:.2f}"


def _busiest(records: Sequence[Row]) -> float:
    """Return the most payload bytes that one peer sends or receives."""
    return float(max(max(each["sent_bytes"], each["received_bytes"]) for each in records))


def _moved(records: Sequence[Row], link: Link | None) -> str:
    payload = f"{_busiest(records) / 1e6:.1f}"
    if link is None:
        return payload
    wire = statistics.mean(max(each["wire_sent_bytes"], each["wire_received_bytes"]) for each in records)
    return f"{payload}, {wire / 1e6:.1f}"


def _rows(results: Sequence[Row], kind: str, settings: Sequence[Setting]) -> list[tuple[Setting, Case, Row]]:
    """Return the existing rows in the plan's order."""
    by_name = {(row["setting"], row["case"]): row for row in results}
    return [
        (setting, case, by_name[setting.name, case.name])
        for setting in settings
        for case in CASES
        if case.kind == kind and (setting.name, case.name) in by_name
    ]
