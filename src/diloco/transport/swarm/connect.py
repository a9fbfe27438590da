"""The directory of a swarm: its DHT says where to ask, and a peer that finds no member founds a view of itself."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from diloco.algorithm import check_whole
from diloco.errors import RendezvousError
from diloco.membership import MOST_RANK, BootstrapElection, LastViews, byzantine_quorum, enough_without, names_of
from diloco.protocol import Entry, MessageError, Refused, Registry, Rules, Store, decode, encode
from diloco.transport.address import Address
from diloco.transport.connections.limits import pauses
from diloco.transport.connections.streams import say
from diloco.transport.peers.directory import Directory, Members
from diloco.transport.peers.transport import PeerTransport
from diloco.transport.swarm.engine import plainly
from diloco.transport.swarm.governance import Govern, Governed, Order, founder_of, load_order, save_order
from diloco.transport.swarm.identity import Admission, NodePlace, PeerRecord, load_identity, number_of
from diloco.transport.swarm.status import PeerStatus, serve_status
from diloco.transport.swarm.streams import PeerAddress, PeerStreams, SwarmLinks
from diloco.waiting import waiting_for


@dataclass(frozen=True, kw_only=True)
class SwarmPlace:
    """A peer and the run that it wants to take part in."""

    identity: Path  # file of the peer's private key
    admission: Admission  # the run's name, and the rules for admission
    node: NodePlace = field(default_factory=NodePlace)  # the peer's addresses, and the peers that it knows
    replica: int | None = None  # the replica number; None: derived from the identity
    name: str = ""  # what people call the replica, at most `MAX_NAME` characters that print; "": its number
    swarm: str = ""  # the swarm that the peer was a member of before; "": none
    views: LastViews | None = None  # what the peer has been and promised in that swarm; None for a new process
    # how long the peer searches for the others; None: the rules' ``rendezvous_timeout_s``
    patience_s: float | None = None
    held_swarm: str = ""  # the swarm in which the peer reached the newest step it could resume from; "": unknown
    # how long a peer that finds no member waits for other searching peers before one of them founds a swarm
    join_window_s: float = 3.0
    status: PeerStatus = field(default_factory=PeerStatus)  # what the peer reports to observers
    closed: str = ""  # why no peer may join at first; "": all may


_ANNOUNCE_S = 60.0
_MOST_PLACES = 16  # of an entry
_IN_FORCE_S = 5.0  # how long a peer that asks for an ejection waits for the next view at most
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
        self._before: set[str] = set()  # peers of a lower number that have searched at the same time
        self._order: Order | None = None  # the founder's last one
        self.connections.receivers["order"] = self._take_order
        self.connections.services[Govern] = self._govern

    async def addresses(self) -> Collection[Address]:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._announced_s >= self.transport.rules.silence_s / _BEATS:
            self._announced_s = now_s
            if not self._place.node.insists:
                await self._node.enter()
            await self.announce()
        self._records = [each for each in await self._node.find(self._streams.admission) if each.number >= 0]
        for record in self._records:
            self._streams.know(record.peer_id, record.addresses)
        return [PeerAddress(record.peer_id) for record in self._records]

    async def announce(self) -> None:
        addresses, number = await self._node.addresses(), self.election.number
        places = (*self._streams.places_for_payloads(addresses), *addresses)[:_MOST_PLACES]
        self.registry.entries[number] = Entry(
            number, self._node.peer_id, self.transport.rules.facts, self.election.held_step, places, self._place.name
        )
        record = PeerRecord(number, self.swarm, addresses, self._finished)
        await self._node.announce(self._streams.admission, record)

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
        founder = founder_of(self._place.held_swarm) or self._node.peer_id
        self.swarm = found.swarm if found else self._place.swarm or f"{founder}.{secrets.token_hex(8)}"
        self.founded_step = found.founded_step if found else held_step
        if found is None:  # joining peers receive it
            self.transport.step = held_step if self._place.views else 0

    # Orders of the founder.

    def keep(self, order: Order) -> None:
        """Take an order for the last one, of which those are told who join."""
        self._order, self.transport.order = order, encode(order)

    def _is_new(self, order: Order) -> bool:
        last = self._order  # that of another founder is of an earlier swarm
        if last is None or last.founder != order.founder:
            return True
        return (order.version, order.dht_key) > (last.version, last.dht_key)

    def _take_order(self, sender: int | None, data: bytes) -> None:
        order, founder = decode(data, Order), founder_of(self.swarm)
        if order.founder != founder:  # the sender knows the swarm under another name
            return
        if self._is_new(order):
            if why := order.problem(self._place.admission.run, founder, self._node.peer_id):
                raise MessageError(f"it passed on an order, but {why}")
            self._follow(order)
        if order == self._order:
            self.transport.eject(self._ejected_members(order), sender, f"the founder {founder} has ejected a member")

    def _follow(self, order: Order) -> None:
        """Follow a new order, and pass it on."""
        me, connections, members = self._node.peer_id, self.connections, self.members
        joining = self.transport.views.joining
        try:
            save_order(self._place.identity, order)
        except OSError as error:
            logging.getLogger(__name__).warning("the order of the founder can't be kept for a restart: %s", error)
        if me in order.ejected:
            self.transport.end(order.error(me))
            return
        self._streams.admit_by(order.applied(self._streams.admission, self._order))
        self.keep(order)
        for rank in connections.connected:
            is_ejected = connections.identity(rank) in order.ejected
            if rank in members:
                connections.send(rank, Store("order", encode(order.public if is_ejected else order)))
            elif is_ejected or (members and rank not in joining):  # a joiner is told by the members
                connections.drop({connections.peers[rank]: "it may not know the new secret"})
        connections.begin(self.announce())  # where those look who have the new secret
        words = "the founder has ejected %s. Peers that join from now on need the new secret."
        logging.getLogger(__name__).warning(words, ", ".join(order.ejected))

    async def _govern(self, asked: Govern, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        order, clock = asked.order, asyncio.get_running_loop()
        if why := self._objection(order):
            await say(Refused(why, for_good=True), reader, writer)
            return
        if order is not None:
            self._take_order(None, encode(order))
        until_s = clock.time() + _IN_FORCE_S
        while (remaining := self._ejected_members(self._order)) and clock.time() < until_s:
            await asyncio.sleep(_CHECK_S)
        await say(Governed(self._order and self._order.public, tuple(sorted(remaining))), reader, writer)

    def _ejected_members(self, order: Order | None) -> set[int]:
        identities = self.connections.identities
        return {each for each in self.members if order is not None and identities.get(each) in order.ejected}

    def _objection(self, order: Order | None) -> str:
        founder, view = founder_of(self.swarm), self.transport.view
        if not self.members:
            return "it is no member of the swarm at present. Ask another peer"
        if order is None:
            return ""
        if self._node.peer_id in order.ejected:
            return "it is to be ejected itself. Ask another peer"
        if why := order.problem(self._place.admission.run, founder, self._node.peer_id):
            return f"it can't follow the order: {why}"
        if order != self._order and not self._is_new(order):
            return "it follows a newer order, which was given at the same time. Give this one again"
        ejected = self._ejected_members(order)
        if ejected and not enough_without(view, ejected, self.transport.rules.policy):
            return (
                f"without {names_of(ejected)}, too few of {names_of(view.members)} would be left to continue. Stop the "
                "run, and resume it with another secret on the machines that are to stay"
            )
        return ""

    def had_members(self) -> bool:
        return any(record.swarm for record in self._records)

    def is_behind_another(self, answers: Mapping[Address, object]) -> bool:
        """Both may be behind routers, where neither can be asked until, after minutes, a relay carries its streams."""
        silence_s, mine, before = self.transport.rules.silence_s, self.election.number, self._before
        self._before = {
            each.peer_id
            for each in self._records
            if (each.peer_id in before if each.swarm else each.number < mine and each.age_s < silence_s)
        }
        unheard = any(isinstance(answers.get(PeerAddress(each)), Exception) for each in self._before)
        return unheard and self.election.views is None

    def over(self) -> str:
        ours = [each for each in self._records if each.swarm and self._place.swarm in ("", each.swarm)]
        known = 1 if self.election.views is None else len(self.election.views.last.members)
        enough = byzantine_quorum(max(known, len(ours)))  # one may lie
        if sum(each.finished for each in ours) < enough or not (self._place.swarm or self.election.held_step < 0):
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


_START_AGAIN_S = 0.5, 4.0  # pauses between two attempts to enter the network


def enter_swarm(place: SwarmPlace, rules: Rules, *, held_step: int = -1) -> Directory:
    """Find the members of the run and connect to all of them, or found the swarm if there are none.

    Args:
        place: this peer and its run.
        rules: the rules of the run.
        held_step: the newest step that this peer could resume from; -1 for none, in which case the peer can't found a
            swarm that replaces an earlier one.

    Raises:
        RendezvousError: if this does not succeed in time, the peers are incompatible, or the swarm is behind this
            peer's checkpoint; nothing stays open.
        EjectedError: if the founder has ejected this peer.
        TransportError: if the peer can't be started.
    """
    identity = load_identity(place.identity)
    number = number_of(identity.peer_id) if place.replica is None else place.replica
    order, admission = load_order(place.identity, place.admission.run), place.admission
    if order is not None:
        admission = order.applied(admission)
        if identity.peer_id in order.ejected:
            raise order.error(identity.peer_id)
    streams = PeerStreams(identity, place.node, admission)
    transport = PeerTransport(dataclasses.replace(rules, rank=number, together=False), streams, SwarmLinks)
    try:
        _start(transport, place, rules.rendezvous_timeout_s)
        return _connect(transport, place, rules, held_step, order)
    except BaseException:
        transport.close()
        raise


def _start(transport: PeerTransport, place: SwarmPlace, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    pauses_s = pauses(*_START_AGAIN_S, seed=str(place.replica))
    with waiting_for(lambda: f"an answer from a peer at {', '.join(place.node.join) or 'this machine'}", timeout_s):
        while True:
            try:
                transport.connections.listen()
                return
            except RendezvousError:
                if time.monotonic() >= deadline_s:
                    raise
            time.sleep(next(pauses_s))


def _connect(
    transport: PeerTransport, place: SwarmPlace, rules: Rules, held_step: int, order: Order | None
) -> Directory:
    election = BootstrapElection(
        number=transport.replica,
        held_step=held_step,
        views=place.views,
        alone=not place.node.join,
        window_s=place.join_window_s,
        policy=rules.policy,
    )
    directory, connections = SwarmDirectory(transport, Registry(0), election, place), transport.connections
    if order is not None:
        directory.keep(order)
    connections.call(directory.announce())
    directory.enter(place.closed)
    if not directory.joining:
        connections.call(directory.announce())  # before other peers search
    serve_status(directory, place.status)
    connections.post(directory.keep_announcing)
    return directory


_CHECK_S = 0.1


@contextmanager
def connect_swarm(
    *,
    run: str,
    num_replicas: int,
    identity: str | Path,
    join_at: Sequence[str] = (),
    replica: int | None = None,
    secret: str = "",
    allow: Sequence[str] = (),
    on_address: Callable[[str], None] = print,
    node: NodePlace | None = None,
    **rules: Any,
) -> Iterator[PeerTransport]:
    """Find the other replicas of ``run``, connect to them over libp2p, and yield the transport.

    All replicas begin together, as soon as ``num_replicas`` are connected. No replica can join later, because your
    training loop can't be moved to the step of the others (``diloco train --transport swarm`` can do that). A
    replica that is lost later stays lost, and the others continue without it. At the end of the ``with`` block this
    replica leaves, and the others continue.

    Args:
        run: name of the run, the same for all replicas.
        num_replicas: number of replicas M with which training begins.
        identity: file of this peer's private key, created if it does not exist.
        join_at: addresses of any peers of the run, as passed to ``on_address``; empty for the first peer.
        replica: number m of this replica. None derives a number from the identity, which can't serve as an index into
            shards of the data.
        secret: the text of a file that ``diloco secret`` has written, the same for all peers; peers without it are
            rejected. "" means no secret.
        allow: identities of the peers that may take part; empty means all.
        on_address: called with each address at which others can join, before waiting for them.
        node: where to listen, if not at every address of this machine.
        rules: any field of `diloco.protocol.Rules`, such as ``round_timeout_s=60`` or ``facts=...``.

    Raises:
        RendezvousError: if the others do not join in time or are incompatible, or the run has already begun.
        ConfigurationError: if an argument can't work, Hivemind is not installed, or the key or the secret can't be
            used.
    """
    check_whole("num_replicas", num_replicas, 1)
    if replica is not None:
        check_whole("replica", replica, 0, MOST_RANK)
    exchange = Rules.of(rules, continue_without_lost=True)
    place = SwarmPlace(
        identity=Path(identity),
        admission=Admission(run, secret, frozenset(allow)),
        node=dataclasses.replace(node or NodePlace(), join=tuple(join_at)),
        replica=replica,
    )
    connected = enter_swarm(place, exchange)
    transport = connected.transport
    streams = cast(PeerStreams, transport.connections.streams)
    try:
        if connected.joining and connected.step > 0:
            raise connected.already_running()
        for address in transport.connections.call(streams.node.addresses()):
            on_address(address)
        with waiting_for(lambda: f"the members of run {run!r} to let this peer in", exchange.rendezvous_timeout_s):
            if connected.joining and connected.join(exchange.rendezvous_timeout_s) > 0:
                raise connected.already_running()
        _wait_for(connected, num_replicas, exchange.rendezvous_timeout_s)
        place.status.seen["state"] = "training"
        transport.on_report = place.status.add
        transport.views.closed_to_joiners = "its replicas run a training loop that no other replica can join"
        yield transport
        connected.finish()
        transport.leave()
    finally:
        transport.close()


def _wait_for(connected: Directory, num_replicas: int, timeout_s: float) -> None:
    transport, deadline_s = connected.transport, time.monotonic() + timeout_s
    with waiting_for(
        lambda: f"{num_replicas} replicas, {len(transport.view.members)} of which have joined,", timeout_s
    ):
        while len(transport.view.members) < num_replicas:
            if transport.failure is not None:
                raise transport.failure
            if time.monotonic() > deadline_s:
                raise RendezvousError(
                    f"{len(transport.view.members)} of {num_replicas} replicas joined within {timeout_s:g} s. Start "
                    "the missing ones, or choose a longer rendezvous_timeout_s."
                )
            time.sleep(_CHECK_S)
