"""This rank's connections to all others, for small messages: they never wait behind payloads, and tell who is there.

One thread runs an event loop; everything that happens is told in that thread, one event after the other. Each pair of
ranks shares one connection, on which both send a beat every ``heartbeat_s``. A rank is lost when its connection ends,
or when nothing came from it for ``silence_s``. No clock is compared with another machine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any, TypeVar
from weakref import WeakSet

from diloco.errors import TransportError
from diloco.protocol.events import Connected, Disconnected, Event, Lost, Received
from diloco.protocol.failure_detector import Loss, Pulse, Timing, silent_ones
from diloco.transport.address import Address
from diloco.transport.peers.control_connection import ControlConnection, inquire
from diloco.transport.peers.streams import Streams, hear_out, pack, read_frame, within

__all__ = ["ConnectionManager", "Service"]

T = TypeVar("T")
Message = Mapping[str, Any]
Service = Callable[[dict[str, Any], bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Takes over a connection whose first message asked for it; the connection is closed when it returns."""

_BEAT: Message = {"kind": "beat"}
FIRST_MESSAGE_S = 10.0
_FLUSH_S = 1.0
_ROUNDS_OF_ENDING = 5
CLOSING_S = 8.0
"""What has not ended by then ends with the process: a network that answers nothing any more, a busy thread."""


