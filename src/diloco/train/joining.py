"""How the replica of a process becomes a member of a run that goes on: when it starts, and after it lost the others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from diloco.errors import ConfigurationError, RunOverError, TransportError
from diloco.events import Event, Note, ViewChanged
from diloco.train.fleet.peer_fleet import PeerFleet
from diloco.train.local_replica import Replica
from diloco.train.session import Session
from diloco.train.stopping import StopAsked, StopRequest
from diloco.waiting import waiting_for

__all__ = ["OVER", "come_back", "follow_views", "join_run"]

_AGAIN_S = 1.0

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
            "only DiLoCo and Streaming DiLoCo can be joined. Start all replicas again. Nothing was started."
        )
    if fleet.others_have_trained:
        session.begin_diloco(replica).take_over(fleet.view.members)
    _become_member(session, replica, fleet, timeout_s)


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
        before, now = news.previous.members, news.view.members if news.view else ()
        emit(
            ViewChanged(
                step=step,
                replica=fleet.transport.replica,
                view=news.view.id if news.view else news.previous.id,
                members=now,
                joined=news.joined,
                left=tuple(sorted(set(before) - set(now))),
                reason=news.reason,
            )
        )
    if fleet.failure is None or stop.signal is not None:
        return
    emit(Note(step=step, text=f"{fleet.failure} It looks for the others."))
    limit_s = session.settings.transport.give_up_after_s
    gives_up_s = time.monotonic() + (math.inf if limit_s is None else limit_s)
    try:
        while True:
            try:
                come_back(session, fleet, max(0.0, gives_up_s - time.monotonic()), stop.interrupting)
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
    looking: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """After this replica lost the others: take over what they have, and keep the work that is not shared yet.

    If all have lost each other, one of them founds another view instead, and goes on when enough are back.

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
    session.open_to_joiners()
    timeout_s = session.settings.transport.rendezvous_timeout_s
    if not fleet.joining:
        with looking():
            fleet.gather(timeout_s)
        return
    if replica.diloco is not None:
        replica.diloco.take_over(fleet.view.members, keep_work=True)
    _become_member(session, replica, fleet, timeout_s)


def _become_member(session: Session, replica: Replica, fleet: PeerFleet, timeout_s: float) -> None:
    totals = session.totals
    before = totals.steps
    with waiting_for(lambda: f"the other replicas to let replica {replica.number} in", timeout_s):
        totals.steps = fleet.join(timeout_s)
    totals.sequences += (totals.steps - before) * session.sequences_per_step  # of the others, about
    if replica.diloco is not None:
        replica.diloco.steps = totals.steps - session.settings.train.data_parallel_steps
    replica.sampler.join_at(totals.steps, replica.diloco.shared.data_order if replica.diloco else "")
