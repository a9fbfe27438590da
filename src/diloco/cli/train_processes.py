"""The kinds of processes of ``diloco train``: all replicas in one, a launcher, a rank, or a peer of a swarm."""

from __future__ import annotations

import dataclasses
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.checkpoint import lock_folder
from diloco.cli import DONE, FAILED, INTERRUPTED
from diloco.cli.run_folder import (
    clear_folder,
    continue_record,
    folder_of_rank,
    has_other_files,
    not_empty_error,
)
from diloco.config import CONFIG_FILE, Configuration, RunPlan, join_command, resume_command
from diloco.events import Event, RoundVoid
from diloco.monitor import Sinks, make_sinks
from diloco.plugins import is_own
from diloco.train import Role, TrainSettings
from diloco.transport import Address

if TYPE_CHECKING:
    from diloco.train import SwarmFleet, TorchFleet

__all__ = ["launch_ranks", "train_alone", "train_peer", "train_rank"]


def train_alone(plan: RunPlan, folder: Path) -> int:
    """Train all replicas in this process."""
    from diloco.train import run_training

    if plan.source is not None:
        continue_record(plan, plan.source, folder)
    with closing(_watch(plan.configuration, folder)) as sink:
        summary = run_training(plan.configuration, folder=folder, sink=sink, config_toml=plan.record, notes=plan.notes)
    return _exit_code(summary, sink.void_reason)


def train_peer(plan: RunPlan, folder: Path) -> int:
    """Train as a peer of the swarm in the settings, until its run ends or a signal asks this replica to leave.

    It prints the commands with which others join and, if it is stopped, with which it resumes.
    """
    from diloco.train import OVER, connect_peer, run_training

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
        invitation = f"others join with\n  {join}{secret} {addresses}" if addresses else "no other peer can join here"
        print(f"diloco: {invitation}", file=sys.stderr, flush=True)
        return fleet

    with closing(_watch(settings, folder)) as sink:
        summary = run_training(settings, folder=folder, sink=sink, config_toml=plan.record, notes=notes, meet=meet)
    code = _exit_code({**summary, "interrupted": summary["interrupted"] not in (None, OVER)}, sink.void_reason)
    if code == INTERRUPTED:
        print(
            f"diloco: stopped; the state is saved. {_how_to_resume(settings, folder, fleets)}",
            file=sys.stderr,
        )
    return code


def _how_to_resume(settings: Configuration, folder: Path, fleets: Sequence[SwarmFleet]) -> str:
    others = fleets[-1].left_at if fleets else ()
    first = f"To resume: {resume_command(settings, folder)}"
    if not others:
        return first
    return (
        f"To resume while others train: {resume_command(settings, folder, others)}\n"
        f"diloco: if all have stopped, the one that stopped last resumes first, and the others join it. {first}"
    )


def launch_ranks(plan: RunPlan, folder: Path, typed: Sequence[str], *, has_out: bool, lock: int) -> int:
    """Start every rank on this machine with the arguments of this command, and wait for them."""
    from diloco.train import launch

    def command(replica: int, position: int, address: Address) -> list[str]:
        out = [] if has_out or plan.source is not None else ["--out", str(folder)]
        return [*typed, "--replica", str(replica), "--join", str(address), *out]

    def show(words: str) -> None:
        print(f"diloco: {words}", file=sys.stderr, flush=True)

    settings = plan.configuration
    talking_ranks = settings.network.replica_size if settings.train.parallelism == "fsdp" else 1
    return launch(settings.network, command, show, talking_ranks=talking_ranks, lock=lock)


def train_rank(plan: RunPlan, role: Role, *, quiet: bool) -> int:
    """Train as one of several ranks.

    Args:
        quiet: show progress only on rank 0.

    Raises:
        ConfigurationError: if another process is using the folder of the rank, or it holds files of another run.
    """
    folder = folder_of_rank(plan, role)
    with lock_folder(folder):
        return _train_rank_in(folder, plan, role, quiet=quiet)


