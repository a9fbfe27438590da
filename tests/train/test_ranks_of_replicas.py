"""Two replicas of two ranks each, over real connections, equal two replicas of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diloco.transport import (
    Address,
    InProcessTransport,
    LeaderTransport,
    PeerTransport,
    Place,
    ReplicaGroup,
    TcpWire,
    connect,
)
from tests.processes import Processes
from tests.train.ranks import STEPS, Rank, Setup, largest_difference, open_group, unequal
from tests.transport.wires import QUICK, at_once, rendezvous

PATIENT = QUICK | {"round_timeout_s": 300.0, "silence_s": 300.0, "rendezvous_timeout_s": 300.0}
"""A machine with few cores may stall for a while when four processes start."""


def result_of(rank: Rank) -> dict[str, Any]:
    losses, norms = rank.train(STEPS)
    rank.diloco.drain()
    outer = rank.diloco.outer_loop
    return {
        "losses": losses,
        "norms": norms,
        "committed": rank.diloco.rounds_committed,
        "sent": rank.diloco.transport.sent_bytes,
        "digests": [outer.digest(fragment.index) for fragment in rank.diloco.fragments],
        "values": rank.values(),
    }


def connected(place: Place) -> PeerTransport:
    return connect(place, TcpWire(**PATIENT)).transport


def rank_of_two_replicas(rank: int, strategy: Any, address: Address, folder: Path) -> dict[str, Any]:
    replica, position = divmod(rank, 2)
    setup = Setup(strategy=strategy, size=2, codec="float32")
    group = open_group(setup, position, folder, replica=replica)
    if strategy == "fsdp":  # each rank averages its shards
        way_out = connected(
            Place(replica=replica, num_replicas=2, position=position, ranks_per_replica=2, rendezvous=address)
        )
        transport: Any = way_out
    else:  # position 0 averages for both
        leads = group.leads
        way_out = connected(Place(replica=replica, num_replicas=2, rendezvous=address)) if leads else None
        transport = LeaderTransport(group, way_out)
    result = result_of(Rank(setup, group, transport=transport, replica=replica))
    if way_out is not None:
        way_out.meet("finished", 0)
        way_out.close()
    group.close()
    return result


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Any]]:
    """Return the results of two replicas of one rank each."""
    hub = InProcessTransport(2)
    replicas = [Rank(Setup(), ReplicaGroup(), transport=hub.endpoint(m), replica=m) for m in (0, 1)]
    results = at_once([lambda replica=replica: result_of(replica) for replica in replicas])
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_replicas_of_two_ranks_train_as_replicas_of_one(
    strategy: str, alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    with rendezvous(2 if strategy == "ddp" else 4, 1 if strategy == "ddp" else 2) as address, Processes() as processes:
        processes.start(4, rank_of_two_replicas, strategy, address, tmp_path)
        ranks = processes.results(timeout_s=300)
    for rank, done in ranks.items():
        replica, position = divmod(rank, 2)
        assert done["committed"] == alone[replica]["committed"] == 7
        assert done["losses"] == pytest.approx(alone[replica]["losses"], abs=1e-5)
        assert done["norms"] == pytest.approx(alone[replica]["norms"], rel=1e-5)
        assert largest_difference(done["values"], alone[replica]["values"]) < 1e-5
        assert unequal(done["values"], ranks[2 * replica]["values"]) == [], "the same on all ranks of a replica"
        assert done["digests"] == ranks[position]["digests"], "bit-identical global parameters (invariant 1)"
    sent = [done["sent"] for done in ranks.values()]
    once = alone[0]["sent"]
    if strategy == "ddp":
        assert sent == [once] * 4, "each value crosses the link once, and every rank reports it"
    else:
        assert sent[0] + sent[1] == sent[2] + sent[3] == once
