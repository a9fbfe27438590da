"""Members, and one more peer that joins, leaves or is killed: when have all members adopted the next view, and when has
a round in it finished?

The last worker is not a peer; it starts and ends the guest, a process of its own in the same node.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.decentralised.guest import Guest, first_round
from benchmarks.decentralised.methods import base
from benchmarks.decentralised.peers import addresses_of, become_member, key_file, make_peer, wait_for_members
from benchmarks.decentralised.plan import Job
from diloco.membership import NextView
from diloco.transport import load_identity

__all__ = ["Program"]

_REST_S = 1.5
"""The pause between two changes; longer than a change takes."""


class Program(base.Program):
    """The option ``times`` says how often a guest leaves, and how often one is killed."""

    def __init__(self, job: Job, replica: int) -> None:
        super().__init__(job, replica)
        self.hosts = replica == job.num_replicas - 1
        self.adopted: list[dict[str, Any]] = []
        self.guests: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        times = min(self.options["times"], job.rounds)
        self._guests = range(replica, replica + 2 * times)  # every guest is a new peer

    def prepare(self) -> Mapping[str, Any]:
        if self.replica:
            return {}
        self.transport = make_peer(self.job, 0, self.address, []).transport
        return {"addresses": addresses_of(self.transport)}

    def connect(self, known: Sequence[Mapping[str, Any]]) -> None:
        self.known: list[str] = known[0]["addresses"]
        if self.hosts:
            for number in self._guests:
                load_identity(key_file(self.job, number))  # making a key takes seconds, once per peer
            return
        if self.replica:
            connected = make_peer(self.job, self.replica, self.address, self.known)
            self.transport = become_member(connected, self.job.timeout_s)
        wait_for_members(self.transport, self.job.num_replicas - 1, self.job.timeout_s)
        self.transport.on_change = self._note
        threading.Thread(target=self._do_rounds, daemon=True).start()

    def measure(self, begin: base.Begin) -> None:
        if not self.hosts:
            return
        for turn, number in enumerate(self._guests):
            time.sleep(_REST_S)
            guest = Guest(self.job, number, self.address, self.known)
            guest.wait_for("round")
            time.sleep(_REST_S)
            if turn % 2:
                guest.kill()
            else:
                guest.command("leave")
                guest.wait_for("left")
            time.sleep(_REST_S)
            guest.end()
            self.guests.append(guest.events)

    def result(self) -> dict[str, Any]:
        return {"adopted": self.adopted, "guests": self.guests}

    def close(self) -> None:
        if not self.hosts:
            self.transport.close()

    def _note(self, following: NextView) -> None:
        """Record a new view; called in the control thread."""
        with self._changed:
            members = following.view.members if following.view else ()
            self.adopted.append({"at_s": time.monotonic(), "members": members, "from_step": following.from_step})
            self._changed.notify_all()

    def _do_rounds(self) -> None:
        """Run a tiny round in every view; all members do."""
        last: dict[str, Any] | None = None
        while True:
            with self._changed:
                while not self.adopted or self.adopted[-1] is last:
                    self._changed.wait()
                last = self.adopted[-1]
            first_round(self.transport, last["from_step"])
            last["round_s"] = time.monotonic()