def _train_rank_in(folder: Path, plan: RunPlan, role: Role, *, quiet: bool) -> int:
    from diloco.devices import choose_device
    from diloco.train import checkpoint_home, connect_rank, held_step, run_training

    settings = plan.configuration
    occupied = plan.source is None and has_other_files(folder)
    if plan.source is not None and (folder / CONFIG_FILE).exists():
        continue_record(plan, folder, folder)
    if quiet and not role.is_first:
        settings = dataclasses.replace(settings, monitor=dataclasses.replace(settings.monitor, console="quiet"))
    settings = dataclasses.replace(settings, train=_on_own_device(settings.train, role))

    def meet(facts: Mapping[str, str], own: Path) -> TorchFleet:
        home = own.parent if role.position else own
        resume, held = settings.checkpoint.resume, -1
        if resume is not None:
            held = held_step(checkpoint_home(home, role.replica, resume), resume)
        fleet = connect_rank(settings, role, facts, held, choose_device(settings.train.device))
        try:
            with fleet.group.all_or_none():
                if occupied and not fleet.joining:
                    raise not_empty_error(folder)
        except BaseException:
            fleet.close()
            raise
        return fleet

    notes = plan.notes if role.is_first else ()
    try:
        with closing(_watch(settings, folder, role)) as sink:
            summary = run_training(settings, folder=folder, sink=sink, config_toml=plan.record, notes=notes, meet=meet)
    finally:
        if not occupied and not (folder / CONFIG_FILE).exists():
            clear_folder(folder, of_rank=True)
    return _exit_code(summary, sink.void_reason, quiet=not role.is_first)


def _exit_code(summary: Mapping[str, Any], void_reason: str, *, quiet: bool = False) -> int:
    """Return the exit code of a process that has trained: a run whose rounds were all void has failed."""
    in_vain = summary.get("rounds_void") and not summary.get("rounds_committed")
    if in_vain and not quiet:
        print(
            f"diloco: no round was committed, so the replicas have learned nothing from each other: all "
            f"{summary['rounds_void']} were void. The reason of the last one: {void_reason or 'see metrics.jsonl'}. "
            "Remove the cause, then start a new run.",
            file=sys.stderr,
        )
    return INTERRUPTED if summary["interrupted"] else FAILED if in_vain else DONE


class _Watched:
    """The sinks of a process, and the reason of the last void round."""

    def __init__(self, sinks: Sinks) -> None:
        self._sinks = sinks
        self.void_reason = ""

    def handle(self, event: Event) -> None:
        if isinstance(event, RoundVoid):
            self.void_reason = event.reason.rstrip(".")
        self._sinks.handle(event)

    def close(self) -> None:
        self._sinks.close()


def _on_own_device(settings: TrainSettings, role: Role) -> TrainSettings:
    """Assign the CUDA devices of this machine to its processes in turn."""
    import torch

    if settings.device not in ("auto", "cuda") or not torch.cuda.is_available():
        return settings
    local = role.torchrun.local_rank if role.torchrun else role.local_rank
    return dataclasses.replace(settings, device=f"cuda:{local % torch.cuda.device_count()}")


def _watch(configuration: Configuration, folder: Path, role: Role | None = None) -> _Watched:
    """Return the sinks of the process that trains in ``folder``.

    A process with all replicas is a single run of a tracker; any other process is one run of a group.

    Args:
        role: the rank that this process is. None: it holds all replicas, or is a peer of a swarm.
    """
    monitor, name, group = configuration.monitor, folder.resolve().name, None
    if role is not None:
        home = folder.resolve()
        home = home.parent if role.position else home
        group = (home.parent if role.replica else home).name
        name = f"{group}-replica-{role.replica}"
        if role.position:  # it reports what position 0 does
            monitor = dataclasses.replace(monitor, sinks=tuple(filter(is_own, monitor.sinks)))
    elif configuration.network.transport == "hivemind":
        group = configuration.network.run
        name = configuration.network.name or platform.node()
    is_terminal, config = sys.stdout.isatty(), dataclasses.asdict(configuration)
    return _Watched(make_sinks(monitor, folder, is_terminal=is_terminal, config=config, name=name, group=group))
