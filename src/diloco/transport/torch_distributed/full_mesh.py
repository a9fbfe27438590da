"""Connecting a rank to all others in a table, some of which may have failed since the table was made."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Collection

from diloco.errors import RendezvousError, TransportError
from diloco.transport.address import parse_address
from diloco.transport.connections.backoff import Backoff
from diloco.transport.connections.connection_manager import ConnectionManager
from diloco.transport.connections.streams import within
from diloco.transport.peers.connected import Table
from diloco.transport.torch_distributed.rendezvous import greet
from diloco.waiting import waiting_for

__all__ = ["connect_to_all"]

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
