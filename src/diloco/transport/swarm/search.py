"""The search for the members of a run in the DHT, which ends by connecting to all of them or founding a swarm.

There is no coordinator: a peer that finds no member founds a view of itself alone, and all other peers join it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence

from diloco.errors import RendezvousError, RunFinishedError
from diloco.membership import BootstrapElection, Candidates, View
from diloco.protocol import Entry, Registry, Rules
from diloco.transport.connections.limits import Backoff
from diloco.transport.swarm.daemon import plainly
from diloco.transport.swarm.identity import PeerRecord
from diloco.transport.swarm.peer_config import SwarmPlace
from diloco.transport.swarm.peer_streams import PeerStreams
from diloco.transport.swarm.swarm import MemberDialer, NotNowError, SwarmTable

__all__ = ["Announcer", "Search"]

_LOOK_AGAIN_S = 0.5, 2.0  # pauses between two look-ups
_ANNOUNCE_S = 60.0
_BEATS = 4  # how often a searching peer announces itself within the time after which it would count as gone


class Announcer:
    """Stores the record of this peer in the DHT."""

    def __init__(
        self,
        place: SwarmPlace,
        streams: PeerStreams,
        registry: Registry,
        number: int,
        facts: Mapping[str, str],
        held_step: int,
    ) -> None:
        self.swarm = ""  # the swarm that this peer is a member of; "" while it is searching for one
        self.finished = False  # whether this peer has finished all steps of the run
        self._place = place
        self._node = streams.node
        self._registry = registry
        self._number = number
        self._facts = facts
        self._held_step = held_step
        self._beat = 0

    async def refresh(self) -> None:
        """Update this peer's entry in the registry, as the addresses at which it can be reached may have changed."""
        places = await self._node.addresses()
        name = self._place.name
        entry = Entry(self._number, self._node.peer_id, self._facts, self._held_step, places, name)
        self._registry.entries[self._number] = entry

    async def announce(self) -> None:
        """Store the record of this peer."""
        self._beat += 1
        views = self._place.views
        record = PeerRecord(
            self._node.peer_id,
            self._number,
            self.swarm,
            self._held_step,
            self._registry.entries[self._number].places,
            self.finished,
            self._beat,
            was="" if self.swarm else self._place.swarm,
            last=None if self.swarm or views is None else views.last,
            agreed=None if self.swarm or views is None else views.agreed,
            vote=None if self.swarm or views is None else views.vote,
        )
        await self._node.announce(self._place.admission, record)

    def keep_announcing(self) -> None:
        """Start to announce this peer at regular intervals."""
        self._task = asyncio.ensure_future(self._announce_often())

    async def _announce_often(self) -> None:
        while True:
            try:
                await self.refresh()
                await self.announce()
            except Exception as error:  # from the DHT; the next attempt may succeed
                words = "this peer could not be announced (%s). It tries again in %g s."
                logging.getLogger(__name__).warning(words, plainly(error), _ANNOUNCE_S)
            await asyncio.sleep(_ANNOUNCE_S)


