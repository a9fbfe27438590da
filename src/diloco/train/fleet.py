"""The replicas that train in this process and their connection to the others, which may come and go."""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch.distributed as dist

from diloco.data import Assignment, Shares, as_message, read_message
from diloco.errors import RendezvousError, ReplicaLostError, TransportError
from diloco.events import Site
from diloco.membership import Cause, Count, NextView
from diloco.protocol import Left, Rules, WireMessage, decode, encode
from diloco.transport import (
    Directory,
    Lost,
    MeetingPlace,
    ReplicaGroup,
    RollCall,
    Transport,
    connect,
    join,
)
from diloco.waiting import waiting_for

_POLL_S = 0.05
_ROUND_MAY_TAKE_S = 4.0  # time for a round in flight to end before a replica of a swarm that is to stop leaves


class WelcomeNote(WireMessage):
    """What a member tells a replica that joins; nothing if there are no shares of data and the run has just started."""

    begun: bool = False  # whether training has begun
    shares: Shares | None = None  # who draws which data, in a run whose replicas join and leave
    steps: Count = 0  # inner steps that the member has finished
    sequences: Count = 0  # on which all replicas together had trained by then


class Fleet:
    """The replicas of this process where the members of a run are fixed: all of them, or one rank of one of them.

    Args:
        transports: those of the local replicas.
        group: the ranks of the local replica; None: this rank alone.
        roll: what all ranks know of each other; None: what the transport knows.
        held_steps: the newest step from which each rank could resume, -1 for none; empty if they need not agree.
        restarted: whether a launcher has started all processes again.
    """

    elastic = False  # whether replicas come and go, each as it likes
    rejoins = False  # whether this process searches for the other replicas after losing them
    joining = False  # whether the others were already training when this process joined or rejoined
    notes: tuple[str, ...] = ()  # sentences for the user about the beginning

    def __init__(
        self,
        transports: Sequence[Transport],
        *,
        group: ReplicaGroup | None = None,
        roll: RollCall | None = None,
        held_steps: Mapping[int, int] | None = None,
        restarted: bool = False,
    ) -> None:
        self.transports = transports
        self.group = group or ReplicaGroup()
        self.held_steps, self.restarted = held_steps or {}, restarted
        self.place = MeetingPlace()  # where this rank meets the others
        self._roll = roll

    @property
    def transport(self) -> Transport:
        """The transport of the first local replica."""
        return self.transports[0]

    @property
    def local(self) -> tuple[int, ...]:
        """The numbers of the replicas that train in this process."""
        return tuple(transport.replica for transport in self.transports)

    @property
    def num_members(self) -> int:
        """The number of replicas that train, in all processes."""
        return len(self.transport.view.members)

    def leads(self) -> bool:
        """Return whether this process evaluates and reports for all replicas. Call it on all ranks of a replica."""
        return bool(self.group.share(self.local[0] == self.transport.view.members[0]))

    @property
    def roll(self) -> RollCall | Transport:
        """What knows whether the others are there, and when all stop."""
        return self._roll or self.transport

    def failure(self) -> TransportError | None:
        """Return why the replicas can't continue together, or None. Call it on all ranks of a replica."""
        if self._roll is not None or self.group.size == 1:
            return self.roll.failure
        reasons = self.group.gather_texts(str(self.transport.failure or ""))
        return next((ReplicaLostError(reason) for reason in reasons if reason), None)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Disconnect when the block ends. An error that the loss of another rank has caused then names that rank."""
        try:
            yield
        except (RuntimeError, ReplicaLostError) as error:
            raise (error if self._roll is None else self._roll.explained(error)) from error.__cause__
        finally:
            self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the connection for a checkpoint."""
        return self.transport.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.transport.load_state_dict(state)

    # Between two steps.

    def details(self) -> dict[str, str]:
        """Return facts about the connection to the other replicas, by name."""
        return {}

    def exchange_site(self, site: Site, wait_s: float) -> dict[str, Site]:
        """Tell the other replicas how this one fares with its own data. Call it on all ranks of the replica.

        Return what each member has told last, by its number as text, and who left after this step; after at most
        ``wait_s`` seconds in which some have not told of this step.
        """

        def exchange() -> dict[str, Site]:
            transport, until_s = self.transport, time.monotonic() + wait_s
            transport.announce_site(site)
            while True:
                told = {**transport.sites(), transport.replica: site}
                done = {replica for replica, news in told.items() if news.step >= site.step}
                members = {*transport.view.members}
                if members <= done or transport.failure is not None or time.monotonic() > until_s:
                    return {str(replica): told[replica] for replica in sorted(told) if replica in members | done}
                time.sleep(_POLL_S)

        return {name: Site(*fields) for name, fields in self.group.done_by_leader(exchange).items()}

    # The beginning and the end.

    def wait_for_start(self, stopped: Callable[[], bool]) -> None:
        """Wait until there are enough replicas to start training, or ``stopped`` returns True."""

    def stop_soon(self) -> None:
        """Act on the user's request to stop as soon as it arrives, in any thread, whatever the training waits for.

        Replicas that stop together ask for it here, or one of them would wait for a round of another that has already
        asked and waits for it.
        """
        self.roll.ask_to_stop()

    def end_steps(self) -> None:
        """Wait for no lost replicas any more, as this one takes no more steps."""

    def stop_step(self, step: int, *, wanted: bool) -> int | None:
        """Return the step after which all replicas stop, or None; ``wanted``: whether this process wants to stop."""
        return self.roll.stop_step(step, wanted=wanted)

    def finish(self, *, done: bool) -> None:
        """Wait until the others have finished too, then disconnect; ``done``: all steps are, as late ones are told."""
        self.roll.finish()

    def close(self) -> None:
        """Disconnect."""
        error = sys.exception()
        if self._roll is not None:
            self._roll.close("" if error is None else str(error) or repr(error))
        self.transport.close()
        self.group.close()
        # if a rank is missing, NCCL would wait for it; if there is one replica, its group was that of all ranks
        if self._roll is not None and self._roll.failure is None and dist.is_initialized():
            dist.destroy_process_group()


