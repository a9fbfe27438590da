"""Where a run begins or goes on: at step 0, at a checkpoint, or where the other replicas are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from diloco.algorithm import model_state
from diloco.checkpoint import LASTING, Checkpoint, list_checkpoints, open_checkpoint, open_sound
from diloco.errors import CheckpointError
from diloco.state_tree import readable_state
from diloco.train.met_session import MetSession
from diloco.train.session import Session
from diloco.train.state import checkpoint_of, load_session, replicas_in
from diloco.units import diff

OTHERS = "the other replicas"  # what a replica continues from that joins them


def _find_own_place(session: MetSession) -> None:
    """Go on with what nobody else has, this replica's data and what stays at home, as its own checkpoint has it."""
    replica, resume = session.replica, session.settings.checkpoint.resume
    if resume is None or not (held := newest_checkpoints(Path(resume), replica.number, check=True)):
        return
    checkpoint = max(held, key=lambda checkpoint: checkpoint.step)
    _check_same_run(session, checkpoint)
    if session.settings.data.local:
        replica.sampler.load_state_dict(checkpoint.load(f"replica-{replica.number}")["sampler"])
    state = model_state(replica.model)
    kept = {f"model/{name}": state[name] for name in session.at_home}
    if kept:
        checkpoint.load_into(f"replica-{replica.number}-values", kept)


def find_beginning(session: Session) -> str | None:
    """Bring a new session to the point from which its run continues: that of the other replicas, or a checkpoint.

    Replicas in separate processes that start together continue from the newest checkpoint that all of them have.
    Return what the run continues from, for the log; None: from step 0.
    """
    fleet = session.fleet
    if isinstance(session, MetSession) and fleet.joining:
        if session.settings.data.local or session.at_home:
            _find_own_place(session)
        session.join()
        return OTHERS
    resume, steps = session.settings.checkpoint.resume, fleet.held_steps
    if resume is None and max(steps.values(), default=-1) < 0:
        return None
    path = Path(resume or "")
    if steps:
        if fleet.restarted and min(steps.values()) < 0:  # not all had saved, so all begin again
            return None
        if lacking := ", ".join(str(rank) for rank, step in steps.items() if step < 0):
            raise CheckpointError(
                f"--resume needs a checkpoint on every rank, but rank {lacking} has none in its folder. Copy its "
                "checkpoints there, or start a new run with --init-from from the global parameters of an existing one."
            )
        step, newest = min(steps.values()), max(steps.values())
        if step < newest:
            behind = ", ".join(str(rank) for rank, held in steps.items() if held == step)
            whole = f"All ranks continue from step {step}, the last one that is whole on rank {behind}"
            fleet.notes = (*fleet.notes, f"{whole}; another rank has step {newest}.")
        common = _run_folder(path) / "checkpoints" / f"step-{step:08d}"
        path = next((checkpoint.path for checkpoint in newest_checkpoints(common, fleet.local[0])), common)

    def check(checkpoint: Checkpoint) -> None:
        for number in fleet.local:  # other replicas of this process may be in folders of their own
            if (other := checkpoint_of(number, checkpoint)) is not checkpoint:
                other.check_content()

    def sound() -> list[Any]:
        checkpoint, passed_over = open_sound(path, check if len(fleet.local) > 1 else lambda checkpoint: None)
        return [str(checkpoint.path), *passed_over]

    found, *passed_over = fleet.group.done_by_leader(sound)
    fleet.notes = (*fleet.notes, *passed_over)
    with fleet.group.all_or_none():  # a rank may not see the file
        checkpoint = open_checkpoint(Path(found))
        _check_same_run(session, checkpoint)
    with readable_state(str(checkpoint.path)):
        load_session(session, checkpoint)
    return str(checkpoint.path)


def _check_same_run(session: Session, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint of different data or a different model. `DiLoCo` compares what concerns its own state."""
    saved = checkpoint.fact("identity", dict)
    there, here = str(checkpoint.path), "this run"
    if difference := diff(saved, session.identity, there, here, LASTING):
        if not diff(saved, session.identity, there, here, [name for name in LASTING if name != "data"]):
            files = {"data": checkpoint.fact("files", str, "")}, {"data": session.corpus.files}
            difference = diff(*files, there, here) or difference  # which files
        raise CheckpointError(
            f"{difference}. Use the model, the files and the tokenizer with which the run started. Nothing was loaded."
        )


def held_checkpoint(resume: str | None) -> tuple[int, int | None, str]:
    """Return the step of the checkpoint that ``--resume`` names (-1: none), its only replica, and its swarm.

    A replica that ended before its first checkpoint can still join others.
    """
    try:
        checkpoint = open_sound(Path(resume))[0] if resume else None
    except CheckpointError:  # reported when it is loaded
        checkpoint = None
    if checkpoint is None:
        return -1, None, ""
    replicas = replicas_in(checkpoint)
    with readable_state(str(checkpoint.path)):
        swarm = str(checkpoint.load("run")["transport"].get("swarm", ""))
    return checkpoint.step, replicas[0] if len(replicas) == 1 else None, swarm


def held_step(replica: int, resume: Path, *, check: bool = False) -> int:
    """Return the newest step from which a replica could resume, as ``--resume`` names it; -1 for none.

    Args:
        check: whether to read the files, and pass over a damaged checkpoint.
    """
    return max((checkpoint.step for checkpoint in newest_checkpoints(resume, replica, check=check)), default=-1)


def newest_checkpoints(resume: Path, replica: int, *, check: bool = False) -> list[Checkpoint]:
    """Return the newest checkpoints of a replica: of all replicas, and of it alone; or those of the step in ``resume``.

    One process saves all replicas in the run folder, in which a process of the replica's own saves in its own folder.
    """

    def usable(checkpoint: Checkpoint) -> bool:
        try:
            if check:
                checkpoint.check_content()
        except CheckpointError:
            return False
        return replica in replicas_in(checkpoint)

    name = os.path.basename(os.path.abspath(resume))
    run, name, newest = _run_folder(resume), name if name.startswith("step-") else "", []
    for folder in (run, run / f"replica-{replica}") if replica else (run,):
        named = [
            checkpoint for checkpoint in list_checkpoints(folder / "checkpoints") if name in ("", checkpoint.path.name)
        ]
        newest += [checkpoint for checkpoint in reversed(named) if usable(checkpoint)][:1]
    return newest


def _run_folder(resume: Path) -> Path:
    """Return the run folder of what ``--resume`` names: itself, or the one that holds this checkpoint."""
    path = Path(os.path.abspath(resume))
    return next((folder.parent for folder in (path, path.parent) if folder.name == "checkpoints"), resume)
