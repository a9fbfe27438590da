"""The search of ranks that have lost their view for the members or for each other, at the addresses that they know."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from diloco.errors import RendezvousError, RunFinishedError, TransportError
from diloco.membership import GREATEST, BootstrapElection, Candidate, Count, Rank, Ranks, View, byzantine_quorum
from diloco.protocol import Entries, Entry, Refused, Registry, WireMessage
from diloco.transport.address import Address, parse_address
from diloco.transport.connections.limits import Backoff
from diloco.transport.connections.streams import pack, within
from diloco.transport.peers.connected import Connected, Table
from diloco.transport.peers.transport import PeerTransport
from diloco.transport.tcp.rendezvous import question, serve
from diloco.waiting import waiting_for

__all__ = ["Reconnection", "TorchConnected", "serve_candidates"]

_ANSWER_S = 5.0
_OVER_S = 2.0
_LOOK_AGAIN_S = 0.5, 2.0  # pauses between two questions to all known ranks
_CLOSED = "it is rejoining itself"


class Look(WireMessage):
    """A rank that has lost its view asks for the others."""

    entry: Entry


class Looking(WireMessage):
    """The asked rank has lost its view, too; the fields are those of a `Candidate`."""

    number: Rank
    held_step: Annotated[int, Meta(ge=-1, le=GREATEST)]
    last: View | None
    agreed: View | None
    vote: View | None


class Members(WireMessage):
    """The members of the asked rank's view."""

    entries: Entries
    members: Ranks
    step: Count


class Over(WireMessage):
    """The run has ended for the sender's replica."""

    replica: Rank


_Answer = Looking | Members | Refused


