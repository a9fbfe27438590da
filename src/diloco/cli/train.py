"""``diloco train``: plan the run, choose its folder, build the sinks, train."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from diloco.checkpoint.disk import write_whole
from diloco.config.configuration import Configuration, parse_arguments
from diloco.config.flags import CommandLine
from diloco.config.keys import Values
from diloco.config.run_plan import CONFIG_FILE, RunPlan, command_to_go_on, plan_run
from diloco.errors import ConfigurationError
from diloco.train.roles import Role, TorchRun, read_torchrun, role_of

__all__ = ["claim_numbered", "continue_record", "run", "writable"]

INTERRUPTED = 130


def run(arguments: Sequence[str]) -> int:
    """Train; returns 130 when a signal stopped the run and its state was saved."""
    torchrun = read_torchrun(os.environ)
    line = _fitted(parse_arguments(arguments), torchrun)
    plan = plan_run(line)
    if line.print_config:
        for note in plan.notes:
            print(f"diloco: note: {note}", file=sys.stderr)
        print(plan.record)
        print("\n".join(f"# {name}: {fact}" for name, fact in _facts(plan.configuration).items()))
        return 0
    role = role_of(plan.configuration.transport, torchrun)
    if role.kind == "rank":
        from diloco.cli.rank import train_rank

        code = train_rank(plan, role, quiet="monitor.console" not in line.values)
        launched = torchrun is not None or "transport.position" in line.values  # whoever started it says it for all
        if (base := plan.configuration.out or plan.source) is not None and not launched:
            _say_how_to_go_on(plan, base, code)
        return code
    folder = _claim_folder(plan)
    code = _train_in(folder, plan, role, line, arguments)
    _say_how_to_go_on(plan, folder, code)
    return code


def _say_how_to_go_on(plan: RunPlan, folder: Path, code: int) -> None:
    if code == INTERRUPTED:
        command = command_to_go_on(plan.configuration, folder)
        print(f"diloco: stopped, and the state is saved. To go on: {command}", file=sys.stderr)


def _train_in(folder: Path, plan: RunPlan, role: Role, line: CommandLine, arguments: Sequence[str]) -> int:
    """Train in the folder that was made for it, in this process or in those that it starts."""
    try:
        if role.kind == "launcher":
            from diloco.cli.rank import launch_ranks

            return launch_ranks(plan, folder, arguments, has_out="out" in line.values)
        if role.kind == "peer":
            from diloco.cli.peer import train_peer

            return train_peer(plan, folder)
        return _train(plan, folder)
    finally:
        # Nothing of a run that never began stays behind to stand in the way of the next attempt.
        if plan.source is None and not (folder / CONFIG_FILE).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _fitted(line: CommandLine, torchrun: TorchRun | None) -> CommandLine:
    """Under ``torchrun``, replicas in processes, as many as it started, where nothing else was said."""
    if torchrun is None or line.file is not None or "checkpoint.resume" in line.values:
        return line
    values: Values = {"transport.name": "torch"} | line.values
    size = int(values.get("transport.replica_size", 1))
    if values["transport.name"] == "torch" and torchrun.world_size % size == 0:
        values = {"transport.replicas": torchrun.world_size // size} | values
    return dataclasses.replace(line, values=values)


def _train(plan: RunPlan, folder: Path) -> int:
    from diloco.cli.watching import watch
    from diloco.train.run import run_training

    if plan.source is not None:
        continue_record(plan, plan.source, folder)
    sink = watch(plan.configuration, folder)
    try:
        summary = run_training(plan.configuration, folder=folder, sink=sink, config_toml=plan.record, notes=plan.notes)
    finally:
        sink.close()
    return INTERRUPTED if summary["interrupted"] else 0


def _claim_folder(plan: RunPlan) -> Path:
    """The folder of the run, made; nobody else's files are in it.

    Raises:
        ConfigurationError: the folder asked for holds something.
    """
    out, source = plan.configuration.out, plan.source
    if source is not None and (out is None or out.resolve() == source.resolve()):
        return writable(source)
    if out is None:
        configuration = plan.configuration
        name = configuration.swarm.run or f"{configuration.algorithm}-{configuration.model_label}"
        return claim_numbered(Path("runs") / name)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "is no folder" if not out.is_dir() else "is not empty"
        works = "another --out" if source is not None else f"--resume {out} to go on with a run there, or another --out"
        raise ConfigurationError(f"--out {out} was given and {what}; {works} would work. Nothing was started.")
    writable(out).mkdir(parents=True, exist_ok=True)
    return out


def claim_numbered(first: Path) -> Path:
    """``first``, or with the lowest number behind it that nobody has taken; two runs started at once get two."""
    writable(first.parent).mkdir(parents=True, exist_ok=True)
    for number in count(2):
        folder = first if number == 2 else first.with_name(f"{first.name}-{number - 1}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("the numbers do not end")


def writable(folder: Path) -> Path:
    """``folder``, which may still must be made, if this process can write there.

    Raises:
        ConfigurationError: if it can't.
    """
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = f"{there} is no folder" if not there.is_dir() else f"{there} can't be written to"
        raise ConfigurationError(
            f"{folder} was to be the folder of the run, and {why}; another --out, where this user may write, would "
            "work. Nothing was started."
        )
    return folder


def continue_record(plan: RunPlan, source: Path, folder: Path) -> None:
    """Keep the record true when a run goes on with changes, or in another folder."""
    from diloco.data.tokenizer_choice import load_tokenizer

    if folder != source:
        load_tokenizer(source).save(folder)
    write_whole(folder / CONFIG_FILE, plan.record)


def _facts(configuration: Configuration) -> dict[str, str]:
    """What follows from the settings, from a model without memory."""
    from diloco.data.corpus import corpus_vocabulary_size
    from diloco.train.components import outline
    from diloco.train.describe import describe

    vocab_size = configuration.model.vocab_size or corpus_vocabulary_size(configuration.data)
    return describe(configuration, outline(configuration, vocab_size))
