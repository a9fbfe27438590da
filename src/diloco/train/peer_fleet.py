"""One rank of a replica whose peers come and go: how it meets them, loses them, and finds them again."""

from __future__ import annotations

import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from diloco.data import Assignment, Shares, as_message, read_message
from diloco.devices import choose_threads
from diloco.errors import RendezvousError, ReplicaLostError, TransportError
from diloco.events import Event, StateFetched, StepFinished
from diloco.membership import LastViews, NextView, Ranks, View, refusal
from diloco.protocol import Rules, WireMessage, decode, encode
from diloco.train.fleet import Fleet
from diloco.transport import (
    Directory,
    Lost,
    PeerStreams,
    PeerTransport,
    Place,
    ReplicaGroup,
    SwarmPlace,
    connect,
    join,
    parse_address,
)
from diloco.waiting import waiting_for

_ROUND_MAY_TAKE_S = 4.0  # time for a round in flight to end before a replica of a swarm that is to stop leaves


class WelcomeNote(WireMessage):
    """What a member tells a replica that joins; nothing if there are no shares of data and the run has just started."""

    gathers: Ranks = ()  # the members of the lost view, if too few of them have come back so far
    begun: bool = False  # whether training has begun
    shares: Shares | None = None  # who draws which data, in a run whose replicas join and leave


