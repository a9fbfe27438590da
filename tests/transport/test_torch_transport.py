"""The torch.distributed transport: the contract, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from diloco.transport.base import Transport
from diloco.transport.tcp import congestion_control, streams_to_each
from tests.transport.contract import MakeEndpoints, TransportContract, contribution, exchange
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


def test_payloads_may_take_another_interface(wires: Wires) -> None:
    transports = wires.meet(2, interface="lo")
    averages = exchange(transports, [contribution(m) for m in range(2)])
    assert averages[0].contributors == (0, 1)
    assert all(entry.places != (entry.address,) for each in transports for entry in each.known_entries())


def test_a_replica_that_loss_slows_down_opens_more_streams() -> None:
    assert congestion_control() in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    for others in (1, 2, 4):
        assert streams_to_each(others, "bbr") * others == 4
        assert streams_to_each(others, "cubic") == streams_to_each(others, "") == 4 * streams_to_each(others, "bbr")
