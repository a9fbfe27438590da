"""The folder of a run: a run or one of its processes claims it, and clears it if training never starts."""

from __future__ import annotations

import os
import shutil
from itertools import count
from pathlib import Path

from diloco.checkpoint.disk import write_whole
from diloco.config.flags import command_text
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
    """Create and return the folder of a single-process run or of a peer.

    Raises:
        ConfigurationError: if the folder given as --out is not empty.
    """
    out, source = plan.configuration.out, plan.source
    if source is not None and (out is None or out.resolve() == source.resolve()):
        return writable(source)
    if out is None:
        return _claim_numbered(plan)
    if out.exists() and not out.is_dir():
        raise ConfigurationError(f"--out {out} is not a folder. Choose another --out.")
    if out.exists() and any(out.iterdir()):
        if source is None:
            raise not_empty_error(out)
        raise ConfigurationError(f"--out {out} is not empty. Choose another --out.")
    return _create(out)


def folder_of_rank(plan: RunPlan, role: Role) -> Path:
    """Return the run's folder for rank 0, or a folder inside it for any other rank, without creating it.

    Raises:
        ConfigurationError: if the ranks have no way to agree on a common folder.
    """
    from diloco.transport.torch_distributed.rendezvous import share_text

    settings, torchrun = plan.configuration, role.torchrun
    base = settings.out or plan.source
    if base is None and torchrun is not None and role.rendezvous is None:
        claimed = str(_claim_numbered(plan)) if role.is_first else None
        timeout_s = settings.transport.rendezvous_timeout_s
        base = Path(share_text(torchrun.master, claimed, timeout_s, f"folder (attempt {torchrun.attempt})"))
    if base is None:
        raise ConfigurationError(
            f"--replica {role.replica} needs --out, with the same folder for all replicas, such as --out runs/my-run."
        )
    home = base / f"replica-{role.replica}" if role.replica else base
    return writable(home / f"rank-{role.position}" if role.position else home)


def has_other_files(folder: Path) -> bool:
    """Return whether the folder of a rank exists and holds anything other than folders of other ranks."""
    return folder.is_dir() and any(not _of_another_rank(entry) for entry in folder.iterdir())


def clear_folder_of_rank(folder: Path) -> None:
    """Remove the files of a run that never started, so that the next attempt finds the folder empty."""
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
    """Return the error for a new run in a folder that is not empty."""
    resume = command_text("train", flags={"--resume": folder})
    return ConfigurationError(
        f"--out {folder} is not empty. To continue the run there, use `{resume}`; or choose another --out."
    )


def _claim_numbered(plan: RunPlan) -> Path:
    """Create and return ``runs/NAME`` or ``runs/NAME-N`` with the lowest free N; concurrent runs never share one."""
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
    raise AssertionError("unreachable: count() is infinite")


def _create(folder: Path) -> Path:
    try:
        writable(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:  # for example in /proc, where even root can't create a folder
        raise ConfigurationError(
            f"{folder} cannot be the folder of the run: it can't be created ({error.strerror}). Choose another --out."
        ) from error
    return folder


def writable(folder: Path) -> Path:
    """Return ``folder``, which need not exist yet.

    Raises:
        ConfigurationError: if this process can't write there.
    """
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = f"{there} is not a folder" if not there.is_dir() else f"{there} is not writable"
        raise ConfigurationError(
            f"{folder} cannot be the folder of the run: {why}. Choose another --out, in a place where you may write."
        )
    return folder


def continue_record(plan: RunPlan, source: Path, folder: Path) -> None:
    """Rewrite ``config.toml`` when a run resumes with changes or in a folder other than ``source``."""
    from diloco.data.tokenizer_choice import load_tokenizer

    if folder != source:
        load_tokenizer(source).save(folder)
    write_whole(folder / CONFIG_FILE, plan.record)
