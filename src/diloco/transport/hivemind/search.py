"""Finding the members of a run in the DHT and connecting to all of them, or deciding that this peer founds a swarm.

Nobody is in charge: a peer that finds no member founds a view of itself alone, and everybody else joins.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence

from diloco.errors import RendezvousError, RunOverError
from diloco.membership.founding import Founding, Looker, Lookers
from diloco.membership.quorum import Policy
from diloco.membership.view import View
from diloco.protocol.registry import Entry, Registry
from diloco.transport.hivemind.identity import PeerRecord
from diloco.transport.hivemind.peer_streams import PeerStreams
from diloco.transport.hivemind.place import SwarmPlace
from diloco.transport.hivemind.swarm import MemberDialer, NotNowError, SwarmTable
from diloco.transport.peers.connected import Wire

__all__ = ["Announcer", "Search"]

_LOOK_AGAIN_S = 0.5
_ANNOUNCE_S = 60.0
_BEATS = 4  # of a peer that looks, within the time after which it would count as gone


class Announcer:
    """What this peer says of itself in the DHT."""

    def __init__(
        self,
        place: SwarmPlace,
        streams: PeerStreams,
        registry: Registry,
        number: int,
        facts: Mapping[str, str],
        held_step: int,
    ) -> None:
        self.swarm = ""  # that it is a member of; "" while it looks for one
        self.finished = False  # whether it has done all steps of the run
        self._place = place
        self._node = streams.node
        self._registry = registry
        self._number = number
        self._facts = facts
        self._held_step = held_step
        self._beat = 0

    async def refresh(self) -> None:
        """Bring this peer's entry in the registry up to date: it may be reached at other addresses by now."""
        places = await self._node.addresses()
        entry = Entry(self._number, self._node.peer_id, self._facts, self._held_step, places)
        self._registry.entries[self._number] = entry

    async def announce(self) -> None:
        """Store the record of this peer."""
        self._beat += 1
        record = PeerRecord(
            self._node.peer_id,
            self._number,
            self.swarm,
            self._held_step,
            self._registry.entries[self._number].places,
            self.finished,
            self._beat,
            was="" if self.swarm else self._place.swarm,
            last=None if self.swarm else self._place.last,
        )
        await self._node.announce(self._place.admission, record)

    def keep_announcing(self) -> None:
        """From now on announce from time to time."""
        self._task = asyncio.ensure_future(self._announce_often())

    async def _announce_often(self) -> None:
        while True:
            try:
                await self.refresh()
                await self.announce()
            except Exception:  # of the DHT; a later time will do
                logging.getLogger(__name__).debug("announcing failed", exc_info=True)
            await asyncio.sleep(_ANNOUNCE_S)


