"""`connect_swarm`: replicas with a training loop of their own that find each other by the name of a run."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diloco import DiLoCo, SyncSchedule, connect_swarm
from diloco.errors import RendezvousError
from diloco.transport import NodePlace, PeerStatus, PeerTransport, new_secret
from tests.transport.swarms import HIVEMIND_LEAVES_CONNECTIONS, LOOPBACK, QUICK
from tests.transport.wires import at_once

pytestmark = HIVEMIND_LEAVES_CONNECTIONS

SECRET = new_secret()


def peer(keys: Path, number: int, join_at: Sequence[str] = (), **others: Any) -> AbstractContextManager[PeerTransport]:
    given: dict[str, Any] = {
        "run": "ours",
        "num_replicas": 2,
        "replica": number,
        "identity": keys / f"{number}.key",
        "join_at": join_at,
        "on_address": lambda _: None,
        "node": NodePlace(listen=LOOPBACK, map_ports=False),
        "secret": SECRET,
    }
    return connect_swarm(**(given | QUICK | others))


def test_two_find_each_other_and_train_and_nobody_comes_later(keys: Path) -> None:
    told: queue.Queue[str] = queue.Queue()

    def train(number: int, way_in: AbstractContextManager[PeerTransport]) -> tuple[int, str]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with way_in as transport:
            with DiLoCo(model, optimizer, transport=transport, schedule=SyncSchedule(inner_steps=2)) as diloco:
                for _ in range(4):
                    model(torch.full((1, 2), 1.0 + number)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    diloco.step()
            status = getattr(transport.on_report, "__self__", None)
            assert isinstance(status, PeerStatus), "what `diloco watch --run` asks for"
            told_of = status.message(transport, "ours", "float32", since=0)
            assert told_of["state"] == "training"
            assert sum(record["event"] == "RoundCommitted" for record in told_of["events"]) == 2
            if number == 1:
                with pytest.raises(RendezvousError), peer(keys, 2, [address], rendezvous_timeout_s=1.0):
                    pass
            transport.meet("seen", 0)
        return diloco.rounds_committed, diloco.fragments[0].state.digest()

    def first() -> tuple[int, str]:
        return train(0, peer(keys, 0, on_address=told.put))

    def second() -> tuple[int, str]:
        nonlocal address
        address = told.get(timeout=60.0)
        return train(1, peer(keys, 1, [address]))

    address = ""
    results = at_once([first, second])
    assert results[0] == results[1], results
    assert results[0][0] == 2


def test_who_waits_for_others_in_vain_says_so(keys: Path) -> None:
    with (
        pytest.raises(RendezvousError, match=r"1 of 2 replicas joined within 0\.5 s"),
        peer(keys, 0, rendezvous_timeout_s=0.5),
    ):
        pass
