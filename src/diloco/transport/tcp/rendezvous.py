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
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Annotated, Any

from msgspec import Meta

from diloco.errors import RendezvousError, TransportError
from diloco.membership import Ranks, Words
from diloco.protocol import Entries, Entry, Refused, Registry, WireMessage
from diloco.transport.address import Address, parse_address
from diloco.transport.connections.connection_manager import ConnectionManager
from diloco.transport.connections.control_connection import Who
from diloco.transport.connections.limits import Backoff
from diloco.transport.connections.streams import MAX_MESSAGE_BYTES, Streams, pack, read_frame, within
from diloco.transport.peers.connected import Table
from diloco.transport.secret import TurnedAwayError
from diloco.units import visible
from diloco.waiting import waiting_for

__all__ = ["ask", "cause", "connect_to_all", "greet", "question", "serve", "share_text"]


_LONGEST_S = 30 * 86_400.0
_ANSWER_S = 5.0
_MOST_REASON = 500
_MOST_UNANSWERED = 3  # unanswered greetings after which the program at the address can't be a diloco
TELL_EVERY_S = 1.5  # how often waiting ranks are sent the missing ranks; less than the delay before they print them


class Register(WireMessage):
    """A rank registers."""

    entry: Entry
    patience_s: Annotated[float, Meta(ge=0.0, le=_LONGEST_S)]
    tell: bool = False  # whether it is to be told, while it waits, which ranks are missing


