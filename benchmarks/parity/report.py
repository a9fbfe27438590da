"""The tables of the parity benchmark, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.parity.plan import ABLATIONS, COMMON, MAIN, TUNING, Variant

__all__ = ["write_report"]

Row = dict[str, Any]
MARK = "<!-- what follows is written by python -m benchmarks.parity -->"


def write_report(results: Sequence[Row], path: Path, *, seeds: int) -> None:
    """Replace everything after `MARK` in ``path`` by the tables."""
    prose = path.read_text(encoding="utf-8").split(MARK)[0]
    path.write_text(prose + MARK + "\n\n" + tables(results, seeds), encoding="utf-8")


def tables(results: Sequence[Row], seeds: int) -> str:
    """Return the main table with the spread over seeds, the tables with one seed, and the commands."""
    by_name: dict[str, dict[int, Row]] = {}
    for row in results:
        by_name.setdefault(row["variant"], {})[row["seed"]] = row
    base = {seed: row["heldout_loss"] for seed, row in by_name["data-parallel"].items()}
    lines = [
        f"## {seeds} seeds",
        "",
        "| run | held-out loss, mean | largest - smallest | relative to data-parallel, per seed | "
        "sent after the start | minutes |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_main_row(variant, by_name[variant.name], base) for variant in MAIN]
    for settings in (v.name.removeprefix("Streaming fp4, ") for v in MAIN if v.name.startswith("Streaming fp4, ")):
        rival = {seed: row["heldout_loss"] for seed, row in by_name[f"data-parallel, {settings}"].items()}
        own = by_name[f"Streaming fp4, {settings}"]
        gaps = [f"{_gap(own[seed], rival[seed])} (seed {seed})" for seed in sorted(own) if seed in rival]
        lines += ["", f"Streaming fp4 relative to data-parallel, both with {settings}: {', '.join(gaps)}."]
    for heading, variants in (("Ablations", ABLATIONS), ("Learning rates, Muon and topk2", TUNING)):
        lines += ["", f"## {heading}, seed 0", ""]
        lines += ["| run | held-out loss | relative to data-parallel | sent after the start |", "|---|---|---|---|"]
        lines += [_one_seed_row(v, by_name[v.name][0], base[0]) for v in variants if v.name in by_name]
    lines += [
        "",
        "## Commands",
        "",
        f"`diloco train {COMMON} --seed SEED`, followed by:",
        "",
        "| run | arguments |",
        "|---|---|",
    ]
    shown = [v for v in (*MAIN, *ABLATIONS, *TUNING) if v.name in by_name]
    lines += [f"| {v.name} | `{f'{v.arguments} {v.inner}'.strip()}` |" for v in shown]
    return "\n".join(lines) + "\n"


def _sent(row: Row) -> str:
    start = row["shared_start_sent_bytes_per_replica"] if row["shared_start_steps"] else 0
    return f"{(row['sent_bytes_per_replica'] - start) / 1e6:,.1f} MB"


def _main_row(variant: Variant, rows: dict[int, Row], base: dict[int, float]) -> str:
    losses = [rows[seed]["heldout_loss"] for seed in sorted(rows)]
    gaps = " / ".join(_gap(rows[seed], base[seed]) for seed in sorted(rows))
    minutes = statistics.mean(row["wall_s"] for row in rows.values()) / 60
    return (
        f"| {variant.name} | {statistics.mean(losses):.4f} | {max(losses) - min(losses):.4f} | {gaps} | "
        f"{_sent(rows[min(rows)])} | {minutes:.1f} |"
    )


def _one_seed_row(variant: Variant, row: Row, base: float) -> str:
    return f"| {variant.name} | {row['heldout_loss']:.4f} | {_gap(row, base)} | {_sent(row)} |"


def _gap(row: Row, base: float) -> str:
    return f"{100 * (row['heldout_loss'] / base - 1):+.2f} %"
