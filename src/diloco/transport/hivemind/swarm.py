"""What a peer of a run answers to those who want to know who takes part: joiners, and people who look."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from diloco.errors import RendezvousError
from diloco.protocol.registry import Entry, Registry, difference
from diloco.transport.hivemind.peer_streams import PeerAddress, PeerStreams
from diloco.transport.peers.connection_manager import ConnectionManager
from diloco.transport.peers.frames import pack, read_frame
from diloco.transport.peers.streams import within

__all__ = ["NotNowError", "SwarmDesk", "SwarmTable", "ask_peer"]

_ANSWER_S = 10.0


class NotNowError(OSError):
    """A peer is there, and does not say what it was asked for: it is starting, or joining itself."""


@dataclass(frozen=True)
class SwarmTable:
    """Who takes part, as one member sees it.

    Attributes:
        swarm: its name, made up by who founded it.
        entries: rank -> entry, of the members and of those who are about to become some.
        members: ranks of the view.
        step: inner steps that the member has begun to synchronise.
        founded_step: that of the checkpoint which the swarm was founded from; 0 for none.
    """

    swarm: str
    entries: Mapping[int, Entry]
    members: tuple[int, ...]
    step: int
    founded_step: int = 0

    @property
    def first(self) -> Entry:
        """Of the member that joiners ask, so that they hear of each other."""
        return self.entries[min(self.members)]

    def to_message(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "kind": "table",
            "swarm": self.swarm,
            "entries": [entry.to_message() for entry in self.entries.values()],
            "members": list(self.members),
            "step": self.step,
            "founded_step": self.founded_step,
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> SwarmTable:
        """From JSON; `ValueError`, `TypeError` or `KeyError` for anything that is none."""
        entries = [Entry.from_message(each) for each in message["entries"]]
        members = tuple(sorted(int(rank) for rank in message["members"]))
        step, founded_step = int(message["step"]), int(message.get("founded_step", 0))
        table = cls(str(message["swarm"]), {entry.rank: entry for entry in entries}, members, step, founded_step)
        if not members or any(rank not in table.entries for rank in members):
            raise ValueError("members without entries")
        return table


class SwarmDesk:
    """Answers at a member's connections.

    Args:
        connections: of this peer.
        streams: of this peer.
        registry: of all that are known.
        mine: this peer's own entry.
        swarm: name of the swarm.
        founded_step: as in `SwarmTable`.
        members: tells the view's members; empty while this peer is none itself.
        closed: tells why nobody can join now, or "".
        step: tells the inner steps done.
        status: tells what people want to know, as JSON.
    """

    def __init__(
        self,
        connections: ConnectionManager,
        streams: PeerStreams,
        registry: Registry,
        mine: Entry,
        swarm: str,
        founded_step: int,
        *,
        members: Callable[[], tuple[int, ...]],
        closed: Callable[[], str],
        step: Callable[[], int],
        status: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._connections = connections
        self._streams = streams
        self._registry = registry
        self._mine = mine
        self._swarm = swarm
        self._founded_step = founded_step
        self._members = members
        self._closed = closed
        self._step = step
        self._status = status
        connections.services["table"] = self._answer_table
        connections.services["introduce"] = self._introduce
        connections.services["status"] = self._answer_status

    def table(self) -> SwarmTable:
        """The members, and who is connected and wants to be one."""
        members = self._members()
        ranks = {*members, *(self._connections.connected & self._registry.entries.keys())}
        entries = {rank: self._registry.entries[rank] for rank in sorted(ranks) if rank in self._registry.entries}
        return SwarmTable(self._swarm, entries, members, self._step(), self._founded_step)

    def admits(self, entry: Entry) -> str:
        """Why a peer can't take part; "" where it can."""
        known = self._registry.entries.get(entry.rank)
        if known is not None and known.address != entry.address and entry.rank in self._members():
            return f"replica {entry.rank} is {known.address} already; another number would work"
        return difference(self._mine, entry)

    async def _answer_table(
        self, message: dict[str, Any], blob: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        entry = Entry.from_message(message["entry"])
        if entry.address != self._connections.streams.identity(writer):
            return
        if closed := self._closed() or ("" if self._members() else "it is joining itself"):
            answer: dict[str, Any] = {"kind": "refused", "reason": closed, "for_good": False}
        elif why := self.admits(entry):
            answer = {"kind": "refused", "reason": why, "for_good": True}
        else:
            self._registry.entries[entry.rank] = entry
            answer = self.table().to_message()
        await _say(answer, reader, writer)

    async def _introduce(
        self, message: dict[str, Any], blob: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Somebody can't open a connection to a member: ask the member to open one."""
        entry, to = Entry.from_message(message["entry"]), int(message["to"])
        if entry.address == self._connections.streams.identity(writer) and to in self._members():
            self._connections.send(to, {"kind": "introduce", "entry": entry.to_message()})
            await _say({"kind": "introduced"}, reader, writer)

    async def _answer_status(
        self, message: dict[str, Any], blob: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Of this peer, or of another member that the asker can't reach and that this one is connected to."""
        other, members = message.get("of"), self._members()
        if other is None:
            answer = {"kind": "status", **self._status()}
        elif any(self._registry.entries[rank].address == other for rank in members if rank != self._mine.rank):
            answer = await ask_peer(self._streams, str(other), {"kind": "status"})
        else:
            answer = {"kind": "refused", "reason": f"{str(other)[:80]} is no other member here", "for_good": False}
        await _say(answer, reader, writer)


async def ask_peer(streams: PeerStreams, peer_id: str, question: Mapping[str, Any]) -> dict[str, Any]:
    """A peer's answer.

    Raises:
        RendezvousError: if it refuses for good; it says why.
        NotNowError: if it is there and does not answer, or not now.
        OSError: if it can't be reached.
    """
    reader, writer = await streams.open(PeerAddress(peer_id))
    try:
        writer.write(pack(question))
        answer, _ = await within(_ANSWER_S, read_frame(reader))
    except (EOFError, TimeoutError) as error:
        raise NotNowError(f"{peer_id} does not answer") from error
    finally:
        writer.close()
    if answer["kind"] == "refused":
        if answer["for_good"]:
            raise RendezvousError(f"{peer_id} refuses: {answer['reason']}. Nothing was started.")
        raise NotNowError(f"{peer_id} can't say yet: {answer['reason']}")
    return answer


async def _say(answer: Mapping[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer, and let the asker end the stream: the daemon drops what is not read yet when its own side ends it."""
    writer.write(pack(answer))
    await writer.drain()
    await within(_ANSWER_S, reader.read(1))
