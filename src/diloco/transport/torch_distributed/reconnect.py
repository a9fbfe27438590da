"""Ranks that have lost their view find each other again, or those who went on, over the addresses that they know."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco.errors import ConfigurationError, RendezvousError, RunOverError, TransportError
from diloco.membership.founding import Founding, Looker
from diloco.membership.view import View
from diloco.protocol.registry import Entry, Registry
from diloco.transport.address import Address, parse_address
from diloco.transport.peers.connected import Connected, Table
from diloco.transport.peers.frames import pack, read_frame
from diloco.transport.peers.streams import within
from diloco.transport.peers.transport import PeerTransport
from diloco.transport.torch_distributed.rendezvous import serve
from diloco.waiting import waiting_for

__all__ = ["LookAgain", "serve_lookers", "tell_that_it_is_over"]

_ANSWER_S = 5.0
_OVER_S = 2.0
_LOOK_AGAIN_S = 0.5
_WINDOW_S = 3.0


def serve_lookers(transport: PeerTransport, registry: Registry, looker: Callable[[], Looker]) -> None:
    """Answer those who have lost their view: with the members, as one of them, or as one that looks itself.

    Args:
        transport: of this rank.
        registry: of all that are known; gets those who ask.
        looker: what this rank says as one that looks.
    """

    async def answer(
        message: dict[str, Any], blob: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        entry = Entry.from_message(message["entry"])
        last = transport.last_view
        if last is None or transport.failure is not None:
            mine = looker()
            view = [] if mine.last is None else [mine.last.id, *mine.last.members]
            said: dict[str, Any] = {"kind": "looking", "number": mine.number, "held_step": mine.held_step, "last": view}
        else:
            try:
                registry.register(entry)
                entries = [each.to_message() for each in registry.entries.values()]
                said = {"kind": "members", "entries": entries, "members": list(transport.view.members)}
                said["step"] = transport.step
            except RendezvousError as error:
                said = {"kind": "refused", "reason": str(error)}
        writer.write(pack(said))
        await writer.drain()

    async def hear_that_it_is_over(
        message: dict[str, Any], blob: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        transport.run_is_over = True

    transport.connections.services["look"] = answer
    transport.connections.services["over"] = hear_that_it_is_over


def tell_that_it_is_over(transport: PeerTransport) -> None:
    """All steps are done: tell those who have been members and are none now, wherever they listen."""
    size, members = transport.rules.ranks_per_replica, transport.view.members
    absent = [entry for entry in transport.known_entries() if entry.rank // size not in members]

    async def tell(address: Address) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            _, writer = await within(_OVER_S, asyncio.open_connection(address.host, address.port))
            writer.write(pack({"kind": "over"}))
            await within(_OVER_S, writer.drain())
            writer.close()

    async def tell_all() -> None:
        await asyncio.gather(*(tell(parse_address(entry.address)) for entry in absent))

    transport.connections.call(tell_all())


@dataclass(frozen=True, kw_only=True)
class LookAgain:
    """What a rank goes by that has lost its view.

    Attributes:
        transport: a new one, that listens where the one before did.
        entry: its own.
        looker: what it says of itself.
        known: entries of the others, as they were last.
        elsewhere: another address at which somebody may know more.
        patience_s: so long it looks.
    """

    transport: PeerTransport
    entry: Entry
    looker: Looker
    known: Sequence[Entry]
    elsewhere: Address | None
    patience_s: float

    def connect(self, open_link: Any) -> Connected:
        """Find the members and connect to all of them, or found a view for those who look, too.

        Args:
            open_link: makes payload connections.

        Raises:
            RendezvousError: if neither is possible in time.
        """
        transport, connections = self.transport, self.transport.connections
        entries = [self.entry, *(each for each in self.known if each.rank != self.entry.rank)]
        registry = Registry(len(entries), transport.rules.ranks_per_replica, entries)
        serve_lookers(transport, registry, lambda: self.looker)
        there: set[int] = set()
        with waiting_for(lambda: self._whom(there), self.patience_s):
            found = connections.call(self._find(registry, there))
        serve(connections, registry)
        if isinstance(found, View):
            transport.step = self.looker.held_step  # what those who join are told
            transport.begin(found, registry, open_link, member=True, closed="it is coming back itself")
            return Connected(
                transport, Table(dict(registry.entries), False), False, finish=lambda: tell_that_it_is_over(transport)
            )
        members, step = found
        transport.begin(View(-1, members), registry, open_link, member=False, closed="it is coming back itself")

        return Connected(
            transport,
            Table(dict(registry.entries), True, step),
            True,
            refresh=lambda: self.dial_members(registry),
            finish=lambda: tell_that_it_is_over(transport),
        )

    def dial_members(self, registry: Registry) -> None:
        """For one that asks to join: ask who the members are by now, and connect to those that have come since."""
        self.transport.connections.call(self._members(registry))

    def _whom(self, there: set[int]) -> str:
        members = () if self.looker.last is None else self.looker.last.members
        others = ", ".join(str(each) for each in members if each != self.looker.number)
        return f"enough of replicas {others} to go on with ({len(there)} of them looking, too)"

    async def _find(self, registry: Registry, there: set[int]) -> tuple[tuple[int, ...], int] | View:
        """Members that are connected now and the step they are at, or the view to found."""
        clock = asyncio.get_running_loop()
        founding = Founding(me=self.looker, alone=False, window_s=_WINDOW_S, policy=self.transport.policies.quorum)
        began_s = clock.time()
        while True:
            asked_s = clock.time()
            answers = await self._answers(registry)
            lookers = [_looker_of(each) for each in answers if each["kind"] == "looking"]
            there.clear()
            there.update(each.number for each in lookers)
            for answer in (each for each in answers if each["kind"] == "members"):
                if members := await self._dialled(answer, registry):
                    return members, int(answer["step"])
            running = any(each["kind"] == "members" for each in answers)
            if self.transport.run_is_over and not running:
                raise RunOverError("the others have finished the run, and nobody of it is left to join.")
            if not running and (view := founding.founds(lookers, asked_s - began_s)):
                return view
            if refused := next((each["reason"] for each in answers if each["kind"] == "refused"), ""):
                raise RendezvousError(str(refused))
            if clock.time() - began_s > self.patience_s:
                raise RendezvousError(
                    f"replica {self.looker.number} has looked for the others for {self.patience_s:g} s, as long as it "
                    f"was to, and found {len(lookers)} that look, too. Its state is saved."
                )
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _answers(self, registry: Registry) -> list[dict[str, Any]]:
        places = dict.fromkeys(
            str(entry.address) for rank, entry in registry.entries.items() if rank != self.entry.rank
        )
        if self.elsewhere is not None and str(self.elsewhere) != self.entry.address:
            places[str(self.elsewhere)] = None
        answers = await asyncio.gather(*(self._ask(parse_address(place)) for place in places))
        return [each for each in answers if each is not None]

    async def _ask(self, address: Address) -> dict[str, Any] | None:
        async def ask() -> dict[str, Any]:
            reader, writer = await asyncio.open_connection(address.host, address.port)
            try:
                writer.write(pack({"kind": "look", "entry": self.entry.to_message()}))
                answer, _ = await read_frame(reader)
                return answer
            finally:
                writer.close()

        try:
            answer = await within(_ANSWER_S, ask())
            if answer["kind"] == "looking":
                _looker_of(answer)
            return answer if answer["kind"] in ("members", "looking", "refused") else None
        except (OSError, EOFError, TimeoutError, TransportError, ConfigurationError, KeyError, ValueError, TypeError):
            return None  # it has ended, can't be reached, or is no diloco

    async def _members(self, registry: Registry) -> None:
        for answer in await self._answers(registry):
            if answer["kind"] == "members" and await self._dialled(answer, registry):
                return

    async def _dialled(self, answer: Mapping[str, Any], registry: Registry) -> tuple[int, ...]:
        """The members that an answer names, once all of them are connected; () if one can't be."""
        connections, size = self.transport.connections, self.transport.rules.ranks_per_replica
        try:
            entries = {entry.rank: entry for entry in map(Entry.from_message, answer["entries"])}
            members = tuple(sorted(int(each) for each in answer["members"]))
            ranks = [rank for member in members for rank in range(member * size, (member + 1) * size)]
            places = {rank: parse_address(entries[rank].address) for rank in ranks if rank != self.entry.rank}
        except (KeyError, ValueError, TypeError):
            return ()
        mine = {self.entry.rank: self.entry}
        registry.entries.update(entries | mine)
        try:
            for rank, address in places.items():
                if rank not in connections.connected:
                    await within(_ANSWER_S, connections.connect(rank, address))
        except (OSError, EOFError, TimeoutError, TransportError):
            return ()
        return tuple(member for member in members if member != self.looker.number)


def _looker_of(answer: Mapping[str, Any]) -> Looker:
    last = [int(each) for each in answer["last"]]
    view = View(last[0], tuple(last[1:])) if last else None
    return Looker(int(answer["number"]), int(answer["held_step"]), view)
