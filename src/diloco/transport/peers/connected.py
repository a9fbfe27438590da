"""A connected transport, and joining a running run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from diloco.errors import RendezvousError
from diloco.protocol import Entry, Welcome
from diloco.transport.connections.limits import Backoff
from diloco.transport.peers.directory import Directory
from diloco.transport.peers.transport import PeerTransport
from diloco.waiting import waiting_for

_ANSWER_S = 30.0
_FAREWELL_S = 10.0  # for a leaving process to announce that the run has ended
_AGAIN_S = 0.3, 2.0  # pauses between two requests to join


@dataclass(frozen=True)
class Connected:
    transport: PeerTransport  # ready for rounds; for a joiner, ready for `fetch` and then `join`
    directory: Directory
    joining: bool  # whether the run had already begun
    entries: Mapping[int, Entry]  # of all ranks, this one included
    step: int = 0  # inner steps done when this rank asked; 0 unless it joins
    founded_step: int = 0  # step of the checkpoint from which the run was resumed, if the network reports it

    @property
    def swarm(self) -> str:
        return self.directory.swarm

    def finish(self) -> None:
        """Announce to late joiners and replicas that are not members at present that the run has ended."""
        patience_s = self.transport.rules.silence_s + _FAREWELL_S
        self.transport.connections.call(self.directory.announce_end(), patience_s)

    def already_running(self) -> RendezvousError:
        """Return the error for a replica that was to start a run and found it already running."""
        return RendezvousError(
            f"replica {self.transport.replica} was to start a run, but the other replicas are already running one. "
            "Choose another rendezvous, or join the run."
        )


def connect_all(directory: Directory, closed: str = "") -> Connected:
    """Find the members and connect to them, or found a view, and begin.

    Args:
        closed: why nobody can join at first; "" if all can.
    """
    transport, registry = directory.transport, directory.registry
    transport.connections.entries = registry.entries
    with waiting_for(directory.awaited, directory.patience_s):
        view, found = transport.connections.call(directory.find())
    directory.settle(found)
    transport.begin(view, registry, member=found is None, closed=closed)
    entries = dict(sorted({**(found.entries if found else {}), **registry.entries}.items()))
    step, founded_step = (found.step, found.founded_step) if found else (0, directory.founded_step)
    return Connected(transport, directory, found is not None, entries, step, founded_step)


def join(connected: Connected, timeout_s: float) -> int:
    """Become a member of the running run.

    Returns:
        The number of inner steps that are done. The joiner's first step is the next one.

    Raises:
        RendezvousError: The members refuse, or do not answer in time.
    """
    transport, entry = connected.transport, connected.entries[connected.transport.rules.rank]
    deadline_s = time.monotonic() + timeout_s
    why, backoff = f"no answer within {timeout_s:g} s", Backoff(*_AGAIN_S, seed=entry.address)
    while True:
        answer = transport.ask_to_join(entry, min(_ANSWER_S, deadline_s - time.monotonic()))
        final = False
        if answer is not None:
            said, _ = answer
            if isinstance(said, Welcome):
                break
            why = f"the members refuse: {said.reason}"
            final = said.for_good and not connected.swarm  # another member may let it in
        if time.monotonic() > deadline_s or final:
            raise RendezvousError(f"replica {transport.replica} can't join the run: {why}. It stops here.")
        time.sleep(backoff.next_s())  # the members are not ready for it yet
        transport.connections.call(connected.directory.refresh())
    transport.enter(answer)
    return transport.step