class Missing(WireMessage):
    """Some ranks are still missing."""

    missing: Ranks
    refused: Annotated[tuple[Words, ...], Meta(max_length=1)]  # why the last one was refused that did not fit
    final: bool  # whether the receiver has waited for as long as it wanted to


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
    begun = asyncio.Event()
    waiting: dict[int, asyncio.Future[WireMessage]] = {}
    refusals: list[str] = []  # why ranks were refused; the last one is what the others learn

    async def register(asked: Register, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        entry, patience_s = asked.entry, asked.patience_s
        parse_address(entry.address)  # all others would fail at it
        if host not in (None, entry.rank):
            await asyncio.wait_for(begun.wait(), patience_s)
        was_running = registry.running
        try:
            registry.register(entry)
            begun.set()
        except RendezvousError as error:
            refusals[:] = [str(error)]
            writer.write(pack(Refused(str(error))))
            await writer.drain()
            return
        if not was_running and not registry.complete:
            future: asyncio.Future[WireMessage] = asyncio.get_running_loop().create_future()
            waiting[entry.rank] = future
            leaving = asyncio.ensure_future(reader.read(1))
            leaving.add_done_callback(lambda _: future.done() or future.cancel())
            telling = asyncio.ensure_future(_tell_missing(registry, refusals, writer)) if asked.tell else None
            await asyncio.wait([future], timeout=patience_s)
            waiting.pop(entry.rank, None)
            leaving.cancel()
            if telling is not None:
                telling.cancel()
            if future.cancelled() or not future.done():
                registry.withdraw(entry.rank)
            if future.cancelled():
                return
            missing = tuple(rank for rank in registry.missing if rank != entry.rank)
            answer: WireMessage = Missing(missing, tuple(refusals), final=True)
            if future.done():
                answer = future.result()
        else:
            answer = _table(registry, was_running)
            if not was_running:
                for future in waiting.values():
                    if not future.done():
                        future.set_result(answer)
        with contextlib.suppress(OSError):
            writer.write(pack(answer))
            await writer.drain()

    connections.services[Register] = register


async def _tell_missing(registry: Registry, refusals: Sequence[str], writer: asyncio.StreamWriter) -> None:
    """Send a waiting rank the missing ranks from time to time."""
    while True:
        await asyncio.sleep(TELL_EVERY_S)
        writer.write(pack(Missing(registry.missing, tuple(refusals), final=False)))


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
    missing: list[str] = []
    with waiting_for(lambda: missing[-1] if missing else f"an answer at the rendezvous {address}", timeout_s):
        return connections.call(_ask(connections.streams, address, entry, timeout_s, answer_s, missing))


async def _ask(
    streams: Streams, address: Address, entry: Entry, timeout_s: float, answer_s: float, missing: list[str]
) -> Table:
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    attempts, unanswered, why = 0, 0, ""
    backoff = Backoff(0.25, 1.0, seed=f"{entry.rank} {entry.address}")
    while (left_s := deadline_s - asyncio.get_running_loop().time()) > 0:
        attempts += 1
        try:
            await greet(streams, address, min(left_s, answer_s))
            left_s = max(0.0, deadline_s - asyncio.get_running_loop().time())
            answer = await within(left_s, _register(streams, address, entry, min(0.9 * left_s, _LONGEST_S), missing))
            if isinstance(answer, Refused):
                raise RendezvousError(answer.reason)
            if isinstance(answer, Missing):
                raise RendezvousError(
                    f"rank {entry.rank} waited {timeout_s:g} s at {address} for {_ranks(answer)}{_refused(answer)}. "
                    "Start the missing ranks, or choose a longer network.round_timeout, of which this is half."
                )
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
            why, unanswered = "no answer", unanswered + 1
            if unanswered == _MOST_UNANSWERED:
                raise _another_program(entry.rank, address, "does not answer") from None
        except (OSError, EOFError) as error:
            why = str(error) or type(error).__name__
        except RendezvousError:
            raise
        except (TransportError, ValueError) as error:
            raise _another_program(entry.rank, address, f"did not answer as a diloco does ({cause(error)})") from error
        await asyncio.sleep(min(backoff.next_s(), max(0.0, deadline_s - asyncio.get_running_loop().time())))
    raise RendezvousError(
        f"rank {entry.rank} found no rendezvous at {address} within {timeout_s:g} s ({attempts} attempts): {why}. "
        "Start replica 0 there, open that port, or, to join a running training, give the address of any of its "
        "replicas."
    )


def _another_program(rank: int, address: Address, behaviour: str) -> RendezvousError:
    return RendezvousError(
        f"rank {rank} found no rendezvous at {address}: port {address.port} there is in use by another program, which "
        f"{behaviour}. Choose another port, the same for all replicas (--join {address.host}:PORT), or end that "
        "program."
    )


def cause(error: Exception) -> str:
    """Return the message of an error about received data, without its sentence about the connection."""
    return str(error).partition(". The connection")[0]


async def greet(streams: Streams, address: Address, timeout_s: float) -> None:
    """Check that the program at ``address`` is a diloco.

    Raises:
        TransportError: if it is another program.
        TurnedAwayError: if it has another secret.
        TimeoutError: if it does not answer.
        OSError, EOFError: if nothing listens there, or the connection is closed.
    """
    await within(timeout_s, question(streams, address, Who(), Who))


async def question(streams: Streams, address: Address, message: WireMessage, expected: Any) -> Any:
    """Send ``message`` to ``address`` over a new connection and return the answer; raise the errors of `greet`."""
    reader, writer = await streams.open(address)
    try:
        writer.write(pack(message))
        answer, _ = await read_frame(reader, expected, MAX_MESSAGE_BYTES)
        return answer
    finally:
        writer.close()


async def _register(
    streams: Streams, address: Address, entry: Entry, patience_s: float, missing: list[str]
) -> RankTable | Missing | Refused:
    """Register and return the answer; while waiting, set ``missing`` to a text that names the missing ranks."""
    reader, writer = await streams.open(address)
    try:
        writer.write(pack(Register(entry, patience_s, tell=True)))
        await writer.drain()
        while True:
            answer, _ = await read_frame(reader, RankTable | Missing | Refused, MAX_MESSAGE_BYTES)
            if not isinstance(answer, Missing) or answer.final:
                return answer  # type: ignore[no-any-return]  # one of these types
            missing[:] = [f"{_ranks(answer)} at the rendezvous {address}{_refused(answer)}"]
    finally:
        writer.close()


def _ranks(answer: Missing) -> str:
    """Return the missing ranks as text."""
    return f"rank {', '.join(map(str, answer.missing))}"


def _refused(answer: Missing) -> str:
    """Return why the last rank was refused that came, as a text in brackets; "" if none was."""
    return "".join(
        f" (one was refused: {visible(each.removesuffix('.'), _MOST_REASON)})" for each in answer.refused[:1]
    )


def _table(registry: Registry, running: bool) -> RankTable:
    return RankTable(Entries.of(registry.entries[rank] for rank in sorted(registry.entries)), running)


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
                    await greet(connections.streams, address, timeout_s - waited_s)
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
