"""One rank of a replica communicates with the others, and all of its ranks get the same results (invariant 10)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from diloco.algorithm import RoundId, make_codec
from diloco.errors import (
    ConfigurationError,
    DiLoCoError,
    DivergedError,
    ReplicaLostError,
    RoundTimeoutError,
    RoundVoidError,
    TransportError,
)
from diloco.transport import InProcessTransport, LeaderTransport, ReplicaGroup, Transport, open_replica_group
from tests.faults import Fault, FaultyTransport
from tests.processes import Processes
from tests.same import same
from tests.transport.contract import SIZE, MakeEndpoints, TransportContract, contribution


class TestLeaderOfOneRank(TransportContract):
    @pytest.fixture
    def make_endpoints(self) -> MakeEndpoints:
        def make(num_replicas: int) -> Sequence[Transport]:
            hub = InProcessTransport(num_replicas)
            return [LeaderTransport(ReplicaGroup(), hub.endpoint(m)) for m in range(num_replicas)]

        return make


class Replica:
    """Replica 1 of two; its position 0 also plays replica 0, in the same process."""

    def __init__(self, position: int, size: int, folder: Path, **hub: Any) -> None:
        store = dist.FileStore(str(folder / "store"), size)
        self.group = open_replica_group(
            store, replica=1, position=position, size=size, device=torch.device("cpu"), timeout_s=300.0
        )
        self.hub = FaultyTransport(2, **hub) if position == 0 else None
        self.transport = LeaderTransport(self.group, self.hub.endpoint(1) if self.hub else None)

    def other_contributes(self, **fields: Any) -> None:
        if self.hub:
            self.hub.endpoint(0).average(contribution(0, **fields))


def outcome(act: Callable[[], Any]) -> dict[str, Any]:
    """Return everything that an error contains."""
    try:
        act()
    except DiLoCoError as error:
        fields = ("round", "replicas", "donor", "digest")
        return {"class": type(error).__name__, "words": str(error)} | {
            name: getattr(error, name) for name in fields if hasattr(error, name)
        }
    raise AssertionError("nothing was raised")


def rank_hears(position: int, folder: Path) -> dict[str, Any]:
    replica = Replica(
        position, 3, folder, faults=[Fault(kind="drop", round=RoundId(0, 1), replica=0)], round_timeout_s=0.0
    )
    transport = replica.transport
    heard: dict[str, Any] = {"replica": transport.replica, "view": transport.view}

    replica.other_contributes()
    average = transport.average(contribution(1)).wait()
    heard["average"] = vars(average)
    heard["traffic"] = (transport.sent_bytes, transport.received_bytes)

    replica.other_contributes(outer_step=1)
    heard["void"] = outcome(transport.average(contribution(1, outer_step=1)).wait)

    replica.other_contributes(outer_step=2, digest="even")
    pending = transport.average(contribution(1, outer_step=2, digest="odd"))
    heard["diverged"] = outcome(pending.wait)

    heard["nothing published"] = outcome(lambda: transport.fetch(0, [0]).result())
    if replica.hub:
        state = {"global_params": torch.arange(5.0), "outer_step": 7, "slots": {"momentum": torch.ones(5)}, "none": {}}
        replica.hub.endpoint(0).publish(lambda fragment: {"fragment": fragment, **state})
    heard["state"] = transport.fetch(3, [0]).result()

    heard["timeout"] = outcome(transport.average(contribution(1, outer_step=3)).wait)
    heard["twice"] = outcome(lambda: transport.average(contribution(1, outer_step=3)))
    heard["shared"] = transport.shared(lambda leader: [leader.replica, "words"])

    if replica.hub:
        replica.hub.endpoint(0).agree({"codec": "fp4"})
    heard["other arguments"] = outcome(lambda: transport.agree({"codec": "int8"}))

    def fails(leader: Transport) -> None:
        raise KeyError("nobody foresaw it")

    try:
        transport.shared(fails)
    except (KeyError, ReplicaLostError) as error:
        heard["own failure"] = f"{type(error).__name__}: {error}"
    transport.tick()
    transport.publish(lambda fragment: {})
    replica.group.close()
    return heard


def test_all_ranks_hear_what_the_leader_hears(tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(3, rank_hears, tmp_path)
        ranks = processes.results(timeout_s=300)
    leader = ranks[0]
    decoded = [make_codec("float32").decode(contribution(m).payload, SIZE) for m in (0, 1)]
    torch.testing.assert_close(leader["average"]["values"], (decoded[0] + decoded[1]) / 2)
    assert leader["average"]["values"].shape == (SIZE,)
    assert leader["average"]["integers"].tolist() == [0, 7]
    assert leader["average"]["contributors"] == (0, 1)
    assert leader["traffic"] == (4 * SIZE + 10, 4 * SIZE + 10)
    assert leader["replica"] == 1
    assert (leader["diverged"]["class"], leader["diverged"]["donor"]) == (DivergedError.__name__, 0)
    assert leader["diverged"]["replicas"] == (1,)
    assert (leader["void"]["class"], leader["void"]["round"]) == (RoundVoidError.__name__, "fragment 0, outer step 1")
    assert (leader["timeout"]["class"], leader["timeout"]["replicas"]) == (RoundTimeoutError.__name__, (0,))
    assert leader["nothing published"]["class"] == leader["twice"]["class"] == TransportError.__name__
    assert leader["other arguments"]["class"] == ConfigurationError.__name__
    assert (leader["state"]["fragment"], leader["state"]["outer_step"]) == (3, 7)
    assert leader["shared"] == [1, "words"]
    assert leader.pop("own failure").startswith("KeyError")
    for position in (1, 2):
        words = ranks[position].pop("own failure")
        assert words.startswith("ReplicaLostError: Position 0 of replica 1")
        assert "nobody foresaw it" in words
        assert [key for key in leader if not same(leader[key], ranks[position][key])] == []
