"""The fleet of one replica of a swarm: its data assignments, its status for the user, and how it rejoins the others."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from diloco.data import Assignment, Shares, as_message, read_message
from diloco.events import Event, StateFetched
from diloco.membership import LastViews, NextView
from diloco.protocol import Rules
from diloco.train.fleet import PeerFleet, WelcomeNote
from diloco.train.session_state import Held
from diloco.transport import Connected, PeerStreams, SwarmPlace, enter_swarm, same_port
from diloco.waiting import waiting_for

__all__ = ["SwarmFleet"]

_STARTING = "it is starting"
_CLOCK_OFF_S = 3.0  # smaller clock differences are not reported
_ROUND_MAY_TAKE_S = 4.0  # time for a round in flight to end after the user asked to stop


class SwarmFleet(PeerFleet):
    """A replica of a run whose replicas join and leave.

    The constructor connects. A joiner then becomes a member by `join`; a founder admits others by `wait_for_start`.

    Args:
        held: the checkpoint from which this replica could resume.
        start_replicas: the number of replicas at which training starts.
        margin: the number of inner steps within which every member has to wait for a round.
        batch_size: sequences per batch of a replica (B).
    """

    elastic = True
    rejoins = True

    def __init__(
        self,
        place: SwarmPlace,
        rules: Rules,
        held: Held,
        *,
        start_replicas: int,
        margin: int,
        batch_size: int,
    ) -> None:
        number = held.replica if place.replica is None else place.replica
        self._place = dataclasses.replace(place, replica=number, held_swarm=held.swarm, closed=_STARTING)
        self._rules = rules
        self._held = held
        self._start_replicas = start_replicas
        self._margin = margin
        self._batch_size = batch_size
        self._assignments: tuple[Assignment, ...] = ()
        self._taken: tuple[Assignment, ...] = ()
        self.left_at: tuple[str, ...] = ()  # once it has left: addresses at which the run goes on without it
        self._leaving: threading.Timer | None = None
        self.begun = False
        self.shares = Shares.of((0,))
        super().__init__(enter_swarm(self._place, rules, held_step=held.step))

    def _connect(self, connected: Connected) -> None:
        super()._connect(connected)
        self._listened = self.addresses()
        self.note(state="joining", name=self._place.name)
        if not self.joining:
            self.shares = Shares.of(self.local)
            self._assignments = self.shares.of_member(self.transport.replica)
            self._note_members(1)

    def _connect_again(self, views: LastViews, patience_s: float) -> Connected:
        known = [address for entry in self.transport.known_entries() for address in entry.places]
        node = self._place.node
        join = tuple(dict.fromkeys((*node.join, *known)))
        self._place = dataclasses.replace(
            self._place,
            replica=self.transport.replica,
            swarm=self.connected.swarm,
            views=views,
            patience_s=patience_s,
            closed=_STARTING,
            node=dataclasses.replace(node, join=join, listen=same_port(node.listen, self._listened), insists=False),
        )
        self._held = Held(self.transport.step, self.transport.replica, self.connected.swarm)
        self.transport.close()
        return enter_swarm(self._place, self._rules, held_step=self._held.step)

    @property
    def others_have_trained(self) -> bool:
        return self.connected.table.step > 0

    def join(self, timeout_s: float) -> int:
        step = super().join(timeout_s)
        self._note_members(self.num_members)
        with self._changed:
            self._assignments, self._taken = self.shares.of_member(self.transport.replica), ()
        return step

    def _read_welcome(self, note: WelcomeNote) -> None:
        super()._read_welcome(note)
        if note.shares is None:
            raise ValueError("it does not say who draws which data")
        self.begun, self.shares = note.begun, note.shares

    def wait_for_start(self, stopped: Callable[[], bool]) -> None:
        self.transport.close_to_joiners("")
        with waiting_for(self._missing), self._changed:
            while not self.begun and not stopped() and self.failure is None:
                self._changed.wait(0.2)

    def _missing(self) -> str:
        more = self._start_replicas - self.num_members
        return f"{more} more replica{'s' if more > 1 else ''}, to start with {self._start_replicas} (Ctrl-C leaves),"

    # Queries of the training loop at every step.

    @property
    def num_members(self) -> int:
        return len(self.transport.view.members)

    def take_assignments(self) -> tuple[Assignment, ...]:
        with self._changed:
            taken = tuple(each for each in self._assignments if each not in self._taken)
            self._taken = self._assignments
            return taken

    def note(self, **seen: Any) -> None:
        self._place.status.seen.update(seen)

    def publish(self, event: Event) -> None:
        self._place.status.add(event)
        if isinstance(event, StateFetched):
            self.note(state_received_bytes=event.received_bytes, state_expected_bytes=event.expected_bytes)

    # The end. Each replica stops on its own, and the others continue.

    def stop_soon(self) -> None:
        """Leave within seconds, so that no round is waited for longer. Work that is not shared is kept."""
        self._leaving = threading.Timer(_ROUND_MAY_TAKE_S, lambda: self.transport.leave_at_once())
        self._leaving.daemon = True
        self._leaving.start()

    def finish(self) -> None:
        self.close()

    def close(self) -> None:
        """Leave the swarm explicitly, so that the others do not have to detect the loss of this replica."""
        if self._leaving is not None:
            self._leaving.cancel()
        self.left_at = self._others_at()
        self.transport.leave()
        self.transport.close()

    def _others_at(self) -> tuple[str, ...]:
        """Return addresses of the other members, and those given as --join that are not of replicas that have left."""
        view, known = self.transport.last_view, self.transport.known_entries()
        members = () if view is None else view.members
        gone = {entry.address for entry in known if entry.rank not in members}
        given = [address for address in self._place.node.join if address.rpartition("/p2p/")[2] not in gone]
        there = [address for entry in known if entry.rank in members for address in entry.places]
        return tuple(dict.fromkeys([*given, *sorted(there, key=lambda address: address.startswith("/ip4/127."))]))

    # Texts for the user.

    def addresses(self) -> tuple[str, ...]:
        """Return the multiaddresses at which others can join; loopback addresses come last."""
        found = self.transport.connections.call(self._streams.node.addresses())
        return tuple(sorted(found, key=lambda address: address.startswith("/ip4/127.")))

    @property
    def _streams(self) -> PeerStreams:
        return cast(PeerStreams, self.transport.connections.streams)

    def invitation(self) -> str:
        """Return the end of the command with which others join: ``--join`` and addresses; "" if there are none."""
        found = self.addresses()
        outside = [address for address in found if not address.startswith("/ip4/127.")]
        return f"--join {' '.join(outside or found)}" if found else ""

    def names(self) -> dict[str, str]:
        known = {self.transport.replica: self._place.name}
        known |= {entry.rank: entry.name for entry in self.transport.known_entries()}
        often = Counter(known.values())
        return {
            str(number): name if often[name] == 1 else f"{name}/{number % 10_000}"
            for number, name in known.items()
            if name
        }

    def beginning(self) -> tuple[str, ...]:
        """Return lines about the use of the checkpoint from which this replica could resume; none without one."""
        held, table = self._held, self.connected.table
        if held.step < 0:
            return ()
        if not self.joining:
            alone = "No other peer was found" if self._place.node.join else "It knows no other peer (no --join)"
            return (f"{alone}, so it founds a new swarm at step {held.step}. Peers that join adopt its state.",)
        lost = "the work that it had not shared by then is lost"
        if self.connected.swarm != held.swarm and table.founded_step < held.step:
            lost = f"the others continued from step {table.founded_step} and do not have the later steps either"
        return (
            f"It adopts the state of the others, which are at step {table.step}. Its own checkpoint of step "
            f"{held.step} is not used: {lost}.",
        )

    def facts(self) -> dict[str, str]:
        name, run = self.names().get(str(self.transport.replica), "it"), self._place.admission.run
        return {"replica": f"{name}, of {self.num_members} in run {run!r}"}

    def details(self) -> dict[str, str]:
        transport, clock, off_s = self.transport, {}, self._streams.node.clock_off_s
        if abs(off_s) >= _CLOCK_OFF_S:
            side = "ahead of" if off_s > 0 else "behind"
            clock = {"clock": f"{abs(off_s):,.0f} s {side} the clocks of the others, which does no harm"}
        return {
            "number": f"{transport.replica}, peer {transport.address}",
            "swarm": self.connected.swarm,
            "listens at": ", ".join(self.addresses()) or "no address: it opens all connections itself",
            "payload links": self._streams.direct_description,
            **clock,
            "lost replicas": f"noticed after at most {transport.rules.silence_s:g} s; the others then continue",
        }

    # The shares of the data.

    def state_dict(self) -> dict[str, Any]:
        with self._changed:
            shares, swarm = as_message(self.shares), self.connected.swarm
            return {**super().state_dict(), "shares": shares, "begun": self.begun, "swarm": swarm}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned, with this replica as the only member."""
        super().load_state_dict(state)
        with self._changed:
            continued = read_message(state["shares"], Shares).following(
                self.transport.step, self.local, joined=(), margin=0, batch_size=self._batch_size
            )
            self.shares = Shares(continued.chain[-1:])  # earlier assignments no longer matter
            self._assignments = self.shares.of_member(self.transport.replica)

    def _follow(self, following: NextView) -> WelcomeNote:
        """Also reassign the data, and add the assignment to the welcome note."""
        with self._changed:
            if following.view is not None:
                members, was_begun = following.view.members, self.begun
                self.shares = self.shares.following(
                    following.from_step - 1,
                    members,
                    joined=following.joined,
                    margin=self._margin if was_begun else 0,  # no replica takes a step before the run begins
                    batch_size=self._batch_size,
                )
                self._note_members(len(members))
                self._assignments = self.shares.of_member(self.transport.replica)
            return msgspec.structs.replace(super()._follow(following), shares=self.shares, begun=self.begun)

    def _note_members(self, members: int) -> None:
        self.begun = self.begun or members >= self._start_replicas
        if not self.joining:
            self.note(state="training" if self.begun else "waiting for replicas")