class MetFleet(Fleet):
    """One rank of one replica that has met the others at addresses, may lose them, and finds them again."""

    begun = True  # whether there have been enough replicas to start training
    counted: tuple[int, int] = (0, 0)  # inner steps finished, and sequences of all replicas in them: told to who joins

    def __init__(
        self,
        place: MeetingPlace,
        rules: Rules,
        *,
        held_step: int = -1,
        closed: str = "",
        group: ReplicaGroup | None = None,
    ) -> None:
        """Connect to the other replicas. Each rank communicates with those that hold the same shard.

        Args:
            place: this rank, and where it meets the others.
            rules: the rules of the run.
            held_step: the newest step from which this rank could resume; -1 for none.
            closed: why nobody can join at first; "" if all can.
            group: the ranks of the replica; None: this rank alone.
        """
        self._changed = threading.Condition()
        self._news: list[tuple[NextView, str, Cause]] = []
        self._listening: socket.socket | None = None  # over TCP, where it stays reachable while it searches
        directory = connect(place, rules, held_step=held_step, closed=closed, on_change=self._note_view)
        steps = dict[int, int]()
        if not self.elastic:
            steps = {rank: entry.held_step for rank, entry in directory.transport.entries().items()}
        super().__init__([directory.transport], group=group, held_steps=steps)
        self.place, self.rejoins = place, not rules.together
        self._enter(directory)

    def _enter(self, directory: Directory) -> None:
        self.directory, self.transports, self.joining = directory, [directory.transport], directory.joining

    def close_to_joiners(self, reason: str, *, for_good: bool = False) -> None:
        """Refuse replicas that ask to join, giving ``reason``; "" admits them again."""
        self.directory.transport.close_to_joiners(reason, for_good=for_good)

    def take_news(self) -> list[tuple[NextView, str, Cause]]:
        """Return the views adopted since the last call, each with the reason and its cause."""
        with self._changed:
            taken, self._news = self._news, []
            return taken

    def take_findings(self) -> list[str]:
        """Return sentences for the user about what has been found of the others since the last call."""
        findings = self.directory.findings
        return [findings.popleft() for _ in range(len(findings))]

    def take_assignments(self) -> tuple[Assignment, ...]:
        """Return the new data assignments since the last call, which follow when replicas join or leave."""
        return ()

    def details(self) -> dict[str, str]:
        return self.directory.details()

    def end_steps(self) -> None:
        self.directory.transport.end_steps()

    def finish(self, *, done: bool) -> None:
        self._announce_end(done=done)
        self.roll.finish()
        self.close()

    def _announce_end(self, *, done: bool) -> None:
        if done:
            try:
                self.directory.finish()
            except Exception:  # errors of the DHT have no common base class
                logging.getLogger(__name__).debug("announcing that the run has ended failed", exc_info=True)

    def close(self) -> None:
        self._stop_listening()
        super().close()

    # Joining and rejoining, where the others may be lost.

    def join(self, timeout_s: float) -> int:
        """Become a member of a running run and return the number of inner steps done."""
        step = join(self.directory, timeout_s)
        self.joining = False
        try:
            note = decode(self.directory.transport.welcome_note or encode(WelcomeNote()), WelcomeNote)
            self._take_welcome(note)
        except ValueError as error:
            raise RendezvousError(
                f"The welcome note from the members can't be read: {error}. This replica does not take part."
            ) from error
        self.counted = note.steps, note.sequences
        return step

    def _take_welcome(self, note: WelcomeNote) -> None:
        """Take over what a member says to those that join; raise ValueError if something is missing."""

    def rejoin(self, patience_s: float) -> None:
        """Find the other replicas, which have gone on without this one.

        After a `TransportError`, if none is found in time or the members refuse, the call may be repeated.
        """
        lost = self.directory.transport
        last = lost.views.last_view or self.directory.last
        assert last is not None, "only a member can lose the others"
        try:
            self._listening = self._listening or lost.connections.streams.keep()
            lost.close()
            listening = self._listening and self._listening.dup()
            again = Lost(self.directory, last, patience_s, listening)
            closed = "it is rejoining itself"
            self._enter(connect(self.place, lost.rules, lost=again, closed=closed, on_change=self._note_view))
        except OSError as error:  # another program has its port, say, or it has no descriptor left
            raise TransportError(f"replica {lost.replica} can't listen for the others: {error}.") from error
        self._stop_listening()
        self.transport.sent_bytes, self.transport.received_bytes = lost.sent_bytes, lost.received_bytes

    def _stop_listening(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    # View changes, in the control thread.

    def _note_view(self, following: NextView, reason: str, cause: Cause) -> bytes:
        return encode(self._follow(following, reason, cause))

    def _follow(self, following: NextView, reason: str, cause: Cause) -> WelcomeNote:
        """Record an adopted view, and return the welcome note for the replicas that join it."""
        with self._changed:
            self._news.append((following, reason, cause))
            self._changed.notify_all()
            return WelcomeNote(steps=self.counted[0], sequences=self.counted[1])


class Swarm(MetFleet):
    """One replica of a swarm, in which replicas join and leave, and divide the data anew each time."""

    elastic = True
    left_at: tuple[str, ...] = ()  # once it has left: addresses at which the run goes on without it
    relays: tuple[str, ...] = ()  # likewise: addresses through which its members find each other

    def __init__(
        self,
        place: MeetingPlace,
        rules: Rules,
        *,
        held_step: int = -1,
        replicas: int = 1,
        margin: int = 0,
        batch_size: int = 1,
    ) -> None:
        """Find the swarm of a run, or found it.

        Args:
            place: this replica, and where it meets the others.
            rules: the rules of the run.
            held_step: the newest step from which this replica could resume; -1 for none.
            replicas: the number of replicas with which training starts.
            margin: the number of inner steps within which every member has to wait for a round.
            batch_size: sequences per batch of a replica (B).
        """
        self.begun = False
        self._replicas, self._margin, self._batch_size = replicas, margin, batch_size
        self._assignments: tuple[Assignment, ...] = ()
        self._taken: tuple[Assignment, ...] = ()
        self._leaving: threading.Timer | None = None
        super().__init__(place, rules, held_step=held_step, closed="it is starting")
        if self.joining:
            self.shares = Shares.of(self.local)  # who draws which data

    def _enter(self, directory: Directory) -> None:
        super()._enter(directory)
        if not self.joining:
            self._share(Shares.of(self.local), 1)

    def state_dict(self) -> dict[str, Any]:
        with self._changed:
            state = {"shares": as_message(self.shares), "begun": self.begun, "swarm": self.directory.swarm}
            return {**super().state_dict(), **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned, with this replica as the only member."""
        super().load_state_dict(state)
        with self._changed:
            continued = read_message(state["shares"], Shares).following(
                self.directory.transport.step, self.local, joined=(), margin=0, batch_size=self._batch_size
            )
            self._share(Shares(continued.chain[-1:]))  # earlier assignments no longer matter

    def take_assignments(self) -> tuple[Assignment, ...]:
        with self._changed:
            taken = tuple(assignment for assignment in self._assignments if assignment not in self._taken)
            self._taken = self._assignments
            return taken

    def wait_for_start(self, stopped: Callable[[], bool]) -> None:
        if self.begun:
            return
        self.close_to_joiners("")
        with waiting_for(self._missing), self._changed:
            while not self.begun and not stopped() and self.transport.failure is None:
                self._changed.wait(0.2)

    def _missing(self) -> str:
        more = self._replicas - self.num_members
        return f"{more} more replica{'s' if more > 1 else ''}, to start with {self._replicas} (Ctrl-C leaves),"

    def stop_soon(self) -> None:
        """Leave within seconds, whatever the training waits for; work that is not shared is kept."""
        self._leaving = threading.Timer(_ROUND_MAY_TAKE_S, lambda: self.directory.transport.post(Left()))
        self._leaving.daemon = True
        self._leaving.start()

    def stop_step(self, step: int, *, wanted: bool) -> int | None:
        """Return ``step`` if this process wants to stop: each replica stops on its own, and the others continue."""
        return step if wanted else None

    def finish(self, *, done: bool) -> None:
        self._announce_end(done=done)
        self.close()

    def close(self) -> None:
        """Leave explicitly, so that the others do not have to detect the loss of this replica, and disconnect."""
        if self._leaving is not None:
            self._leaving.cancel()
        self.left_at, self.relays = self.directory.others(), self.directory.relays()
        self.directory.transport.leave()
        super().close()

    def _take_welcome(self, note: WelcomeNote) -> None:
        if note.shares is None:
            raise ValueError("it does not say who draws which data")
        with self._changed:
            self.begun, self._taken = note.begun, ()
            self._share(note.shares, self.num_members)

    def _follow(self, following: NextView, reason: str, cause: Cause) -> WelcomeNote:
        """Record an adopted view, divide the data again, and return the welcome note for the replicas that join it."""
        with self._changed:
            shares = self.shares.following(
                following.from_step - 1,
                following.view.members,
                joined=following.joined,
                margin=self._margin if self.begun else 0,  # no replica trains before the run begins
                batch_size=self._batch_size,
            )
            self._share(shares, len(following.view.members))
            return msgspec.structs.replace(
                super()._follow(following, reason, cause), begun=self.begun, shares=self.shares
            )

    def _share(self, shares: Shares, members: int = 0) -> None:
        """Divide the data as ``shares`` say; training begins once there are enough members."""
        self.shares, self._assignments = shares, shares.of_member(self.transport.replica)
        if members:
            self.begun = self.begun or members >= self._replicas
            if not self.joining:
                self.place.note(state="training" if self.begun else "waiting for replicas")
