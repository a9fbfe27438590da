"""A connected transport, and joining a running run."""

from __future__ import annotations

import time
from dataclasses import dataclass

from diloco.errors import RendezvousError
from diloco.protocol import Entry, Welcome
from diloco.transport.connections.limits import Backoff
from diloco.transport.peers.directory import Directory
from diloco.transport.peers.transport import PeerTransport

__all__ = ["Connected", "Table", "join"]

_ANSWER_S = 30.0
_FAREWELL_S = 10.0  # for a leaving process to announce that the run has ended
_AGAIN_S = 0.3, 2.0  # pauses between two requests to join


@dataclass(frozen=True)
class Table:
    """The entries of all ranks."""

    entries: dict[int, Entry]  # by rank, this rank's own included
    running: bool  # whether the run had already begun when this rank asked
    step: int = 0  # inner steps done by then, if the network reports them
    founded_step: int = 0  # step of the checkpoint from which the run was resumed, if the network reports it


@dataclass(frozen=True)
class Connected:
    """A transport that is connected to the other ranks."""

    transport: PeerTransport  # ready for rounds; for a joiner, ready for `fetch` and then `join`
    table: Table
    joining: bool  # whether the run had already begun
    directory: Directory

    @property
    def swarm(self) -> str:
        """The name of the swarm; "" over TCP."""
        return self.directory.swarm

    def refresh(self) -> None:
        """Look up the current members and connect to all of them. Only a joiner needs this."""
        self.transport.connections.call(self.directory.refresh())

    def finish(self) -> None:
        """Announce to late joiners and replicas that are not members at present that the run has ended."""
        self.transport.connections.call(self.directory.announce_end(), _FAREWELL_S)

    def already_running(self) -> RendezvousError:
        """Return the error for a replica that was to start a run and found it already running."""
        return RendezvousError(
            f"replica {self.transport.replica} was to start a run, but the other replicas are already running one. "
            "Choose another rendezvous, or join the run."
        )


def join(connected: Connected, timeout_s: float) -> int:
    """Become a member of the running run.

    Returns:
        The number of inner steps that are done. The joiner's first step is the next one.

    Raises:
        RendezvousError: The members refuse, or do not answer in time.
    """
    transport, entry = connected.transport, connected.table.entries[connected.transport.rules.rank]
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
        connected.refresh()
    transport.enter(answer)
    return transport.step
