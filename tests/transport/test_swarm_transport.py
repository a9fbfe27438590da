"""Payloads of a swarm over direct streams and libp2p; the code for the rest of the contract is the same as over TCP."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from diloco.transport import PeerStreams
from tests.transport import contract
from tests.transport.contract import MakeEndpoints
from tests.transport.swarms import HIVEMIND_LEAVES_CONNECTIONS, Swarms

pytestmark = HIVEMIND_LEAVES_CONNECTIONS

FIRSTS = itertools.count(step=30)


@pytest.fixture(scope="class")
def swarm_of(request: pytest.FixtureRequest, keys: Path) -> Iterator[MakeEndpoints]:
    """One swarm of each size for all tests of a class, because a peer takes long to start."""
    swarms, places = Swarms(keys), PeerStreams.places_for_payloads
    with mock.patch.object(PeerStreams, "places_for_payloads", places if request.cls.direct else lambda *_: ()):
        yield cache(swarms.meet)
        swarms.close()
    gc.collect()


class SharedSwarms(contract.PayloadContract):
    @pytest.fixture
    def make_endpoints(self, swarm_of: MakeEndpoints, monkeypatch: pytest.MonkeyPatch) -> MakeEndpoints:
        monkeypatch.setattr(contract, "FIRST", next(FIRSTS))
        return swarm_of

    @pytest.mark.parametrize("num_replicas", [2, 3])  # a lone replica sends nothing
    def test_every_replica_gets_the_same_weighted_mean(self, make_endpoints: MakeEndpoints, num_replicas: int) -> None:
        super().test_every_replica_gets_the_same_weighted_mean(make_endpoints, num_replicas)


class TestDirectStreamsContract(SharedSwarms):
    direct = True


class TestLibp2pStreamsContract(SharedSwarms):
    direct = False
