"""The directory of a swarm: its DHT says where to ask, and a peer that finds no member founds a view of itself."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Collection, Mapping
from typing import cast

from diloco.errors import RendezvousError
from diloco.membership import BootstrapElection
from diloco.protocol import Entry, Registry
from diloco.transport.address import Address
from diloco.transport.peers.directory import Directory, Members
from diloco.transport.peers.transport import PeerTransport
from diloco.transport.swarm.daemon import plainly
from diloco.transport.swarm.identity import PeerRecord
from diloco.transport.swarm.peer_config import SwarmPlace
from diloco.transport.swarm.peer_streams import PeerAddress, PeerStreams

__all__ = ["SwarmDirectory"]

_ANNOUNCE_S = 60.0
_MOST_PLACES = 16  # of an entry
_BEATS = 4  # how often a peer that searches announces itself within the time after which it would count as gone


class SwarmDirectory(Directory):
    """The directory of one peer.

    Args:
        place: this peer and its run.
        registry: the entry of this peer is kept up to date in it.
    """

    def __init__(
        self, transport: PeerTransport, registry: Registry, election: BootstrapElection, place: SwarmPlace
    ) -> None:
        rules = transport.rules
        patience_s = rules.rendezvous_timeout_s if place.patience_s is None else place.patience_s
        super().__init__(transport, registry, election, patience_s, place.swarm or place.held_swarm)
        self._place = place
        self._streams = cast(PeerStreams, self.connections.streams)
        self._node = self._streams.node
        self._finished = False  # whether this peer has finished all steps of the run
        self._announced_s = -math.inf
        self._records: list[PeerRecord] = []  # of the other peers that train, or trained within the last half hour

    async def addresses(self) -> Collection[Address]:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._announced_s >= self.transport.rules.silence_s / _BEATS:
            self._announced_s = now_s
            if not self._place.node.insists:
                await self._node.enter()
            await self.announce()
        self._records = [each for each in await self._node.find(self._place.admission) if each.number >= 0]
        for record in self._records:
            self._streams.know(record.peer_id, record.addresses)
        return [PeerAddress(record.peer_id) for record in self._records]

    async def announce(self) -> None:
        """Store where this peer is, in its own entry and in the DHT."""
        addresses, number = await self._node.addresses(), self.election.number
        places = (*self._streams.places_for_payloads(addresses), *addresses)[:_MOST_PLACES]
        self.registry.entries[number] = Entry(
            number, self._node.peer_id, self.transport.rules.facts, self.election.held_step, places, self._place.name
        )
        record = PeerRecord(self._node.peer_id, number, self.swarm, addresses, self._finished)
        await self._node.announce(self._place.admission, record)

    def keep_announcing(self) -> None:
        """Start to announce this peer at regular intervals, as its addresses may change."""
        self._task = asyncio.ensure_future(self._announce_often())

    async def _announce_often(self) -> None:
        while True:
            try:
                await self.announce()
            except Exception as error:  # from the DHT; the next attempt may succeed
                words = "this peer could not be announced (%s). It tries again in %g s."
                logging.getLogger(__name__).warning(words, plainly(error), _ANNOUNCE_S)
            await asyncio.sleep(_ANNOUNCE_S)

    async def announce_end(self) -> None:
        self._finished = True
        await self.announce()

    def check(self, found: Members) -> None:
        """Raise if the swarm is behind this peer's own checkpoint, whose work would be lost.

        A swarm that this peer was a member of already contains that work.
        """
        mine, run = self.election, self._place.admission.run
        step = max(found.step, found.founded_step)  # the founder may not have loaded its checkpoint yet
        if found.swarm in (self._place.swarm, self._place.held_swarm) or mine.held_step <= step:
            return
        raise RendezvousError(
            f"the swarm of run {run!r} is at step {step}, and the newest checkpoint of replica {mine.number} is of "
            f"step {mine.held_step}, which the others do not have. To continue from step {mine.held_step}, stop the "
            "others and start this replica first, so that they join it. To join them and discard those steps, start "
            "this replica in another folder."
        )

    def settle(self, found: Members | None) -> None:
        held_step = max(0, self.election.held_step)
        self.swarm = found.swarm if found else self._place.swarm or secrets.token_hex(8)
        self.founded_step = found.founded_step if found else held_step
        if found is None:  # joining peers receive it
            self.transport.step = held_step if self._place.views else 0

    def had_members(self) -> bool:
        return any(record.swarm for record in self._records)

    def over(self) -> str:
        ours = [each for each in self._records if each.swarm and self._place.swarm in ("", each.swarm)]
        if not any(each.finished for each in ours) or not (self._place.swarm or self.election.held_step < 0):
            return ""
        return (
            f"the others have finished run {self._place.admission.run!r}, and no member is left to join. To train "
            "more, resume from a checkpoint of the run with more steps, or choose another name for the run."
        )

    def awaited(self) -> str:
        run = self._place.admission.run
        return f"a member of run {run!r}" if self.election.views is None else f"{super().awaited()}, of run {run!r}"

    def nobody(self, why: Mapping[str, str]) -> str:
        run, for_s = self._place.admission.run, f"within {self.patience_s:g} s"
        if self.had_members():
            tried = "; ".join(why.values()) or "none of them answers"
            return (
                f"run {run!r} has had a swarm within the last half hour, but no member could be joined {for_s}: "
                f"{tried}. Make one of its peers reachable, resume from a checkpoint of the run, or choose another "
                "name for it."
            )
        if self.looking:
            newest = min(self.looking, key=lambda each: (-each.held_step, each.number))
            held = "no checkpoint" if newest.held_step < 0 else f"a checkpoint of step {newest.held_step}"
            return (
                f"replica {newest.number} of run {run!r}, which has {held}, is also searching for the others, and has "
                f"not founded a swarm {for_s}. Restart it or stop it."
            )
        return (
            f"no other peer of run {run!r} was found {for_s}. Check the name of the run, its secret, and the "
            "addresses given with --join."
        )
