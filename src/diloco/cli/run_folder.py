"""The folder of a run: claimed by the run or one of its processes, and cleared if the run never begins."""

from __future__ import annotations

import os
import shutil
from itertools import count
from pathlib import Path

from diloco.checkpoint.disk import write_whole
from diloco.config.run_plan import CONFIG_FILE, RunPlan
from diloco.errors import ConfigurationError
from diloco.train.roles import Role

__all__ = [
    "claim_folder",
    "clear_folder_of_rank",
    "continue_record",
    "folder_of_rank",
    "has_other_files",
    "not_empty_error",
    "writable",
]


def claim_folder(plan: RunPlan) -> Path:
    """The folder of a run in one process, or of a peer, created; nobody else's files are in it.

    Raises:
        ConfigurationError: if the folder asked for holds something.
    """
    out, source = plan.configuration.out, plan.source
    if source is not None and (out is None or out.resolve() == source.resolve()):
        return writable(source)
    if out is None:
        return _claim_numbered(plan)
    if out.exists() and not out.is_dir():
        raise ConfigurationError(f"--out {out} is no folder; choose another --out.")
    if out.exists() and any(out.iterdir()):
        if source is None:
            raise not_empty_error(out)
        raise ConfigurationError(f"--out {out} is not empty; choose another --out.")
    return _create(out)


def folder_of_rank(plan: RunPlan, role: Role) -> Path:
    """The run's folder for rank 0, and one inside it for every other rank; not created.

    Raises:
        ConfigurationError: if the ranks could not know of a common folder.
    """
    from diloco.transport.torch_distributed.rendezvous import exchange_word

    settings, torchrun = plan.configuration, role.torchrun
    base = settings.out or plan.source
    if base is None and torchrun is not None and role.rendezvous is None:
        claimed = str(_claim_numbered(plan)) if role.is_first else None
        timeout_s = settings.transport.rendezvous_timeout_s
        base = Path(exchange_word(torchrun.master, claimed, timeout_s, f"folder (attempt {torchrun.attempt})"))
    if base is None:
        raise ConfigurationError(
            f"--replica {role.replica} needs --out, a folder that all replicas are given, such as --out runs/my-run."
        )
    home = base / f"replica-{role.replica}" if role.replica else base
    return writable(home / f"rank-{role.position}" if role.position else home)


def has_other_files(folder: Path) -> bool:
    """Whether the folder of a rank exists and holds anything but folders of other ranks."""
    return folder.is_dir() and any(not _of_another_rank(entry) for entry in folder.iterdir())


def clear_folder_of_rank(folder: Path) -> None:
    """Remove what a run that never began has left, so that the next attempt finds the folder empty."""
    for entry in folder.iterdir():
        if entry.is_dir() and not _of_another_rank(entry):
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.is_file():
            entry.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def _of_another_rank(entry: Path) -> bool:
    return entry.is_dir() and entry.name.startswith(("replica-", "rank-"))


def not_empty_error(folder: Path) -> ConfigurationError:
    """The refusal to begin a run in a folder that holds something."""
    return ConfigurationError(
        f"--out {folder} is not empty; use --resume {folder} to go on with a run there, or another --out."
    )


def _claim_numbered(plan: RunPlan) -> Path:
    """``runs/NAME``, or with the lowest number behind it that is free; two runs started at once get two."""
    settings = plan.configuration
    first = Path("runs") / (settings.swarm.run or f"{settings.algorithm}-{settings.model_label}")
    _create(first.parent)
    for number in count(2):
        folder = first if number == 2 else first.with_name(f"{first.name}-{number - 1}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("the numbers do not end")


def _create(folder: Path) -> Path:
    try:
        writable(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:  # such as in /proc, where even root makes none
        raise ConfigurationError(
            f"{folder} cannot be the folder of the run: it can't be made ({error.strerror}). Choose another --out."
        ) from error
    return folder


def writable(folder: Path) -> Path:
    """``folder``, which may not exist yet, if this process can write there.

    Raises:
        ConfigurationError: if it can't.
    """
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = f"{there} is no folder" if not there.is_dir() else f"{there} can't be written to"
        raise ConfigurationError(
            f"{folder} cannot be the folder of the run: {why}. Choose another --out, where you may write."
        )
    return folder


def continue_record(plan: RunPlan, source: Path, folder: Path) -> None:
    """Keep the record true when a run goes on with changes, or in another folder than ``source``."""
    from diloco.data.tokenizer_choice import load_tokenizer

    if folder != source:
        load_tokenizer(source).save(folder)
    write_whole(folder / CONFIG_FILE, plan.record)
