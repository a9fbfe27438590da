"""One replica of a swarm: its way to the others, its share of the data, and coming back after it was lost."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

from diloco.data.assignment import Assignment
from diloco.data.shares import Shares
from diloco.membership.change import NextView
from diloco.membership.quorum import consequences
from diloco.membership.view import View
from diloco.train.fleet.returning import Returning
from diloco.train.held import Held
from diloco.train.threads import PeerThreads
from diloco.transport.hivemind.connect import SwarmPlace, connect_swarm
from diloco.transport.hivemind.node import same_port
from diloco.transport.hivemind.peer_streams import PeerStreams
from diloco.transport.peers.connected import Connected, join
from diloco.transport.peers.wire import Wire
from diloco.transport.replica_group import ReplicaGroup
from diloco.waiting import waiting_for

__all__ = ["SwarmFleet"]

_STARTING = "it is starting"
_CLOCK_OFF_S = 3.0  # worth telling
_ROUND_MAY_TAKE_S = 4.0
"""A round in flight has so long to end when somebody asks to stop."""


class SwarmFleet(Returning):
    """Made connected; a joiner becomes a member by `join`, a founder lets others in by
    `wait_for_start`.

    Args:
        place: which peer this is.
        wire: how contributions are exchanged.
        held: what it could go on from.
        start_replicas: training begins with so many.
        margin: inner steps within which every member has to wait for a round.
        batch_size: sequences per batch of a replica (B).
        threads: with which it computes beside other peers on its machine.
    """

    elastic = True
    comes_back = True
    group = ReplicaGroup()

    def __init__(
        self,
        place: SwarmPlace,
        wire: Wire,
        held: Held,
        *,
        start_replicas: int,
        margin: int,
        batch_size: int,
        threads: PeerThreads,
    ) -> None:
        number = held.replica if place.replica is None else place.replica
        self._place = dataclasses.replace(
            place, replica=number, held_swarm=held.swarm, status=self._status, closed=_STARTING
        )
        self._wire = wire
        self._held = held
        self._start_replicas = start_replicas
        self._margin = margin
        self._batch_size = batch_size
        self._assignments: tuple[Assignment, ...] = ()
        self._taken: tuple[Assignment, ...] = ()
        self._seen: dict[str, Any] = {}
        self.threads = threads
        self._started_s = time.monotonic()
        self._leaving: threading.Timer | None = None
        self.begun = False
        self.shares = Shares.of((0,))
        super().__init__(connect_swarm(self._place, wire, held_step=held.step))

    def _go_by(self, connected: Connected) -> None:
        super()._go_by(connected)
        self.transport.on_change = self._follow
        self._listened = self.addresses()
        if not self.joining:
            self.shares = Shares.of((self.transport.replica,))
            self._assignments = self.shares.of_member(self.transport.replica)
            self._note_members(1)

    @property
    def num_members(self) -> int:
        """Replicas that take part now."""
        return len(self.transport.view.members)

    @property
    def leads(self) -> bool:
        return self.transport.replica == self.transport.view.members[0]

    # Becoming a member, and again.

    @property
    def others_have_trained(self) -> bool:
        """For a joiner: whether there is a state to take over."""
        return self.connected.table.step > 0

    def join(self, timeout_s: float) -> int:
        """Become a member; the inner steps that are done."""
        step = join(self.connected, timeout_s)
        note = self.transport.welcome_note
        self.begun = bool(note["begun"])
        self.shares = Shares.from_message(note["shares"])
        self._note_members(len(self.transport.view.members))
        with self._changed:
            self._assignments, self._taken = self.shares.of_member(self.transport.replica), ()
        self.joining = False
        return step

    def _look_again(self, last: View, patience_s: float) -> Connected:
        known = [place for entry in self.transport.known_entries() for place in entry.places]
        node = self._place.node
        join = tuple(dict.fromkeys((*node.join, *known)))
        self._place = dataclasses.replace(
            self._place,
            replica=self.transport.replica,
            swarm=self.connected.swarm,
            last=last,
            patience_s=patience_s,
            closed=_STARTING,
            node=dataclasses.replace(node, join=join, listen=same_port(node.listen, self._listened), insists=False),
        )
        self._held = Held(self.transport.step, self.transport.replica, self.connected.swarm)
        self.transport.close()
        return connect_swarm(self._place, self._wire, held_step=self._held.step)

    def wait_for_start(self, stopped: Callable[[], bool]) -> None:
        """Let others join, until enough are there for training to begin, or somebody asks to stop."""
        self.transport.close_to_joiners("")
        with waiting_for(self._lacking), self._changed:
            while not self.begun and not stopped() and self.failure is None:
                self._changed.wait(0.2)

    def _lacking(self) -> str:
        more = self._start_replicas - self.num_members
        return f"{more} more replica{'s' if more > 1 else ''}, to begin with {self._start_replicas} (Ctrl-C leaves),"

    # What the session asks at every step.

    def take_assignments(self) -> tuple[Assignment, ...]:
        """What the sampler is to draw by from now on, if that has changed."""
        with self._changed:
            taken = tuple(each for each in self._assignments if each not in self._taken)
            self._taken = self._assignments
            return taken

    def take_words(self) -> str:
        return self.threads.follow()

    @property
    def view(self) -> View:
        """Who takes part."""
        return self.transport.view

    def tell_speed(self, steps_per_s: float) -> None:
        """Let the other members know how many inner steps this replica takes a second."""
        self.transport.tell_speed(steps_per_s)

    def speeds(self) -> Mapping[int, float]:
        """Replica -> inner steps per second, of the other members that are known."""
        return self.transport.speeds()

    def note(self, **seen: Any) -> None:
        """Tell what people that look shall see of this replica."""
        self._seen.update(seen)

    def stop_step(self, step: int, *, wanted: bool) -> int | None:
        """Each stops for itself; the others go on."""
        return step if wanted else None

    # The end.

    def leave_soon(self) -> None:
        """Leave within seconds, also in the middle of a round that does not come to its end; its work is kept."""
        self._leaving = threading.Timer(_ROUND_MAY_TAKE_S, lambda: self.transport.leave_at_once())
        self._leaving.daemon = True
        self._leaving.start()

    def finish(self) -> None:
        """The run is over, for all; or for this replica, which leaves."""
        self.close()

    def close(self) -> None:
        """Leave, so that the others need not find out that this replica is gone."""
        if self._leaving is not None:
            self._leaving.cancel()
        self.threads.leave()
        self.transport.leave()
        self.transport.close()

    def invitation(self) -> tuple[str, ...]:
        """What to print for those who want to take part, a line each."""
        found = self.addresses()
        if not found:
            return (f"diloco: replica {self.transport.replica} of run {self._place.admission.run!r} listens nowhere",)
        command = f"diloco train --transport hivemind --run {self._place.admission.run} --join"
        return ("diloco: others take part by", *(f"  {command} {address}" for address in found))

    def beginning(self) -> tuple[str, ...]:
        """What becomes of the checkpoint that it could go on from, and who knows of it; a sentence or two each."""
        held, table = self._held, self.connected.table
        if held.step < 0:
            return ()
        if not self.joining:
            nobody = "Nobody of the run was found" if self._place.node.join else "It knows of nobody else (no --join)"
            return (f"{nobody}, so it founds the swarm anew, at step {held.step}. Whoever joins takes over its state.",)
        lost = "what it had not shared by then is lost"
        if self.connected.swarm != held.swarm and table.founded_step < held.step:
            lost = f"the others went on from step {table.founded_step}, and do not have the steps after that either"
        return (
            f"It takes over the state of the others, who are at step {table.step}. Its own checkpoint of step "
            f"{held.step} is not used: {lost}.",
        )

    def facts(self) -> dict[str, str]:
        transport, timing = self.transport, self.transport.timing
        addresses = self.addresses()
        run = self._place.admission.run
        line = f"diloco train --transport hivemind --run {run} --join {addresses[0]}" if addresses else "(none can)"
        return {
            "replica": f"{transport.replica}, peer {transport.address}",
            "swarm": f"{self.connected.swarm} of run {run!r}, {len(transport.view.members)} replicas",
            "others join by": line,
            "listens at": ", ".join(addresses) or "nowhere: it opens all connections itself",
            **self._clock_facts(),
            "lost replicas": (
                f"noticed when their connection ends, or after {timing.silence_s:g} s of silence; "
                f"{consequences(transport.policies.quorum, max(self._start_replicas, len(transport.view.members)))}"
            ),
        }

    def _clock_facts(self) -> dict[str, str]:
        streams = self.transport.connections.streams
        assert isinstance(streams, PeerStreams)
        off_s = streams.node.clock_off_s
        if abs(off_s) < _CLOCK_OFF_S:
            return {}
        side = "ahead of" if off_s > 0 else "behind"
        return {"clock": f"this machine's is {abs(off_s):,.0f} s {side} that of the others, which harms nothing here"}

    def addresses(self) -> tuple[str, ...]:
        """Multiaddresses that others can join at; those of this machine alone come last."""
        streams = self.transport.connections.streams
        assert isinstance(streams, PeerStreams)
        found = self.transport.connections.call(streams.node.addresses())
        return tuple(sorted(found, key=lambda address: address.startswith("/ip4/127.")))

    def state_dict(self) -> dict[str, Any]:
        with self._changed:
            shares, swarm = self.shares.to_message(), self.connected.swarm
            return {**self.transport.state_dict(), "shares": shares, "begun": self.begun, "swarm": swarm}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; this replica is the only member that is sure to be there."""
        self.transport.load_state_dict(state)
        with self._changed:
            me = (self.transport.replica,)
            going_on = Shares.from_message(state["shares"]).following(
                self.transport.step, me, joined=(), left={}, margin=0, batch_size=self._batch_size
            )
            self.shares = Shares(going_on.chain[-1:])  # what came before is over
            self._assignments = self.shares.of_member(self.transport.replica)

    # In the control thread.

    def _follow(self, following: NextView) -> Mapping[str, Any] | None:
        """A new view: who draws what from now on, which those who join are told."""
        with self._changed:
            if following.view is not None:
                members, was_begun = following.view.members, self.begun
                self.shares = self.shares.following(
                    following.from_step - 1,
                    members,
                    joined=following.joined,
                    left=dict(following.left),
                    margin=self._margin if was_begun else 0,  # until it begins nobody takes a step
                    batch_size=self._batch_size,
                )
                self._note_members(len(members))
                self._assignments = self.shares.of_member(self.transport.replica)
            self._note_view(following)
            return {"shares": self.shares.to_message(), "begun": self.begun}

    def _note_members(self, members: int) -> None:
        self.begun = self.begun or members >= self._start_replicas

    def _status(self) -> Mapping[str, Any]:
        view, moved = self.transport.view, self.transport.last_transfer
        digests = sorted(self.transport.digests.items())
        return {
            "replica": self.transport.replica,
            "swarm": self.connected.swarm if hasattr(self, "connected") else "",
            "state": "joining" if self.joining else ("training" if self.begun else "waiting for replicas"),
            "step": self.transport.step,
            "view": view.id,
            "members": list(view.members),
            "sent_bytes": self.transport.sent_bytes,
            "received_bytes": self.transport.received_bytes,
            "uptime_s": round(time.monotonic() - self._started_s, 1),
            "digest": xxhash.xxh3_64_hexdigest(str(digests).encode()) if digests else "-",
            "link_bits_per_s": 8 * moved[0] / max(1e-9, moved[1]) if moved else None,
            **self._seen,
        }
