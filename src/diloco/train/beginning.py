"""Where a run begins: at step 0, at a checkpoint, or where the others are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from diloco.checkpoint.reading import Checkpoint, open_checkpoint
from diloco.errors import CheckpointError
from diloco.events import Event, Note
from diloco.train.fleet.peer_fleet import PeerFleet
from diloco.train.joining import join_run
from diloco.train.reports import model_fingerprint
from diloco.train.resuming import checkpoint_home
from diloco.train.session import Session
from diloco.train.session_state import load_session

__all__ = ["find_beginning"]


def find_beginning(session: Session, fleet: PeerFleet | None, home: Path, emit: Callable[[Event], None]) -> str | None:
    """Bring a session to where its run goes on: where the others are, or at the checkpoint that was asked for.

    Replicas in processes of their own that begin together go on from the newest checkpoint that all of them have.

    Args:
        session: at step 0.
        fleet: of the session; None: all replicas train in this process.

    Returns:
        What it goes on from, in words; None: it begins at step 0.

    Raises:
        CheckpointError: if there is no checkpoint that all have, or it is of another run.
        TransportError: if the others can't be joined.
    """
    settings = session.settings
    if fleet is not None and fleet.joining:
        join_run(session, fleet, settings.transport.rendezvous_timeout_s)
        return "the other replicas"
    path = settings.checkpoint.resume
    if path is None:
        return None
    if fleet is not None and not fleet.elastic:
        step = _newest_of_all(fleet)
        path = checkpoint_home(home, session.replicas[0].number, path) / "checkpoints" / f"step-{step:08d}"
    checkpoint = open_checkpoint(path)
    _check_same_run(session, checkpoint)
    notes = load_session(session, checkpoint, home)
    before, now = checkpoint.about.get("threads"), torch.get_num_threads()
    if before not in (None, now) and not session.fleet.elastic:  # where the bits are otherwise the same
        notes += (
            f"The checkpoint was saved with train.threads={before}, and this process has {now}: what follows may "
            f"differ in the last bits from a run that never stopped. --train.threads {before} makes it the same.",
        )
    for words in notes:
        emit(Note(step=session.totals.steps, text=words))
    return str(checkpoint.path)


def _newest_of_all(fleet: PeerFleet) -> int:
    """The newest step that all processes have a checkpoint of."""
    held = fleet.held_steps()
    if lacking := ", ".join(str(rank) for rank, step in held.items() if step < 0):
        raise CheckpointError(
            f"--resume was given, and rank {lacking} has no checkpoint in its folder. Put its checkpoints there, or "
            "start a new run with --init-from the global parameters of another one. Nothing was started."
        )
    return min(held.values())


def _check_same_run(session: Session, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint of other data or another model."""
    fingerprint = checkpoint.about.get("corpus")
    if fingerprint != session.corpus.fingerprint:
        raise CheckpointError(
            f"{checkpoint.path} was made with data of fingerprint {fingerprint}, and the data now has "
            f"{session.corpus.fingerprint}. Give the same files and tokeniser. Nothing was started."
        )
    fingerprint, mine = checkpoint.about.get("model_fingerprint"), model_fingerprint(session.replicas[0].model)
    if fingerprint not in (None, mine):
        raise CheckpointError(
            f"{checkpoint.path} is of a model of {fingerprint}, and this is one of {mine}. Give the model that the run "
            "began with, from the same source. Nothing was started."
        )
