"""A swarm's changes of members, as the training loop meets them between two steps."""

from __future__ import annotations

from collections.abc import Callable

from diloco.errors import RunOverError, TransportError
from diloco.events import Event, Note, ViewChanged
from diloco.train.joining import come_back
from diloco.train.session import Session
from diloco.train.stopping import StopAsked, StopRequest
from diloco.train.swarm_fleet import SwarmFleet

__all__ = ["OVER", "follow_views"]

OVER = "the others, who have finished"
"""What stops a replica that comes back when nobody is left to join."""


def follow_views(
    fleet: SwarmFleet, session: Session, stop: StopRequest, emit: Callable[[Event], None], save: Callable[[], None]
) -> None:
    """Tell of the views that were adopted, and come back where the others went on without this replica.

    Args:
        fleet: of the session.
        session: whose replica it is.
        stop: who is asked to stop looks for nobody.
        emit: told of everything.
        save: called before this raises.

    Raises:
        TransportError: if the others can't be found any more, or refuse.
    """
    step = session.totals.steps
    if words := fleet.threads.follow():
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
    happened = str(fleet.failure).partition(". ")[0]
    emit(Note(step=step, text=f"{happened}. It looks for the others, and keeps its work."))
    try:
        come_back(session, fleet, session.settings.transport.rendezvous_timeout_s, stop.interrupting)
    except StopAsked:
        return
    except RunOverError as error:
        emit(Note(step=step, text=f"{error} What this replica has not shared is in its checkpoint."))
        stop.ask(OVER)
        return
    except TransportError:
        save()
        raise
    emit(Note(step=session.totals.steps, text=f"Replica {fleet.transport.replica} is a member again."))
