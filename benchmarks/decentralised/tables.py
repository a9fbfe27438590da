"""The tables of views and joiners, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.decentralised.phases import PHASES
from benchmarks.decentralised.plan import Setting

__all__ = ["joiner_table", "view_table"]

Row = dict[str, Any]
_GOAL_ROUND_TRIPS = 3
_GOAL_S = 0.1
STARTS = "a process starts (until it can ask to join; until its imports are done)"


def view_table(rows: Sequence[tuple[Setting, Row]]) -> list[str]:
    """Return the table of the times from an event until all members have adopted the next view and finished a round."""
    lines = ["| setting | event | until all members have adopted the next view: median (all), s | goal, s | "]
    lines[0] += "until a round in it has finished, s | CPU: workers, all |"
    lines.append("|---" * 6 + "|")
    for setting, row in rows:
        if row["outcome"] != "finished":
            lines.append(f"| {setting.name} | {row['outcome']}: {row['reason']} | | | | |")
            continue
        goal_s = _GOAL_ROUND_TRIPS * (setting.link.rtt_s if setting.link else 0.0) + _GOAL_S
        for words, took in sorted(view_changes(row["replicas"]).items(), key=lambda each: each[0] == STARTS):
            goal = "" if words == STARTS else f"{goal_s:.1f}"
            adopted = [each[0] for each in took]
            through = [each[1] for each in took]
            lines.append(
                f"| {setting.name} | {words} | {_median_and_all(adopted)} | {goal} | "
                f"{_median_and_all(through)} | {row['cpu_workers']:.0%}, {row['cpu_busy']:.0%} |"
            )
    return lines


def view_changes(replicas: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    """Return, by event, the seconds of each occurrence until all had adopted the next view and finished a round."""
    *members, host = replicas
    took: dict[str, list[tuple[float, float]]] = {}
    for guest in host["guests"]:
        number = guest["number"]
        with_it = [_first(member["adopted"], number, present=True) for member in members]
        without = [_first(member["adopted"], number, present=False) for member in members]
        adopted_s = max(guest["member"], *(each["at_s"] for each in with_it))
        through_s = max(guest["round"], *(each.get("round_s", 0.0) for each in with_it))
        took.setdefault("a peer joins (from its request)", []).append(_since(guest["introduced"], adopted_s, through_s))
        words, event = ("a peer is killed", "killed") if "killed" in guest else ("a peer leaves", "leaving")
        adopted_s = max(each["at_s"] for each in without)
        through_s = max(each.get("round_s", 0.0) for each in without)
        took.setdefault(words, []).append(_since(guest[event], adopted_s, through_s))
        took.setdefault(STARTS, []).append(
            (guest["introduced"] - guest["started"], guest["imported"] - guest["started"])
        )
    return took


def _since(began_s: float, adopted_s: float, through_s: float) -> tuple[float, float]:
    return adopted_s - began_s, through_s - began_s


def _first(adopted: Sequence[Row], number: int, *, present: bool) -> Row:
    """Return a member's first view with ``number`` in it, or the first one without it after that."""
    first = next(index for index, each in enumerate(adopted) if number in each["members"])
    return adopted[first] if present else next(each for each in adopted[first:] if number not in each["members"])


def _median_and_all(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({', '.join(f'{each:.2f}' for each in values)})"


def joiner_table(rows: Sequence[tuple[str, Row]]) -> list[str]:
    """Return the table of the joiner's events, and that of the members' inner steps meanwhile."""
    finished = [(name, row) for name, row in rows if row["outcome"] == "finished"]
    events = ("imported", "introduced", "built", "has state", "member", "contributed", "contributed everywhere")
    lines = [
        "| joiner | " + " | ".join(f"{event}, s" for event in events) + " | fetched before joining, in all (MB) | "
        "received on the wire (MB) | CPU: workers, all |",
        "|---" * (len(events) + 4) + "|",
    ]
    for name, row in finished:
        host = row["replicas"][-1]
        guest, wire = host["guest"], host["wire_received_bytes"]
        times = " | ".join(f"{guest[event] - guest['started']:.2f}" for event in events)
        first, total = guest["fetched_first"]["bytes"], guest["fetched"]["bytes"]
        received = f"{wire / 1e6:.0f}" if wire else ""
        lines.append(
            f"| {name} | {times} | {first / 1e6:.0f}, {total / 1e6:.0f} | {received} | "
            f"{row['cpu_workers']:.0%}, {row['cpu_busy']:.0%} |"
        )
    lines += [
        f"| {name} | {row['outcome']}: {row['reason']} |" + " |" * (len(events) + 2)
        for name, row in rows
        if row["outcome"] != "finished"
    ]
    lines += [
        "",
        "| joiner | phase | members' inner steps | mean (ms) | relative to before | matrix products alone (ms) | "
        "longest (ms) | longest wait in a step (ms) |",
        "|---" * 8 + "|",
    ]
    for name, row in finished:
        members = [replica["phases"] for replica in row["replicas"][:-1]]
        before_s = statistics.mean(member["before"]["mean_s"] for member in members)
        for phase, _, _ in PHASES:
            seen = [member[phase] for member in members if member[phase]["steps"]]
            if seen:
                mean_s = statistics.mean(each["mean_s"] for each in seen)
                products_s = statistics.mean(each["products_s"] for each in seen)
                lines.append(
                    f"| {name} | {phase} | {sum(each['steps'] for each in seen)} | {1e3 * mean_s:.1f} | "
                    f"{mean_s / before_s:.2f} | {1e3 * products_s:.1f} | "
                    f"{1e3 * max(each['longest_s'] for each in seen):.0f} | "
                    f"{1e3 * max(each['longest_wait_s'] for each in seen):.0f} |"
                )
    return lines