class ConnectionManager:
    """Connections by rank.

    Args:
        rank: mine; -1 for somebody who is no member (a launcher).
        timing: of heartbeats.
        streams: of the network.
        tell: called with each connection that is made or ends, each message that comes, and, once, each rank that is
            lost. An error of what was said ends the connection.

    Attributes:
        pulse: this process's own signs of life.
    """

    def __init__(
        self,
        rank: int,
        timing: Timing,
        streams: Streams,
        tell: Callable[[Event], object] = lambda event: None,
    ) -> None:
        self.rank = rank
        self.timing = timing
        self.streams = streams
        self.address = Address("", 0)
        self.services: dict[str, Service] = {"who": _say_who}
        self.arrived = asyncio.Event()
        self.admits: Callable[[int, Address], bool] = lambda rank, address: True
        self._tell = tell
        self._lines: dict[int, ControlConnection] = {}
        self._numbers = itertools.count(1)
        self._connections: WeakSet[asyncio.WriteTransport] = WeakSet()  # all that were made, while anything holds them
        self._watch: asyncio.Task[None] | None = None
        self._closing = False
        self.pulse = Pulse(timing)
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(self._note_failure)
        self._thread = threading.Thread(target=self._run, name=f"diloco-control-{rank}", daemon=True)
        self._thread.start()

    # From any thread.

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run ``coroutine`` in the loop's thread and wait for it.

        Raises:
            TransportError: after `close`.
            TimeoutError: if it takes longer than ``timeout_s``; it is cancelled then.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        except RuntimeError as error:
            coroutine.close()
            raise TransportError(f"the connections of rank {self.rank} are closed; nothing was done.") from error
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call ``function`` in the loop's thread, soon; after `close`, not at all."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *arguments)

    def listen(self, *where: Any) -> Address:
        """Accept connections; ``where`` is what the network's own `Streams.listen` takes.

        Raises:
            TransportError: if it can't.
        """
        return self.call(self.listen_at(*where))

    def close(self) -> None:
        """End all connections and the thread, in some seconds, whatever the network does. Nobody is told of a loss."""
        if self.loop.is_closed():
            return
        if not self._closing:
            self._closing = True
            asyncio.run_coroutine_threadsafe(self._close_and_stop(), self.loop)
        self._thread.join(2 * CLOSING_S)
        if self._thread.is_alive():  # it is busy, and ends when it is not
            return
        self.loop.run_until_complete(self._end_tasks())  # of calls that came in the last moment
        self.loop.close()

    # In the loop's thread.

    @property
    def connected(self) -> frozenset[int]:
        """Ranks with a standing connection."""
        return frozenset(self._lines)

    def address_of(self, rank: int) -> Address | None:
        """Where a connected rank listens."""
        line = self._lines.get(rank)
        return line.address if line is not None else None

    def connection(self, rank: int) -> int | None:
        """Number of the connection to ``rank``: another one once another process of that rank has come."""
        line = self._lines.get(rank)
        return line.number if line is not None else None

    def words(self, rank: int) -> int:
        """How many messages have come over the connection to ``rank``, beats included; 0 where there is none."""
        line = self._lines.get(rank)
        return line.words if line is not None else 0

    def send(self, rank: int, message: Message, blob: bytes = b"") -> None:
        """Send a message, if there is a connection; else it is dropped, as its receiver is lost."""
        line = self._lines.get(rank)
        if line is not None:
            line.writer.write(pack(message, blob))

    async def open(self, address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """As `Streams.open`; `close` ends the connection, whatever it still has to send.

        Raises:
            OSError: as there.
        """
        reader, writer = await self.streams.open(address)
        self._connections.add(writer.transport)
        return reader, writer

    async def connect(self, rank: int, address: Address) -> None:
        """Open the connection to ``rank``, which listens at ``address``.

        Raises:
            OSError: if nobody answers there.
            TransportError: if somebody else does.
        """
        reader, writer = await self.open(address)
        try:
            self.streams.tune(writer, self.timing.silence_s)
            writer.write(pack({"kind": "hello", "rank": self.rank, "address": str(self.address)}))
            answer, _ = await read_frame(reader)
            if answer.get("kind") != "hello" or answer.get("rank") != rank:
                raise TransportError(
                    f"{address} was to be rank {rank} and answered {answer}; another diloco may be using that port."
                )
        except BaseException:
            writer.close()
            raise
        self._register(rank, address, reader, writer)
        self.send(rank, _BEAT)  # so that the other end knows that the connection stands here, too

    def hang_up(self, rank: int) -> None:
        """End the connection to ``rank``; nobody is told of a loss."""
        line = self._lines.pop(rank, None)
        if line is not None:
            if line.task is not None:
                line.task.cancel()
            line.writer.close()

    def give_up(self, ranks: Collection[int]) -> None:
        """Nothing has come from these ranks for too long: all of them are lost at once."""
        lines = [self._lines[rank] for rank in ranks]
        for line in lines:
            line.writer.write(pack({"kind": "given-up"}))  # for one that only stood still
            self.hang_up(line.rank)
            self._tell(Disconnected(line.rank))
        for line in lines:
            text = f"nothing came from {line.address} for {self.timing.silence_s:g} s"
            self._tell(Lost(line.rank, Loss("silent", text)))

    def _note_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A task that nobody waits for has failed, such as a library's: a line and no page, and nothing at the end."""
        error = context.get("exception")
        said = context["message"] if error is None else f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        level = logging.DEBUG if self._closing else logging.WARNING
        logging.getLogger(__name__).log(level, "diloco: a task of the connections failed: %s", said)
        logging.getLogger(__name__).debug("where it did", exc_info=error)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    async def listen_at(self, *where: Any) -> Address:
        """As `listen`, in the loop's thread."""
        self.address = await self.streams.listen(self._arrive, *where)
        self._watch = asyncio.get_running_loop().create_task(self._beat())
        return self.address

    def _arrive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Coroutine[Any, Any, None]:
        self._connections.add(writer.transport)  # at once: the task that looks after it may be ended before it begins
        return self._accept(reader, writer)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            message, blob = await within(FIRST_MESSAGE_S, read_frame(reader))
            if message["kind"] == "hello":
                rank, address = int(message["rank"]), self.streams.address(str(message["address"]))
                if self.streams.identity(writer) not in ("", str(address)) or not self.admits(rank, address):
                    return
                self.streams.tune(writer, self.timing.silence_s)
                writer.write(pack({"kind": "hello", "rank": self.rank}))
                self._register(rank, address, reader, writer)
                return
            service = self.services.get(message["kind"])
            if service is not None:
                await service(message, blob, reader, writer)
        except (OSError, EOFError, TransportError, TimeoutError, KeyError, ValueError, TypeError):
            pass  # whoever that was, it is not one of us, or has left
        except asyncio.CancelledError:
            pass  # this process is leaving; asyncio would print an error of the one who came
        finally:
            if not any(line.writer is writer for line in self._lines.values()):
                writer.close()

    def _register(
        self, rank: int, address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        before = self._lines.get(rank)
        if before is not None:
            before.writer.write(pack({"kind": "replaced"}))
            self.hang_up(rank)
        hear_out(writer.transport)
        line = ControlConnection(rank, next(self._numbers), address, writer, self.loop.time())
        self._lines[rank] = line
        self._tell(Connected(rank, line.number, str(address)))
        line.task = self.loop.create_task(self._listen_to(line, reader))
        self.arrived.set()

    async def _listen_to(self, line: ControlConnection, reader: asyncio.StreamReader) -> None:
        ended = await line.listen(reader, self.arrived, self._hand_on)
        if self._lines.get(line.rank) is not line:
            return
        del self._lines[line.rank]  # its task is the one that runs here
        line.writer.close()
        self._tell(Disconnected(line.rank))
        if ended.given_up or self.pulse.stood_still(self.loop.time()):
            # it may have gone on and ended since: its port has nothing to say
            why = "gave it up" if ended.given_up else f"ended the connection ({ended.reason})"
            text = f"{line.address} heard nothing of this process for too long and {why}"
            self._tell(Lost(line.rank, Loss("cut", text)))
            return
        loss = await inquire(self.open, line.address, ended.reason, min(2.0, self.timing.silence_s))
        if line.rank not in self._lines:  # else another process has come in its place, and says so itself
            self._tell(Lost(line.rank, loss))

    def _hand_on(self, rank: int, message: dict[str, Any], blob: bytes) -> None:
        if latency_s := self.timing.latency_s:
            self.loop.call_later(latency_s, self._tell, Received(rank, message, blob))
        else:
            self._tell(Received(rank, message, blob))

    async def _beat(self) -> None:
        beat = pack(_BEAT)
        self.pulse.begin(self.loop.time())
        while True:
            await asyncio.sleep(self.timing.heartbeat_s)
            now_s = self.loop.time()
            if self.pulse.beat(now_s):  # it was this process that stood still
                for line in self._lines.values():
                    line.heard_s = now_s
            silent = silent_ones({rank: now_s - line.heard_s for rank, line in self._lines.items()}, self.timing)
            self.give_up(silent)
            for line in self._lines.values():
                line.writer.write(beat)

    async def _close_and_stop(self) -> None:
        try:
            await within(CLOSING_S, self.end())
        except TimeoutError:
            logging.getLogger(__name__).debug("not all of what is to end has ended in %g s", CLOSING_S)
        finally:
            self.loop.stop()

    async def end(self) -> None:
        """End all connections, also those that come meanwhile, and all tasks but the one that asks for it."""
        if self._watch is not None:
            self._watch.cancel()
        await self.streams.refuse()
        for _ in range(4):  # turns of the loop, in which connections that have just come get the tasks that close them
            await asyncio.sleep(0)
        await self._hang_up_all(_FLUSH_S)
        await self.streams.close()
        await self._end_tasks()

    async def _end_tasks(self) -> None:
        await asyncio.sleep(0)
        for _ in range(_ROUNDS_OF_ENDING):
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=_FLUSH_S)
            await self._hang_up_all(0.0)  # a task that is told to end may still open a line, if its hello had come

    async def _hang_up_all(self, flush_s: float) -> None:
        """End all connections; what the other side does not take in ``flush_s`` it never will."""
        flushed = [asyncio.create_task(line.writer.wait_closed()) for line in self._lines.values()]
        for rank in self.connected:
            self.hang_up(rank)
        if flushed:
            await asyncio.wait(flushed, timeout=flush_s)
        for connection in list(self._connections):
            connection.abort()
        if flushed:
            await asyncio.wait(flushed, timeout=_FLUSH_S)
        await asyncio.sleep(0)  # in which connections end


async def _say_who(
    message: dict[str, Any], blob: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """For who wants to know whether it is a diloco that listens here."""
    writer.write(pack({"kind": "who"}))
    await writer.drain()
