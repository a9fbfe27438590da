"""The torch transport: the contract over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from diloco.errors import ReplicaLostError, RoundVoidError, TransportError
from diloco.transport import Transport, congestion_control, in_thread, streams_to_each
from tests.transport.contract import MakeEndpoints, TransportContract, contribution, exchange
from tests.transport.wires import Wires


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


def test_whose_values_spoil_three_means_is_put_out(wires: Wires) -> None:
    """Each other replica notices the fault in its own exchange; in this test all stop when one is lost."""
    transports = wires.meet(3)

    def contribute() -> None:
        for outer_step in range(9):
            given = [contribution(m, outer_step=outer_step, scale=1e37 if m == 1 else 1.0) for m in range(3)]
            for each in [transport.average(one) for transport, one in zip(transports, given, strict=True)]:
                with suppress(RoundVoidError):
                    each.wait()

    with pytest.raises(ReplicaLostError, match="replica 1 has spoilt at least 3 recent rounds: the mean has values up"):
        contribute()


def test_closing_wakes_all_that_wait_and_what_comes_afterwards_is_refused(
    wires: Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other replica is silent: it contributes nothing, enters no barrier, and never publishes its state."""
    transport, other = wires.meet(2)
    asked, ready = threading.Event(), threading.Event()
    other.publish(lambda fragment: {"ready": asked.set() or ready.wait()})
    waiting = [
        in_thread(transport.average(contribution(0)).wait, "round"),
        in_thread(lambda: transport.meet("the end", 1), "barrier"),
        in_thread(lambda: transport.agree({"seed": "0"}), "agreement"),
        transport.fetch_in_background(0, [1]),
    ]
    assert asked.wait(20)
    # the control thread never processes what is submitted while it ends
    monkeypatch.setattr(transport.connections, "post", lambda *call: None)
    waiting.append(in_thread(transport.average(contribution(0, fragment=1)).wait, "late"))
    try:
        transport.close()
        for each in waiting:
            with pytest.raises(TransportError, match="closed"):
                each.result(10)
    finally:
        ready.set()
    for late in (lambda: transport.average(contribution(0, outer_step=1)), lambda: transport.meet("later", 1)):
        with pytest.raises(TransportError, match="has closed its transport"):
            late()


def test_a_replica_that_loss_slows_down_opens_more_streams() -> None:
    assert congestion_control() in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    for others in (1, 2, 4):
        assert streams_to_each(others, "bbr") * others == 4
        assert streams_to_each(others, "cubic") == streams_to_each(others, "") == 4 * streams_to_each(others, "bbr")
