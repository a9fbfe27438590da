"""``diloco sweep``: run a study, which is a set of runs that differ in some settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

from diloco.checkpoint import lock_folder, write_whole
from diloco.config import parse_options
from diloco.errors import ConfigurationError
from diloco.sweep import read_study

if TYPE_CHECKING:
    from diloco.sweep import Ended, Outcomes, Run

__all__ = ["run"]

DESCRIPTION = """Run a study: the same training run with settings varied along axes.

STUDY is a TOML file. The table [base] holds the settings that all runs share, with
the keys of `diloco train`. The table [axes] holds a list of values for each key that
is varied, and every combination is run. Keys separated by a comma are varied
together. Runs that differ only in their seed share a row of the result table.

  [base]
  train.steps = 300
  [axes]
  "sync.inner_steps" = [10, 30]
  "sync.codec" = ["float32", "fp4"]
  seed = [0, 1, 2]

The command writes DIR/results.jsonl with a line for each run that has ended,
DIR/table.md, and a run folder for each run in DIR/runs. After an interruption the
same command continues the study: finished runs are not repeated, interrupted ones
resume from their checkpoints, and failed ones are retried. A run whose settings or
data have changed is another run: it begins anew, in a folder of its own.

Examples:
  diloco sweep study.toml --out studies/first --dry-run
  diloco sweep study.toml --out studies/first"""


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """The options of `diloco sweep`."""

    study: Annotated[Positional[Path], arg(metavar="STUDY", help_behavior_hint="")]
    """TOML file with [base] and [axes]."""
    out: Annotated[Path, arg(metavar="DIR", help_behavior_hint="")]
    """Folder for the runs and their results."""
    jobs: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Number of runs at a time. Default: one for each visible GPU, or for each core if there is none; one if a run uses
    several processes or names its GPU."""
    dry_run: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """List the runs and which of them are done, without running any."""


def run(arguments: Sequence[str]) -> int:
    """Run all runs that are not done yet; return 1 if a run failed."""
    given = parse_options(SweepOptions, "sweep", DESCRIPTION, arguments)
    if given.jobs is not None and given.jobs < 1:
        raise ConfigurationError(f"--jobs must be at least 1, got {given.jobs}.")
    runs = read_study(given.study)

    from diloco.sweep import Outcomes, places, run_all, table

    if given.dry_run:
        outcomes = Outcomes(given.out / "results.jsonl")
        print(_counted(runs, outcomes))
        for each in runs:
            print(f"  {'done ' if outcomes.is_done(each) else 'to do'}  {each.name}")
        return 0

    with lock_folder(given.out) as lock:
        outcomes = Outcomes(given.out / "results.jsonl")
        rest = [each for each in runs if not outcomes.is_done(each)]
        where = places(rest, given.jobs)
        gpus = sorted({place for place in where if place is not None})
        print(f"{_counted(runs, outcomes)}; {len(where)} at a time{' on GPU ' if gpus else ''}{', '.join(gpus)}")
        (given.out / "runs").mkdir(exist_ok=True)
        for each, ended in run_all(rest, given.out / "runs", where, lock):
            if ended is None:
                print(f"  start  {each.name}", flush=True)
                continue
            outcomes.add(each, ended.identity, ended.summary, ended.error)
            write_whole(given.out / "table.md", table(outcomes.of_all(runs)) + "\n")
            print(f"  {'failed' if ended.summary is None else 'done  '} {each.name}: {_in_words(ended)}", flush=True)
        ends = outcomes.of_all(runs)
        write_whole(given.out / "table.md", table(ends) + "\n")
    print(table(ends))
    return 1 if any(end["status"] != "done" for end in ends) else 0


def _counted(runs: Sequence[Run], outcomes: Outcomes) -> str:
    return f"{len(runs)} runs, {sum(map(outcomes.is_done, runs))} of them done"


def _in_words(ended: Ended) -> str:
    if ended.summary is None:
        return ended.error
    loss = ended.summary["heldout_loss"]
    return f"{'no held-out loss' if loss is None else f'held-out loss {loss:.4f}'}, {ended.summary['wall_s']:.0f} s"
