"""The hivemind transport: the contract, over real libp2p streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from diloco.transport.base import Transport
from tests.transport.contract import MakeEndpoints, TransportContract
from tests.transport.swarms import Swarms


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Private keys, which take a second each to make."""
    return tmp_path_factory.mktemp("keys")


@pytest.fixture
def swarms(keys: Path) -> Iterator[Swarms]:
    made = Swarms(keys)
    yield made
    made.close()


class TestHivemindContract(TransportContract):
    @pytest.fixture
    def make_endpoints(self, swarms: Swarms) -> MakeEndpoints:
        def make(num_replicas: int) -> Sequence[Transport]:
            return swarms.meet(num_replicas)

        return make
