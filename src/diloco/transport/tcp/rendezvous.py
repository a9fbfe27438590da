"""The rendezvous: an address that all ranks of a run know, at which they register to find and connect to each other.

The ranks need it only until they have connected. From then on every member also answers at its own control port, so a
replica that rejoins can ask any of them if the first address is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import threading
from collections.abc import Collection
from datetime import timedelta
from typing import Annotated, Any

from msgspec import Meta

from diloco.errors import RendezvousError, TransportError
from diloco.membership import Ranks, Words
from diloco.protocol import Entries, Entry, Refused, Registry, WireMessage
from diloco.transport.address import Address, parse_address
from diloco.transport.connections.connection_manager import ConnectionManager
from diloco.transport.connections.limits import Backoff
from diloco.transport.connections.streams import MAX_MESSAGE_BYTES, pack, read_frame, within
from diloco.transport.peers.connected import Table
from diloco.transport.secret import TurnedAwayError
from diloco.units import visible
from diloco.waiting import waiting_for

__all__ = ["ask", "cause", "connect_to_all", "greet", "serve", "share_text"]


_ANSWER_S = 5.0
_MOST_REASON = 500
_MOST_UNANSWERED = 3  # unanswered greetings after which the program at the address can't be a diloco
TELL_EVERY_S = 1.5  # how often waiting ranks are sent the missing ranks; less than the delay before they print them


class Register(WireMessage):
    """A rank registers, for as long as its connection lasts."""

    entry: Entry


class Missing(WireMessage):
    """Some ranks are still missing."""

    missing: Ranks
    refused: Annotated[tuple[Words, ...], Meta(max_length=1)]  # why the last one was refused that did not fit

    def __str__(self) -> str:
        why = "".join(f" (one was refused: {visible(each.removesuffix('.'), _MOST_REASON)})" for each in self.refused)
        return f"rank {', '.join(map(str, self.missing))}{why}"


class RankTable(WireMessage, tag="table"):
    """The entries of all ranks."""

    entries: Entries
    running: bool  # whether the run had begun before the receiver asked


def serve(connections: ConnectionManager, registry: Registry, host: int | None = None) -> None:
    """Answer ranks that register at ``connections``, with the table of all ranks as soon as it is complete.

    A rank that does not fit is refused alone. The others wait for one that does, and learn why it was refused.

    Args:
        host: the rank that answers here. It registers first, because the rendezvous would end with it if it were
            refused. None: no rank does.
    """
    begun, news = asyncio.Event(), [asyncio.Event()]  # set when a rank is refused and when all have registered
    refusals: list[str] = []  # why ranks were refused; the last one is what the others learn

    async def register(asked: Register, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        entry, was_running = asked.entry, registry.running
        parse_address(entry.address)  # all others would fail at it
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            if host not in (None, entry.rank):
                await _first_of(leaving, begun)
            if reason := await connections.claimed(entry.rank, writer):
                raise RendezvousError(reason)
            registry.register(entry)
            begun.set()
            if registry.running:
                news[0].set()
            while not registry.running:
                missing = tuple(rank for rank in registry.missing if rank != entry.rank)
                writer.write(pack(Missing(missing, tuple(refusals))))
                await _first_of(leaving, news[0], TELL_EVERY_S)
                if leaving.done():
                    registry.withdraw(entry.rank)
                    return
            entries = Entries.of(registry.entries[rank] for rank in sorted(registry.entries))
            answer: WireMessage = RankTable(entries, was_running)
        except RendezvousError as error:
            refusals[:] = [str(error)]
            answer = Refused(str(error))
            news[0].set()
            news[:] = [asyncio.Event()]
        finally:
            leaving.cancel()
        writer.write(pack(answer))
        await writer.drain()

    connections.services[Register] = register


async def _first_of(leaving: asyncio.Future[bytes], event: asyncio.Event, timeout_s: float | None = None) -> None:
    """Wait until a process leaves, or an event or the time comes."""
    coming = asyncio.ensure_future(event.wait())
    both: list[asyncio.Future[Any]] = [leaving, coming]
    try:
        await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        coming.cancel()


def ask(
    connections: ConnectionManager, address: Address, entry: Entry, timeout_s: float, answer_s: float = _ANSWER_S
) -> Table:
    """Register ``entry`` at ``address``, wait for the other ranks, and return the table of all.

    Args:
        connections: the connection manager whose event loop does the work.
        address: address of the rendezvous.
        entry: entry of this rank.
        timeout_s: how long to wait for all ranks, in seconds.
        answer_s: how long the program at the address may take to identify itself as a diloco, in seconds.

    Raises:
        RendezvousError: if there is no answer, the rank is refused, or a rank does not arrive in time; the message says
            which.
    """
    told: list[Missing] = []
    with waiting_for(lambda: f"{told[0] if told else 'an answer'} at the rendezvous {address}", timeout_s):
        return connections.call(_ask(connections, address, entry, timeout_s, answer_s, told))


async def _ask(
    connections: ConnectionManager,
    address: Address,
    entry: Entry,
    timeout_s: float,
    answer_s: float,
    told: list[Missing],
) -> Table:
    clock = asyncio.get_running_loop()
    deadline_s = clock.time() + timeout_s
    attempts, unanswered, why = 0, 0, ""
    backoff = Backoff(0.25, 1.0, seed=f"{entry.rank} {entry.address}")
    while (left_s := deadline_s - clock.time()) > 0:
        attempts += 1
        writer: asyncio.StreamWriter | None = None
        told.clear()
        try:
            stream = await within(min(left_s, answer_s), connections.open(address))
            reader, writer = stream
            stream[1].write(pack(Register(entry)))
            async with asyncio.timeout_at(deadline_s):
                while isinstance(answer := await _next(reader), Missing):
                    told[:] = [answer]
            if isinstance(answer, Refused):
                raise RendezvousError(answer.reason)
            return Table({each.rank: each for each in answer.entries.whole()}, answer.running)
        except TurnedAwayError as error:
            raise RendezvousError(
                f"rank {entry.rank} can't take part in the run at {address}: {error}. All replicas need the same "
                "secret in their network.secret_file, or none of them may have one."
            ) from error
        except socket.gaierror as error:
            why = f"its name does not resolve ({error.strerror or error})"
        except ConnectionRefusedError:
            why = "nothing listens there (connection refused)"
        except TimeoutError:
            if told:
                raise RendezvousError(
                    f"rank {entry.rank} waited {timeout_s:g} s at {address} for {told[0]}. Start the missing ranks, or "
                    "choose a longer network.round_timeout, of which this is half."
                ) from None
            why, unanswered = "no answer", unanswered + 1
            if unanswered == _MOST_UNANSWERED:
                raise _another_program(entry.rank, address, "does not answer") from None
        except (OSError, EOFError) as error:
            why = str(error) or type(error).__name__
        except RendezvousError:
            raise
        except (TransportError, ValueError) as error:
            raise _another_program(entry.rank, address, f"did not answer as a diloco does ({cause(error)})") from error
        finally:
            if writer is not None:
                writer.transport.abort()
        await asyncio.sleep(min(backoff.next_s(), max(0.0, deadline_s - clock.time())))
    raise RendezvousError(
        f"rank {entry.rank} found no rendezvous at {address} within {timeout_s:g} s ({attempts} attempts): {why}. "
        "Start replica 0 there, open that port, or, to join a running training, give the address of any of its "
        "replicas."
    )


async def _next(reader: asyncio.StreamReader) -> RankTable | Missing | Refused:
    answer, _ = await read_frame(reader, RankTable | Missing | Refused, MAX_MESSAGE_BYTES)
    return answer  # type: ignore[no-any-return]  # one of these types


def _another_program(rank: int, address: Address, behaviour: str) -> RendezvousError:
    return RendezvousError(
        f"rank {rank} found no rendezvous at {address}: port {address.port} there is in use by another program, which "
        f"{behaviour}. Choose another port, the same for all replicas (--join {address.host}:PORT), or end that "
        "program."
    )


def cause(error: Exception) -> str:
    """Return the message of an error about received data, without its sentence about the connection."""
    return str(error).partition(". The connection")[0]


async def greet(connections: ConnectionManager, address: Address, timeout_s: float) -> None:
    """Check that the program at ``address`` is a diloco with the same secret, which the handshake shows.

    Raises:
        TransportError: if it is another program.
        TurnedAwayError: if it has another secret.
        TimeoutError: if it does not answer.
        OSError, EOFError: if nothing listens there, or the connection is closed.
    """
    _, writer = await within(timeout_s, connections.open(address))
    writer.transport.abort()


def share_text(master: Address, mine: str | None, timeout_s: float, key: str) -> str:
    """Share a text from rank 0 with all ranks through the store of ``torchrun``'s agent, and return it.

    The store is used for nothing else. If its host freezes, the store blocks beyond all of its own time-outs, so the
    call runs in a thread that may never end.

    Args:
        master: address of the store.
        mine: the text, on rank 0; None on the other ranks.
        timeout_s: how long to wait for the store, in seconds.
        key: key of the text in the store.

    Raises:
        RendezvousError: if the store does not return the text in time.
    """
    result: list[str | Exception] = []

    def talk() -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs lack it

        try:
            store = TCPStore(master.host, master.port, is_master=False, timeout=timedelta(seconds=timeout_s))
            if mine is not None:
                store.set(key, mine)
            result.append(store.get(key).decode())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=talk, name="diloco-torchrun-store", daemon=True)
    thread.start()
    with waiting_for(lambda: f"the {key} of rank 0 in the store of torchrun at {master}", timeout_s):
        thread.join(timeout_s)
    if result and isinstance(result[0], str):
        return result[0]
    why = str(result[0]).splitlines()[0] if result else "no answer"
    raise RendezvousError(
        f"the store of torchrun at {master} gave no {key} of rank 0 within {timeout_s:g} s: {why}. "
        "Give a reachable --master-addr and --master-port (or --rdzv-endpoint)."
    )


REFUSED_S = 1.0  # a rank whose port has refused connections for this long has ended
_AGAIN_S = 0.2


def connect_to_all(
    connections: ConnectionManager, table: Table, mine: Collection[int], timeout_s: float
) -> dict[int, str]:
    """Connect to all other ranks of a table.

    When a run begins, a rank connects to the lower ranks and waits for the higher ones to connect. A joiner connects to
    all ranks that answer.

    Args:
        connections: the connections of this rank.
        table: the entries of all ranks.
        mine: the ranks of this replica; a joiner's are all new processes.
        timeout_s: time limit for ranks whose ports do not refuse connections.

    Returns:
        A mapping from each rank that was not reached to the reason.

    Raises:
        RendezvousError: if a joiner can't reach a rank whose process has not ended.
    """

    def unreached() -> str:
        ranks = sorted(table.entries.keys() - {connections.rank} - connections.connected)
        return f"rank {', '.join(f'{rank} ({table.entries[rank].address})' for rank in ranks)}"

    with waiting_for(unreached, timeout_s):
        return connections.call(_connect_to_all(connections, table, mine, timeout_s))


async def _connect_to_all(
    connections: ConnectionManager, table: Table, mine: Collection[int], timeout_s: float
) -> dict[int, str]:
    loop, me, lacking = asyncio.get_running_loop(), connections.rank, dict[int, str]()
    began_s = loop.time()

    async def one(rank: int) -> None:
        address, why, refused_s = parse_address(table.entries[rank].address), "no answer", math.inf
        is_new = table.running and rank in mine  # it may not listen yet
        backoff = Backoff(_AGAIN_S, 5 * _AGAIN_S, seed=f"{me} {rank}")
        dials_me = rank > me and (is_new or not table.running)
        refused_for_s = math.inf if is_new else 0.0 if table.running else REFUSED_S
        while (waited_s := loop.time() - began_s) < timeout_s and loop.time() - refused_s <= refused_for_s:
            if dials_me:
                await _wait_briefly(connections, rank)
            if rank in connections.connected:
                return
            try:
                if dials_me and not is_new:
                    await greet(connections, address, timeout_s - waited_s)
                else:
                    await within(timeout_s - waited_s, connections.connect(rank, address))
                why, refused_s = "it does not connect", math.inf
            except ConnectionRefusedError as error:
                why, refused_s = str(error), min(refused_s, loop.time())
            except (OSError, EOFError, TransportError, TimeoutError) as error:
                why, refused_s = str(error) or type(error).__name__, math.inf
            if rank not in connections.connected:
                await asyncio.sleep(backoff.next_s())
        failed = f"can't reach rank {rank} at"
        if dials_me:
            failed = f"at {connections.address} was not reached by rank {rank} at"
        lacking[rank] = (
            f"rank {me} {failed} {address} within {waited_s:.0f} s: {why}. If that rank has ended, restart all ranks. "
            "Otherwise open its port, or use another network.listen there; `diloco doctor` checks the connection."
        )
        if table.running and loop.time() - refused_s <= refused_for_s:
            raise RendezvousError(lacking[rank], replicas=[rank // len(mine)])

    await asyncio.gather(*(one(rank) for rank in table.entries if rank != me))
    return lacking


async def _wait_briefly(connections: ConnectionManager, rank: int) -> None:
    """Wait a moment for a rank to connect."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_AGAIN_S):
            while rank not in connections.connected:
                connections.arrived.clear()
                await connections.arrived.wait()
