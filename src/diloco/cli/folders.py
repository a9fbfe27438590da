"""The folder of a run: created, locked, refused if it is occupied, and cleared if the run did not start."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path

from diloco.checkpoint import LOCK_FILE, lock_folder
from diloco.config import CONFIG_FILE, RunPlan, command_text
from diloco.errors import ConfigurationError
from diloco.private_files import make_private_folder


def has_checkpoints(folder: Path) -> bool:
    from diloco.checkpoint import list_checkpoints  # which loads torch

    return any(map(list_checkpoints, (folder / "checkpoints", *folder.glob("replica-*/checkpoints"))))


def ended_early(folder: Path) -> bool:
    """Return whether a run has begun in a folder, and has ended before its first checkpoint."""
    from diloco.checkpoint import holds_none

    if not folder.is_dir() or not all(map(holds_none, (folder / "checkpoints", *folder.glob("replica-*/checkpoints")))):
        return False
    return has_record(folder) or (any(folder.iterdir()) and not any(map(_has_begun, folder.iterdir())))


def has_record(folder: Path) -> bool:
    """Return whether the settings of a run are in its folder, or in those of its replicas."""
    return any(place.is_file() for place in (folder / CONFIG_FILE, *folder.glob(f"replica-*/{CONFIG_FILE}")))


@contextmanager
def claimed(
    folder: Path, plan: RunPlan, *, of_rank: bool = False, again: bool = False, locked: bool = False
) -> Iterator[tuple[int, bool]]:
    """Create and lock a folder; yield its lock, and whether there is anything in it but the run to resume.

    ``again``: a run that was killed before its first checkpoint begins again in its folder. ``locked``: by the process
    that started this one, whose lock this one has inherited.

    What a run that did not start has written is deleted, so that the next attempt can use the folder.
    """
    out = plan.configuration.out or plan.source
    resumes = plan.source is not None and out is not None and out.resolve() == plan.source.resolve()
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(f"--out {folder} is not a folder. Choose another --out.")
    with nullcontext(-1) if locked else lock_folder(folder) as lock:
        begins_again, before = again and (folder / CONFIG_FILE).exists(), _files(folder, of_rank=of_rank)
        occupied = not (resumes or begins_again) and any(map(_has_begun, before))
        try:
            yield lock, occupied
        finally:
            if not occupied and not (folder / CONFIG_FILE).exists():
                for entry in {*_files(folder, of_rank=of_rank)} - {*before}:
                    if entry.is_dir() and not entry.is_symlink():
                        shutil.rmtree(entry, ignore_errors=True)
                    else:
                        entry.unlink(missing_ok=True)  # ranks that fail together clear their folders at once


def _files(folder: Path, *, of_rank: bool) -> list[Path]:
    """Return what is in the folder except its lock and, in the folder of a rank, the folders of other ranks."""
    entries = [entry for entry in folder.iterdir() if entry.name != LOCK_FILE]
    return [entry for entry in entries if not _is_of_rank(entry)] if of_rank else entries


def _is_of_rank(entry: Path) -> bool:
    return entry.is_dir() and entry.name.startswith(("replica-", "rank-"))


def _has_begun(entry: Path) -> bool:
    """Return whether ``entry`` is more than a run leaves behind that is killed before it has met the others."""
    if _is_of_rank(entry):
        return any(map(_has_begun, entry.iterdir()))
    return entry.name not in (LOCK_FILE, "metrics.jsonl", "identity.key")


def not_empty(folder: Path, run: Path) -> ConfigurationError:
    """Return the refusal of a folder of ``run``, with what may be done instead."""
    advice = "Choose another --out."
    if has_checkpoints(run):
        resume = command_text("train", flags={"--resume": run})
        advice = f"To continue the run there, use `{resume}`; or choose another --out."
    elif (run / CONFIG_FILE).exists():
        advice = f"To begin the run there again, give --resume-or-start {run} in its place; or choose another."
    return ConfigurationError(f"--out {folder} is not empty. {advice}")


def claim_numbered(plan: RunPlan) -> Path:
    """Create and return ``runs/NAME`` or ``runs/NAME-N`` with the lowest free N; concurrent runs never share one."""
    folder = first = _first_numbered(plan)
    try:
        make_private_folder(first.parent)
        for number in count(2):
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
                break
            folder = first.with_name(f"{first.name}-{number}")
    except OSError as error:
        raise ConfigurationError(f"{folder} can't be created: {error.strerror}. Choose another --out.") from error
    return folder


def check_named(folder: Path, plan: RunPlan) -> None:
    """Raise `ConfigurationError` for a run folder from torchrun's store that this rank's own command does not name.

    Anybody who reaches the store can write to it.
    """
    out, first = plan.configuration.out or plan.source, _first_numbered(plan)
    number = folder.name.removeprefix(first.name)
    is_numbered = folder.parent == first.parent and folder.name.startswith(first.name)
    if folder == out or (out is None and is_numbered and re.fullmatch(r"(-[0-9]+)?", number)):
        return
    here = f"--out {out}" if out else f"{first} or {first}-N"
    raise ConfigurationError(
        f"The store of torchrun names the run folder {str(folder)!r}, and the command of this rank {here}. Give all "
        "ranks the same --out, and torchrun a --master-port that nobody else can reach."
    )


def _first_numbered(plan: RunPlan) -> Path:
    settings = plan.configuration
    return Path("runs") / (settings.network.run or f"{settings.algorithm}-{settings.model_label}")
