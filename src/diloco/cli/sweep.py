"""``diloco sweep``: run a study, which is a set of runs that differ in some settings."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta
from tyro.conf import Positional, arg

from diloco.checkpoint import lock_folder, write_whole
from diloco.config import flatten, parse_options
from diloco.events import to_json


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Run a study: the same training run with settings varied along axes.

    STUDY is a TOML file. [base] holds the settings that all runs share, [axes] a list of
    values for each key that is varied. Every combination is run, and runs that differ
    only in their seed share a row of DIR/table.md. The same command continues a study.

    Examples:
      diloco sweep study.toml --out studies/first --dry-run
    """

    study: Positional[Path]
    """TOML file with [base] and [axes]."""
    out: Annotated[Path, arg(metavar="DIR")]
    """Folder for the runs and their results."""
    jobs: Annotated[int | None, Meta(ge=1)] = None
    """Number of runs at a time. Default: one for each visible GPU, or for each core if there is none."""
    dry_run: bool = False
    """List the runs and which of them are done, without running any."""


def run_sweep(arguments: Sequence[str]) -> int:
    """Run all runs that are not done yet; return 1 if a run failed."""
    given = parse_options(SweepOptions, "sweep", arguments)

    from diloco.sweep import places, read_study, run_all, table

    runs, folder, errors = read_study(given.study), given.out / "runs", dict[str, str]()

    def save() -> str:
        rows = []
        for run in runs:
            if (summary := run.summary(folder)) or run.plan.record in errors:
                about = {"run": run.name, "varied": run.varied, "error": errors.get(run.plan.record, "")}
                rows.append(about | {"settings": flatten(run.plan.configuration)} | (summary or {}))
        write_whole(given.out / "results.jsonl", "".join(to_json(row) + "\n" for row in rows))
        write_whole(given.out / "table.md", table(rows) + "\n")
        return table(rows)

    with contextlib.nullcontext() if given.dry_run else lock_folder(given.out) as lock:
        rest = [run for run in runs if run.summary(folder) is None]
        print(f"{len(runs)} runs, {len(runs) - len(rest)} of them done")
        if given.dry_run:
            print("\n".join(f"  {'to do' if run in rest else 'done '}  {run.name}" for run in runs))
            return 0
        folder.mkdir(exist_ok=True)
        for run, error in run_all(rest, folder, places(given.jobs), lock):
            if error is None:
                print(f"  start  {run.name}", flush=True)
                continue
            print(f"  {'failed' if error else 'done  '} {run.name}", flush=True)
            errors[run.plan.record] = error
            save()
        print(save())
    return 1 if any(errors.values()) else 0
