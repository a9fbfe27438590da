"""The torch.distributed transport: the contract, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from diloco.transport.base import Transport
from tests.transport.contract import MakeEndpoints, TransportContract
from tests.transport.wires import Wires


@pytest.fixture
def wires() -> Iterator[Wires]:
    made = Wires()
    yield made
    made.close()


class TestTorchContract(TransportContract):
    @pytest.fixture
    def make_endpoints(self, wires: Wires) -> MakeEndpoints:
        def make(num_replicas: int) -> Sequence[Transport]:
            return wires.meet(num_replicas)

        return make
