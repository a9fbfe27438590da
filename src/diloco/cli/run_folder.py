"""The folder of a run: a run or one of its processes claims it, and clears it if training never starts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from diloco.checkpoint import LOCK_FILE, lock_folder, write_whole
from diloco.config import CONFIG_FILE, RunPlan, command_text
from diloco.errors import ConfigurationError
from diloco.private_files import make_private_folder
from diloco.train import Role


@contextmanager
def claimed_folder(plan: RunPlan) -> Iterator[tuple[Path, int]]:
    """Create and lock the folder of a single-process run, of a peer, or of all processes that a launcher starts.

    The folder of a new run that did not start is cleared and removed, so that the next attempt can use it.

    Yields:
        The folder and its lock.

    Raises:
        ConfigurationError: if another run is using the folder, or the folder given as --out is not empty.
    """
    source = plan.source
    folder = plan.configuration.out or source or _claim_numbered(plan)
    resumes = source is not None and folder.resolve() == source.resolve()
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(f"--out {folder} is not a folder. Choose another --out.")
    with lock_folder(folder) as lock:
        if not resumes and _files(folder, of_rank=False):
            raise not_empty_error(folder)
        try:
            yield folder, lock
        finally:
            if source is None and not (folder / CONFIG_FILE).exists():
                clear_folder(folder, of_rank=False)


def folder_of_rank(plan: RunPlan, role: Role) -> Path:
    """Return the run's folder for rank 0, or a folder inside it for any other rank, without creating it.

    Raises:
        ConfigurationError: if the ranks have no way to agree on a common folder.
    """
    from diloco.transport import share_text

    settings, torchrun = plan.configuration, role.torchrun
    base = settings.out or plan.source
    if base is None and torchrun is not None and role.rendezvous is None:
        claimed = str(_claim_numbered(plan)) if role.is_first else None
        timeout_s = settings.network.start_timeout_s
        base = Path(share_text(torchrun.master, claimed, timeout_s, f"folder (attempt {torchrun.attempt})"))
    if base is None:
        raise ConfigurationError(
            f"--replica {role.replica} needs --out, with the same folder for all replicas, such as --out runs/my-run."
        )
    home = base / f"replica-{role.replica}" if role.replica else base
    return home / f"rank-{role.position}" if role.position else home


def has_other_files(folder: Path) -> bool:
    """Return whether the folder of a rank holds anything other than its lock and folders of other ranks."""
    return bool(_files(folder, of_rank=True))


def clear_folder(folder: Path, *, of_rank: bool) -> None:
    """Remove the files of a run that never started, so that the next attempt finds the folder empty.

    The lock stays, and the folders of other ranks if this is the folder of a rank.
    """
    for entry in _files(folder, of_rank=of_rank):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink()


def _files(folder: Path, *, of_rank: bool) -> list[Path]:
    """Return what is in the folder except its lock and, in the folder of a rank, the folders of other ranks."""
    others = ("replica-", "rank-") if of_rank else ()
    entries = (entry for entry in folder.iterdir() if entry.name != LOCK_FILE)
    return [entry for entry in entries if not (entry.is_dir() and entry.name.startswith(others))]


def not_empty_error(folder: Path) -> ConfigurationError:
    """Return the error for a new run in a folder that is not empty."""
    resume = command_text("train", flags={"--resume": folder})
    return ConfigurationError(
        f"--out {folder} is not empty. To continue the run there, use `{resume}`; or choose another --out."
    )


def _claim_numbered(plan: RunPlan) -> Path:
    """Create and return ``runs/NAME`` or ``runs/NAME-N`` with the lowest free N; concurrent runs never share one."""
    settings = plan.configuration
    folder = first = Path("runs") / (settings.network.run or f"{settings.algorithm}-{settings.model_label}")
    try:
        make_private_folder(first.parent)
        for number in count(2):
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
                break
            folder = first.with_name(f"{first.name}-{number}")
    except OSError as error:
        raise ConfigurationError(
            f"{folder} can't be created: {error.strerror}. Choose another place as --out."
        ) from error
    return folder


def continue_record(plan: RunPlan, source: Path, folder: Path) -> None:
    """Rewrite ``config.toml`` when a run resumes with changes or in a folder other than ``source``."""
    from diloco.data import load_tokenizer

    if folder != source:
        load_tokenizer(source).save(folder)
    write_whole(folder / CONFIG_FILE, plan.record)
