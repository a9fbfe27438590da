"""From a run's name and the address of any peer to a transport whose view stands: found a swarm, or find it and join.

Nobody is in charge: whoever finds no member of the run founds the swarm, as a view of one, and everybody else joins.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco.errors import RendezvousError, RunOverError
from diloco.membership.founding import Founding, Looker, Lookers
from diloco.membership.view import View
from diloco.protocol.failure_detector import Timing
from diloco.protocol.registry import Entry, Registry
from diloco.transport.hivemind.dialler import Dialler
from diloco.transport.hivemind.identity import Admission, load_identity, number_of
from diloco.transport.hivemind.node import NodePlace
from diloco.transport.hivemind.peer_streams import PeerStreams
from diloco.transport.hivemind.records import PeerRecord
from diloco.transport.hivemind.swarm import NotNowError, SwarmDesk, SwarmTable
from diloco.transport.peers.connected import Connected, Table
from diloco.transport.peers.link_manager import LinkManager
from diloco.transport.peers.transport import PeerTransport
from diloco.transport.peers.wire import Wire
from diloco.waiting import waiting_for

__all__ = ["SwarmPlace", "connect_swarm"]

_LOOK_AGAIN_S = 0.5
_ANNOUNCE_S = 60.0
_LAST_WORD_S = 10.0  # to tell that the run is over, by a peer that ends
_BEATS = 4  # of one that looks, within the time after which it would count as gone


@dataclass(frozen=True, kw_only=True)
class SwarmPlace:
    """Which peer this is, and which run it wants to take part in.

    Attributes:
        identity: file of its private key.
        admission: the run's name, and who may take part in it.
        node: where this peer is, and whom it knows.
        replica: its number; None: one that follows from its identity.
        swarm: the swarm that it was a member of before; "": any.
        last: the newest view of that one that it was a member of, or had agreed to be; None: it begins.
        patience_s: so long it looks for the others; None: as long as a wire's ``rendezvous_timeout_s``.
        held_swarm: the swarm in which it came to the newest step that it could resume from; "": not known.
        join_window_s: who finds no member waits this long for others that look, too, before one of them founds it.
        status: what people that look are told of this peer, as JSON.
        closed: why nobody can join at first; "": all can.
    """

    identity: Path
    admission: Admission
    node: NodePlace = field(default_factory=NodePlace)
    replica: int | None = None
    swarm: str = ""
    last: View | None = None
    patience_s: float | None = None
    held_swarm: str = ""
    join_window_s: float = 3.0
    status: Callable[[], Mapping[str, Any]] = dict
    closed: str = ""


def connect_swarm(place: SwarmPlace, wire: Wire, *, held_step: int = -1) -> Connected:
    """Find the members of the run and connect to all of them, or found the swarm where there are none.

    Args:
        place: which peer this is.
        wire: how contributions are exchanged.
        held_step: the newest step that this peer could resume from; -1: none, so it can't take the place of a swarm
            that was there before.

    Raises:
        RendezvousError: if that does not succeed in time, or the peers do not fit together, or the swarm is not as far
            as this peer was; nothing stays open.
        TransportError: if the peer can't be started.
    """
    identity = load_identity(place.identity)
    number = number_of(identity.peer_id) if place.replica is None else place.replica
    streams = PeerStreams(identity, place.node, place.admission)
    rules, policies = wire.rules_and_policies(number, 0, 1, others=1)
    timing = Timing(wire.heartbeat_s, wire.silence_s)
    transport = PeerTransport(
        rules, policies, timing, streams, wire.link, together=False, state_bytes_per_s=wire.state_bytes_per_s
    )
    try:
        _enter(transport, place, wire.rendezvous_timeout_s)
        return _Arrival(place, wire, transport, streams, held_step).connect()
    except BaseException:
        transport.close()
        raise


def _enter(transport: PeerTransport, place: SwarmPlace, timeout_s: float) -> None:
    """Start the peer; those that it was told to enter the network through may be starting themselves, or cut off."""
    deadline_s = time.monotonic() + timeout_s
    with waiting_for(lambda: f"an answer of a peer at {', '.join(place.node.join) or 'this machine'}", timeout_s):
        while True:
            try:
                transport.connections.listen()
                return
            except RendezvousError:
                if time.monotonic() >= deadline_s:
                    raise
            time.sleep(_LOOK_AGAIN_S)


class _Arrival:
    """What happens between the start of a peer and its view."""

    def __init__(
        self, place: SwarmPlace, wire: Wire, transport: PeerTransport, streams: PeerStreams, held_step: int
    ) -> None:
        self.place = place
        self.wire = wire
        self.transport = transport
        self.connections = transport.connections
        self.streams = streams
        self.held_step = held_step
        self.registry = Registry(0)
        self.number = transport.replica
        self.patience_s = wire.rendezvous_timeout_s if place.patience_s is None else place.patience_s
        self.finished = False
        self.beat = 0
        self.looking = 0
        self.dialler = Dialler(
            self.connections,
            streams,
            self.registry,
            self.number,
            mine=lambda: self.mine,
            silence_s=wire.silence_s,
        )
        transport.on_introduction = self.dialler.call_back

    def connect(self) -> Connected:
        call = self.connections.call
        self.mine = call(self._entry())
        self.registry.entries[self.number] = self.mine
        open_link = LinkManager(self.connections, self.registry.entries, self.wire.silence_s).open_link
        self.connections.admits = lambda rank, address: (
            (known := self.registry.entries.get(rank)) is None or known.address == str(address)
        )
        with waiting_for(self._whom, self.patience_s):
            answer = call(self._find())
        found, founded = (None, answer) if isinstance(answer, View) else (answer, None)
        self.swarm = found.swarm if found else self.place.swarm or secrets.token_hex(8)
        closed = self.place.closed
        if found:
            self.transport.begin(View(-1, found.members), self.registry, open_link, member=False, closed=closed)
        else:
            assert founded is not None
            self.transport.step = max(0, self.held_step) if self.place.last else 0  # what those who join are told
            self.transport.begin(founded, self.registry, open_link, member=True, closed=closed)
            call(self.streams.node.announce(self.place.admission.run, self._record(self.swarm)))  # before anybody looks
        founded_step = found.founded_step if found else max(0, self.held_step)
        SwarmDesk(
            self.connections,
            self.streams,
            self.registry,
            self.mine,
            self.swarm,
            founded_step,
            members=self._members,
            closed=lambda: self.transport.closed_to_joiners,
            step=lambda: self.transport.step,
            status=self.place.status,
        )
        self.connections.post(self._keep_announcing)
        entries = dict(found.entries) if found else {}
        everybody = {**entries, self.number: self.mine}
        table = Table(everybody, found is not None, found.step if found else 0, founded_step)
        return Connected(self.transport, table, found is not None, self.swarm, self._refresh, self._finish)

    def _whom(self) -> str:
        run = self.place.admission.run
        if self.place.last is None:
            return f"a member of run {run!r}"
        members = ", ".join(str(each) for each in self.place.last.members if each != self.number)
        return f"enough of replicas {members} of run {run!r} to go on with ({self.looking} of them looking, too)"

    def _members(self) -> tuple[int, ...]:
        view = self.transport.view
        return view.members if self.number in view.members else ()

    async def _entry(self) -> Entry:
        places = await self.streams.node.addresses()
        return Entry(self.number, self.streams.node.peer_id, self.wire.facts, self.held_step, places)

    def _record(self, swarm: str) -> PeerRecord:
        peer_id = self.streams.node.peer_id
        return PeerRecord(
            peer_id,
            self.number,
            swarm,
            self.held_step,
            self.mine.places,
            self.finished,
            self.beat,
            was="" if swarm else self.place.swarm,
            last=None if swarm else self.place.last,
        )

    def _finish(self) -> None:
        self.finished = True
        self.connections.call(
            self.streams.node.announce(self.place.admission.run, self._record(self.swarm)), _LAST_WORD_S
        )

    async def _find(self) -> SwarmTable | View:
        """The swarm, once all its members are connected; or the view that this peer is to found.

        A member that can't be reached may be one that has just ended: the next table may be without it.
        """
        loop = asyncio.get_running_loop()
        run, node, place = self.place.admission.run, self.streams.node, self.place
        founding = Founding(
            me=Looker(self.number, self.held_step, place.last),
            alone=not place.node.join,
            window_s=place.join_window_s,
            policy=self.transport.policies.quorum,
        )
        lookers, why = Lookers(self.wire.silence_s), dict[str, str]()
        began_s, said_s = loop.time(), -math.inf
        known_s = math.inf  # when others could know of this peer; until then waiting for them says nothing
        while True:
            if loop.time() - said_s >= self.wire.silence_s / _BEATS:
                said_s, self.beat = loop.time(), self.beat + 1
                if not place.node.insists:
                    await node.enter()
                await node.announce(run, self._record(""))
                known_s = min(known_s, loop.time())
            there = False  # somebody of a swarm, who can't be joined now
            for record in (each for each in await self._records() if each.swarm):
                try:
                    table = await self.dialler.ask(record.peer_id)
                    there = True
                    self._check_behind(table)
                    await self.dialler.dial(table)
                    return table
                except OSError as error:
                    there = there or isinstance(error, NotNowError)
                    why[record.peer_id] = str(error)
            asked_s = loop.time()  # once more: where peers are gone, asking them takes long
            records = await self._records()
            heard = lookers.hear({each.peer_id: each.beat for each in records if not each.swarm}, asked_s)
            looking = [each for each in records if each.peer_id in heard]
            self.looking = len(looking)
            there = there or any(record.swarm and record.peer_id not in why for record in records)
            had_members = any(record.swarm for record in records)
            others = [each.looker(place.swarm) for each in looking]
            if not there and (view := founding.founds(others, asked_s - known_s, had_members=had_members)):
                return view
            self._stop_if_over(records)
            if loop.time() - began_s > self.patience_s:
                self._stop_looking(records, looking, why)
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _records(self) -> list[PeerRecord]:
        """Of the other peers that train, or did within the last half hour."""
        records = [each for each in await self.streams.node.find(self.place.admission.run) if each.number >= 0]
        for record in records:
            self.streams.know(record.peer_id, record.addresses)
        return records

    def _check_behind(self, table: SwarmTable) -> None:
        """Who would take over the state of a swarm that is not as far as its own checkpoint would lose what is there.

        A swarm that it was a member of itself has that work, wherever it is now.
        """
        step = max(table.step, table.founded_step)  # its founder may not have loaded what it founds it with
        if table.swarm in (self.place.swarm, self.place.held_swarm) or self.held_step <= step:
            return
        raise RendezvousError(
            f"the swarm of run {self.place.admission.run!r} is at step {step}, and the newest checkpoint of replica "
            f"{self.number} is of step {self.held_step}, which the others do not have. To go on from step "
            f"{self.held_step}, stop the others and start this one first; the others join it then. To join them as "
            "they are, and do without those steps, start it anew in another folder. Nothing was started."
        )

    def _stop_if_over(self, records: Sequence[PeerRecord]) -> None:
        """For who would join, and finds nobody but peers that say that they have finished."""
        ours = [record for record in records if record.swarm and self.place.swarm in ("", record.swarm)]
        if any(record.finished for record in ours) and (self.place.swarm or self.held_step < 0):
            raise RunOverError(
                f"the others have finished run {self.place.admission.run!r}, and nobody of it is left to join. Going "
                "on from a checkpoint of it with more steps, or another name of a run, would work."
            )

    def _stop_looking(
        self, records: Sequence[PeerRecord], looking: Sequence[PeerRecord], why: Mapping[str, str]
    ) -> None:
        run = self.place.admission.run
        if any(record.swarm for record in records):
            tried = "; ".join(why.values()) or "none of them answers"
            raise RendezvousError(
                f"run {run!r} has had a swarm within the last half hour, and nobody of it could be joined within "
                f"{self.patience_s:g} s: {tried}. A way to one of its peers, a checkpoint of the run to begin again "
                "from, or another name of a run, would work. Nothing was started."
            )
        if looking:
            newest = min(looking, key=lambda each: (-each.held_step, each.number))
            held = "no checkpoint" if newest.held_step < 0 else f"a checkpoint of step {newest.held_step}"
            raise RendezvousError(
                f"replica {newest.number} of run {run!r}, which has {held}, looks for the others, too, and has not "
                f"begun within {self.patience_s:g} s. Starting it again, or stopping it, would work. Nothing was "
                "started."
            )
        raise RendezvousError(
            f"nobody of run {run!r} could be found within {self.patience_s:g} s. Nothing was started."
        )

    def _refresh(self) -> None:
        """The members may be others by now."""
        self.connections.call(self._look_again())

    async def _look_again(self) -> None:
        for rank in sorted(self.connections.connected & self.registry.entries.keys()):
            try:
                await self.dialler.dial(await self.dialler.ask(self.registry.entries[rank].address))
                return
            except OSError:
                continue

    def _keep_announcing(self) -> None:
        self._announcing = asyncio.ensure_future(self._announce_often())

    async def _announce_often(self) -> None:
        while True:
            try:
                self.mine = await self._entry()
                self.registry.entries[self.number] = self.mine
                await self.streams.node.announce(self.place.admission.run, self._record(self.swarm))
            except Exception:  # of the DHT; a later time will do
                logging.getLogger(__name__).debug("announcing failed", exc_info=True)
            await asyncio.sleep(_ANNOUNCE_S)
