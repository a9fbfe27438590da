"""``diloco train`` in several processes: the one that starts them, and one rank of many."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.config.run_plan import CONFIG_FILE, RunPlan
from diloco.errors import ConfigurationError
from diloco.train.roles import Role
from diloco.train.settings import TrainSettings
from diloco.transport.address import Address

if TYPE_CHECKING:
    from diloco.train.fleet.torch_fleet import TorchFleet

__all__ = ["launch_ranks", "train_rank"]


def launch_ranks(plan: RunPlan, folder: Path, arguments: Sequence[str], *, has_out: bool) -> int:
    """Start every rank on this machine with the arguments of this command, and wait for them."""
    from diloco.train.launcher import launch

    def command(replica: int, position: int, address: Address, inner: Address | None) -> list[str]:
        added = ["--replica", str(replica), "--transport.position", str(position), "--rendezvous", str(address)]
        if inner is not None:
            added += ["--transport.inner-store", str(inner)]
        if not has_out and plan.source is None:
            added += ["--out", str(folder)]
        return ["train", *arguments, *added]

    def say(words: str) -> None:
        print(f"diloco: {words}", file=sys.stderr, flush=True)

    settings = plan.configuration
    talking_ranks = settings.transport.replica_size if settings.train.parallelism == "fsdp" else 1
    return launch(settings.transport, command, say, talking_ranks=talking_ranks)


def train_rank(plan: RunPlan, role: Role, *, quiet: bool) -> int:
    """Be one rank; only rank 0 shows its progress, where nothing else was asked for.

    Raises:
        ConfigurationError: if its folder holds something of another run.
    """
    from diloco.cli.train import continue_record, writable
    from diloco.cli.watching import watch
    from diloco.devices import choose_device
    from diloco.train.fleet.connecting import connect_rank
    from diloco.train.resuming import checkpoint_home, held_step
    from diloco.train.run import run_training

    settings = plan.configuration
    folder = writable(_folder(plan, role))
    occupied = (
        plan.source is None and folder.is_dir() and any(not _of_another_rank(entry) for entry in folder.iterdir())
    )
    if plan.source is not None and (folder / CONFIG_FILE).exists():
        continue_record(plan, folder, folder)
    if quiet and not role.is_first:
        settings = dataclasses.replace(settings, monitor=dataclasses.replace(settings.monitor, console="quiet"))

    def meet(facts: Mapping[str, str], own: Path) -> TorchFleet:
        home = own.parent if role.position else own
        resume, held = settings.checkpoint.resume, -1
        if resume is not None:
            held = held_step(checkpoint_home(home, role.replica, resume), resume)
        fleet = connect_rank(settings, role, facts, held, choose_device(settings.train.device))
        if occupied and not fleet.joining:
            fleet.close()
            raise ConfigurationError(
                f"--out {folder} is not empty; --resume {folder} to go on with a run there, or another --out, would "
                "work. Nothing was started."
            )
        return fleet

    settings = dataclasses.replace(settings, train=_on_own_device(settings.train, role))
    sink = watch(settings, folder, role)
    try:
        summary = run_training(
            settings,
            folder=folder,
            sink=sink,
            config_toml=plan.record,
            notes=plan.notes if role.is_first else (),
            meet=meet,
        )
    finally:
        sink.close()
        if not occupied and not (folder / CONFIG_FILE).exists():
            _clear(folder)
    return 130 if summary["interrupted"] else 0


def _on_own_device(settings: TrainSettings, role: Role) -> TrainSettings:
    """Processes of one machine take a CUDA device each, in turn."""
    import torch

    if settings.device not in ("auto", "cuda") or not torch.cuda.is_available():
        return settings
    local = role.torchrun.local_rank if role.torchrun else role.local_rank
    device = f"cuda:{local % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
    return dataclasses.replace(settings, device=device)


def _folder(plan: RunPlan, role: Role) -> Path:
    """The run's folder for rank 0, one inside it for every other."""
    from diloco.cli.train import claim_numbered
    from diloco.transport.torch_distributed.rendezvous import exchange_word

    settings = plan.configuration
    base = settings.out or plan.source
    if base is None and role.torchrun is not None:
        mine = None
        if role.is_first:
            mine = str(claim_numbered(Path("runs") / f"{settings.algorithm}-{settings.model_label}"))
        timeout_s = settings.transport.rendezvous_timeout_s
        base = Path(exchange_word(role.torchrun.master, mine, timeout_s, f"folder (attempt {role.torchrun.attempt})"))
    if base is None:
        raise ConfigurationError(
            f"--replica {role.replica} was given without --out; a folder that all replicas are given, such as --out "
            "runs/my-run, would work. Nothing was started."
        )
    home = base / f"replica-{role.replica}" if role.replica else base
    return home / f"rank-{role.position}" if role.position else home


def _clear(folder: Path) -> None:
    """Nothing of a run that never began stays behind to stand in the way of the next attempt."""
    for entry in folder.iterdir():
        if entry.is_dir() and not _of_another_rank(entry):
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.is_file():
            entry.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def _of_another_rank(entry: Path) -> bool:
    return entry.is_dir() and entry.name.startswith(("replica-", "rank-"))
