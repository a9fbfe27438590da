"""Where a run begins: at step 0, at a checkpoint, or where the others are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from diloco.checkpoint.reading import Checkpoint, open_checkpoint
from diloco.errors import CheckpointError
from diloco.events import Event, Note
from diloco.train.fleet.base import InProcessFleet
from diloco.train.fleet.leader_fleet import LeaderFleet
from diloco.train.fleet.torch_fleet import TorchFleet
from diloco.train.handshake import model_fingerprint
from diloco.train.joining import JoinableFleet, join_run
from diloco.train.resize import checkpoint_home
from diloco.train.session import Session
from diloco.train.session_state import load_session

__all__ = ["find_beginning"]


def find_beginning(
    session: Session, fleet: InProcessFleet | JoinableFleet, home: Path, emit: Callable[[Event], None]
) -> str | None:
    """Bring a session to where its run goes on: as one who joins it, or at the checkpoint that is asked for.

    Replicas in processes of their own that begin together go on from the newest checkpoint that all of them have.

    Args:
        session: at step 0.
        fleet: of the session.
        home: the replica's run folder.
        emit: told what is different from now on.

    Returns:
        What it goes on from, in words; None: it begins at step 0.

    Raises:
        CheckpointError: if there is none that all have, or it is of another run.
        TransportError: if the others can't be joined.
    """
    settings = session.settings
    if not isinstance(fleet, InProcessFleet) and fleet.joining:
        join_run(session, fleet, settings.transport.rendezvous_timeout_s)
        return "the other replicas"
    path = settings.checkpoint.resume
    if path is None:
        return None
    if isinstance(fleet, TorchFleet | LeaderFleet):
        step = _newest_of_all(fleet)
        path = checkpoint_home(home, session.replicas[0].number, path) / "checkpoints" / f"step-{step:08d}"
    checkpoint = open_checkpoint(path)
    _check_same_run(session, checkpoint)
    for words in (*load_session(session, checkpoint, home), *_other_threads(fleet, checkpoint)):
        emit(Note(step=session.totals.steps, text=words))
    return str(checkpoint.path)


def _other_threads(fleet: InProcessFleet | JoinableFleet, checkpoint: Checkpoint) -> tuple[str, ...]:
    """That going on is not the same as never having stopped, where that is otherwise promised."""
    before, now = checkpoint.about.get("threads"), torch.get_num_threads()
    if fleet.elastic or before in (None, now):
        return ()
    return (
        f"The checkpoint was saved with train.threads={before}, and this process has {now}: what follows may differ in "
        f"the last bits from a run that never stopped. --train.threads {before} makes it the same.",
    )


def _newest_of_all(fleet: TorchFleet | LeaderFleet) -> int:
    """The newest step that all processes have a checkpoint of."""
    held = fleet.held_steps()
    if min(held.values()) < 0:
        lacking = ", ".join(str(rank) for rank, step in held.items() if step < 0)
        raise CheckpointError(
            f"--resume was given, and rank {lacking} has no checkpoint in its folder; its checkpoints in place, or "
            "a new run with --init-from the global parameters of another one, would work. Nothing was started."
        )
    return min(held.values())


def _check_same_run(session: Session, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint of other data or another model."""
    fingerprint = checkpoint.about.get("corpus")
    if fingerprint != session.corpus.fingerprint:
        raise CheckpointError(
            f"{checkpoint.path} was made with data of fingerprint {fingerprint}, and the data now has "
            f"{session.corpus.fingerprint}; the same files and tokeniser would work. Nothing was started."
        )
    fingerprint = checkpoint.about.get("model_fingerprint")
    mine = model_fingerprint(session.replicas[0].model)
    if fingerprint not in (None, mine):
        raise CheckpointError(
            f"{checkpoint.path} is of a model of {fingerprint}, and this is one of {mine}; the model that the run "
            "began with, from the same source, would work. Nothing was started."
        )
