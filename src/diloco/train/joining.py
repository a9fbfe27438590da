"""How the replica of a process becomes a member of a run that goes on, at first or again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

from diloco.errors import ConfigurationError
from diloco.train.fleet.leader_fleet import LeaderFleet
from diloco.train.fleet.returning import Returning
from diloco.train.fleet.swarm_fleet import SwarmFleet
from diloco.train.fleet.torch_fleet import TorchFleet
from diloco.train.local_replica import Replica, make_gradients
from diloco.train.session import Session
from diloco.waiting import waiting_for

__all__ = ["JoinableFleet", "come_back", "join_run"]

JoinableFleet: TypeAlias = TorchFleet | LeaderFleet | SwarmFleet
"""Of one replica in processes of its own."""


def join_run(session: Session, fleet: JoinableFleet, timeout_s: float) -> None:
    """Take over what the others have, and become one of them: their global parameters, step and place in the data.

    The global parameters and outer state are fetched while the others train on; what changes meanwhile is taken
    over fragment by fragment afterwards. The inner optimizer starts fresh.

    Args:
        session: at its beginning.
        fleet: of the session.
        timeout_s: for becoming a member.

    Raises:
        ConfigurationError: if the algorithm of the run keeps nothing that could be taken over.
        TransportError: if there is nobody to take over from, or the others refuse.
    """
    (replica,) = session.replicas
    fleet.close_to_joiners("")
    if session.settings.algorithm not in ("streaming", "diloco"):
        raise ConfigurationError(
            f"replica {replica.number} came to a run of algorithm={session.settings.algorithm!r} that is going on; "
            "only DiLoCo and Streaming DiLoCo can be joined. Starting all replicas again would work. "
            "Nothing was started."
        )
    if fleet.others_have_trained:
        diloco = session.begin_diloco(replica)
        diloco.take_over(fleet.endpoint(replica.number).view.members)
    _become_member(session, replica, fleet, timeout_s)


def come_back(
    session: Session,
    fleet: Returning,
    patience_s: float,
    looking: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """After this replica lost the others: take over what they have, and keep the work not shared yet.

    Where all have lost each other, one of them founds another view instead, and goes on when enough are back.

    Args:
        session: of the replica.
        fleet: of the session.
        patience_s: so long they are looked for.
        looking: entered while they are looked for, when whatever it raises leaves everything as it is.

    Raises:
        TransportError: if they aren't found, or refuse; it may be called again.
    """
    (replica,) = session.replicas
    if replica.diloco is not None:
        # what is in flight ends with the failure, and stays in the local parameters
        replica.diloco.drain(take_over=False)
    with looking():
        fleet.rejoin(patience_s)
    replica.gradients = make_gradients(session.settings, replica.model, fleet, replica.number)
    if replica.diloco is not None:
        replica.diloco.change_transport(fleet.endpoint(replica.number))
    session.open_to_joiners()
    timeout_s = session.settings.transport.rendezvous_timeout_s
    if not fleet.joining:
        with looking():
            fleet.gather(timeout_s)
        return
    if replica.diloco is not None:
        replica.diloco.take_over(fleet.endpoint(replica.number).view.members, keep_work=True)
    _become_member(session, replica, fleet, timeout_s)


def _become_member(session: Session, replica: Replica, fleet: Returning | LeaderFleet, timeout_s: float) -> None:
    totals = session.totals
    before = totals.steps
    with waiting_for(lambda: f"the other replicas to let replica {replica.number} in", timeout_s):
        totals.steps = fleet.join(timeout_s)
    totals.sequences += (totals.steps - before) * session.sequences_per_step  # of the others, about
    if replica.diloco is not None:
        replica.diloco.steps = totals.steps - session.settings.train.data_parallel_steps
    replica.sampler.join_at(totals.steps, replica.diloco.data_order if replica.diloco else "")
