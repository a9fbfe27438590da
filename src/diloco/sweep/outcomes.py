"""The outcomes of the runs of a study: a JSON line for each, a table, and a plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco.checkpoint.disk import write_whole
from diloco.errors import ConfigurationError
from diloco.events import json_ready
from diloco.simulate.picture_files import check_picture_path, picture_style, write_picture
from diloco.sweep.study import Run
from diloco.units import format_bytes

__all__ = ["Outcomes", "check_plot", "draw", "table"]

SEED = "seed"

Outcome = Mapping[str, Any]
"""``run`` (the name), ``varied`` and ``settings`` (key -> value), ``status`` ("done" or "failed"), ``error``, and for a
run that is done the entries of its summary."""


class Outcomes:
    """The file ``results.jsonl`` with the last outcome of each run. It is rewritten after each run.

    Raises:
        ConfigurationError: if the file exists and holds anything else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: dict[str, Outcome] = {}
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                outcome = json.loads(line)
                self._held[str(outcome["run"])] = outcome
            except (ValueError, KeyError, TypeError):
                raise ConfigurationError(
                    f"line {number} of {path} is not the outcome of a run. Move the file away to start the study again."
                ) from None

    def of(self, run: Run) -> Outcome | None:
        """Return the outcome of ``run``, or None if it has not been run with these settings."""
        outcome = self._held.get(run.name)
        return outcome if outcome is not None and outcome["settings"] == json_ready(run.settings) else None

    def of_all(self, runs: Sequence[Run]) -> list[Outcome]:
        """Return the outcomes of those of ``runs`` that have one, in their order."""
        return [outcome for outcome in map(self.of, runs) if outcome is not None]

    def is_done(self, run: Run) -> bool:
        """Return whether ``run`` has finished successfully."""
        outcome = self.of(run)
        return outcome is not None and outcome["status"] == "done"

    def add(self, run: Run, summary: Mapping[str, Any] | None, error: str = "") -> None:
        """Store the outcome of ``run``: its summary, or the error if it has none."""
        held = {"run": run.name, "varied": json_ready(run.varied), "settings": json_ready(run.settings)}
        self._held[run.name] = {
            **held,
            "status": "failed" if summary is None else "done",
            "error": error,
            **(summary or {}),
        }
        write_whole(self._path, "".join(json.dumps(each) + "\n" for each in self._held.values()))


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table with a row for each point of the axes. Runs that differ only in their seed share a row.

    >>> one = {"varied": {"codec.name": "fp4", "seed": 0}, "status": "done", "heldout_loss": 1.5,
    ...        "sent_bytes_per_replica": 2_000_000, "tokens_per_s": 100.0, "wall_s": 9.0}
    >>> print(table([one, one | {"varied": {"codec.name": "fp4", "seed": 1}, "heldout_loss": 1.7}]))
    | codec.name | held-out loss | lowest, highest | runs | sent by a replica | tokens/s |
    |---|---|---|---|---|---|
    | fp4 | 1.6000 | 1.5000, 1.7000 | 2 | 2.0 MB | 100 |
    """
    keys = _shown_keys(outcomes)
    header = [*keys, "held-out loss", "lowest, highest", "runs", "sent by a replica", "tokens/s"]
    lines = [_row(header), "|" + "---|" * len(header)]
    lines += [_row([*map(str, point), *_cells(alike)]) for point, alike in _by_point(outcomes, keys).items()]
    return "\n".join(lines)


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


def check_plot(path: Path, runs: Sequence[Run]) -> None:
    """Check that the study can be plotted to ``path``.

    Raises:
        ConfigurationError: as in `check_picture_path`, and if no axis holds at least two numbers.
    """
    check_picture_path(path)
    if _across([{"varied": json_ready(run.varied)} for run in runs]) is None:
        raise ConfigurationError(
            "--plot needs an axis of at least two numbers other than the seed, and this study has none. Leave --plot "
            "out."
        )


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Plot the held-out loss over the first numeric axis, one line for each point of the other axes, seeds as dots."""
    across = _across(outcomes)
    assert across is not None, "call check_plot first"
    others = [key for key in _shown_keys(outcomes) if key != across]
    with picture_style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.2, 4.4), layout="constrained")
        axes = figure.add_subplot()
        for point, alike in _by_point(outcomes, others).items():
            dots = sorted((each["varied"][across], each["heldout_loss"]) for each in alike if _has_loss(each))
            means = {x: statistics.fmean(loss for at, loss in dots if at == x) for x, _ in dots}
            label = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in zip(others, point, strict=True))
            (line,) = axes.plot(list(means), list(means.values()), label=label or None)
            axes.plot([x for x, _ in dots], [y for _, y in dots], "o", color=line.get_color(), markersize=3.5)
        numbers = sorted({each["varied"][across] for each in outcomes})
        if numbers[0] > 0 and numbers[-1] / numbers[0] >= 8:
            axes.set_xscale("log")
            axes.set_xticks(numbers, [f"{number:g}" for number in numbers])
            axes.minorticks_off()
        axes.set_xlabel(across)
        axes.set_ylabel("held-out loss")
        if others:
            axes.legend(frameon=False, fontsize=8)
        write_picture(figure, path, {}, "Held-out loss")


def _has_loss(outcome: Outcome) -> bool:
    return outcome["status"] == "done" and outcome["heldout_loss"] is not None


def _shown_keys(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the keys of the axes, except for the seed."""
    return list(dict.fromkeys(key for each in outcomes for key in each["varied"] if key != SEED))


def _across(outcomes: Sequence[Outcome]) -> str | None:
    """Return the key of the first numeric axis, other than the seed, on which the outcomes differ."""
    for key in _shown_keys(outcomes):
        values = [each["varied"].get(key) for each in outcomes]
        if len(set(map(repr, values))) > 1 and all(type(value) in (int, float) for value in values):
            return key
    return None


def _by_point(outcomes: Sequence[Outcome], keys: Sequence[str]) -> dict[tuple[Any, ...], list[Outcome]]:
    points: dict[tuple[Any, ...], list[Outcome]] = {}
    for outcome in outcomes:
        point = tuple(_hashable(outcome["varied"].get(key, "")) for key in keys)
        points.setdefault(point, []).append(outcome)
    return points


def _hashable(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) else json.dumps(value)
