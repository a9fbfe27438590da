"""How a replica comes to where its run goes on: at a checkpoint, where the others are, or after it lost them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from diloco.checkpoint.reading import Checkpoint, open_checkpoint
from diloco.errors import CheckpointError, ConfigurationError, RunOverError, TransportError
from diloco.events import Event, Note, ViewChanged
from diloco.train.fleet.peer_fleet import PeerFleet
from diloco.train.local_replica import Replica
from diloco.train.reports import model_fingerprint
from diloco.train.resuming import checkpoint_home
from diloco.train.session import Session
from diloco.train.session_state import load_session
from diloco.train.stopping import StopAsked, StopRequest
from diloco.waiting import waiting_for

__all__ = ["OVER", "come_back", "find_beginning", "follow_views", "join_run"]

_GATHER_S = 60.0  # then it looks again: the others may have found each other without it
_AGAIN_S = 1.0

Looking = Callable[[], AbstractContextManager[None]]

OVER = "the others, who have finished"  # what stops a replica that comes back when nobody is left to join


def join_run(session: Session, fleet: PeerFleet, timeout_s: float) -> None:
    """Take over what the others have, and become one of them: their global parameters, step and place in the data.

    Global parameters and outer state are fetched while the others train on. What changes meanwhile is taken over
    afterwards, fragment by fragment. The inner optimizer starts fresh.

    Args:
        timeout_s: for becoming a member.

    Raises:
        ConfigurationError: if the algorithm of the run keeps nothing that could be taken over.
        TransportError: if there is nobody to take over from, or the others refuse.
    """
    (replica,) = session.replicas
    fleet.close_to_joiners("")
    if session.settings.algorithm not in ("streaming", "diloco"):
        raise ConfigurationError(
            f"Replica {replica.number} came to a run of algorithm={session.settings.algorithm!r} that is going on, and "
            "only DiLoCo and Streaming DiLoCo can be joined. Start all replicas again."
        )
    if fleet.others_have_trained:
        _take_over(session, replica, fleet)
    _become_member(session, replica, fleet, timeout_s)


def _take_over(session: Session, replica: Replica, fleet: PeerFleet) -> None:
    """Take over what the others have; wait while they are there and have nothing yet, as they have just been started
    or average gradients at every step."""
    diloco, limit_s = session.begin_diloco(replica), session.settings.transport.give_up_after_s or math.inf
    began_s, why = time.monotonic(), ""
    with waiting_for(lambda: f"a state to take over, as {why or 'the other replicas send it'}", limit_s):
        while True:
            try:
                return diloco.take_over(fleet.view.members)
            except TransportError as error:
                why = str(error).partition(". ")[0]
                if time.monotonic() - began_s >= limit_s or not fleet.sees_others:
                    raise
            time.sleep(_AGAIN_S)


def follow_views(fleet: PeerFleet, session: Session, stop: StopRequest, emit: Callable[[Event], None]) -> None:
    """Between two steps: report the views that were adopted, and come back if this replica has lost the others.

    Args:
        stop: a replica that was asked to stop does not look for the others.

    Raises:
        TransportError: if the others aren't found within `transport.give_up_after_s`, where that is given.
    """
    step = session.totals.steps
    if words := fleet.take_words():
        emit(Note(step=step, text=words))
    for news in fleet.take_news():
        now = news.view.members if news.view else ()
        left = set(news.previous.members) - set(now)
        emit(
            ViewChanged(
                step=step,
                replica=fleet.transport.replica,
                view=news.view.id if news.view else news.previous.id,
                members=now,
                joined=news.joined,
                left=tuple(sorted(left)),
                lost=tuple(sorted(left - {replica for replica, _ in news.left})),
                reason=news.reason,
            )
        )
    lost = fleet.failure is not None
    if not (lost or fleet.gathering) or stop.signal is not None:
        return
    if lost:
        emit(Note(step=step, text=f"{fleet.failure} It looks for the others."))
    limit_s = session.settings.transport.give_up_after_s
    gives_up_s = time.monotonic() + (math.inf if limit_s is None else limit_s)
    try:
        while True:
            try:
                if lost:  # or it has just joined others who wait for more
                    come_back(session, fleet, max(0.0, gives_up_s - time.monotonic()), stop.interrupting)
                lost = True  # if too few come
                with stop.interrupting():
                    fleet.gather(min(session.settings.transport.rendezvous_timeout_s, _GATHER_S))
                break
            except RunOverError:
                raise
            except TransportError as error:
                if time.monotonic() >= gives_up_s:
                    raise
                emit(Note(step=session.totals.steps, text=f"Coming back has failed, and is tried again: {error}"))
            with stop.interrupting():
                time.sleep(_AGAIN_S)
    except StopAsked:
        return
    except RunOverError as error:
        emit(Note(step=step, text=f"{error} What this replica has not shared is in its checkpoint."))
        stop.ask(OVER)
        return
    how = "is a member again" if len(fleet.view.members) > 1 else "goes on"
    emit(Note(step=session.totals.steps, text=f"Replica {fleet.transport.replica} {how}."))


def come_back(
    session: Session,
    fleet: PeerFleet,
    patience_s: float,
    looking: Looking = nullcontext,
) -> None:
    """After this replica lost the others: take over what they have, and keep the work that is not shared yet.

    If all have lost each other, one of them founds another view instead, in which `PeerFleet.gather` waits. In the
    shared start there is nothing to take over yet: who finds the others waits for its end, and who founds ends it.

    Args:
        looking: entered while looking; whatever it raises leaves everything as it is.

    Raises:
        TransportError: if they aren't found, or refuse; it may be called again.
    """
    (replica,) = session.replicas
    if replica.diloco is not None:
        # what is in flight ends with the failure, and stays in the local parameters
        replica.diloco.drain(take_over=False)
    with looking():
        fleet.rejoin(patience_s)
    replica.gradients.transport = fleet.endpoint(replica.number)
    if replica.diloco is not None:
        replica.diloco.change_transport(fleet.endpoint(replica.number))
    if fleet.joining:
        _join_again(session, replica, fleet, looking)
    else:
        _found_again(session, replica, fleet)


def _join_again(session: Session, replica: Replica, fleet: PeerFleet, looking: Looking) -> None:
    """The others go on: take over what they have, and become one of them."""
    session.open_to_joiners()
    if replica.diloco is not None:
        replica.diloco.take_over(fleet.view.members, keep_work=True)
    else:
        try:
            with looking():
                _take_over(session, replica, fleet)
        except BaseException:  # it is where it was, in the shared start
            replica.diloco = None
            raise
    _become_member(session, replica, fleet, session.settings.transport.rendezvous_timeout_s)


def _found_again(session: Session, replica: Replica, fleet: PeerFleet) -> None:
    """Nobody goes on: this replica has founded a view, to which the others may come."""
    if replica.diloco is None and session.settings.algorithm in ("streaming", "diloco"):
        session.end_shared_start()
    session.open_to_joiners()
    fleet.gathering = replica.diloco is not None  # gradients alone nobody can join


def _become_member(session: Session, replica: Replica, fleet: PeerFleet, timeout_s: float) -> None:
    totals = session.totals
    before = totals.steps
    with waiting_for(lambda: f"the other replicas to let replica {replica.number} in", timeout_s):
        totals.steps = fleet.join(timeout_s)
    totals.sequences += (totals.steps - before) * session.sequences_per_step  # of the others, about
    if replica.diloco is not None:
        shared_start = min(session.settings.train.data_parallel_steps, replica.diloco.shared.begun_after)
        replica.diloco.steps = totals.steps - shared_start
    replica.sampler.join_at(totals.steps, replica.diloco.shared.data_order if replica.diloco else "")


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
            "start a new run with --init-from the global parameters of another one."
        )
    return min(held.values())


def _check_same_run(session: Session, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint of other data or another model."""
    fingerprint = checkpoint.about.get("corpus")
    if fingerprint != session.corpus.fingerprint:
        raise CheckpointError(
            f"{checkpoint.path} was made with data of fingerprint {fingerprint}, and the data now has "
            f"{session.corpus.fingerprint}. Give the same files and tokeniser."
        )
    fingerprint, mine = checkpoint.about.get("model_fingerprint"), model_fingerprint(session.replicas[0].model)
    if fingerprint not in (None, mine):
        raise CheckpointError(
            f"{checkpoint.path} is of a model of {fingerprint}, and this is one of {mine}. Give the model that the run "
            "began with, from the same source."
        )
