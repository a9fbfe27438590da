"""The tables of the WAN benchmark, in Markdown."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import table, write_below
from benchmarks.wan.plan import GRID, LINKS, METHODS, ROUND_VALUES, Link, Work

Row = dict[str, Any]
MARK = "<!-- what follows is written by python -m benchmarks.wan -->"
HEAD = (
    "| s per inner step | CU | sent per H steps: wire, payload (MB) | wire / payload | "
    "training loop blocked per synchronisation: mean, max (s) | transfer: mean (floor), s | "
    "same bits everywhere | CPU: workers, all |"
)


def write_report(
    results: Sequence[Row], grid: Sequence[Row], in_turn: Sequence[Row], quick_start: Sequence[Row], path: Path
) -> None:
    """Write the tables below the mark in ``path``: commits in turn, the quick start, links, rounds alone, the grid."""
    runs = [row for row in results if not _of_rounds(row)]
    lines = (
        in_turn_table(in_turn)
        + quick_start_table(quick_start)
        + _by_link(runs, LINKS, baseline_s(results))
        + rounds_table(results)
    )
    write_below(MARK, "\n".join([*lines, *_by_link(grid, GRID, baseline_s([*results, *grid]), "Grid: ")]), path)


def in_turn_table(rows: Sequence[Row]) -> list[str]:
    """Return a table with a line for each link and method and a column for each commit, in the order of the runs."""
    commits = list(dict.fromkeys(row["commit"] for row in rows))
    base_s = baseline_s(rows)
    lines = []
    for link in LINKS:
        for method in METHODS[1:]:
            of_pair = [row for row in rows if (row["link"], row["method"]) == (link.name, method.name)]
            if of_pair:
                cells = (_in_turn([row for row in of_pair if row["commit"] == commit], base_s) for commit in commits)
                lines.append(f"| {link.name} | {method.name} | {' | '.join(cells)} |")
    if not lines:
        return []
    heads = " | ".join(f"{commit}: CU; mean transfer (s)" for commit in commits)
    header = [f"| link | method | {heads} |", "|---" * (2 + len(commits)) + "|"]
    return ["## Commits in turn", "", *header, *lines, ""]


def _in_turn(rows: Sequence[Row], base_s: float) -> str:
    """Return the cell of one commit: its runs' utilisation, then their mean transfers; a run that failed is named."""
    if not rows:
        return ""
    shares = [f"{base_s / step_s(row):.1%}" if row["outcome"] == "finished" else row["outcome"] for row in rows]
    means_s = [f"{_mean_transfer_s(row):.2f}" for row in rows if row["outcome"] == "finished"]
    return f"{', '.join(shares)}; {', '.join(means_s)}"


def _mean_transfer_s(row: Row) -> float:
    return statistics.mean([float(value) for replica in row["replicas"] for value in replica["transfers_s"]])


def quick_start_table(rows: Sequence[Row]) -> list[str]:
    """Return the tables of whole runs of the quick start, and of the peers that join one."""
    lines: list[str] = []
    if runs := [row for row in rows if "summary" in row]:
        head = ["three replicas, 20 Mbit/s, 40 ms", "s from begin to end", "sent by a replica: payload, wire (MB)"]
        cells = [_quick_start(row) for row in runs]
        lines += [
            "## The quick start",
            "",
            table([*head, "held-out loss", "compute", "same digest", "commit"], cells),
            "",
        ]
    for row in rows:
        if "joins" in row:
            cells = [[each["started_at"], each["member_at"], f"{each['member_s']:.1f}"] for each in row["joins"]]
            head = ["a peer is started at step", "is a member at step", "s from its start"]
            lines += [f"## Joins, {row['commit']}", "", table(head, cells), ""]
    return lines


def _quick_start(row: Row) -> list[str]:
    summary, wire = row["summary"], statistics.mean(row["wire_sent_bytes"])
    return [
        row["part"],
        f"{row['wall_s']:.0f}",
        f"{summary['sent_bytes_per_replica'] / 1e6:.1f}, {wire / 1e6:.1f}",
        f"{summary['heldout_loss']:.4f}",
        f"{summary['compute_utilization']:.1%}",
        "yes" if row["same_digest"] else "no",
        row["commit"],
    ]


def _by_link(rows: Sequence[Row], links: Sequence[Link], base_s: float, title: str = "") -> list[str]:
    """Return a table with the methods of each link or, with a title, one with the links of each method."""
    made: dict[str, list[str]] = {}
    for link in links:
        for method in METHODS[1:] if title else METHODS:
            for row in rows:
                if (row["link"], row["method"]) == (link.name, method.name):
                    heading, cell = (title + method.name, link.name) if title else (link.name, method.name)
                    made.setdefault(heading, []).append(describe(cell, row, link, base_s))
    header = [f"| method {HEAD}", "|---" * HEAD.count("|") + "|"]
    return [line for name, found in made.items() for line in (f"## {name}", "", *header, *found, "")]


