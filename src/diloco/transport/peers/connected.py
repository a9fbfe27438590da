"""A transport that stands, and becoming a member of a run that is going on."""

from __future__ import annotations

import time
from dataclasses import dataclass

from diloco.errors import RendezvousError
from diloco.protocol.registry import Entry
from diloco.transport.peers.transport import PeerTransport

__all__ = ["Connected", "Table", "join"]

_ANSWER_S = 30.0
_AGAIN_S = 0.3


@dataclass(frozen=True)
class Table:
    """Everybody's entries.

    Attributes:
        entries: rank -> entry, my own included.
        running: whether the run was going on already when I asked.
        step: inner steps that were done then, where the network tells.
        founded_step: that of the checkpoint which the run went on from, where the network tells.
    """

    entries: dict[int, Entry]
    running: bool
    step: int = 0
    founded_step: int = 0


@dataclass(frozen=True)
class Connected:
    """A transport that is connected to the others.

    Attributes:
        transport: ready for rounds, or, for a joiner, for `fetch` and then `join`.
        table: everybody's entries.
        joining: whether the run was going on already.
        swarm: name of the swarm, where it has one.
    """

    transport: PeerTransport
    table: Table
    joining: bool
    swarm: str = ""

    def refresh(self) -> None:
        """For a joiner: look who the members are by now, and connect to all of them."""

    def finish(self) -> None:
        """Tell those who come later, or are not members now, that the run is over."""

    def already_running(self) -> RendezvousError:
        """For who came to begin a run, and finds one that is going on."""
        return RendezvousError(
            f"replica {self.transport.replica} came to begin a run, and the others are in the middle of one; another "
            "rendezvous, or joining them, would work. Nothing was started."
        )


def join(connected: Connected, timeout_s: float) -> int:
    """Become a member of the run that is going on.

    Returns:
        The inner steps that are done: the joiner's own first step is the one after.

    Raises:
        RendezvousError: if the members refuse, or do not answer in time.
    """
    transport, entry = connected.transport, connected.table.entries[connected.transport.rules.rank]
    deadline_s = time.monotonic() + timeout_s
    why = f"no answer within {timeout_s:g} s"
    while True:
        answer = transport.ask_to_join(entry, min(_ANSWER_S, deadline_s - time.monotonic()))
        if answer is not None and answer[0]["kind"] == "welcome":
            break
        why = f"they refuse: {answer[0]['reason']}" if answer else why
        final = answer is not None and answer[0]["for_good"] and not connected.swarm  # another member may let it in
        if time.monotonic() > deadline_s or final:
            raise RendezvousError(f"replica {transport.replica} can't join the others: {why}. It stops here.")
        time.sleep(_AGAIN_S)  # they are not ready for it yet
        connected.refresh()
    transport.enter(answer)
    return transport.step
