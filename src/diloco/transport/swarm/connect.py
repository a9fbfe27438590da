"""Where the peers of a swarm meet: its DHT says whom to ask, and a peer that finds no member founds a view."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

from diloco.errors import RendezvousError, TransportError
from diloco.events import Event
from diloco.membership import names_of, refusal
from diloco.protocol import Closed, Ejected, Entry, MessageError, Refused, Rules, Store, decode, encode
from diloco.transport.address import Address
from diloco.transport.connections.limits import pauses
from diloco.transport.connections.streams import NotNowError, say, within
from diloco.transport.peers.connect import MeetingPlace
from diloco.transport.peers.directory import Directory, Lost, Members
from diloco.transport.peers.transport import OnChange, PeerTransport
from diloco.transport.swarm.engine import in_short
from diloco.transport.swarm.governance import Govern, Governed, Order, founder_of, load_order, save_order
from diloco.transport.swarm.identity import Admission, NodePlace, PeerRecord, load_identity, number_of
from diloco.transport.swarm.status import PeerStatus, serve_status
from diloco.transport.swarm.streams import (
    PeerAddress,
    PeerStreams,
    SwarmLinks,
    hosts_in,
    is_loopback,
    limits_of_reach,
    port_in,
    told_addresses,
)
from diloco.waiting import waiting_for

_ANNOUNCE_S = 60.0
_MOST_PLACES = 16  # of an entry
_START_AGAIN_S = 0.5, 4.0  # pauses between two attempts to enter the network
_YIELDS = 2 / 3  # for how much of its search a peer leaves it to one that can't be asked to found a swarm
_BEATS = 4  # how often a peer that searches announces itself within the time after which it would count as gone


class SwarmDirectory(Directory):
    """The directory of one peer."""

    def __init__(self, transport: PeerTransport, place: SwarmPlace, held_step: int, lost: Lost | None) -> None:
        super().__init__(
            transport,
            held_step=held_step,
            join_window_s=place.join_window_s,
            alone=not place.node.join,
            founds=place.founds or not place.node.join,
            lost=lost,
            held_swarm=place.held_swarm,
        )
        self._place = place
        self._streams = cast(PeerStreams, self.connections.streams)
        self._finished = False  # whether this peer has finished all steps of the run
        self._announced_s = -math.inf
        self._records: list[PeerRecord] = []  # of the other peers that train, or trained within the last half hour
        self._seen_at = ""  # the host from which others see this peer come; "": unknown
        self._objections = ""  # why peers named by --join can't be joined, as they say at their doors
        self._unreached: list[int] = []  # numbers of peers that also search, and can't be reached
        self._before: set[str] = set()  # peers of a lower number that have searched at the same time
        self._order: Order | None = None  # the founder's last one
        self._moved = asyncio.Event()  # set when it has a new secret, and so another place in the DHT
        self.connections.receivers["order"] = self._take_order
        self.connections.services[Govern] = self._govern

    def enter(self) -> None:
        """Enter the network, and announce this peer.

        Raises:
            EjectedError: the founder has ejected this peer.
            RendezvousError: no peer that it knows answers in time.
        """
        if order := load_order(self._place.identity, self._place.admission.run):
            if self._streams.me in order.ejected:
                raise order.error(self._streams.me)
            self._streams.admit_by(order.applied(self._streams.admission))
            self.keep(order)
        timeout_s, known = self.transport.rules.rendezvous_timeout_s, self._streams.place.join
        until_s, pauses_s = time.monotonic() + timeout_s, pauses(*_START_AGAIN_S, seed=self._streams.me)
        with waiting_for(lambda: f"an answer from a peer at {', '.join(known) or 'this machine'}", timeout_s):
            while True:
                try:
                    self.connections.listen()
                    break
                except RendezvousError:
                    if time.monotonic() >= until_s:
                        raise
                time.sleep(next(pauses_s))
        self.connections.call(self.announce())

    async def addresses(self) -> Collection[Address]:
        now_s, node = asyncio.get_running_loop().time(), self._streams.node
        try:
            if now_s - self._announced_s >= self.transport.rules.silence_s / _BEATS:
                self._announced_s = now_s
                await node.enter()
                await self.announce()
            self._records = [each for each in await self._streams.find() if each.number >= 0]
        except Exception as error:  # those of the DHT have no common base class
            raise TransportError(f"the peers of the run can't be looked up: {in_short(error)}") from error
        return [PeerAddress(record.peer_id) for record in self._records]

    async def examine(self, answers: Mapping[Address, object]) -> None:
        """Ask at the doors of the peers named by --join that don't answer.

        Raises:
            RendezvousError: none of them can be joined: at least one says why, and all others are relays.
        """
        given = self._streams.given
        searching = {
            each.peer_id: each.number for each in self._records if not each.swarm and math.isfinite(each.age_s)
        }
        silent = {str(place) for place, each in answers.items() if isinstance(each, OSError) and _is_unanswered(each)}
        self._unreached = sorted(searching[each] for each in silent & searching.keys())
        answered = {str(place) for place, each in answers.items() if not _is_unanswered(each)}
        leads_on = self.me.founds or any(math.isfinite(each.age_s) for each in self._records)
        objections, may_answer = [], bool(answered)
        for peer_id in given.keys() - answered:
            try:
                visit = await self._streams.visit(peer_id)
            except (OSError, EOFError, TransportError):
                may_answer = True  # later: it may be starting
                continue
            may_answer |= not visit.objection and not visit.is_relay
            if visit.objection and (visit.same_run or not leads_on):
                objections.append(f"the peer at {given[peer_id][0]} answers, but {visit.objection}.")
        self._objections = " ".join(sorted(objections))
        if objections and not may_answer and self.last is None:
            raise RendezvousError(self._objections)

    async def announce(self) -> None:
        node, number, me = self._streams.node, self.me.number, self._streams.me
        try:
            addresses = await node.addresses()
            places = (*self._streams.places_for_payloads(addresses), *addresses)[:_MOST_PLACES]
            facts = self.transport.rules.facts
            self.known[number] = Entry(number, me, me, facts, self.me.held_step, places, self._place.name)
            record = PeerRecord(number, self.swarm, addresses, self._finished)
            await node.announce(self._streams.admission, record)
        except Exception as error:  # as above
            raise TransportError(f"this peer could not be announced ({in_short(error)})") from error

    def open_up(self) -> None:
        super().open_up()
        if not self.joining:
            self.connections.call(self.announce())  # before other peers search
        serve_status(self, self._place.status)
        self._seen_at = self.connections.call(self._streams.seen_at())
        self.connections.post(lambda: self.connections.begin(self._keep_announcing()))

    async def _keep_announcing(self) -> None:
        """Announce this peer at regular intervals, as its addresses may change."""
        while True:
            self._moved.clear()
            try:
                await self.announce()
            except TransportError as error:  # the next attempt may succeed
                logging.getLogger(__name__).warning("%s. It tries again in %g s.", error, _ANNOUNCE_S)
            with contextlib.suppress(TimeoutError):
                await within(_ANNOUNCE_S, self._moved.wait())

    def listens_at(self) -> tuple[str, ...]:
        addresses = sorted(self.connections.call(self._streams.node.addresses()), key=is_loopback)
        relays = () if self._place.node.announce else self.relays()  # what it announces may be a name
        return told_addresses(addresses, self._seen_at, relays)

    def limits_of_reach(self) -> str:
        addresses = self.listens_at()
        if self._place.node.announce:
            return ""
        if addresses and addresses == self.relays():
            return "this peer is behind a router: others reach it through the relay, about 3 minutes after it started"
        return limits_of_reach(hosts_in(addresses), port_in(addresses), self._seen_at)

    def details(self) -> dict[str, str]:
        place, transport = self._place, self.transport
        return {
            "replica": f"{place.name}, of {len(transport.view.members)} in run {place.admission.run!r}",
            "number": f"{transport.replica}, peer {transport.address}",
            "swarm": self.swarm,
            "listens at": ", ".join(self.listens_at()) or "no address: it opens all connections itself",
        }

    def others(self) -> tuple[str, ...]:
        """Return addresses of the other members, and those given as --join that are not of replicas that have left.

        Those on loopback are left out, unless this peer, too, has no others.
        """
        view = self.transport.views.last_view
        known = [entry for rank, entry in self.transport.entries().items() if rank != self.me.number]
        members = () if view is None else view.members
        gone = {entry.key for entry in known if entry.rank not in members}
        given = [address for address in self._place.node.join if address.rpartition("/p2p/")[2] not in gone]
        there = [each for entry in known if entry.rank in members for each in entry.places if "/p2p/" in each]
        mine = [each for each in self.entry.places if "/p2p/" in each]
        if not mine or not all(map(is_loopback, mine)):
            there = [each for each in there if not is_loopback(each)]
        return tuple(dict.fromkeys([*given, *there]))

    def relays(self) -> tuple[str, ...]:
        return self._streams.relays()

    async def announce_end(self) -> None:
        self._finished = True
        await self.announce()

    def check(self, found: Members) -> None:
        """Raise if the swarm is behind this peer's own checkpoint, whose work would be lost.

        A swarm that this peer was a member of already contains that work.
        """
        mine, run = self.me, self._place.admission.run
        step = max(found.step, found.founded_step)  # the founder may not have loaded its checkpoint yet
        if found.swarm in (self.former_swarm, self._place.held_swarm) or mine.held_step <= step:
            return
        raise RendezvousError(
            f"the swarm of run {run!r} is at step {step}, and the newest checkpoint of replica {mine.number} is of "
            f"step {mine.held_step}, which the others do not have. To continue from step {mine.held_step}, stop the "
            "others and start this replica first, so that they join it. To join them and discard those steps, start "
            "this replica in another folder."
        )

    def settle(self) -> None:
        founder = founder_of(self._place.held_swarm) or self._streams.me
        found = self.found
        self.swarm = found.swarm if found else self._lost_swarm or f"{founder}.{secrets.token_hex(8)}"
        self.founded_step = found.founded_step if found else max(0, self.me.held_step)

    @property
    def _lost_swarm(self) -> str:
        """The swarm that this peer was a member of since its process began; "": none."""
        return "" if self.last is None else self.former_swarm

    # Orders of the founder.

    def keep(self, order: Order) -> None:
        """Take an order for the last one, of which those are told who join."""
        self._order, self.transport.order = order, encode(order)

    def _is_new(self, order: Order) -> bool:
        last = self._order  # that of another founder is of an earlier swarm
        return last is None or last.founder != order.founder or order.is_after(last)

    def _take_order(self, sender: int | None, data: bytes) -> None:
        order, founder = decode(data, Order), founder_of(self.swarm)
        if order.founder != founder:  # the sender knows the swarm under another name
            return
        if self._is_new(order):
            if why := order.problem(self._place.admission.run, founder, self._streams.me):
                raise MessageError(f"it passed on an order, but {why}")
            self._follow(order)
        if order == self._order:
            why = f"the founder {founder} has ejected a member"
            self.transport.post(Ejected(self._ejected_members(order), sender, why))

    def _follow(self, order: Order) -> None:
        """Follow a new order, and pass it on."""
        me, connections, members = self._streams.me, self.connections, self.members
        joining = self.transport.views.joining
        try:
            save_order(self._place.identity, order)
        except OSError as error:
            logging.getLogger(__name__).warning("the order of the founder can't be kept for a restart: %s", error)
        if me in order.ejected:
            self.transport.post(Closed(order.error(me)))
            return
        self._streams.admit_by(order.applied(self._streams.admission, self._order))
        self.keep(order)
        for rank in connections.connected:
            is_ejected = connections.identity(rank) in order.ejected
            if rank in members:
                connections.send(rank, Store("order", encode(order.public if is_ejected else order)))
            elif is_ejected or (members and rank not in joining):  # a joiner is told by the members
                connections.drop({connections.peers[rank]: "it may not know the new secret"})
        self._moved.set()  # it announces itself where those look who have the new secret
        words = "the founder has ejected %s. Peers that join from now on need the new secret."
        logging.getLogger(__name__).warning(words, ", ".join(order.ejected))

    async def _govern(self, asked: Govern, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        order = asked.order
        if why := self._objection(order):
            await say(Refused(why, for_good=True), reader, writer)
            return
        if order is not None:
            self._take_order(None, encode(order))
        await say(Governed(self._order and self._order.public), reader, writer)

    def _ejected_members(self, order: Order) -> frozenset[int]:
        return frozenset(each for each in self.members if self.connections.identities.get(each) in order.ejected)

    def _objection(self, order: Order | None) -> str:
        founder, view = founder_of(self.swarm), self.transport.view
        if not self.members:
            return "it isn't a member of the swarm at present. Ask another peer"
        if order is None:
            return ""
        if self._streams.me in order.ejected:
            return "it is to be ejected itself. Ask another peer"
        if why := order.problem(self._place.admission.run, founder, self._streams.me):
            return f"it can't follow the order: {why}"
        if order != self._order and not self._is_new(order):
            return "it follows a newer order, which was given at the same time. Give this one again"
        ejected = self._ejected_members(order)
        if ejected and refusal(view, ejected, self.transport.rules):
            return (
                f"without {names_of(ejected)}, too few of {names_of(view.members)} would be left to continue. Stop the "
                "run, and resume it with another secret on the machines that are to stay"
            )
        return ""

    def _had_members(self) -> bool:
        return any(record.swarm for record in self._records)

    def may_found(self, answers: Mapping[Address, object], waited_s: float) -> bool:
        """Not without a checkpoint where there was a swarm, and not by a look-up that failed.

        Nor while another one can't be asked: both may be behind routers until, after minutes, a relay carries their
        streams.
        """
        silence_s, mine, before = self.transport.rules.silence_s, self.me.number, self._before
        self._before = {
            each.peer_id
            for each in self._records
            if (each.peer_id in before if each.swarm else each.number < mine and each.age_s < silence_s)
        }
        unheard = any(isinstance(answers.get(PeerAddress(each)), Exception) for each in self._before)
        yields = unheard and self.last is None and waited_s < self.patience_s * _YIELDS
        in_the_dark = self.last is None and self._streams.look_up_failure
        return not yields and not in_the_dark and not (self.me.held_step < 0 and self._had_members())

    def over(self) -> str:
        ours = [each for each in self._records if each.swarm and self._lost_swarm in ("", each.swarm)]
        known = 1 if self.last is None else len(self.last.members)
        finished = sum(each.finished for each in ours)  # without a secret anybody may write one
        if 2 * finished < max(known, len(ours)) or not (self._lost_swarm or self.me.held_step < 0):
            return ""
        return (
            f"the others have finished run {self._place.admission.run!r}, and no member is left to join. To train "
            "more, resume from a checkpoint of the run with more steps, or choose another name for the run."
        )

    def awaited(self) -> str:
        run = self._place.admission.run
        if self.last is not None:
            return f"{super().awaited()}, of run {run!r}"
        return f"a member of run {run!r}{self._hint()}"

    def _out_of_reach(self) -> str:
        numbers = names_of(self._unreached)
        return (
            f"{numbers} can't be reached. If both are behind routers, they need a relay: a `diloco relay` on a public "
            "address, which both name with --join"
        )

    def _hint(self) -> str:
        """Return a hint for a message: the look-up failed, or nobody that searches may found the swarm; "": neither."""
        if failure := self._streams.look_up_failure:
            return f" ({failure})"
        if self._unreached:
            return f" ({self._out_of_reach()})"
        if any(each.founds for each in (self.me, *self.looking)) or self._had_members():
            return ""
        there = f"{len(self.looking)} more also wait for one" if self.looking else "none is known yet"
        return f" ({there}; whoever is to found the run adds --found)"

    def nobody(self, why: Mapping[str, str]) -> str:
        run, for_s = self._place.admission.run, f"within {self.patience_s:g} s"
        if self._objections:
            return f"no member of run {run!r} was found {for_s}: {self._objections}"
        if failure := self._streams.look_up_failure:
            return f"no member of run {run!r} was found {for_s}: {failure}. Check the addresses given with --join."
        if self._had_members():
            tried = "; ".join(why.values()) or "none of them answers"
            return (
                f"run {run!r} has had a swarm within the last half hour, but no member could be joined {for_s}: "
                f"{tried}. Make one of its peers reachable, resume from a checkpoint of the run with --found, or "
                "choose another name for it."
            )
        if self.looking and not any(each.founds for each in (self.me, *self.looking)):
            return (
                f"no member of run {run!r} was found {for_s}. {len(self.looking)} more peers wait for one. Start "
                "one of them with --found."
            )
        if self._unreached:
            tried = "; ".join(why.values())
            return f"no member of run {run!r} was found {for_s}: {self._out_of_reach()} ({tried})."
        if self.looking:
            newest = min(self.looking, key=lambda each: (-each.held_step, each.number))
            held = "no checkpoint" if newest.held_step < 0 else f"a checkpoint of step {newest.held_step}"
            return (
                f"replica {newest.number} of run {run!r}, which has {held}, is also searching for the others, and has "
                f"not founded a swarm {for_s}. Restart it or stop it."
            )
        return (
            f"no other peer of run {run!r} was found {for_s}. Check the name of the run, its secret, and the "
            "addresses given with --join. To found the run instead, add --found."
        )


def _is_unanswered(answer: object) -> bool:
    """Return whether the peer that was asked has not let this one in, or can't be reached."""
    return isinstance(answer, Exception) and not isinstance(answer, RendezvousError | NotNowError)


