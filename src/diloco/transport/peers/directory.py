"""The directory of a run: each process answers who the members are, and one that looks for them asks.

An answer is the table of the members, or that the process is looking for them, too, or a refusal. It is the same over
TCP and in a swarm, at the start of a swarm and after a process has lost its view; only where to ask differs. Where a
run begins and nobody is a member, one of those that are looking founds the first view.

Where a view change waits for members, the others look for these, again and again: one that is still in the view is
connected again, and one that was started again hears of them, and joins them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from diloco.errors import ConfigurationError, RendezvousError, RunFinishedError, TransportError
from diloco.membership import View, names_of
from diloco.protocol import (
    REDIAL,
    Ask,
    Entry,
    Introduce,
    Over,
    Refused,
    WireMessage,
    Yielded,
    choose_founder,
    note,
    table_of,
)
from diloco.protocol import Looking as Looking
from diloco.protocol import Members as Members
from diloco.transport.address import Address
from diloco.transport.connections.connection_manager import ConnectionManager
from diloco.transport.connections.limits import few_at_once, pauses
from diloco.transport.connections.streams import Done, NotNowError, RefusedError, question, say, within
from diloco.transport.peers.transport import PeerTransport

_LEAST_S = 0.1
_MOST_JOINERS = 32  # of which a joiner is told: a message has room for no more, if they are strangers
_OVER_S = 2.0
_FAREWELL_S = 10.0  # for a leaving process to announce that the run has ended
# Times `silence_s`, while members wait for lost ones: the longest attempt to reach one, and the longest pause after it.
# One that becomes reachable during an attempt is reached by the next attempt at the latest.
_DIAL, _PAUSE = 1 / 2, 1 / 8
assert 2 * _DIAL + _PAUSE <= REDIAL


@dataclass(frozen=True)
class Lost:
    """A view that a rank has lost, and what it needs to find the others again."""

    directory: Directory  # with which it had found them; its transport is closed
    last: View  # the newest view that it was a member of
    patience_s: float  # how long it searches
    listening: socket.socket | None = None  # over TCP, what `TcpStreams.keep` returned; closed with the next transport


class Directory:
    """What one process knows about who the members are.

    The training thread makes it, and calls `settle`, `open_up` and `finish`; all else runs in the control thread.

    Args:
        held_step: the newest step that this process could resume from; -1 for none.
        join_window_s: how long a process that finds no member waits for others that search before one founds a view.
        alone: whether it knows no other process to ask.
        founds: whether it may found a view although it was a member of none.
        lost: the view that this process has lost; None: it begins.
        held_swarm: the swarm of ``held_step``; "": none, or unknown.
    """

    def __init__(
        self,
        transport: PeerTransport,
        *,
        held_step: int = -1,
        join_window_s: float = 0.0,
        alone: bool = False,
        founds: bool = True,
        lost: Lost | None = None,
        held_swarm: str = "",
    ) -> None:
        self.found: Members | None = None  # the members that it has found; None: none yet, or it is one from the start
        self.swarm = ""  # the swarm that this process has found or founded
        self.founded_step = 0  # step of the checkpoint from which the swarm was founded
        self.patience_s = lost.patience_s if lost else transport.rules.rendezvous_timeout_s
        self.last = lost.last if lost else None  # the newest view that it was a member of, and was left out of
        self.me = Looking(transport.replica, held_step, founds=founds and lost is None)
        self.join_window_s, self.alone = join_window_s, alone and lost is None
        self.looking: list[Looking] = []  # the other processes that were looking at the last check
        self.searches = False  # whether it looks for the members at present
        self.member_answered = False  # whether one answered the last questions, even if it can't be joined now
        self.postponed = ""  # why members that answered let nobody join yet; "": none did, or they do
        self.former_swarm = lost.directory.swarm if lost else held_swarm  # the swarm that this process was a member of
        self.findings: deque[str] = deque()  # sentences for the user about what it has found since it is a member
        self.transport = transport
        self.connections: ConnectionManager = transport.connections
        self.known = self.connections.entries  # the entries of all known ranks, that of this one included
        services = self.connections.services
        services[Ask], services[Over] = self._tell_members, self._note_end

    # What differs between networks.

    answers: Any = Members | Looking  # what a process may answer that is asked who the members are
    begins = False  # whether all ranks of the run are to begin together
    pauses_s = 0.5, 2.0  # between two questions to all known processes

    async def begin(self, answers: Mapping[Address, object]) -> View | None:
        """Return the first view, once all ranks have come that are to begin together; None otherwise.

        Raises:
            RendezvousError: the answers show that the search is in vain.
        """
        return None

    def settle(self) -> None:
        """Take note of the members that were found, or that this process founds a view."""

    def open_up(self) -> None:
        """Let others know of this process, which has begun. For the training thread."""
        if self.transport.rules.continue_without_lost:
            self.connections.post(lambda: self.connections.begin(self._look_for_lost()))

    def listens_at(self) -> tuple[str, ...]:
        """Return where others can join, loopback addresses last. For the training thread."""
        return (str(self.transport.address),)

    def limits_of_reach(self) -> str:
        """Return why others may not reach those addresses, and what to do; "" if nothing is known."""
        return ""

    def details(self) -> dict[str, str]:
        """Return facts about the connection to the other replicas, by name. For the training thread."""
        addresses = (f"{rank} at {entry.address}" for rank, entry in self.transport.entries().items())
        return {"control addresses": ", ".join(addresses)}

    def others(self) -> tuple[str, ...]:
        """Return addresses at which a swarm goes on without this replica."""
        return ()

    def relays(self) -> tuple[str, ...]:
        """Return addresses through which the others find this process, and at which no replica is."""
        return ()

    async def addresses(self) -> Collection[Address]:
        """Return the addresses at which members may answer, and let others find this process."""
        raise NotImplementedError

    def check(self, found: Members) -> None:
        """Raise `RendezvousError` if this process must not join these members."""

    def may_found(self, answers: Mapping[Address, object], waited_s: float) -> bool:
        """Return whether this process may found a view if it is elected, ``waited_s`` after others could know of it."""
        return True

    async def examine(self, answers: Mapping[Address, object]) -> None:
        """Find out why those do not answer that this process was told of.

        Raises:
            RendezvousError: this process can't join any of them.
        """

    def over(self) -> str:
        """Return why there is nobody left to join; "" if there may be."""
        last, replica_of = self.last, self.transport.rules.replica_of
        members = {*map(replica_of, self.known)} if last is None else {*last.members}
        over = not self.transport.finishers.isdisjoint(members)
        return "the others have finished the run, and no member is left to join." if over else ""

    def subject(self) -> str:
        """Return what this process waits for, for a report."""
        if self.postponed:
            return f"those that are there to let others join ({self.postponed})"
        limit = f" (gives up after {self.patience_s:g} s)" if math.isfinite(self.patience_s) else ""
        return f"{self.awaited()}{limit}"

    def awaited(self) -> str:
        return f"a member of the run that goes on without this replica ({len(self.looking)} more are looking for one)"

    def nobody(self, why: Mapping[str, str]) -> str:
        return (
            f"replica {self.me.number} has searched for the others for {self.patience_s:g} s, its limit, and "
            f"found {len(self.looking)} that are also searching. Its state is saved. If the others have ended for "
            "good, start this one again from its checkpoint."
        )

    async def announce_end(self) -> None:
        """Tell former members, where they listen, that the run has ended; one may be frozen just now."""
        rules, members = self.transport.rules, self.transport.view.members
        clock = asyncio.get_running_loop()
        until_s, pauses_s = clock.time() + rules.silence_s, pauses(*self.pauses_s, seed=self.entry.address)

        async def tell(entry: Entry) -> Any:
            while True:
                try:
                    address, message = self.connections.streams.locate(entry), Over(self.transport.replica)
                    # an answer is awaited: a process that has just thawed may close the connection unread, and search
                    async with asyncio.timeout(_OVER_S):
                        return await question(await self.connections.open(address), address, message, Done)
                except (OSError, EOFError, TransportError, ValueError) as error:
                    if isinstance(error, ConnectionRefusedError) or clock.time() >= until_s:
                        return None  # its process has ended, or does not answer
                await asyncio.sleep(next(pauses_s))

        present = {*members, self.me.number}
        absent = [entry for rank, entry in self.known.items() if rules.replica_of(rank) not in present]
        await asyncio.gather(*map(tell, absent))

    # What was found.

    @property
    def joining(self) -> bool:
        """Whether the run had already begun: the transport is ready for `fetch`, and then for `join`."""
        return self.found is not None

    @property
    def step(self) -> int:
        """The inner steps done when this rank asked; 0 unless it joins."""
        return self.found.step if self.found else 0

    @property
    def entry(self) -> Entry:
        return self.known[self.connections.rank]

    def finish(self) -> None:
        """Announce to late joiners and replicas that are not members at present that the run has ended."""
        self.connections.call(self.announce_end(), self.transport.rules.silence_s + _FAREWELL_S)

    # Looking for the members.

    async def find(self) -> View:
        """Connect to all members and return their view; or return the view to found.

        A member that can't be reached may just have ended, so the search goes on with the next answers.

        Raises:
            RendezvousError: there is neither in time, or this process can't take part.
            RunFinishedError: the others have finished.
        """
        self.searches = True
        try:
            return await self._find()
        finally:
            self.searches = False

    async def _find(self) -> View:
        clock, known_s = asyncio.get_running_loop(), math.inf  # when others could first know of this process
        until_s, pauses_s = clock.time() + self.patience_s, pauses(*self.pauses_s, seed=self.entry.address)
        why: dict[Address, str] = {}  # why each was of no use
        heard: set[Address] = set()  # those that have answered before: the last question may have too little time
        while True:
            addresses, asked_s = await self.addresses(), clock.time()
            known_s = min(known_s, asked_s)
            answers = await self._ask_all(addresses, until_s)
            heard |= {address for address, answer in answers.items() if not isinstance(answer, Exception)}
            if view := await self.begin(answers) or await self._join_any(answers, why, heard):
                return view
            self.looking = [answer for answer in answers.values() if isinstance(answer, Looking)]
            await self.examine(answers)
            if view := self._founded(answers, asked_s - known_s):
                return view
            if self.postponed:  # members answer, and ask it to wait
                until_s = max(until_s, clock.time() + self.patience_s)
            if clock.time() >= until_s:
                raise RendezvousError(self.nobody({str(address): reason for address, reason in why.items()}))
            await asyncio.sleep(next(pauses_s))

    async def _ask_all(
        self, addresses: Collection[Address], until_s: float
    ) -> dict[Address, Members | Looking | Exception]:
        clock = asyncio.get_running_loop()

        async def ask(address: Address) -> Members | Looking | Exception:
            try:
                return await within(max(_LEAST_S, until_s - clock.time()), self.ask(address))
            except (OSError, EOFError, TransportError, ValueError) as error:
                return error

        return dict(zip(addresses, await few_at_once(ask, addresses), strict=True))

    async def _join_any(
        self,
        answers: Mapping[Address, Members | Looking | Exception],
        why: dict[Address, str],
        heard: Collection[Address],
    ) -> View | None:
        """Connect to the members that the answers name, and return their view; None: none can be joined now.

        ``why`` gets the reasons, except that an address in ``heard`` does not answer this time.

        Raises:
            RendezvousError: all that answer refuse.
        """
        refusals: list[RendezvousError] = []
        self.member_answered, self.postponed = False, ""
        for address, answer in _best_first(answers):
            try:
                if isinstance(answer, Exception):
                    raise answer
                if isinstance(answer, Members):
                    self.check(answer)
                    self.member_answered = True
                    self.found = await self.dial_all(answer)
                    return View(-1, tuple(member for member in self.found.members if member != self.me.number))
            except RendezvousError as error:  # this one refuses, but another one may not
                refusals.append(error)
                why[address] = str(error)
            except (OSError, EOFError, TransportError, ValueError) as error:
                if isinstance(error, NotNowError):
                    self.member_answered, self.postponed = True, error.reason or self.postponed
                if isinstance(error, ConnectionRefusedError):
                    why[address] = "nothing listens there (connection refused)"
                elif str(error) or not isinstance(error, TimeoutError):
                    why[address] = str(error) or type(error).__name__
                elif address not in heard:
                    why.setdefault(address, "no answer")
        if refusals and not self.member_answered:
            raise refusals[0]
        return None

    def _founded(self, answers: Mapping[Address, object], waited_s: float) -> View | None:
        """Return the view that this process founds; None: it founds none, as a member answered or another one is to.

        Raises:
            RunFinishedError: the others have finished.
        """
        if self.member_answered or self.begins:
            return None
        if over := self.over():
            raise RunFinishedError(over)
        may_found = self.may_found(answers, waited_s) and (self.alone or waited_s >= self.join_window_s)
        if may_found and (self.alone or choose_founder([self.me, *self.looking]) == self.me.number):
            return View(0, (self.me.number,))
        return None

    async def ask(self, address: Address, unreachable: int | None = None) -> Members | Looking:
        """Ask a process who the members are, and to have the member ``unreachable`` connect to this process.

        Raises:
            RendezvousError: it refuses for good.
            NotNowError: it can't answer now.
            OSError, EOFError, TransportError: it can't be reached.
        """
        stream = await self.connections.open(address)
        answer = await question(stream, address, Ask(self.entry, unreachable), self.answers)
        if isinstance(answer, Members):
            keep = {self.connections.rank, *self.transport.rules.ranks(answer.members), *self.connections.connected}
            for rank, entry in answer.entries.items():
                peer, key = self.connections.peers.get(rank), self.connections.identity(rank)
                is_elsewhere = peer is not None and (str(peer.address), key) != (entry.address, entry.key)
                if rank != self.connections.rank and rank < self.connections.most_ranks and not is_elsewhere:
                    with contextlib.suppress(ConfigurationError):  # at an address that is none, all would fail
                        self.connections.streams.locate(entry)
                        note(self.known, entry, keep)
        return answer  # type: ignore[no-any-return]  # what was asked for

    async def dial_all(self, found: Members) -> Members:
        """Connect to all members, and as far as possible to others that are about to join. Return the newest table.

        Raises:
            OSError: a member can't be reached.
        """
        connections, streams = self.connections, self.connections.streams
        first = self.known.get(min(self.transport.rules.ranks(found.members)))
        if first is not None and first.rank != connections.rank:
            try:  # all joiners ask the same one, so that they learn of each other
                answer = await self.ask(streams.locate(first))
            except RendezvousError:
                pass  # the member that was asked first has not refused
            except (OSError, EOFError, TransportError) as error:
                raise NotNowError(str(error)) from error
            else:
                found = answer if isinstance(answer, Members) and answer.swarm == found.swarm else found
        # the other ranks of this replica are about to join, too
        members = {*self.transport.rules.ranks((*found.members, self.me.number))}
        wanted = sorted((members | found.entries.keys()) - connections.connected - {connections.rank})
        results = await asyncio.gather(*(self._reach(rank, found) for rank in wanted), return_exceptions=True)
        for rank, result in zip(wanted, results, strict=True):
            if isinstance(result, BaseException) and rank in members:
                raise result
        return found

    async def _reach(self, rank: int, found: Members) -> None:
        entry = found.entries.get(rank) or self.known.get(rank)
        try:
            if entry is None:
                raise TransportError("nobody has told its address")
            await within(self.transport.rules.silence_s, self.connections.dial(entry))
        except (OSError, EOFError, TransportError, ValueError) as error:
            refused = isinstance(error, ConnectionRefusedError)
            if entry is not None and not refused and await self._called_back(found, entry):
                return
            raise OSError(
                f"replica {self.me.number} can't reach rank {rank}, which is a member: "
                f"{str(error) or type(error).__name__}. If both are behind routers that block incoming connections, "
                "they need a relay: a peer with a public address"
            ) from error

    async def _called_back(self, found: Members, entry: Entry) -> bool:
        """Ask the members to have one of them open the connection, and return whether it did."""
        rank, members = entry.rank, self.transport.rules.ranks(found.members)
        if rank not in members:
            return False
        others = [other for other in members if other != rank and other in found.entries]

        async def ask(other: int) -> None:
            with contextlib.suppress(OSError, EOFError, TransportError):
                await self.ask(self.connections.streams.locate(found.entries[other]), unreachable=rank)

        asking = asyncio.ensure_future(few_at_once(ask, others))  # one after the other, each would cost a silence
        try:
            return await self.arrives(entry, 2 * self.transport.rules.silence_s)
        finally:
            asking.cancel()

    async def arrives(self, entry: Entry, wait_s: float) -> bool:
        """Wait until a rank has connected, and has shown by a message that its end is open. Return whether it has."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not self.connections.hears(entry):
                    self.connections.arrived.clear()
                    await self.connections.arrived.wait()
                return True
        return False

    async def refresh(self) -> str:
        """Ask a member anew, and connect to those that it names. Return why that has failed; "": it has not."""
        why = "nobody is known to ask"
        entries, streams = self.known, self.connections.streams
        connected = [streams.locate(entries[rank]) for rank in sorted(self.connections.connected & entries.keys())]
        for are_connected in (True, False):  # it takes long to look up the others in a DHT
            for address in connected if are_connected else await self.addresses():
                try:
                    answer = await within(self.transport.rules.silence_s, self.ask(address))
                    if isinstance(answer, Members):
                        await self.dial_all(answer)
                        return ""
                    why = f"{address} is looking for the members, too"
                except (OSError, EOFError, TransportError, ValueError) as error:
                    why = str(error) or f"{address} does not answer ({type(error).__name__})"
        return why

    # Looking for members that are lost.

    async def _look_for_lost(self) -> None:
        """Look, again and again, for the members for whom a view change waits."""
        views, (first_s, longest_s) = self.transport.views, self.pauses_s
        most_s = _PAUSE * self.transport.rules.silence_s
        pauses_s = pauses(min(first_s, most_s), min(longest_s, most_s), seed=self.entry.address)
        while True:
            await asyncio.sleep(next(pauses_s))
            await few_at_once(self._dial_lost, self.transport.rules.ranks(sorted(views.missing)))

    async def _dial_lost(self, rank: int) -> None:
        """Connect to a member again. A new process in its place learns of this one, or tells how the others went on."""
        connections, process = self.connections, self.connections.machine.roster.process(rank)
        with contextlib.suppress(OSError, EOFError, TransportError, ValueError, KeyError):
            if rank in connections.peers:  # a new process in the member's place, which is about to join
                return
            entry, wait_s = self.known[rank], _DIAL * self.transport.rules.silence_s
            try:
                await within(wait_s, connections.dial(entry, process))
            except RefusedError:
                address = connections.streams.locate(entry)
                stream = await within(wait_s, connections.reach(address, entry.key))
                answer = await question(stream, address, Ask(self.entry, None, self.members, True), self.answers)
                self._follow_other(rank, answer)

    def _follow_other(self, rank: int, answer: object) -> None:
        """Stop if a member's new process is a member elsewhere: the others went on without this one."""
        replica = self.transport.rules.replica_of(rank)
        if isinstance(answer, Members) and replica in answer.members and self.transport.views.waiting:
            why = f"replica {replica} was started again, and {names_of(answer.members)} went on without this replica."
            self.connections.handle(Yielded(why))

    # Answering.

    @property
    def members(self) -> tuple[int, ...]:
        """The members of the view, or those that this process hears if it waits for others; empty if it is none."""
        views = self.transport.views
        if views.last_view is None or self.transport.failure is not None:
            return ()  # before the start there is no view to read
        members = views.heard if views.waiting else self.transport.view.members
        return members if self.transport.replica in members else ()

    async def _tell_members(self, request: Ask, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        entry, streams = request.entry, self.connections.streams
        streams.locate(entry)  # raises for an address that is none, at which all others would fail
        if entry.key != streams.identity(writer):
            return
        self._yield_to(entry)
        if self.searches:
            answer: WireMessage = self.me
        elif not self.members:
            answer = Refused("it is joining itself")
        elif refused := await self._refusal(entry, writer):
            answer = refused
        elif closed := self.transport.views.closed_to_joiners:
            answer = Refused(closed, for_good=self.transport.never_opens)
        else:
            rules = self.transport.rules
            ours = {*rules.ranks(self.members), self.connections.rank}
            note(self.known, entry, {*ours, *self.connections.connected})
            joiners = [rank for rank in self.connections.peers if rank not in ours][-_MOST_JOINERS:]
            listed = self.known.keys() & {*ours, *joiners, *rules.ranks([rules.replica_of(entry.rank)])}
            known = table_of(self.known[rank] for rank in sorted(listed))
            if request.unreachable is not None and request.unreachable in ours:
                self.connections.send(request.unreachable, Introduce(entry))
            step, waiting = self.transport.step, self.transport.views.waiting
            answer = Members(known, self.members, step, self.swarm, self.founded_step, waiting)
        await say(answer, reader, writer)

    def _yield_to(self, entry: Entry) -> None:
        """Stop waiting for a member whose new process has got further than any member of this view can be."""
        replica, known = self.transport.rules.replica_of(entry.rank), self.known.get(entry.rank)
        if replica not in self.transport.views.missing or known is None or known.key != entry.key:
            return
        if entry.held_step > self.connections.machine.rounds.greatest_step:
            why = f"replica {replica} has a checkpoint of step {entry.held_step}: the others went on without this one."
            self.connections.handle(Yielded(why))

    async def _refusal(self, entry: Entry, writer: asyncio.StreamWriter) -> Refused | None:
        if entry.rank >= self.connections.most_ranks:
            return Refused(f"rank {entry.rank} is none of the run's {self.connections.most_ranks} ranks", True)
        if difference := self.entry.diff(entry, self.transport.rules.ranks_per_replica):
            return Refused(f"{difference}; both sides need the same value", True)
        return await self.connections.refusal(entry.rank, writer)

    async def _note_end(self, message: Over, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_from(message.replica, self.connections.streams.identity(writer)):
            self.transport.finishers.add(message.replica)
            if self.transport.views.last_view is not None and message.replica in self.transport.view.members:
                # it has gone on in a later view, of which this process has heard nothing
                self.connections.handle(
                    Yielded(f"replica {message.replica} has finished the run without this replica.")
                )
            await say(Done(), reader, writer)

    def identity_of(self, rank: int) -> str:
        """Return the identity that the last member of a rank has proved; "" if there was none."""
        return self.connections.identities.get(rank, "")

    def is_from(self, replica: int, identity: str) -> bool:
        """Return whether a process with this identity may speak for a replica: the member, if there was one."""
        known = self.connections.identities or {rank: entry.key for rank, entry in self.known.items()}
        return identity in map(known.get, self.transport.rules.ranks([replica]))


def _best_first(
    answers: Mapping[Address, Members | Looking | Exception],
) -> list[tuple[Address, Members | Looking | Exception]]:
    """Return answers in the order in which they are tried.

    What most say comes first, as without a secret anybody may answer. Members that wait for others come last.
    """
    tables = {address: answer for address, answer in answers.items() if isinstance(answer, Members)}
    alike = Counter((table.members, table.swarm) for table in tables.values())
    votes = {address: alike[table.members, table.swarm] for address, table in tables.items()}
    waiting = {address for address, table in tables.items() if table.waiting}
    return sorted(answers.items(), key=lambda item: (item[0] in waiting, -votes.get(item[0], 0)))
