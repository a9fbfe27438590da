"""Peers that do not train: one that others find each other through, and one that looks who is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco.errors import RendezvousError, TransportError
from diloco.transport.hivemind.identity import load_identity
from diloco.transport.hivemind.node import Node
from diloco.transport.hivemind.peer_streams import PeerStreams
from diloco.transport.hivemind.place import Admission, NodePlace
from diloco.transport.hivemind.records import PeerRecord
from diloco.transport.hivemind.swarm import ask_peer
from diloco.transport.peers.streams import within

__all__ = ["Seen", "look", "stand"]

_ANSWER_S = 10.0


@dataclass(frozen=True)
class Seen:
    """One peer of a run.

    Attributes:
        peer_id: who.
        number: the replica number that it announced.
        status: what it says of itself when asked; empty where it does not answer.
        problem: why not; "" where it does.
        finished: whether it has announced that it did all steps of the run.
    """

    peer_id: str
    number: int
    status: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    finished: bool = False


async def stand(identity: Path, place: NodePlace, ready: Callable[[tuple[str, ...]], None]) -> None:
    """Be a peer that trains nothing, until cancelled.

    Args:
        identity: file of its private key.
        place: where it is.
        ready: told its addresses, once it can be reached.

    Raises:
        RendezvousError, TransportError: if it can't be started.
    """
    node = await Node.start(load_identity(identity), place)
    try:
        ready(await node.addresses())
        await asyncio.Event().wait()
    finally:
        await node.close()


async def look(identity: Path, place: NodePlace, admission: Admission) -> list[Seen]:
    """Every peer of a run that is or was there within the last half hour, as it answers.

    Raises:
        RendezvousError: if nobody of ``place.join`` answers.
    """
    streams = PeerStreams(load_identity(identity), place, admission)

    async def nobody_comes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    await streams.listen(nobody_comes)
    try:
        records = await streams.node.find(admission.run)
        for record in records:
            streams.know(record.peer_id, record.addresses)
        seen = await asyncio.gather(*(_asked(streams, each) for each in records))
        there = [each.peer_id for each in seen if each.status]
        return list(await asyncio.gather(*(_asked_through(streams, there, each) for each in seen)))
    finally:
        await streams.refuse()
        await streams.close()


async def _asked(streams: PeerStreams, record: PeerRecord) -> Seen:
    try:
        answer = await within(_ANSWER_S, ask_peer(streams, record.peer_id, {"kind": "status"}))
    except (OSError, TimeoutError, RendezvousError, TransportError) as error:
        problem = str(error) or f"no answer within {_ANSWER_S:g} s"
        return Seen(record.peer_id, record.number, problem=problem, finished=record.finished)
    return Seen(record.peer_id, record.number, answer, finished=record.finished)


async def _asked_through(streams: PeerStreams, others: Sequence[str], seen: Seen) -> Seen:
    """What one that did not answer says to another member: it may listen nowhere and be connected to that one."""
    for other in others if seen.problem else ():
        try:
            answer = await within(_ANSWER_S, ask_peer(streams, other, {"kind": "status", "of": seen.peer_id}))
        except (OSError, TimeoutError, RendezvousError, TransportError):
            continue
        return Seen(seen.peer_id, seen.number, answer, finished=seen.finished)
    return seen