class PeerFleet(Fleet):
    """One rank of a replica and its connection to the other replicas, which it finds over TCP or in a swarm.

    Each rank of a replica holds a shard, and communicates with those that hold the same shard.

    Args:
        place: this rank, and where it meets the others.
        rules: the rules of the run.
        held_step: the newest step from which this rank could resume; -1 for none.
        group: the ranks of the replica; None: this rank alone.
        replicas: the planned number of replicas; in a swarm, with which training starts.
        margin: in a swarm, the number of inner steps within which every member has to wait for a round.
        batch_size: in a swarm, sequences per batch of a replica (B).
        batch_tokens: in a swarm, tokens per batch.
    """

    transport: PeerTransport
    directory: Directory
    addresses: tuple[str, ...]  # where others can join; loopback addresses come last

    def __init__(
        self,
        place: Place | SwarmPlace,
        rules: Rules,
        *,
        held_step: int = -1,
        group: ReplicaGroup | None = None,
        replicas: int = 1,
        margin: int = 0,
        batch_size: int = 1,
        batch_tokens: int = 1,
    ) -> None:
        self._place, self._rules = place, rules
        self.group = group or ReplicaGroup()
        self._replicas, self._margin, self._batch_size, self._batch_tokens = replicas, margin, batch_size, batch_tokens
        self.elastic, self.rejoins = isinstance(place, SwarmPlace), not rules.together
        self.left_at: tuple[str, ...] = ()  # once it has left a swarm: addresses at which the run goes on without it
        self._changed = threading.Condition()
        self._news: list[NextView] = []
        self._lost_view: View | None = None
        self._views: LastViews | None = None  # what this replica has been and promised when it last lost its view
        self._identities: dict[int, str] = {}  # rank -> its identity when it was last a member
        self._searching = False  # whether it has lost its view and not found the others again
        self._listening: socket.socket | None = None  # over TCP, where it stays reachable while it searches
        self.gathering = False  # whether a view founded after a loss still has too few members
        self.begun = not self.elastic  # whether there have been enough replicas to start training
        self.shares = Shares.of((0,))  # who draws which data, in an elastic run
        self._assignments: tuple[Assignment, ...] = ()
        self._taken: tuple[Assignment, ...] = ()
        self._leaving: threading.Timer | None = None
        self._connect(connect(place, rules, held_step=held_step, closed="it is starting" if self.elastic else ""))
        if not self.elastic:
            addresses = {rank: parse_address(entry.address).host for rank, entry in self.directory.entries.items()}
            choose_threads([*addresses.values()].count(addresses[self.transport.rules.rank]))

    def _connect(self, directory: Directory) -> None:
        self.directory = directory
        self.transport = directory.transport
        self.transport.on_change = lambda following: encode(self._follow(following))
        self.joining = directory.joining
        self.addresses = (str(directory.transport.address),)
        if isinstance(self._place, SwarmPlace):
            connections = directory.transport.connections
            addresses = connections.call(cast(PeerStreams, connections.streams).node.addresses())
            self.addresses = tuple(sorted(addresses, key=lambda address: address.startswith("/ip4/127.")))
            self.note(state="joining", name=self._place.name)
            if not self.joining:
                self._share(Shares.of(self.local), 1)

    def _find_again(self, views: LastViews, patience_s: float) -> Directory:
        """Close the lost connection and find the others, or found the view after ``views`` with those that search."""
        self._listening = self._listening or self.transport.connections.streams.keep()
        self.transport.close()
        listening = self._listening and self._listening.dup()
        lost = Lost(self.directory, views, patience_s, listening)
        directory = connect(self._place, self._rules, lost=lost, closed="it is rejoining itself")
        self._stop_listening()
        return directory

    def _stop_listening(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def failure(self) -> TransportError | None:
        if self.group.size == 1:
            return self.transport.failure
        reasons = self.group.gather_texts(str(self.transport.failure or ""))
        return next((ReplicaLostError(reason) for reason in reasons if reason), None)

    def close_to_joiners(self, reason: str) -> None:
        self.transport.views.closed_to_joiners = reason

    def state_dict(self) -> dict[str, Any]:
        with self._changed:
            more = {"shares": as_message(self.shares), "begun": self.begun, "swarm": self.directory.swarm}
            return self.transport.state_dict() | (more if self.elastic else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned; in an elastic run, with this replica as the only member."""
        self.transport.load_state_dict(state)
        if self.elastic:
            with self._changed:
                continued = read_message(state["shares"], Shares).following(
                    self.transport.step, self.local, joined=(), margin=0, batch_size=self._batch_size
                )
                self._share(Shares(continued.chain[-1:]))  # earlier assignments no longer matter

    # Queries of the training loop between two steps.

    def take_news(self) -> tuple[NextView, ...]:
        """Return the views adopted since the last call."""
        with self._changed:
            taken, self._news = self._news, []
            return tuple(taken)

    def take_assignments(self) -> tuple[Assignment, ...]:
        with self._changed:
            taken = tuple(each for each in self._assignments if each not in self._taken)
            self._taken = self._assignments
            return taken

    def note(self, **seen: Any) -> None:
        """Publish facts about this replica for the status page."""
        if isinstance(self._place, SwarmPlace):
            self._place.status.seen.update(seen)

    def publish(self, event: Event) -> None:
        if not isinstance(self._place, SwarmPlace):
            return
        self._place.status.add(event)
        if isinstance(event, StateFetched):
            self.note(state_received_bytes=event.received_bytes, state_expected_bytes=event.expected_bytes)
        elif isinstance(event, StepFinished) and event.trained:
            self.note(tokens_per_s=self._batch_tokens / max(1e-9, event.step_s))

    def names(self) -> dict[str, str]:
        if not isinstance(self._place, SwarmPlace):
            return {}
        known = {self.transport.replica: self._place.name}
        known |= {entry.rank: entry.name for entry in self.transport.known_entries()}
        often = Counter(known.values())
        unique = {number: name if often[name] == 1 else f"{name}/{number % 10_000}" for number, name in known.items()}
        return {str(number): name for number, name in unique.items() if known[number]}

    def details(self) -> dict[str, str]:
        if not isinstance(self._place, SwarmPlace):
            entries = sorted(self.directory.entries.items())
            return {"control addresses": ", ".join(f"{rank} at {entry.address}" for rank, entry in entries)}
        return {
            "replica": f"{self._place.name}, of {self.num_members} in run {self._place.admission.run!r}",
            "number": f"{self.transport.replica}, peer {self.transport.address}",
            "swarm": self.directory.swarm,
            "listens at": ", ".join(self.addresses) or "no address: it opens all connections itself",
        }

    # The beginning and the end.

    def wait_for_start(self, stopped: Callable[[], bool]) -> None:
        if self.begun:
            return
        self.close_to_joiners("")
        with waiting_for(self._missing), self._changed:
            while not self.begun and not stopped() and self.transport.failure is None:
                self._changed.wait(0.2)

    def _missing(self) -> str:
        start = self._replicas
        more = start - self.num_members
        return f"{more} more replica{'s' if more > 1 else ''}, to start with {start} (Ctrl-C leaves),"

    def stop_soon(self) -> None:
        # Replicas that stop together ask for it here, or one of them would wait for a round of another that has already
        # asked and waits for it. A replica of a swarm leaves within seconds; work that is not shared is kept.
        if self.elastic:
            self._leaving = threading.Timer(_ROUND_MAY_TAKE_S, lambda: self.transport.leave_at_once())
            self._leaving.daemon = True
            self._leaving.start()
        else:
            self.transport.ask_to_stop()

    def stop_step(self, step: int, *, wanted: bool) -> int | None:
        if self.elastic:  # each replica stops on its own, and the others continue
            return step if wanted else None
        transport = self.transport
        if wanted and self.rejoins and (transport.failure is not None or transport.views.last_view is None):
            return step  # no other replica is left to agree with
        if wanted:
            transport.ask_to_stop()
        return transport.stop_step()

    def finish(self, *, done: bool) -> None:
        if done:
            try:
                self.directory.finish()
            except Exception:  # errors of the DHT have no common base class
                logging.getLogger(__name__).debug("announcing that the run has ended failed", exc_info=True)
        if not self.elastic:
            self.transport.finish()
        self.close()

    def close(self) -> None:
        """Disconnect; leave a swarm explicitly, so that the others do not have to detect the loss of this replica."""
        self._stop_listening()
        if self._leaving is not None:
            self._leaving.cancel()
        if isinstance(self._place, SwarmPlace):
            self.left_at = self._others_at(self._place)
            self.transport.leave()
        self.transport.close()
        self.group.close()

    def _others_at(self, place: SwarmPlace) -> tuple[str, ...]:
        """Return addresses of the other members, and those given as --join that are not of replicas that have left."""
        view, known = self.transport.views.last_view, self.transport.known_entries()
        members = () if view is None else view.members
        gone = {entry.address for entry in known if entry.rank not in members}
        given = [address for address in place.node.join if address.rpartition("/p2p/")[2] not in gone]
        there = [each for entry in known if entry.rank in members for each in entry.places if "/p2p/" in each]
        return tuple(dict.fromkeys([*given, *sorted(there, key=lambda address: address.startswith("/ip4/127."))]))

    # Joining and rejoining.

    def sees_nobody(self) -> bool:
        """Return whether there is no connection to another replica."""
        rules = self.transport.rules
        return not {*map(rules.replica_of, self.transport.connections.connected)} - {rules.replica}

    def held_steps(self) -> dict[int, int]:
        return {rank: entry.held_step for rank, entry in self.directory.entries.items()}

    def join(self, timeout_s: float) -> int:
        """Become a member of a running run and return the number of inner steps done."""
        step = join(self.directory, timeout_s)
        self.joining = False
        try:
            note = decode(self.transport.welcome_note or encode(WelcomeNote()), WelcomeNote)
            if self.elastic and note.shares is None:
                raise ValueError("it does not say who draws which data")
        except ValueError as error:
            raise RendezvousError(
                f"The welcome note from the members can't be read: {error}. This replica does not take part."
            ) from error
        with self._changed:
            if note.gathers:
                self._lost_view, self.gathering = View(self.transport.view.id, tuple(sorted({*note.gathers}))), True
            if self.elastic and note.shares is not None:
                self.begun, self._taken = note.begun, ()
                self._share(note.shares, self.num_members)
        return step

    def rejoin(self, patience_s: float) -> None:
        """Find the other replicas after losing them, or found another view for the replicas that also search.

        After a `TransportError`, if none is found in time or the members refuse, the call may be repeated.
        """
        lost, state = self.transport, self.state_dict()
        self._identities |= lost.connections.identities
        last = lost.views.last_view
        if self._views is None or (last and not self._searching):  # else what it promised earlier still holds
            last = last or self._lost_view
            assert last is not None, "only a member can lose the others"
            if self.gathering and self._lost_view is not None:  # no replica trained in a view with too few members
                last = replace(self._lost_view, id=last.id)
            self._lost_view, self.gathering = last, False
            self._views = LastViews(last, lost.views.agreed_view, identities=dict(self._identities))
        self._searching = True
        self._connect(self._find_again(self._views, patience_s))
        self._searching = False
        self.gathering = not self.joining
        self.transport.sent_bytes, self.transport.received_bytes = lost.sent_bytes, lost.received_bytes
        if not self.joining:
            self.load_state_dict(state)

    def gather(self, timeout_s: float) -> None:
        """Wait in a founded view until the replicas outside it are too few to continue from the lost view."""
        if not self.gathering:
            return
        last = self._lost_view
        assert last is not None, "the others were lost"
        with waiting_for(lambda: f"enough of the {len(last.members)} replicas to rejoin", timeout_s), self._changed:
            self._changed.wait_for(lambda: self._enough(self.transport.view) or self.transport.failure, timeout_s)
        if not self._enough(self.transport.view):
            names = self.names()
            missing = (str(each) for each in sorted({*last.members} - {*self.transport.view.members}))
            raise RendezvousError(
                f"Too few of {len(last.members)} replicas rejoined; missing: "
                f"{', '.join(names.get(each, each) for each in missing)}. They may be training without this one, which "
                "takes no step until more have rejoined. Start the missing replicas."
            )
        self.gathering = False

    def _enough(self, view: View) -> bool:
        """Return whether ``view`` has so many members of the lost view that the rest can't continue without them."""
        last = self._lost_view
        return last is None or not refusal(last, {*last.members} - {*view.members}, self.transport.rules.policy)

    # View changes, in the control thread.

    def _follow(self, following: NextView) -> WelcomeNote:
        """Record an adopted view, divide the data again, and return the welcome note for the replicas that join it."""
        view = following.view
        with self._changed:
            if self.elastic:
                shares = self.shares.following(
                    following.from_step - 1,
                    view.members,
                    joined=following.joined,
                    margin=self._margin if self.begun else 0,  # no replica trains before the run begins
                    batch_size=self._batch_size,
                )
                self._share(shares, len(view.members))
            self._news.append(replace(following, reason=self.transport.reason))
            lacks = self.gathering and not self._enough(view)
            self._changed.notify_all()
            gathers = self._lost_view.members if lacks and self._lost_view else ()
            return WelcomeNote(gathers, self.begun, self.shares) if self.elastic else WelcomeNote(gathers)

    def _share(self, shares: Shares, members: int = 0) -> None:
        """Divide the data as ``shares`` say; training begins once there are enough members."""
        self.shares, self._assignments = shares, shares.of_member(self.transport.replica)
        if members and self.elastic:
            self.begun = self.begun or members >= self._replicas
            if not self.joining:
                self.note(state="training" if self.begun else "waiting for replicas")
