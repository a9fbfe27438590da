"""The figures of a benchmark run, as Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.gpu.sizes import Sizes
from benchmarks.markdown import table
from diloco.units import format_bytes, format_count

ROUND_GOAL = 0.005


def report(results: Mapping[str, Any], sizes: Sizes) -> str:
    """Return tables of the parts in ``results``, and for each goal whether it was reached."""
    about = results["about"]
    lines = [f"{about['device']}; {', '.join(f'{name} {version}' for name, version in about['versions'].items())}", ""]
    if "checks" in results:
        words = {True: "yes", False: "**no**", None: "skipped"}
        lines += _table(
            ("check", "", ""), ((row["name"], words[row["ok"]], row["detail"]) for row in results["checks"])
        )
    for name, job in sizes.jobs.items():
        if name in results:
            shape = f"{job.batch_size} sequences of {job.sequence_length} tokens, {sizes.precision}"
            lines += [f"{name}: {shape}", "", *_training(results[name], job.goal)]
    if "rounds" in results:
        lines += _rounds(results["rounds"])
    if "sharing" in results:
        lines += _table(
            ("replicas of 35m on one device", "tokens/s"),
            ((row["name"], format_count(row["tokens_per_s"])) for row in results["sharing"]),
        )
    return "\n".join(lines)


def _training(rows: Sequence[Mapping[str, Any]], goal: float | None) -> list[str]:
    shown = []
    for row in rows:
        if "failed" in row:
            shown.append((row["name"], row["failed"], "", "", ""))
            continue
        used, memory = row["model_flops_utilization"], row["peak_bytes"]
        shown.append(
            (
                row["name"],
                f"{1e3 * row['step_s']:.1f} ms",
                format_count(row["tokens_per_s"]),
                "-" if used is None else f"{100 * used:.1f} %",
                "-" if memory is None else format_bytes(memory),
            )
        )
    lines = _table(("", "step (median)", "tokens/s", "MFU", "peak memory"), shown)
    used = [row["model_flops_utilization"] for row in rows if row["name"].startswith("diloco") and "failed" not in row]
    reached = max((value for value in used if value is not None), default=None)
    if reached is not None and goal is not None:
        words = "reached" if reached >= goal else "**not reached**"
        lines[-1:] = ["", f"Goal of {100 * goal:.0f} %: {words} ({100 * reached:.1f} %).", ""]
    return lines


def _rounds(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = list(rows[0]["parts_s"])
    lines = _table(
        ("a round of the whole model, global parameters", *(row["global_params"] for row in rows)),
        [
            *((name, *(f"{1e3 * row['parts_s'][name]:.2f} ms" for row in rows)) for name in names),
            ("total", *(f"{1e3 * row['round_s']:.2f} ms" for row in rows)),
            (f"share of {rows[0]['inner_steps']} inner steps", *(f"{100 * row['share']:.3f} %" for row in rows)),
        ],
    )
    best = min(row["share"] for row in rows)
    words = "reached" if best < ROUND_GOAL else "**not reached**"
    return [*lines, f"Goal of less than {100 * ROUND_GOAL:.1f} %: {words} ({100 * best:.3f} %).", ""]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [*table(head, rows).splitlines(), ""]
