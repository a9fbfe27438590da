"""Changes of members, as the training loop meets them between two steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from diloco.errors import RunOverError, TransportError
from diloco.events import Event, Note, ViewChanged
from diloco.train.fleet.returning import Returning
from diloco.train.joining import come_back
from diloco.train.session import Session
from diloco.train.stopping import StopAsked, StopRequest

__all__ = ["OVER", "follow_views"]

_AGAIN_S = 1.0

OVER = "the others, who have finished"
"""What stops a replica that comes back when nobody is left to join."""


def follow_views(
    fleet: Returning, session: Session, stop: StopRequest, emit: Callable[[Event], None], save: Callable[[], None]
) -> None:
    """Tell of the views that were adopted, and come back where this replica has lost the others.

    Args:
        fleet: of the session.
        session: whose replica it is.
        stop: who is asked to stop looks for nobody.
        emit: told of everything.
        save: called before this raises.

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
        while not _is_back(session, fleet, gives_up_s, stop, emit):
            with stop.interrupting():
                time.sleep(_AGAIN_S)
    except StopAsked:
        return
    except RunOverError as error:
        emit(Note(step=step, text=f"{error} What this replica has not shared is in its checkpoint."))
        stop.ask(OVER)
        return
    except TransportError:
        save()
        raise
    how = "is a member again" if len(fleet.transport.view.members) > 1 else "goes on"
    emit(Note(step=session.totals.steps, text=f"Replica {fleet.transport.replica} {how}."))


def _is_back(
    session: Session, fleet: Returning, gives_up_s: float, stop: StopRequest, emit: Callable[[Event], None]
) -> bool:
    try:
        come_back(session, fleet, max(0.0, gives_up_s - time.monotonic()), stop.interrupting)
    except RunOverError:
        raise
    except TransportError as error:
        if time.monotonic() >= gives_up_s:
            raise
        emit(Note(step=session.totals.steps, text=f"Coming back has failed, and is tried again: {error}"))
        return False
    return True