@dataclass(frozen=True, kw_only=True)
class SwarmPlace(MeetingPlace):
    """A peer and the run that it wants to take part in."""

    elastic: ClassVar[bool] = True

    identity: Path  # file of the peer's private key
    admission: Admission  # the run's name, and the rules for admission
    node: NodePlace = field(default_factory=NodePlace)  # the peer's addresses, and the peers that it knows
    replica: int | None = None  # the replica number; None: derived from the identity
    name: str = ""  # what people call the replica, at most `MAX_NAME` characters that print; "": its number
    held_swarm: str = ""  # the swarm in which the peer reached the newest step it could resume from; "": unknown
    # whether it may found a swarm although it knows addresses (``node.join``); without any, it may
    founds: bool = False
    # how long a peer that finds no member waits for other searching peers before one of them founds a swarm
    join_window_s: float = 3.0
    status: PeerStatus = field(default_factory=PeerStatus)  # what the peer reports to observers

    def transport(self, rules: Rules, lost: Lost | None, on_change: OnChange | None = None) -> PeerTransport:
        identity, node = load_identity(self.identity), self.node
        if lost is not None:  # where it was, and all peers that it knew then
            before = lost.directory.transport
            others = [entry for rank, entry in before.entries().items() if rank != before.rules.rank]
            known = [each for entry in others for each in entry.places if "/p2p/" in each]
            node = cast(PeerStreams, before.connections.streams).place
            node = dataclasses.replace(node, join=tuple(dict.fromkeys((*self.node.join, *known))), insists=False)
        number = number_of(identity.peer_id) if self.replica is None else self.replica
        rules = dataclasses.replace(rules, rank=number, together=False)
        return PeerTransport(rules, PeerStreams(identity, node, self.admission), SwarmLinks, on_change)

    def directory(self, transport: PeerTransport, held_step: int, lost: Lost | None) -> SwarmDirectory:
        self.note(state="joining", name=self.name)
        directory = SwarmDirectory(transport, self, held_step, lost)
        directory.enter()
        return directory

    def publish(self, event: Event) -> None:
        self.status.add(event)

    def note(self, **seen: Any) -> None:
        self.status.seen.update(seen)