def serve_candidates(transport: PeerTransport, registry: Registry, election: BootstrapElection) -> None:
    """Answer ranks that have lost their view.

    A member answers with the list of members. A rank that has lost its view, too, answers that it is also searching.

    Args:
        transport: the transport of this rank.
        registry: the entries of all known ranks; the entries of asking ranks are added.
        election: what this rank reports while it is searching.
    """

    async def answer(asked: Look, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reply: WireMessage
        parse_address(asked.entry.address)  # all others would fail at it
        if transport.last_view is None or transport.failure is not None:
            me = election.me
            reply = Looking(me.number, me.held_step, me.last, me.agreed, me.vote)
        else:
            try:
                registry.register(asked.entry)
                reply = Members(Entries.of(registry.entries.values()), transport.view.members, transport.step)
            except RendezvousError as error:
                reply = Refused(str(error))
        writer.write(pack(reply))
        await writer.drain()

    async def note_end_of_run(asked: Over, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        transport.finishers.add(asked.replica)

    transport.connections.services[Look] = answer
    transport.connections.services[Over] = note_end_of_run


@dataclass(frozen=True, kw_only=True)
class TorchConnected(Connected):
    """A transport connected over TCP."""

    reconnection: Reconnection  # finds the current members

    def refresh(self) -> None:
        self.transport.connections.call(self.reconnection.connect_to_members())

    def finish(self) -> None:
        """Notify all former members, at the addresses where they listen, that the run has ended."""
        transport = self.transport
        size, members = transport.rules.ranks_per_replica, transport.view.members
        absent = [entry for entry in transport.known_entries() if entry.rank // size not in members]

        async def tell(address: Address) -> None:
            with contextlib.suppress(OSError, TimeoutError):
                _, writer = await within(_OVER_S, transport.connections.streams.open(address))
                writer.write(pack(Over(transport.replica)))
                await within(_OVER_S, writer.drain())
                writer.close()

        async def tell_all() -> None:
            await asyncio.gather(*(tell(parse_address(entry.address)) for entry in absent))

        transport.connections.call(tell_all())


class Reconnection:
    """A rank's search for the members of its run.

    Args:
        transport: a new transport, which listens at the address of the lost one.
        entry: the entry of this rank.
        election: of the rank that founds a view if no member is found.
        registry: the entries of all known ranks, including this one.
        elsewhere: another address at which a member may answer.
        patience_s: how long the rank searches, in seconds.
    """

    def __init__(
        self,
        transport: PeerTransport,
        entry: Entry,
        election: BootstrapElection,
        registry: Registry,
        elsewhere: Address | None,
        patience_s: float,
    ) -> None:
        self._transport = transport
        self._connections = transport.connections
        self._entry = entry
        self._election = election
        self._elsewhere = elsewhere
        self._patience_s = patience_s
        self._looking: list[Candidate] = []
        self._registry = registry

    def connect(self) -> Connected:
        """Find the members and connect to all of them, or found a view for other searching ranks to join.

        Raises:
            RendezvousError: if neither is possible in time.
        """
        transport, registry = self._transport, self._registry
        serve_candidates(transport, registry, self._election)
        with waiting_for(self._awaited, self._patience_s):
            view, step = self._connections.call(self._find())
        serve(self._connections, registry)
        founds = step is None
        if founds:
            transport.step = self._election.held_step  # joining ranks receive it
        transport.begin(view, registry, member=founds, closed=_CLOSED)
        table = Table(dict(registry.entries), not founds, step or 0)
        return TorchConnected(transport=transport, table=table, joining=not founds, reconnection=self)

    def _awaited(self) -> str:
        members = () if self._election.views is None else self._election.views.last.members
        looking = f"{1 + len(self._looking)} of them are searching"
        return f"enough of the {len(members) or 'other'} replicas to continue ({looking})"

    def _is_over(self) -> bool:
        """Return whether more members of the last view than could lie have finished the run; fewer have just left."""
        views, size = self._election.views, self._registry.ranks_per_replica
        members = {rank // size for rank in self._registry.entries} if views is None else {*views.last.members}
        return len(self._transport.finishers & members) >= byzantine_quorum(len(members))

    def _found(self, waited_s: float) -> View | None:
        return self._election.founds(self._looking, waited_s, left=self._transport.finishers)

    async def _find(self) -> tuple[View, int | None]:
        """Return the view of the members, after connecting to them, and their step; or the view to found, and None."""
        clock = asyncio.get_running_loop()
        began_s, backoff = clock.time(), Backoff(*_LOOK_AGAIN_S, seed=self._entry.address)
        while True:
            asked_s = clock.time()
            answers = await self._answers()
            self._looking = [_candidate_of(each) for each in answers if isinstance(each, Looking)]
            running = [each for each in answers if isinstance(each, Members)]
            for answer in running:
                if members := await self._connected_members(answer):
                    return View(-1, members), answer.step
            if self._is_over() and not running:
                raise RunFinishedError("the others have finished the run, and no member is left to join.")
            if not running and (view := self._found(asked_s - began_s)):
                return view, None
            if refused := next((each.reason for each in answers if isinstance(each, Refused)), ""):
                raise RendezvousError(refused)
            if clock.time() - began_s > self._patience_s:
                raise RendezvousError(
                    f"replica {self._election.number} has searched for the others for {self._patience_s:g} s, its "
                    f"limit, and found {len(self._looking)} that are also searching. Its state is saved."
                    + self._election.missing(self._looking)
                )
            await asyncio.sleep(backoff.next_s())

    async def connect_to_members(self) -> None:
        """Ask for the current members and connect to all of them."""
        for answer in await self._answers():
            if isinstance(answer, Members) and await self._connected_members(answer):
                return

    async def _answers(self) -> list[_Answer]:
        entries = self._registry.entries
        places = dict.fromkeys(str(entry.address) for rank, entry in entries.items() if rank != self._entry.rank)
        if self._elsewhere is not None and str(self._elsewhere) != self._entry.address:
            places[str(self._elsewhere)] = None
        answers = await asyncio.gather(*(self._ask(parse_address(place)) for place in places))
        return [each for each in answers if each is not None]

    async def _ask(self, address: Address) -> _Answer | None:
        try:
            asking = question(self._connections.streams, address, Look(self._entry), _Answer)
            return await within(_ANSWER_S, asking)
        except (OSError, EOFError, TimeoutError, TransportError, ValueError):
            return None  # the rank has ended or can't be reached, or another program listens there

    async def _connected_members(self, answer: Members) -> tuple[int, ...]:
        """Connect to the members that an answer names and return them; () if one of them can't be reached."""
        size = self._transport.rules.ranks_per_replica
        try:
            told = answer.entries.whole()
            entries = {entry.rank: entry for entry in told if entry.rank < self._registry.num_ranks}
            members = tuple(sorted(set(answer.members)))
            ranks = [rank for member in members for rank in range(member * size, (member + 1) * size)]
            addresses = {rank: parse_address(entry.address) for rank, entry in entries.items()}
            places = {rank: addresses[rank] for rank in ranks if rank != self._entry.rank}
        except (KeyError, ValueError):
            return ()
        self._registry.entries.update(entries | {self._entry.rank: self._entry})
        try:
            for rank, address in places.items():
                if rank not in self._connections.connected:
                    await within(_ANSWER_S, self._connections.connect(rank, address))
        except (OSError, EOFError, TimeoutError, TransportError):
            return ()
        return tuple(member for member in members if member != self._election.number)


def _candidate_of(answer: Looking) -> Candidate:
    return Candidate(answer.number, answer.held_step, answer.last, answer.agreed, answer.vote)