class Search:
    """One search. It runs in the control thread."""

    def __init__(
        self,
        place: SwarmPlace,
        rules: Rules,
        streams: PeerStreams,
        dialer: MemberDialer,
        announcer: Announcer,
        election: BootstrapElection,
    ) -> None:
        self.looking = 0  # the number of other peers that were also searching at the last check
        self._place = place
        self._streams = streams
        self._dialer = dialer
        self._announcer = announcer
        self._election = election
        self._silence_s = rules.silence_s
        self._run = place.admission.run
        self.patience_s = rules.rendezvous_timeout_s if place.patience_s is None else place.patience_s

    def awaited(self) -> str:
        """Return what the search waits for, as text."""
        if self._place.views is None:
            return f"a member of run {self._run!r}"
        members, looking = len(self._place.views.last.members), 1 + self.looking
        return f"enough of the {members} replicas of run {self._run!r} to continue ({looking} of them are searching)"

    async def find(self) -> tuple[View, SwarmTable | None]:
        """Connect to all members and return their view and table; or return the view to found, and None.

        A member that can't be reached may just have ended, so the search retries with the next table.

        Raises:
            RendezvousError: if there is neither in time, or this peer can't take part.
        """
        loop, place, node = asyncio.get_running_loop(), self._place, self._streams.node
        candidates, why = Candidates(self._silence_s), dict[str, str]()
        backoff = Backoff(*_LOOK_AGAIN_S, seed=node.peer_id)
        began_s, announced_s = loop.time(), -math.inf
        known_s = math.inf  # when others could first know of this peer; the time waited for them counts from then
        while True:
            if loop.time() - announced_s >= self._silence_s / _BEATS:
                announced_s = loop.time()
                if not place.node.insists:
                    await node.enter()
                await self._announcer.announce()
                known_s = min(known_s, loop.time())
            there = False  # whether a member of a swarm answers but can't be joined now
            refusals: list[RendezvousError] = []
            for record in (each for each in await self._records() if each.swarm):
                try:
                    table = await self._dialer.ask(record.peer_id)
                    self._check_behind(table)
                    there = True
                    await self._dialer.dial(table)
                    return View(-1, table.members), table
                except RendezvousError as error:  # this peer refuses, but another one may not
                    refusals.append(error)
                    why[record.peer_id] = str(error)
                except NotNowError as error:
                    there, why[record.peer_id] = True, str(error)
                except OSError as error:
                    why[record.peer_id] = str(error)
            if refusals and not there:
                raise refusals[0]
            asked_s = loop.time()  # look again, because asking peers that are gone takes long
            records = await self._records()
            heard = candidates.record({each.peer_id: each.beat for each in records if not each.swarm}, asked_s)
            looking = [each for each in records if each.peer_id in heard]
            self.looking = len(looking)
            there = there or any(record.swarm and record.peer_id not in why for record in records)
            had_members = any(record.swarm for record in records)
            others = [each.candidate(place.swarm or place.held_swarm) for each in looking]
            voted = self._election.me.vote
            if not there and (view := self._election.founds(others, asked_s - known_s, had_members=had_members)):
                return view, None
            if self._election.me.vote != voted:
                announced_s = -math.inf  # the others wait for this vote
            self._stop_if_over(records)
            if loop.time() - began_s > self.patience_s:
                raise self._nobody(had_members, looking, why, self._election.missing(others))
            await asyncio.sleep(backoff.next_s())

    async def _records(self) -> list[PeerRecord]:
        """Return the records of the other peers that train, or trained within the last half hour."""
        records = [each for each in await self._streams.node.find(self._place.admission) if each.number >= 0]
        for record in records:
            self._streams.know(record.peer_id, record.addresses)
        return records

    def _check_behind(self, table: SwarmTable) -> None:
        """Raise if the swarm is behind this peer's own checkpoint, whose work would be lost.

        A swarm that this peer was a member of already contains that work.
        """
        step = max(table.step, table.founded_step)  # the founder may not have loaded its checkpoint yet
        if table.swarm in (self._place.swarm, self._place.held_swarm) or self._election.held_step <= step:
            return
        mine = self._election
        raise RendezvousError(
            f"the swarm of run {self._run!r} is at step {step}, and the newest checkpoint of replica {mine.number} "
            f"is of step {mine.held_step}, which the others do not have. To continue from step "
            f"{mine.held_step}, stop the others and start this replica first, so that they join it. To join them "
            "and discard those steps, start this replica in another folder."
        )

    def _stop_if_over(self, records: Sequence[PeerRecord]) -> None:
        """Raise if the records only show that the swarm to join has finished."""
        ours = [record for record in records if record.swarm and self._place.swarm in ("", record.swarm)]
        if any(record.finished for record in ours) and (self._place.swarm or self._election.held_step < 0):
            raise RunFinishedError(
                f"the others have finished run {self._run!r}, and no member is left to join. To train more, resume "
                "from a checkpoint of the run with more steps, or choose another name for the run."
            )

    def _nobody(
        self, had_members: bool, looking: Sequence[PeerRecord], why: Mapping[str, str], missing: str
    ) -> RendezvousError:
        run = self._run
        if had_members:
            tried = "; ".join(why.values()) or "none of them answers"
            return RendezvousError(
                f"run {run!r} has had a swarm within the last half hour, but no member could be joined within "
                f"{self.patience_s:g} s: {tried}. Make one of its peers reachable, resume from a checkpoint of the "
                f"run, or choose another name for it.{missing}"
            )
        if looking:
            newest = min(looking, key=lambda each: (-each.held_step, each.number))
            held = "no checkpoint" if newest.held_step < 0 else f"a checkpoint of step {newest.held_step}"
            return RendezvousError(
                f"replica {newest.number} of run {run!r}, which has {held}, is also searching for the others, and has "
                f"not founded a swarm within {self.patience_s:g} s. Restart it or stop it."
            )
        return RendezvousError(
            f"no other peer of run {run!r} was found within {self.patience_s:g} s. Check the name of the run and the "
            "addresses given with --join."
        )
