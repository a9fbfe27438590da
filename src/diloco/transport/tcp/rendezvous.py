"""The directory of a run over TCP: at the start its ranks meet at one address, later each asks at all that it knows.

The process at that address collects the ranks, and each asks it until all have come. From then on every member answers
at its own port, so a replica that rejoins can ask any of them if the first address is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from diloco.errors import RendezvousError, TransportError
from diloco.membership import View, Words, names_of, yields
from diloco.protocol import (
    Ask,
    Entry,
    Looking,
    Members,
    PresumedGone,
    Refused,
    Table,
    WireMessage,
    Yielded,
    table_of,
)
from diloco.transport.address import Address, parse_address
from diloco.transport.connections.limits import pauses
from diloco.transport.connections.streams import question, say, within
from diloco.transport.peers.directory import Directory
from diloco.transport.peers.transport import PeerTransport
from diloco.transport.secret import TurnedAwayError

_GONE_S = 5.0  # a rank that has not asked for this long does not wait any more
_REFUSED_S = 1.0  # a rank whose port has refused connections for this long has ended
_AGAIN_S = 0.1, 1.0
_LOOKING = "the replica that listens there is looking for it, too"


class Gathering(WireMessage):
    """The sender collects the ranks of a run that begins."""

    known: Table  # of the ranks that have come
    refused: Words = ""  # why the last rank was refused that did not fit
    member: Entry | None = None  # a member of a view that waits for others; None: none is known


class TcpDirectory(Directory):
    """The directory of one rank.

    Args:
        entries: of this process, and of others from a view that it has lost.
        meeting: the address at which the ranks meet at the start; later a member may still answer there.
        gathers: whether this process collects the ranks.
    """

    answers = Members | Looking | Gathering

    def __init__(
        self,
        transport: PeerTransport,
        entries: Iterable[Entry],
        meeting: Address,
        *,
        gathers: bool = False,
        **more: Any,
    ) -> None:
        super().__init__(transport, **more)
        self.begins = self.last is None
        self.pauses_s = _AGAIN_S if self.begins else self.pauses_s
        self._meeting = meeting
        self._missing = "an answer"
        self._gathers = gathers
        self.known.update({each.rank: each for each in entries})
        # rank -> what tells its process apart from others with its key
        self._processes = dict.fromkeys(self.known, self.connections.streams.credentials.certificate)
        self._is_running = not self.begins  # whether all ranks have come
        self._asked_s: dict[int, float] = {}  # when each of these last asked
        self._new: dict[int, tuple[bytes, float]] = {}  # rank -> the last process that came, and when
        self._refused = ""
        self._waiting: Entry | None = None  # a member of a view that waits for others, which this process is to join
        self._waiting_s = -math.inf  # when it last asked here
        self._lives: set[int] = set()  # replicas that run though they seemed to have ended, as the user was told

    async def addresses(self) -> Collection[Address]:
        others = [entry for rank, entry in self.known.items() if rank != self.connections.rank]
        others += [self._waiting] if self._waiting else []
        addresses = dict.fromkeys([*map(self.connections.streams.locate, others), self._meeting])
        if not (self.begins and self.connections.address == self._meeting):  # else it asks itself, who has come
            addresses.pop(self.connections.address, None)
        return list(addresses)

    def open_up(self) -> None:
        super().open_up()
        if self.transport.rules.continue_without_lost:
            self.connections.post(lambda: self.connections.begin(self._look_for_presumed()))

    async def _look_for_presumed(self) -> None:
        """Ask the replicas without which this side goes on, as they seemed to have ended, whether they run after all.

        A router that has lost its way may refuse connections to a process that runs. Then both sides may have gone on.
        """
        rules, views = self.transport.rules, self.transport.views
        while True:
            await asyncio.sleep(rules.silence_s)
            self._lives &= views.presumed_gone
            for replica in sorted(views.presumed_gone):
                rank = rules.ranks([replica])[rules.position]
                with contextlib.suppress(OSError, EOFError, TransportError, ValueError, KeyError):
                    answer = await within(rules.silence_s, self._ask_lost(rank))
                    if isinstance(answer, Members) and not answer.waiting:
                        self._meet(replica, answer.members, is_reached=True)

    async def _ask_lost(self, rank: int) -> object:
        """Ask the process that was a member as ``rank`` who its members are. Errors are those of `ask`."""
        address = self.connections.streams.locate(self.known[rank])
        stream = await self.connections.reach(address, self.identity_of(rank))
        return await question(stream, address, Ask(self.entry, members=self.members), self.answers)

    def _meet(self, replica: int, theirs: Collection[int], *, is_reached: bool) -> None:
        """Compare this side with that of a replica that seemed to have ended, but has gone on; one of them yields."""
        mine = () if self.transport.views.waiting else self.members
        if not mine or replica in mine or self.transport.replica in theirs:
            return  # it has stopped by now, or they are about to be one side again
        finding = (
            f"Replica {replica} runs, though nothing listened at its address any more: {names_of(theirs)} went on "
            f"without {names_of(mine)}. Of two sides, the one with fewer members yields, or else the one whose lowest "
            "number is higher."
        )
        if not yields(mine, theirs):
            if replica not in self._lives:
                self.findings.append(f"{finding} They are to yield, and adopt the state of this side.")
            self._lives.add(replica)
        elif is_reached:
            loss = "This side yields, and adopts their state; what it has averaged by itself is lost."
            self.connections.handle(Yielded(f"{finding} {loss}"))
        else:
            self.connections.handle(PresumedGone(frozenset({replica})))  # so that it is asked

    async def _tell_members(self, request: Ask, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        streams, rank, answer = self.connections.streams, request.entry.rank, None
        identity, views = streams.identity(writer), self.transport.views
        is_proved = identity == request.entry.key
        if request.waits and is_proved:
            self._waiting, self._waiting_s = request.entry, self.connections.loop.time()
        elif request.members and identity == self.identity_of(rank):
            self._meet(self.transport.rules.replica_of(rank), request.members, is_reached=False)
        # in a later view, a process that asks has lost the one before
        is_first_view = views.view.id < 1 and not (views.waiting or self.found)
        if self._gathers and is_first_view and is_proved and not request.waits:
            answer = self._gather(request.entry, streams.process(writer))
        if answer is None:
            await super()._tell_members(request, reader, writer)
        else:
            await say(answer, reader, writer)

    def _gather(self, entry: Entry, process: bytes) -> WireMessage | None:
        """Register a rank, and return which have come; None if the run had begun before it first asked.

        Ranks ask again and again. A rank that does not fit is refused by itself, and never ends this process, with
        which the others would lose this address.
        """
        parse_address(entry.address)  # raises for one at which all others would fail
        known, rank, now_s = self.known, entry.rank, self.connections.loop.time()
        if now_s - self._waiting_s <= _GONE_S:  # nobody begins a run beside the member that waits
            return Gathering((), self._refused, self._waiting)
        self._is_running = self._is_running or len(known) == self.connections.most_ranks
        if self._is_running and self._processes.get(rank) != process:
            return None
        if not self._is_running:
            for other in self._asked_s.keys() - {self.connections.rank}:  # this rank may be waiting for an answer
                if now_s - self._asked_s[other] > _GONE_S:
                    known.pop(other, None)
            is_known = self._processes.get(rank) == process and rank in known
            if not is_known and (refused := self._register(entry, process)):
                return refused
        if self._processes.get(rank) == process:
            self._asked_s[rank] = now_s
        return Gathering(table_of(known[each] for each in sorted(known)), self._refused, self._waiting)

    def _register(self, entry: Entry, process: bytes) -> Refused | None:
        """Register a rank, or return why not. It waits while another process that has its rank may have ended."""
        known, rank, num_ranks = self.known, entry.rank, self.connections.most_ranks
        if rank >= num_ranks:
            last = num_ranks - 1
            why = f"rank {rank} at {entry.address} can't register in a run of {num_ranks} ranks; ranks are 0 to {last}."
            self._refused = why
            return Refused(why, for_good=True)
        if self._new.get(rank, (b"", 0.0))[0] != process:
            self._new[rank] = process, self.connections.loop.time()
        # a rank that has not asked since then may have ended, and may be the process that had this rank
        waiting = [each for each in known if self._asked_s.get(each, math.inf) > self._new[rank][1]]
        if rank not in known and len(known) >= num_ranks - 1 and len(waiting) < len(known):
            return None
        why = known[min(known)].diff(entry, self.transport.rules.ranks_per_replica) if known else ""
        why = f"{why}; both sides need the same value." if why else ""
        if rank in known:
            why = (
                f"two processes claim rank {rank}: one at {known[rank].address} and one at {entry.address}; each "
                "process needs a rank of its own."
            )
        if why:
            self._refused = why
            return Refused(why, for_good=rank not in known or rank in waiting)
        known[rank], self._processes[rank] = entry, process
        return None

    async def begin(self, answers: Mapping[Address, object]) -> View | None:
        if not self.begins:
            return None
        answer, num_ranks = answers[self._meeting], self.connections.most_ranks
        if isinstance(answer, Gathering):
            known = {each.rank: each for each in answer.known if each.rank < num_ranks}
            missing = ", ".join(str(rank) for rank in range(num_ranks) if rank not in known)
            refused = f" (one was refused: {answer.refused.removesuffix('.')})" if answer.refused else ""
            self._missing = f"rank {missing}{refused}" if missing else "a member"
            self._waiting = answer.member or self._waiting
            if not missing:
                if not self._gathers:  # else it knows them
                    self.known.update(known | {self.connections.rank: self.entry})
                return await self._begin()
        elif isinstance(answer, TurnedAwayError):
            raise RendezvousError(
                f"rank {self.connections.rank} can't take part in the run at {self._meeting}: {answer}. All replicas "
                "need the same secret in their network.secret_file, or none of them may have one."
            )
        elif isinstance(answer, TransportError | ValueError) and not isinstance(answer, RendezvousError):
            reason = str(answer).partition(". The connection")[0]
            raise RendezvousError(
                f"rank {self.connections.rank} found no rendezvous at {self._meeting}: the port there is in use by "
                f"another program, which did not answer as a diloco does ({reason}). Choose another port, the "
                "same for all replicas (--join), or end that program."
            )
        return None

    async def _begin(self) -> View:
        """Connect to all other ranks, and return the first view. Where the others go on, it may lack some of them."""
        rules, me, entries = self.transport.rules, self.connections.rank, self.known
        wait_s = min(rules.silence_s, rules.rendezvous_timeout_s)
        others = sorted(entries.keys() - {me})
        for rank, why in zip(others, await asyncio.gather(*(self._dial(each, wait_s) for each in others)), strict=True):
            replica = rules.replica_of(rank)
            if why and (not rules.continue_without_lost or replica == rules.replica):
                raise RendezvousError(
                    f"rank {me} can't reach rank {rank} at {entries[rank].address} within {wait_s:g} s: {why}. If that "
                    "rank has ended, restart all ranks. Otherwise open its port, or use another network.listen there; "
                    "`diloco doctor` checks the connection.",
                    replicas=[replica],
                )
        self.begins = False
        return View.of(self.connections.most_ranks // rules.ranks_per_replica)

    async def _dial(self, rank: int, wait_s: float) -> str:
        """Connect to a rank, or wait for a higher one to do it. Return why it can't be reached, or ""."""
        connections, clock, entry = self.connections, self.connections.loop, self.known[rank]
        pauses_s = pauses(*_AGAIN_S, seed=f"{rank}")
        until_s, is_dialled = clock.time() + wait_s, rank > connections.rank
        while True:
            if is_dialled and await self.arrives(entry, _REFUSED_S):
                return ""
            try:
                await within(max(_AGAIN_S[0], until_s - clock.time()), connections.dial(entry))
                return ""
            except ConnectionRefusedError as error:
                why, until_s = str(error), min(until_s, clock.time() + _REFUSED_S)
            except (OSError, EOFError, TransportError, ValueError) as error:
                why = str(error) or "no answer"
            if clock.time() >= until_s:
                return "" if connections.hears(entry) else why
            await asyncio.sleep(next(pauses_s))

    def awaited(self) -> str:
        return f"{self._missing} at the rendezvous {self._meeting}" if self.begins else super().awaited()

    def nobody(self, why: Mapping[str, str]) -> str:
        rank, for_s = self.connections.rank, f"{self.patience_s:g} s"
        if not self.begins:
            return super().nobody(why)
        if self._missing.startswith("rank "):
            return (
                f"rank {rank} waited {for_s} at {self._meeting} for {self._missing}. Start the missing ranks, or "
                "choose a longer network.round_timeout, of which this is half."
            )
        reasons = "; ".join(why.values()) or _LOOKING
        return (
            f"rank {rank} found no rendezvous at {self._meeting} within {for_s}: {reasons}. Start "
            "replica 0 there, open that port, or, to join a running training, give the address of any of its replicas."
        )
