"""Connecting a rank to all others of a table, some of which may have ended or fallen silent since it was made."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Collection

from diloco.errors import RendezvousError, TransportError
from diloco.transport.address import parse_address
from diloco.transport.connections.connection_manager import ConnectionManager
from diloco.transport.connections.streams import within
from diloco.transport.peers.connected import Table
from diloco.transport.torch_distributed.rendezvous import greet
from diloco.waiting import waiting_for

__all__ = ["reach"]

REFUSED_S = 1.0  # nobody listens there any more where a port has refused for so long
_AGAIN_S = 0.2


def reach(connections: ConnectionManager, table: Table, mine: Collection[int], timeout_s: float) -> dict[int, str]:
    """Connect to all lower ranks and let the higher ones come, or, as a joiner, connect to all others that answer.

    Args:
        mine: ranks of this replica; those of a joiner are all started anew.
        timeout_s: for those whose ports don't refuse.

    Returns:
        Rank -> why it was not reached, in words.

    Raises:
        RendezvousError: as a joiner, of one whose process has not ended.
    """

    def unreached() -> str:
        ranks = sorted(table.entries.keys() - {connections.rank} - connections.connected)
        return f"rank {', '.join(f'{rank} ({table.entries[rank].address})' for rank in ranks)}"

    with waiting_for(unreached, timeout_s):
        return connections.call(_reach_all(connections, table, mine, timeout_s))


async def _reach_all(
    connections: ConnectionManager, table: Table, mine: Collection[int], timeout_s: float
) -> dict[int, str]:
    loop, me, lacking = asyncio.get_running_loop(), connections.rank, dict[int, str]()
    began_s = loop.time()

    async def one(rank: int) -> None:
        address, why, refused_s = parse_address(table.entries[rank].address), "no answer", math.inf
        is_new = table.running and rank in mine  # maybe it is still to say where
        comes = rank > me and (is_new or not table.running)
        refused_for_s = math.inf if is_new else 0.0 if table.running else REFUSED_S
        while (waited_s := loop.time() - began_s) < timeout_s and loop.time() - refused_s <= refused_for_s:
            if comes:
                await _comes(connections, rank)
            if rank in connections.connected:
                return
            try:
                if comes and not is_new:
                    await greet(connections.streams, address, timeout_s - waited_s)
                else:
                    await within(timeout_s - waited_s, connections.connect(rank, address))
                why, refused_s = "it does not connect", math.inf
            except ConnectionRefusedError as error:
                why, refused_s = str(error), min(refused_s, loop.time())
            except (OSError, EOFError, TransportError, TimeoutError) as error:
                why, refused_s = str(error) or type(error).__name__, math.inf
            if rank not in connections.connected:
                await asyncio.sleep(_AGAIN_S)
        way = f"at {connections.address} was not reached by rank {rank} at" if comes else f"can't reach rank {rank} at"
        lacking[rank] = (
            f"rank {me} {way} {address} within {waited_s:.0f} s: {why}. If it has ended, start all again; else open "
            "that port, or use another transport.host or transport.ports there; `diloco doctor` checks the way."
        )
        if table.running and loop.time() - refused_s <= refused_for_s:
            raise RendezvousError(lacking[rank], replicas=[rank // len(mine)])

    await asyncio.gather(*(one(rank) for rank in table.entries if rank != me))
    return lacking


async def _comes(connections: ConnectionManager, rank: int) -> None:
    """Wait for a rank to connect, but not for long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_AGAIN_S):
            while rank not in connections.connected:
                connections.arrived.clear()
                await connections.arrived.wait()
