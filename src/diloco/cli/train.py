"""``diloco train``: plan the run, choose its folder, and train: all replicas here, one rank, or a peer of a swarm."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.checkpoint import lock_folder
from diloco.cli import DONE, FAILED, INTERRUPTED
from diloco.cli.run_folder import (
    claimed_folder,
    clear_folder,
    continue_record,
    folder_of_rank,
    has_other_files,
    not_empty_error,
)
from diloco.config import (
    CONFIG_FILE,
    CommandLine,
    Configuration,
    RunPlan,
    join_command,
    parse_arguments,
    plan_run,
    read_toml,
    resume_command,
)
from diloco.events import Event, RoundVoid
from diloco.plugins import is_own
from diloco.train import POSITION, Role, TrainSettings, read_torchrun, role_of

if TYPE_CHECKING:
    from diloco.monitor import Sinks
    from diloco.train import SwarmFleet, TorchFleet


def run(arguments: Sequence[str]) -> int:
    """Train; return 130 if a signal stopped the run and its state was saved."""
    return run_line(with_torchrun(parse_arguments(arguments)), ["train", *arguments])


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


def run_line(line: CommandLine, typed: Sequence[str], *, notes: Sequence[str] = ()) -> int:
    """Train with the settings of a command line.

    Args:
        typed: the command and its arguments, with which the processes of other ranks are started.
        notes: sentences for the user, printed before those that follow from the settings.
    """
    plan = plan_run(line)
    plan = dataclasses.replace(plan, notes=(*notes, *plan.notes))
    if line.print_config:
        for note in plan.notes:
            _say(f"note: {note}")
        print(plan.record)
        print("\n".join(f"# {name}: {fact}" for name, fact in _facts(plan.configuration).items()))
        return DONE
    torchrun = read_torchrun(os.environ)
    role = role_of(plan.configuration.network, torchrun)
    if role.kind == "rank":
        code = _train_rank(plan, role, quiet="monitor.console" not in line.values)
        launched = POSITION in os.environ
        if launched and code == FAILED:
            from diloco.train import IN_VAIN

            return IN_VAIN  # a failure of another kind is an exception; after this one no restart would help
        folder = plan.configuration.out or plan.source
        if torchrun is not None or launched or folder is None:  # the launcher of this process prints how to resume
            return code
    else:
        with claimed_folder(plan) as (folder, lock):
            if role.kind == "peer":
                return _train_peer(plan, folder)
            if role.kind == "launcher":
                code = _launch_ranks(plan, folder, typed, has_out="out" in line.values, lock=lock)
            else:
                if plan.source is not None:
                    continue_record(plan, plan.source, folder)
                code = _train(plan, plan.configuration, folder)
    if code == INTERRUPTED:
        _say(f"stopped; the state is saved. To resume: {resume_command(plan.configuration, folder)}")
    return code


def _say(words: str) -> None:
    print(f"diloco: {words}", file=sys.stderr, flush=True)


def _facts(configuration: Configuration) -> dict[str, str]:
    """Return what follows from the settings, using a model without allocated parameters."""
    from diloco.data import corpus_vocabulary_size
    from diloco.train import describe, identity, outline

    vocab_size = configuration.model.vocab_size or corpus_vocabulary_size(configuration.data)
    model = outline(configuration, vocab_size)
    return describe(configuration, model) | identity(configuration, model)


def _train_peer(plan: RunPlan, folder: Path) -> int:
    """Train as a peer of the swarm in the settings, until its run ends or a signal asks this replica to leave.

    It prints the commands with which others join and, if it is stopped, with which it resumes.
    """
    from diloco.train import connect_peer

    settings = plan.configuration
    if plan.source is not None and (folder / CONFIG_FILE).exists():
        continue_record(plan, plan.source, folder)
    notes, fleets = list(plan.notes), []
    join = join_command(settings, folder)

    def meet(facts: Mapping[str, str], own: Path) -> SwarmFleet:
        fleet = connect_peer(settings, own, facts)
        fleets.append(fleet)
        notes.extend(fleet.beginning())
        addresses = fleet.invitation()
        secret = " --secret-file FILE" if settings.network.secret_file else ""  # their copy of it
        _say(f"others join with\n  {join}{secret} {addresses}" if addresses else "no other peer can join here")
        return fleet

    code = _train(plan, settings, folder, notes, meet)
    if code == INTERRUPTED:
        resume, others = resume_command(settings, folder), fleets[-1].left_at if fleets else ()
        if others:
            _say(
                "stopped; the state is saved. To resume while others train: "
                f"{resume_command(settings, folder, others)}\n"
                "diloco: if all have stopped, the one that stopped last resumes first, and the others join it. To "
                f"resume: {resume}"
            )
        else:
            _say(f"stopped; the state is saved. To resume: {resume}")
    return code


def _launch_ranks(plan: RunPlan, folder: Path, typed: Sequence[str], *, has_out: bool, lock: int) -> int:
    """Start every rank on this machine with the arguments of this command, and wait for them."""
    from diloco.train import launch

    settings = plan.configuration
    out = [] if has_out or plan.source is not None else ["--out", str(folder)]
    talking_ranks = settings.network.replica_size if settings.train.parallelism == "fsdp" else 1
    return launch(
        settings.network,
        lambda replica, position, address: [*typed, "--replica", str(replica), "--join", str(address), *out],
        _say,
        talking_ranks=talking_ranks,
        lock=lock,
    )


def _train_rank(plan: RunPlan, role: Role, *, quiet: bool) -> int:
    """Train as one of several ranks.

    Args:
        quiet: show progress only on rank 0.

    Raises:
        ConfigurationError: if another process is using the folder of the rank, or it holds files of another run.
    """
    from diloco.devices import choose_device
    from diloco.train import connect_rank, held_step

    settings, folder = plan.configuration, folder_of_rank(plan, role)
    if quiet and not role.is_first:
        settings = dataclasses.replace(settings, monitor=dataclasses.replace(settings.monitor, console="quiet"))
    settings = dataclasses.replace(settings, train=_on_own_device(settings.train, role))

    def meet(facts: Mapping[str, str], own: Path) -> TorchFleet:
        home = own.parent if role.position else own
        resume, step = settings.checkpoint.resume, -1
        if resume is not None:
            step = held_step(home, role.replica, resume)
        fleet = connect_rank(settings, role, facts, step, choose_device(settings.train.device))
        try:
            with fleet.group.all_or_none():
                if occupied and not fleet.joining:
                    raise not_empty_error(folder)
        except BaseException:
            fleet.close()
            raise
        return fleet

    with lock_folder(folder):
        occupied = plan.source is None and has_other_files(folder)
        if plan.source is not None and (folder / CONFIG_FILE).exists():
            continue_record(plan, folder, folder)
        try:
            return _train(plan, settings, folder, plan.notes if role.is_first else (), meet, role)
        finally:
            if not occupied and not (folder / CONFIG_FILE).exists():
                clear_folder(folder, of_rank=True)


def _on_own_device(settings: TrainSettings, role: Role) -> TrainSettings:
    """Assign the CUDA devices of this machine to its processes in turn."""
    import torch

    if settings.device not in ("auto", "cuda") or not torch.cuda.is_available():
        return settings
    local = role.torchrun.local_rank if role.torchrun else role.local_rank
    return dataclasses.replace(settings, device=f"cuda:{local % torch.cuda.device_count()}")


class _Watched:
    """The sinks of a process, and the reason of the last void round."""

    def __init__(self, sinks: Sinks) -> None:
        self.close, self.void_reason, self._sinks = sinks.close, "", sinks

    def handle(self, event: Event) -> None:
        if isinstance(event, RoundVoid):
            self.void_reason = event.reason.rstrip(".")
        self._sinks.handle(event)


def _train(
    plan: RunPlan,
    settings: Configuration,
    folder: Path,
    notes: Sequence[str] | None = None,
    meet: Callable[[Mapping[str, str], Path], SwarmFleet | TorchFleet] | None = None,
    role: Role | None = None,
) -> int:
    """Train in ``folder``, and return the exit code: a run whose rounds were all void has failed.

    For a tracker, a process with all replicas is a single run; any other process is one run of a group.

    Args:
        notes: sentences for the user. Default: those of the plan.
        role: the rank that this process is. None: it holds all replicas, or is a peer of a swarm.
    """
    from diloco.monitor import make_sinks
    from diloco.train import OVER, run_training

    monitor, home, group = settings.monitor, folder.resolve(), None
    name = home.name
    if role is not None:
        home = home.parent if role.position else home
        group = (home.parent if role.replica else home).name
        name = f"{group}-replica-{role.replica}"
        if role.position:  # it reports what position 0 does
            monitor = dataclasses.replace(monitor, sinks=tuple(filter(is_own, monitor.sinks)))
    elif settings.network.transport == "hivemind":
        group, name = settings.network.run, settings.network.name or platform.node()
    config: dict[str, Any] = dataclasses.asdict(settings)
    sinks = make_sinks(monitor, folder, is_terminal=sys.stdout.isatty(), config=config, name=name, group=group)
    with closing(_Watched(sinks)) as sink:
        told = plan.notes if notes is None else notes
        summary = run_training(settings, folder=folder, sink=sink, config_toml=plan.record, notes=told, meet=meet)
    in_vain = summary.get("rounds_void") and not summary.get("rounds_committed")
    if in_vain and (role is None or role.is_first):
        _say(
            "no round was committed, so the replicas have learned nothing from each other: all "
            f"{summary['rounds_void']} were void. The reason of the last one: "
            f"{sink.void_reason or 'see metrics.jsonl'}. Remove the cause, then start a new run."
        )
    interrupted = summary["interrupted"] and not (role is None and summary["interrupted"] == OVER)
    return INTERRUPTED if interrupted else FAILED if in_vain else DONE
