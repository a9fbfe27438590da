"""A transport that stands, and becoming a member of a run that is going on."""

from __future__ import annotations

import time
from dataclasses import dataclass

from diloco.errors import RendezvousError
from diloco.transport.peers.registry import Entry
from diloco.transport.peers.transport import PeerTransport

__all__ = ["Connected", "Table", "join"]


@dataclass(frozen=True)
class Table:
    """Everybody's entries.

    Attributes:
        entries: rank -> entry, my own included.
        running: whether the run was going on already when I asked.
    """

    entries: dict[int, Entry]
    running: bool


@dataclass(frozen=True)
class Connected:
    """A transport that stands.

    Attributes:
        transport: ready for rounds, or, for a joiner, for `fetch` and then `join`.
        table: everybody's entries.
        joining: whether the run was going on already.
    """

    transport: PeerTransport
    table: Table
    joining: bool

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
    transport.ask_to_join(entry)
    while (answer := transport.welcome(deadline_s - time.monotonic())) is None or answer["kind"] == "refused":
        if answer is None or answer["for_good"] or time.monotonic() > deadline_s:
            why = f"they refuse: {answer['reason']}" if answer else f"no answer within {timeout_s:g} s"
            raise RendezvousError(f"replica {transport.replica} can't join the others: {why}. It stops here.")
        time.sleep(1.0)  # they are not ready for it yet
        transport.ask_to_join(entry)
    transport.enter(answer)
    return transport.step