class Search:
    """One search. In the control thread."""

    def __init__(
        self,
        place: SwarmPlace,
        wire: Wire,
        streams: PeerStreams,
        dialer: MemberDialer,
        announcer: Announcer,
        me: Looker,
        policy: Policy,
    ) -> None:
        self.looking = 0  # other peers that are looking, too, when last seen
        self._place = place
        self._streams = streams
        self._dialer = dialer
        self._announcer = announcer
        self._me = me
        self._policy = policy
        self._silence_s = wire.silence_s
        self._run = place.admission.run
        self.patience_s = wire.rendezvous_timeout_s if place.patience_s is None else place.patience_s

    def whom(self) -> str:
        """For whom it waits, in words."""
        if self._place.last is None:
            return f"a member of run {self._run!r}"
        members = ", ".join(str(each) for each in self._place.last.members if each != self._me.number)
        return f"enough of replicas {members} of run {self._run!r} to go on with ({self.looking} of them looking, too)"

    async def find(self) -> tuple[View, SwarmTable | None]:
        """The view of the members, all of which are connected, and their table; or the view to found, and None.

        A member that can't be reached may just have ended: the next table may be without it.

        Raises:
            RendezvousError: if there is neither in time, or this peer can't take part.
        """
        loop, place, node = asyncio.get_running_loop(), self._place, self._streams.node
        founding = Founding(me=self._me, alone=not place.node.join, window_s=place.join_window_s, policy=self._policy)
        lookers, why = Lookers(self._silence_s), dict[str, str]()
        began_s, said_s = loop.time(), -math.inf
        known_s = math.inf  # when others could know of this peer; until then waiting for them says nothing
        while True:
            if loop.time() - said_s >= self._silence_s / _BEATS:
                said_s = loop.time()
                if not place.node.insists:
                    await node.enter()
                await self._announcer.announce()
                known_s = min(known_s, loop.time())
            there = False  # whether somebody of a swarm is there, who can't be joined now
            refusals: list[RendezvousError] = []
            for record in (each for each in await self._records() if each.swarm):
                try:
                    table = await self._dialer.ask(record.peer_id)
                    self._check_behind(table)
                    there = True
                    await self._dialer.dial(table)
                    return View(-1, table.members), table
                except RendezvousError as error:  # one peer says so; another one may let this one in
                    refusals.append(error)
                    why[record.peer_id] = str(error)
                except NotNowError as error:
                    there, why[record.peer_id] = True, str(error)
                except OSError as error:
                    why[record.peer_id] = str(error)
            if refusals and not there:
                raise refusals[0]
            asked_s = loop.time()  # once more: asking peers that are gone takes long
            records = await self._records()
            heard = lookers.hear({each.peer_id: each.beat for each in records if not each.swarm}, asked_s)
            looking = [each for each in records if each.peer_id in heard]
            self.looking = len(looking)
            there = there or any(record.swarm and record.peer_id not in why for record in records)
            had_members = any(record.swarm for record in records)
            others = [each.looker(place.swarm) for each in looking]
            if not there and (view := founding.founds(others, asked_s - known_s, had_members=had_members)):
                return view, None
            self._stop_if_over(records)
            if loop.time() - began_s > self.patience_s:
                raise self._nobody(had_members, looking, why)
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _records(self) -> list[PeerRecord]:
        """Of the other peers that train, or did within the last half hour."""
        records = [each for each in await self._streams.node.find(self._place.admission) if each.number >= 0]
        for record in records:
            self._streams.know(record.peer_id, record.addresses)
        return records

    def _check_behind(self, table: SwarmTable) -> None:
        """Refuse a swarm that is not as far as this peer's own checkpoint, whose work would be lost.

        A swarm that it was a member of has that work.
        """
        step = max(table.step, table.founded_step)  # its founder may not have loaded what it founds it with
        if table.swarm in (self._place.swarm, self._place.held_swarm) or self._me.held_step <= step:
            return
        raise RendezvousError(
            f"the swarm of run {self._run!r} is at step {step}, and the newest checkpoint of replica {self._me.number} "
            f"is of step {self._me.held_step}, which the others do not have. To go on from step {self._me.held_step}, "
            "stop the others and start this replica first; they join it then. To join them and give up those steps, "
            "start this replica in another folder."
        )

    def _stop_if_over(self, records: Sequence[PeerRecord]) -> None:
        """If all that can be found of the swarm to join is that it has finished."""
        ours = [record for record in records if record.swarm and self._place.swarm in ("", record.swarm)]
        if any(record.finished for record in ours) and (self._place.swarm or self._me.held_step < 0):
            raise RunOverError(
                f"the others have finished run {self._run!r}, and nobody of it is left to join. To train more, resume "
                "from a checkpoint of it with more steps, or choose another name for the run."
            )

    def _nobody(self, had_members: bool, looking: Sequence[PeerRecord], why: Mapping[str, str]) -> RendezvousError:
        run = self._run
        if had_members:
            tried = "; ".join(why.values()) or "none of them answers"
            return RendezvousError(
                f"run {run!r} has had a swarm within the last half hour, and nobody of it could be joined within "
                f"{self.patience_s:g} s: {tried}. Make one of its peers reachable, resume from a checkpoint of the "
                "run, or choose another name for it."
            )
        if looking:
            newest = min(looking, key=lambda each: (-each.held_step, each.number))
            held = "no checkpoint" if newest.held_step < 0 else f"a checkpoint of step {newest.held_step}"
            return RendezvousError(
                f"replica {newest.number} of run {run!r}, which has {held}, looks for the others, too, and has not "
                f"begun within {self.patience_s:g} s. Restart it or stop it."
            )
        return RendezvousError(f"nobody of run {run!r} could be found within {self.patience_s:g} s.")
