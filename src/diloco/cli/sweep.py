"""``diloco sweep``: run a study, which is a set of runs that differ in some settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

from diloco.checkpoint.disk import write_whole
from diloco.config.flags import parse_options
from diloco.cores import usable_cores
from diloco.errors import ConfigurationError
from diloco.private_files import make_private_folder
from diloco.sweep.study import read_study

if TYPE_CHECKING:
    from diloco.sweep.execute import Ended

__all__ = ["run"]

DESCRIPTION = """Run a study: the same training run with settings varied along axes.

STUDY is a TOML file. The table [base] holds the settings that all runs share, with
the keys of `diloco train`. The table [axes] holds a list of values for each key that
is varied, and every combination is run. Keys separated by a comma are varied
together. Runs that differ only in their seed share a row of the result table.

  [base]
  train.steps = 300
  [axes]
  "schedule.inner_steps" = [10, 30]
  "codec.name" = ["float32", "fp4"]
  seed = [0, 1, 2]

The command writes DIR/results.jsonl with a line for each run that has ended,
DIR/table.md, and a run folder for each run in DIR/runs. After an interruption the
same command continues the study: finished runs are not repeated, interrupted ones
resume from their checkpoints, and failed ones are retried.

Examples:
  diloco sweep study.toml --out studies/first --dry-run
  diloco sweep study.toml --out studies/first --plot studies/first/loss.svg"""


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """The options of `diloco sweep`."""

    study: Annotated[Positional[Path], arg(metavar="STUDY", help_behavior_hint="")]
    """TOML file with [base] and [axes]."""
    out: Annotated[Path, arg(metavar="DIR", help_behavior_hint="")]
    """Folder for the runs and their results."""
    jobs: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Number of runs at a time. Default: one per core."""
    plot: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Plot the held-out loss over the first numeric axis to this file: .svg, .png or .html. Needs matplotlib."""
    dry_run: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """List the runs and which of them are done, without running any."""


def run(arguments: Sequence[str]) -> int:
    """Run all runs that are not done yet; return 1 if a run failed."""
    given = parse_options(SweepOptions, "sweep", DESCRIPTION, arguments)
    jobs = usable_cores() if given.jobs is None else given.jobs
    if jobs < 1:
        raise ConfigurationError(f"--jobs must be at least 1, got {jobs}.")
    runs = read_study(given.study)
    if repeated := [run.name for run in runs if [each.name for each in runs].count(run.name) > 1]:
        raise ConfigurationError(f"two runs of the study would have the name {repeated[0]}.")

    from diloco.sweep.execute import run_all, sweep_lock
    from diloco.sweep.outcomes import Outcomes, check_plot, draw, table

    folder = given.out / "runs"
    _make_folder(given.out if given.dry_run else folder)
    if given.plot is not None:
        check_plot(given.plot, runs)
    outcomes = Outcomes(given.out / "results.jsonl")
    rest = [each for each in runs if not outcomes.is_done(each)]
    print(f"{len(runs)} runs, {len(runs) - len(rest)} of them done; {jobs} at a time", flush=True)
    if given.dry_run:
        for each in runs:
            print(f"  {'done ' if outcomes.is_done(each) else 'to do'}  {each.name}")
        return 0

    with sweep_lock(given.out) as inherited:
        for each, ended in run_all(rest, folder, jobs, inherited):
            if ended is None:
                print(f"  start  {each.name}", flush=True)
                continue
            outcomes.add(each, ended.summary, ended.error)
            write_whole(given.out / "table.md", table(outcomes.of_all(runs)) + "\n")
            print(f"  {'failed' if ended.summary is None else 'done  '} {each.name}: {_in_words(ended)}", flush=True)
    held = outcomes.of_all(runs)
    text = table(held)
    write_whole(given.out / "table.md", text + "\n")
    print(text)
    if given.plot is not None:
        draw(held, given.plot)
    return 1 if any(outcome["status"] != "done" for outcome in held) else 0


def _in_words(ended: Ended) -> str:
    if ended.summary is None:
        return ended.error
    loss = ended.summary["heldout_loss"]
    return f"{'no held-out loss' if loss is None else f'held-out loss {loss:.4f}'}, {ended.summary['wall_s']:.0f} s"


def _make_folder(folder: Path) -> None:
    try:
        make_private_folder(folder)
    except OSError as error:
        raise ConfigurationError(f"--out {folder} can't be created: {error.strerror}.") from error
