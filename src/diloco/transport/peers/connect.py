"""Connecting a rank to the others: to begin a run, to join a running one, or to find them again after a loss.

It is the same over TCP and in a swarm; the `MeetingPlace` says how connections are opened, and whom to ask.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

from diloco.errors import RendezvousError
from diloco.events import Event
from diloco.protocol import PresumedGone, Rules, Welcome
from diloco.transport.connections.limits import pauses
from diloco.transport.peers.directory import Directory, Lost
from diloco.transport.peers.transport import OnChange, PeerTransport
from diloco.waiting import waiting_for

_ANSWER_S = 30.0
_AGAIN_S = 0.3, 2.0  # pauses between two requests to join


class MeetingPlace:
    """A rank, and where it meets the others."""

    elastic: ClassVar[bool] = False  # whether replicas join and leave as they like

    def transport(self, rules: Rules, lost: Lost | None, on_change: OnChange | None = None) -> PeerTransport:
        """Return the transport of this rank, without any connection."""
        raise NotImplementedError

    def directory(self, transport: PeerTransport, held_step: int, lost: Lost | None) -> Directory:
        """Listen, and return what knows whom to ask. For the arguments see `connect`."""
        raise NotImplementedError

    def publish(self, event: Event) -> None:
        """Publish an event for the status page."""

    def note(self, **seen: Any) -> None:
        """Publish facts about this replica for the status page, by their names in `Status`."""


def connect(
    place: MeetingPlace,
    rules: Rules,
    *,
    held_step: int = -1,
    lost: Lost | None = None,
    closed: str = "",
    on_change: OnChange | None = None,
) -> Directory:
    """Find the members and connect to all of them, or found a view if there are none.

    If ``joining`` is true in the result, adopt the others' state and become a member::

        diloco = DiLoCo(model, optimizer, transport=directory.transport, ...)
        if directory.joining:
            diloco.take_over(directory.transport.view.members)
            diloco.steps = join(directory, timeout_s=60)

    A rejoining replica begins after the step that the others' transports have counted. A training loop that resumes
    from a checkpoint must therefore save and load ``directory.transport.state_dict()`` along with that of `DiLoCo`.

    Args:
        held_step: the newest step that this rank could resume from, which is sent to the others; -1 for none.
        lost: the view that this rank has lost. It finds the others again, and founds none.
        closed: why nobody can join at first; "" if all can.
        on_change: told of each next view.

    Raises:
        RendezvousError: if this does not succeed in time, the ranks are incompatible, or a swarm is behind this
            peer's checkpoint; nothing stays open.
        EjectedError: if the founder of the swarm has ejected this peer.
        TransportError: if this machine can't listen at the given address.
    """
    transport = place.transport(rules, lost, on_change)
    try:
        if lost is not None:
            before = lost.directory.transport
            transport.connections.identities |= before.connections.identities  # only they can speak in their names
            transport.finishers, transport.step, held_step = before.finishers, before.step, before.step
            transport.connections.note(PresumedGone(frozenset(before.views.presumed_gone)))
        directory = place.directory(transport, held_step, lost)
        connections = transport.connections
        with waiting_for(directory.subject):
            view = connections.call(directory.find())
        directory.settle()
        transport.begin(view, member=not directory.joining, closed=closed)
        directory.open_up()
    except BaseException:
        transport.close()
        raise
    return directory


def join(directory: Directory, timeout_s: float) -> int:
    """Become a member of the running run.

    Returns:
        The number of inner steps that are done. The joiner's first step is the next one.

    Raises:
        RendezvousError: The members refuse, or do not answer in time.
    """
    transport, entry = directory.transport, directory.entry
    deadline_s = time.monotonic() + timeout_s
    trouble = ""  # why no member could be asked anew, if so
    why, pauses_s = f"no answer within {timeout_s:g} s", pauses(*_AGAIN_S, seed=entry.address)
    while True:
        answer = transport.ask_to_join(entry, min(_ANSWER_S, deadline_s - time.monotonic()))
        final = False
        if answer is not None:
            message, _ = answer
            if isinstance(message, Welcome):
                break
            why = f"the members refuse: {message.reason}"
            final = message.for_good and not directory.swarm  # in a swarm another member may let it in
            if message.waits:
                deadline_s = time.monotonic() + timeout_s
        if time.monotonic() > deadline_s or final:
            reasons = f"{why} ({trouble.rstrip('.')})" if trouble else why
            raise RendezvousError(f"replica {transport.replica} can't join the run: {reasons}. It stops here.")
        time.sleep(next(pauses_s))  # the members are not ready for it yet
        trouble = transport.connections.call(directory.refresh())
    transport.enter(answer)
    return transport.step
