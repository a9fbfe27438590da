"""``diloco train``: plan the run, choose its folder, and train."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from diloco.cli import FAILED, INTERRUPTED
from diloco.cli.run_folder import claimed_folder
from diloco.config import (
    CommandLine,
    Configuration,
    RunPlan,
    parse_arguments,
    plan_run,
    read_toml,
    resume_command,
)
from diloco.train import POSITION, Role, read_torchrun, role_of

__all__ = ["run"]


def run(arguments: Sequence[str]) -> int:
    """Train; return 130 if a signal stopped the run and its state was saved."""
    return run_line(with_torchrun(parse_arguments(arguments)), ["train", *arguments])


def run_line(line: CommandLine, typed: Sequence[str], *, notes: Sequence[str] = ()) -> int:
    """Train with the settings of a command line.

    Args:
        typed: the command and its arguments, with which the processes of other ranks are started.
        notes: sentences for the user, printed before those that follow from the settings.
    """
    torchrun = read_torchrun(os.environ)
    plan = plan_run(line)
    plan = dataclasses.replace(plan, notes=(*notes, *plan.notes))
    if line.print_config:
        for note in plan.notes:
            print(f"diloco: note: {note}", file=sys.stderr)
        print(plan.record)
        print("\n".join(f"# {name}: {fact}" for name, fact in _facts(plan.configuration).items()))
        return 0
    role = role_of(plan.configuration.network, torchrun)
    if role.kind == "rank":
        from diloco.cli.train_processes import train_rank

        code = train_rank(plan, role, quiet="monitor.console" not in line.values)
        folder = plan.configuration.out or plan.source
        launched = POSITION in os.environ
        if torchrun is not None or launched:
            folder = None  # the launcher of this process prints how to resume
        if launched and code == FAILED:
            from diloco.train import IN_VAIN

            code = IN_VAIN  # a failure of another kind is an exception; after this one no restart would help
    else:
        with claimed_folder(plan) as (folder, lock):
            code = _train_in(folder, plan, role, line, typed, lock)
    if code == INTERRUPTED and folder is not None and role.kind != "peer":  # a peer has said it, with the others
        command = resume_command(plan.configuration, folder)
        print(f"diloco: stopped; the state is saved. To resume: {command}", file=sys.stderr)
    return code


def with_torchrun(line: CommandLine) -> CommandLine:
    """Return the line with the defaults of ``torchrun``: --transport torch, and as many replicas as it started."""
    torchrun = read_torchrun(os.environ)
    if torchrun is None or "checkpoint.resume" in line.values:
        return line
    asked = ({} if line.file is None else read_toml(line.file, Configuration)) | line.values
    if asked.get("network.transport", "torch") != "torch":
        return line
    replicas, rest = divmod(torchrun.world_size, asked.get("network.replica_size", 1))
    defaults = {"network.transport": "torch"} | ({} if rest else {"network.replicas": replicas})
    return dataclasses.replace(line, defaults=defaults)


def _train_in(folder: Path, plan: RunPlan, role: Role, line: CommandLine, typed: Sequence[str], lock: int) -> int:
    """Train in ``folder``, in this process or in processes that it starts."""
    from diloco.cli import train_processes

    if role.kind == "launcher":
        return train_processes.launch_ranks(plan, folder, typed, has_out="out" in line.values, lock=lock)
    if role.kind == "peer":
        return train_processes.train_peer(plan, folder)
    return train_processes.train_alone(plan, folder)


def _facts(configuration: Configuration) -> dict[str, str]:
    """Return what follows from the settings, using a model without allocated parameters."""
    from diloco.data import corpus_vocabulary_size
    from diloco.train import describe, identity, outline

    vocab_size = configuration.model.vocab_size or corpus_vocabulary_size(configuration.data)
    model = outline(configuration, vocab_size)
    return describe(configuration, model) | identity(configuration, model)