def baseline_s(results: Sequence[Row]) -> float:
    """Return the seconds per inner step of the fastest run without communication; NaN if there is none."""
    alone = (step_s(row) for row in results if row["method"] == METHODS[0].name and row["outcome"] == "finished")
    return min(alone, default=float("nan"))


def step_s(row: Row) -> float:
    """Return the seconds per inner step of the slowest replica."""
    return float(max(replica["wall_s"] / replica["steps"] for replica in row["replicas"]))


def describe(name: str, row: Row, link: Link, base_s: float) -> str:
    """Return a finished, unfinished or failed run as a line of the table; ``name`` is its first cell."""
    if row["outcome"] != "finished":
        sent = " / ".join(f"{count / 1e6:.1f}" for count in row["wire_sent_bytes"])
        return (
            f"| {name} | {row['outcome']}: {row['reason']}; {row['steps_done']} inner steps in "
            f"{row['elapsed_s']:.0f} s, {sent} MB sent |" + " |" * (HEAD.count("|") - 2)
        )
    work, replicas = Work(**row["work"]), row["replicas"]
    steps = replicas[0]["steps"]
    wire = statistics.mean(replica["wire_sent_bytes"] for replica in replicas) * work.inner_steps / steps
    payload = statistics.mean(replica["payload_sent_bytes"] for replica in replicas) * work.inner_steps / steps
    waits_s = [wait_s for replica in replicas for wait_s in replica["waits_s"]]
    transfers_s = [value for replica in replicas for value in replica["transfers_s"]]
    cells = [
        name,
        f"{step_s(row):.3f}",
        f"{base_s / step_s(row):.1%}",
        f"{wire / 1e6:,.1f}, {payload / 1e6:,.1f}",
        f"{wire / payload:.3f}" if payload else "",
        f"{statistics.mean(waits_s):.2f}, {max(waits_s):.2f}" if waits_s else "",
        _transfers(transfers_s, replicas, link),
        _agreement(replicas),
        f"{row['cpu_workers'] or float('nan'):.0%}, {row['cpu_busy']:.0%}".replace("nan%", "?"),
    ]
    return "| " + " | ".join(cells) + " |"


def _transfers(transfers_s: Sequence[float], replicas: Sequence[Row], link: Link) -> str:
    if not transfers_s:
        return ""
    payload = replicas[0]["payload_sent_bytes"] / replicas[0]["syncs"]
    return f"{statistics.mean(transfers_s):.2f} ({link.transfer_s(payload):.2f})"


def _agreement(replicas: Sequence[Row]) -> str:
    digests = {replica["digest"] for replica in replicas}
    failures = sum(replica["failures"] for replica in replicas)
    if digests == {""}:
        return ""
    return ("yes" if len(digests) == 1 else "no") + (f", {failures} failed" if failures else "")


def _of_rounds(row: Row) -> bool:
    return str(row["method"]).startswith("rounds")


def round_times(row: Mapping[str, Any]) -> dict[int, list[float]]:
    """Return, by the number of values in a round, the seconds of each such round (mean over replicas)."""
    every_s = [statistics.mean(each) for each in zip(*(rep["transfers_s"] for rep in row["replicas"]), strict=True)]
    return {size: every_s[index :: len(ROUND_VALUES)] for index, size in enumerate(ROUND_VALUES)}


def rounds_table(results: Sequence[Row]) -> list[str]:
    """Return the table of rounds alone: the time from submitting to the committed average, by number of values."""
    finished = [row for row in results if _of_rounds(row) and row["outcome"] == "finished"]
    if not finished:
        return []
    lines = [
        "## Rounds alone",
        "",
        "| link | rounds | values: median, max (s) | same bits | CPU: workers, all |",
        "|---" * 5 + "|",
    ]
    order = [link.name for link in LINKS]
    for row in sorted(finished, key=lambda row: (order.index(row["link"]), row["method"])):
        cells = [
            f"{size / 1e6:.1f}M: {statistics.median(times_s):.2f}, {max(times_s):.2f}"
            for size, times_s in round_times(row).items()
        ]
        lines.append(
            f"| {row['link']} | {row['method'].removeprefix('rounds ')} | {'; '.join(cells)} | "
            f"{_agreement(row['replicas'])} | {row['cpu_workers']:.0%}, {row['cpu_busy']:.0%} |"
        )
    return [*lines, ""]
