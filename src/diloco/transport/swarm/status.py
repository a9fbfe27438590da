"""The status and recent events that a peer reports to observers, which do not take part in its swarm."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from diloco.errors import RendezvousError, TransportError
from diloco.events import Event, StateFetched, StepFinished, to_json, to_record
from diloco.membership import GREATEST, Count, Rank
from diloco.private_files import create_private
from diloco.protocol import Refused, WireMessage
from diloco.transport.connections.limits import few_at_once
from diloco.transport.connections.streams import MAX_MESSAGE_BYTES, UNKNOWN_PEER_BYTES, question, say
from diloco.transport.peers.directory import Directory
from diloco.transport.peers.transport import PeerTransport
from diloco.transport.secret import new_secret
from diloco.transport.swarm.governance import Govern, Governed, Order, load_order, save_order
from diloco.transport.swarm.identity import Admission, Identity, NodePlace, PeerRecord, load_identity
from diloco.transport.swarm.node import peer_of
from diloco.transport.swarm.streams import PeerAddress, PeerStreams
from diloco.units import visible
from diloco.waiting import in_thread

KEPT = {
    "RunStarted": 1,
    "StepFinished": 256,
    "RoundSent": 128,
    "RoundCommitted": 128,
    "RoundVoid": 128,
    "ViewChanged": 32,
    "StateFetched": 16,
    "Evaluated": 64,
    "SampleGenerated": 4,
    "CheckpointSaved": 1,
    "RunFinished": 1,
}
"""The number of events kept of each kind. Notes are not reported, because they contain addresses and paths."""

_KEPT_PRIVATE = ("facts", "details", "resumed_from", "path", "summary", "peers")  # they describe this machine

_MOST_EVENTS = 600  # in an answer
_LONGEST_TEXT = 2_000

_Figure = Annotated[float, Meta(ge=0, le=GREATEST)] | None
_Text = Annotated[str, Meta(max_length=200)]


class StatusAsked(WireMessage):
    since: Count | None = None  # the number of the first event to report; None: none
    of: _Text | None = None  # another peer, which the asked one is to ask


class Status(WireMessage):
    """What a peer says of itself. Its texts print."""

    state: _Text = ""
    name: _Text = ""
    replica: Rank = 0
    swarm: _Text = ""
    step: Count = 0
    view: Annotated[int, Meta(ge=-1, le=GREATEST)] = -1
    members: Annotated[tuple[Rank, ...], Meta(max_length=4_096)] = ()
    sent_bytes: Count = 0
    received_bytes: Count = 0
    round: _Text = ""  # of its newest contribution
    digest: _Text = ""  # of the state behind that
    codec: _Text = ""
    link_bits_per_s: _Figure = None
    pace: _Figure = None
    tokens_per_s: _Figure = None
    state_received_bytes: Count = 0  # of the others' state, while it joins
    state_expected_bytes: Count = 0
    events: Annotated[tuple[bytes, ...], Meta(max_length=_MOST_EVENTS)] = ()  # lines of JSON, the oldest first
    next_event: Count = 0  # the number of the first event to ask for later

    def __post_init__(self) -> None:
        if not "".join((self.state, self.name, self.swarm, self.round, self.digest, self.codec)).isprintable():
            raise ValueError("its texts do not print")


class PeerStatus:
    """The reported facts and events; the training thread adds them, and other threads read them.

    ``batch_tokens`` are those of a trained step.

    >>> import json
    >>> from diloco.events import Note, RoundVoid
    >>> status = PeerStatus()
    >>> for outer_step in (4, 5):
    ...     status.add(RoundVoid(step=7, replica=1, fragment=0, outer_step=outer_step, reason="late"))
    >>> told = status.since(1)
    >>> told["next_event"], [json.loads(line)["outer_step"] for line in told["events"]]
    (2, [5])
    """

    def __init__(self, batch_tokens: int = 1) -> None:
        self.seen: dict[str, Any] = {"state": "joining"}  # further fields of `Status`
        self._batch_tokens = batch_tokens
        self._kept: dict[str, deque[tuple[int, bytes]]] = {kind: deque(maxlen=most) for kind, most in KEPT.items()}
        self._next = 0
        self._lock = threading.Lock()

    def add(self, event: Event) -> None:
        if isinstance(event, StateFetched):
            self.seen.update(state_received_bytes=event.received_bytes, state_expected_bytes=event.expected_bytes)
        elif isinstance(event, StepFinished) and event.trained:
            self.seen.update(tokens_per_s=self._batch_tokens / max(1e-9, event.step_s))
        kept = self._kept.get(type(event).__name__)
        if kept is None:
            return
        fields = {name: value for name, value in to_record(event).items() if name not in _KEPT_PRIVATE}
        short = {name: value[:_LONGEST_TEXT] if isinstance(value, str) else value for name, value in fields.items()}
        line = to_json({**short, "time_s": round(time.time(), 3)}).encode()
        with self._lock:
            kept.append((self._next, line))
            self._next += 1

    def of(self, transport: PeerTransport, swarm: str, codec: str, since: int | None) -> Status:
        """Return the status, with the events from number ``since`` on, or without events if it is None."""
        view, (newest, digest) = transport.view, transport.newest_digest
        return Status(
            replica=transport.replica,
            swarm=swarm,
            step=transport.step,
            view=view.id,
            members=view.members,
            sent_bytes=transport.sent_bytes,
            received_bytes=transport.received_bytes,
            round=newest,
            digest=digest,
            link_bits_per_s=float(transport.uplink.bits_per_s) or None,
            codec=codec,
            **self.seen,
            **({} if since is None else self.since(since)),
        )

    def since(self, number: int) -> dict[str, Any]:
        """Return the ``events`` from ``number`` on, oldest first, and the ``next_event`` to ask for later."""
        with self._lock:
            found = sorted(each for kept in self._kept.values() for each in kept if each[0] >= number)
            return {"events": tuple(line for _, line in found[-_MOST_EVENTS:]), "next_event": self._next}


def serve_status(directory: Directory, status: PeerStatus) -> None:
    """Answer observers with the status of this peer, or forward the question to a member that they can't reach."""
    transport, connections, entries = directory.transport, directory.connections, directory.known

    async def answer(request: StatusAsked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        others = {*directory.members} - {transport.replica}
        other = next((each for rank, each in entries.items() if rank in others and each.address == request.of), None)
        reply: WireMessage
        if request.of is None:
            codec = entries[transport.replica].facts.get("codec", "")
            reply = status.of(transport, directory.swarm, codec, request.since)
        elif other is not None:
            address = connections.streams.locate(other)
            reply = await question(await connections.open(address), address, StatusAsked(request.since), Status)
        else:
            reply = Refused(f"{visible(request.of, 80)} is not another member of this swarm")
        await say(reply, reader, writer)

    connections.services[StatusAsked] = answer


_ANSWER_S = 10.0
_MOST_ANSWERS_BYTES = 64 << 20  # of all peers together; anyone may store a record in the DHT and be asked
_MOST_FORWARDERS = 3  # peers that are asked about another one, one after the other; they may never answer


@dataclass(frozen=True)
class PeerReport:
    peer_id: str  # the peer's identity
    number: int  # the replica number that the peer has announced
    status: Status | None = None  # what the peer reports; None if it does not answer
    problem: str = ""  # why the peer does not answer; "" if it does
    finished: bool = False  # whether the peer has announced that it has finished all steps of the run
    searches: bool = False  # whether the peer has announced that it is looking for the members
    objection: str = ""  # why it does not answer this one, as the peer says at its door; "": nothing
    route: str = ""  # the route to the peer: "direct", "relayed", or "through" another peer; "" if it was not reached
    # seconds from the question to the answer, including opening a stream; None without an answer
    round_trip_s: float | None = None


class StatusClient:
    """Asks the peers of a run for their status; created by `open_status_client`."""

    def __init__(self, streams: PeerStreams, admission: Admission) -> None:
        self._streams = streams
        self._admission = admission
        self._most_bytes = MAX_MESSAGE_BYTES  # of one answer

    async def ask(self, since: Mapping[str, int] | None = None) -> list[PeerReport]:
        """Ask every peer of the run that was there within the last half hour, and return their reports.

        Args:
            since: peer -> the number of the first event to report, which is ``next_event`` in the peer's last answer;
                0 for peers that are not in it. None asks for no events.
        """
        records = await self._streams.find()
        requests = {
            each.peer_id: StatusAsked(None if since is None else since.get(each.peer_id, 0)) for each in records
        }
        self._most_bytes = max(UNKNOWN_PEER_BYTES, min(MAX_MESSAGE_BYTES, _MOST_ANSWERS_BYTES // max(1, len(records))))
        seen = await few_at_once(lambda each: self._asked(each, requests[each.peer_id]), records)
        there = [each.peer_id for each in seen if each.status]
        seen = await few_at_once(lambda each: self._asked_through(there, each, requests[each.peer_id]), seen)
        seen = await few_at_once(self._visited, seen)
        relays = {*map(peer_of, self._streams.relays())}
        reports = [each for each in seen if each.peer_id not in relays]
        if self._streams.look_up_failure and not reports:
            raise TransportError(f"{self._streams.look_up_failure}. Check the addresses given with --join.")
        return reports

    async def eject(self, peer: str, founder: Identity, file: Path, agree: Callable[[tuple[str, ...]], bool]) -> bool:
        """Have the members eject a peer, and use a new secret from now on, which is written to ``file``.

        They agree on a view without the peer next, which `ask` shows. The founder's last order is that beside its key,
        or a newer one with its signature that members have.

        Args:
            peer: the identity of the peer.
            founder: signs the order.
            file: does not exist yet.
            agree: is given all identities that the order ejects, also by earlier orders. Nothing is sent if it returns
                False, and nothing is written. It may wait for a person.

        Returns:
            What ``agree`` has returned.

        Raises:
            RendezvousError: the member that was asked refuses; the file is removed.
            TransportError: no peer of ``--join`` answers that is a member and stays, or one has ended before it
                answered, which may have followed the order; then the file stays.
            FileExistsError, OSError: the file can't be written. Nothing was sent.
        """
        last = load_order(founder.path, self._admission.run)
        if last is not None and last.forgery(self._admission.run, founder.peer_id):
            last = None  # of the founder of another swarm, which this peer has joined
        members, orders = await self._members_to_stay({peer, *(last.ejected if last else ())}, founder)
        for order in orders:
            if order.is_after(last):
                last = order
        secret = new_secret()
        order = Order.sign(founder, self._admission, peer, secret, last)
        member = next((each for each in members if each.host not in order.ejected), None)
        if member is None:
            raise TransportError("no member that stays has answered. Give the address of one with --join.")
        # of asyncio's own threads, the end of its loop would wait for one that waits for a person
        if not await asyncio.wrap_future(in_thread(lambda: agree(order.ejected), "diloco-agree")):
            return False
        create_private(file, f"{secret}\n".encode())
        try:  # no other member is asked, as this one may have followed it
            await question(await self._streams.open(member), member, Govern(order), Governed)
        except RendezvousError:
            file.unlink()
            raise
        except (OSError, EOFError, TransportError) as error:
            words = f"It may follow the order: keep {file}, and give the order again with another file"
            raise TransportError(f"{error or type(error).__name__}. {words}.") from error
        try:
            save_order(founder.path, order)  # the founder's peer may not be running
        except OSError as error:
            logging.getLogger(__name__).warning("the order can't be kept beside the founder's key: %s", error)
        return True

    async def _members_to_stay(
        self, ejected: Collection[str], founder: Identity
    ) -> tuple[list[PeerAddress], list[Order]]:
        """Return the members of ``--join`` that answer, and the founder's orders that they know.

        Who is ejected is not asked. What a member returns is an order only with the founder's signature.

        Raises:
            TransportError: none answers.
        """
        why: list[str] = []
        members: list[PeerAddress] = []
        orders: list[Order] = []
        for address in self._streams.place.join:
            place = PeerAddress(peer_of(address))
            if place.host in ejected:
                why.append(f"{place.host} is ejected itself")
                continue
            try:
                order = (await question(await self._streams.open(place), place, Govern(), Governed)).order
            except (OSError, EOFError, TransportError) as error:
                why.append(str(error) or type(error).__name__)
                continue
            if order is not None and (forgery := order.forgery(self._admission.run, founder.peer_id)):
                why.append(f"{place.host} names an order that is none of the founder's: {forgery}")
                continue
            members.append(place)
            if order is not None:
                orders.append(order)
        if not members:
            raise TransportError(
                f"no member of the swarm answers: {'; '.join(why)}. Give the address of one with --join."
            )
        return members, orders

    async def _asked(self, record: PeerRecord, request: StatusAsked) -> PeerReport:
        report = PeerReport(record.peer_id, record.number, finished=record.finished, searches=not record.swarm)
        relayed = bool(record.addresses) and all("/p2p-circuit" in each for each in record.addresses)
        try:
            return await self._answered(report, record.peer_id, request, "relayed" if relayed else "direct")
        except (OSError, EOFError, RendezvousError, TransportError) as error:
            return replace(report, problem=str(error) or f"no answer within {_ANSWER_S:g} s")

    async def _asked_through(self, others: Sequence[str], seen: PeerReport, request: StatusAsked) -> PeerReport:
        """Ask other members to forward the question to a peer that did not answer; it may be connected to them only."""
        some = random.sample(others, min(_MOST_FORWARDERS, len(others)))
        for other in some if seen.problem else ():
            with contextlib.suppress(OSError, EOFError, RendezvousError, TransportError):
                return await self._answered(seen, other, StatusAsked(request.since, seen.peer_id), f"through {other}")
        return seen

    async def _visited(self, report: PeerReport) -> PeerReport:
        """Ask at the door of a peer of `NodePlace.join` that does not answer."""
        if report.problem and report.peer_id in self._streams.given:
            with contextlib.suppress(OSError, EOFError, TransportError):
                return replace(report, objection=(await self._streams.visit(report.peer_id)).objection)
        return report

    async def _answered(self, report: PeerReport, peer: str, request: StatusAsked, route: str) -> PeerReport:
        """Return ``report`` completed by the answer of ``peer``."""
        asked_s = time.monotonic()
        most_bytes = UNKNOWN_PEER_BYTES if request == StatusAsked() else self._most_bytes
        async with asyncio.timeout(_ANSWER_S):
            stream = await self._streams.open(PeerAddress(peer))
            status = await question(stream, PeerAddress(peer), request, Status, most_bytes)
        return replace(report, status=status, problem="", route=route, round_trip_s=time.monotonic() - asked_s)


def absences(reports: Sequence[PeerReport]) -> list[str]:
    """Return why each peer does not answer; "" for one that answers.

    It is "refuses" if it says so, "finished", "joining" while it looks for the members, "gone" if no answering peer has
    it as a member, or "no answer".
    """
    members = {member for each in reports if each.status for member in each.status.members}

    def absence(report: PeerReport) -> str:
        if report.status:
            return ""
        if report.objection:
            return "refuses"
        if report.finished:
            return "finished"
        if not members or report.number in members:
            return "no answer"
        return "joining" if report.searches else "gone"

    return [absence(each) for each in reports]


@asynccontextmanager
async def open_status_client(
    identity: Path, place: NodePlace, admission: Admission, speaker: Identity | None = None
) -> AsyncIterator[StatusClient]:
    """Enter the network until the end of the ``async with`` block, and yield a client that can ask its peers.

    Args:
        identity: file of a private key, created if it does not exist.
        speaker: the identity that members see, if not that of the file; its own peer may be running.

    Raises:
        RendezvousError: if no peer of ``place.join`` answers.
    """
    mine = load_identity(identity)
    streams = PeerStreams(mine if speaker is None else replace(mine, tls_key=speaker.tls_key), place, admission)

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    try:
        await streams.listen(refuse)
        yield StatusClient(streams, admission)
    finally:
        await streams.refuse()
        await streams.close()
