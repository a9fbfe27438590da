"""`SwarmFleet`: replicas of a swarm as a session sees them, on loopback and in one process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diloco.errors import RunOverError
from diloco.train.held import Held
from diloco.train.swarm_fleet import SwarmFleet
from diloco.transport.hivemind.connect import SwarmPlace
from diloco.transport.hivemind.gate import Gate
from diloco.transport.hivemind.node import NodePlace
from diloco.transport.peers.wire import Wire
from tests.transport.swarms import HIVEMIND_LEAVES_CONNECTIONS, LIMIT_S, LOOPBACK, QUICK

pytestmark = HIVEMIND_LEAVES_CONNECTIONS

Make = Callable[..., SwarmFleet]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    fleets: list[SwarmFleet] = []

    def made(number: int, *known: SwarmFleet, run: str = "run", held_step: int = -1) -> SwarmFleet:
        place = SwarmPlace(
            identity=tmp_path / f"{number}.key",
            gate=Gate(run, "", frozenset()),
            node=NodePlace(
                join=tuple(address for each in known for address in each.addresses()), listen=LOOPBACK, map_ports=False
            ),
            replica=number,
            join_window_s=0.5,
        )
        fleets.append(
            SwarmFleet(
                place,
                Wire(**QUICK | {"rendezvous_timeout_s": 15.0}),
                Held(held_step),
                start_replicas=1,
                margin=1,
                batch_size=1,
            )
        )
        return fleets[-1]

    yield made
    for fleet in fleets:
        fleet.transport.close()
    gc.collect()  # what Hivemind leaves open is this test's, not one's that comes later


def test_who_comes_back_lets_others_in_whatever_it_did_when_it_started(make: Make) -> None:
    """Replica 0 is the one that all who come are sent to."""
    first = make(0)
    first.close_to_joiners("")
    second = make(1, first)
    second.close_to_joiners("")
    second.join(LIMIT_S)
    first.transport.leave()
    first.rejoin()
    first.join(LIMIT_S)
    third = make(2, second)
    third.join(10.0)
    assert third.transport.view.members == (0, 1, 2)


def test_who_comes_when_the_others_have_finished_is_told_so_at_once(make: Make) -> None:
    """Also one that comes back; and one who could go on from a checkpoint begins a swarm of its own."""
    standing = make(9, run="another")  # keeps what the network knows
    first = make(0, standing)
    first.close_to_joiners("")
    second = make(1, standing, first)
    second.join(LIMIT_S)
    first.tell_finished()
    first.close()
    second.transport.close()
    with pytest.raises(RunOverError, match="the others have finished run 'run', and nobody of it is left"):
        second.rejoin()
    with pytest.raises(RunOverError):
        make(2, standing)
    assert not make(3, standing, held_step=5).joining
