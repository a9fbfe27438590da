"""The transport over TCP: the contract, speeds of members, closing, and internal errors, which end it and no other."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from diloco.algorithm import Contribution, SendersMean, make_codec
from diloco.errors import RoundVoidError, TransportError
from diloco.protocol import Entry, Store
from diloco.transport import PeerTransport, Transport
from diloco.waiting import in_thread
from tests.gpus import Cuda, on_gpu
from tests.transport.contract import MakeEndpoints, TransportContract, check_void, contribution, exchange
from tests.transport.relays import stranger_at
from tests.transport.wires import LIMIT_S, Wires, at_once, wait_for_members


class TestTcpContract(TransportContract):
    @pytest.fixture
    def make_endpoints(self, wires: Wires) -> MakeEndpoints:
        def make(num_replicas: int) -> Sequence[Transport]:
            return wires.meet(num_replicas)

        return make


def test_a_sum_in_other_memory_than_the_mean_has_the_same_bits(wires: Wires, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: a device with an index has memory of its own."""
    average, elsewhere = PeerTransport.average, torch.device("cpu", 0)
    monkeypatch.setattr(PeerTransport, "average", lambda self, given: average(self, replace(given, device=elsewhere)))
    contract = TransportContract()
    contract.test_every_replica_gets_the_same_weighted_mean(wires.meet, 3)
    contract.test_encoded_means_are_the_bits_of_the_pure_function_round_after_round(wires.meet)
    contract.test_clipping_and_rules_give_every_replica_the_bits_of_the_pure_function(wires.meet, SendersMean())


def test_members_hear_each_others_speeds_and_forget_who_leaves(wires: Wires) -> None:
    first, _, third = transports = wires.meet(3, continue_without_lost=True)
    for number, transport in enumerate(transports):
        transport.announce_speed(1.5 + number)
    at_once([each.finish for each in transports])  # messages of a connection keep their order
    assert first.speeds() == {1: 2.5, 2: 3.5}
    third.leave()
    wait_for_members(first, 2)
    assert first.speeds() == {1: 2.5}


# Closing.


def test_closing_wakes_all_that_wait_and_what_comes_afterwards_is_refused(
    wires: Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other replica is silent: it contributes nothing, enters no barrier, and never publishes its state."""
    transport, other = wires.meet(2)
    asked, ready = threading.Event(), threading.Event()
    other.publish(lambda fragment: {"ready": asked.set() or ready.wait()})
    waiting = [
        in_thread(transport.average(contribution(0)).wait, "waiting"),
        in_thread(transport.finish, "waiting"),
        in_thread(lambda: transport.agree({"seed": "0"}), "waiting"),
        transport.fetch(0, [1]),
    ]
    assert asked.wait(20)
    # the control thread never processes what is submitted while it ends
    monkeypatch.setattr(transport.connections, "post", lambda *call: None)
    waiting.append(in_thread(transport.average(contribution(0, fragment=1)).wait, "waiting"))
    try:
        transport.close()
        for each in waiting:
            with pytest.raises(TransportError, match="closed"):
                each.result(10)
    finally:
        ready.set()
    transport.close()
    assert not any(thread.name == "diloco-control-0" for thread in threading.enumerate())
    for late in (lambda: transport.average(contribution(0, outer_step=1)), transport.finish):
        with pytest.raises(TransportError, match="has closed its transport"):
            late()


def test_a_call_that_comes_at_the_last_moment_ends_too(wires: Wires, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was put to a loop that ran no more, and waited for ever."""
    (transport,) = wires.meet(1)
    connections, calls = transport.connections, list[Future[None]]()
    close = connections.loop.close

    def close_after_a_call() -> None:
        calls.append(in_thread(lambda: connections.call(asyncio.sleep(0)), "calling"))
        with suppress(TimeoutError):
            calls[0].result(0.2)
        close()

    monkeypatch.setattr(connections.loop, "close", close_after_a_call)
    transport.close()
    with pytest.raises(TransportError, match="are closed"):
        calls[0].result(10)


# Internal errors.


BAD = 1  # the replica in which the error happens


class Bug(Exception):
    """An error that no code expects."""


def fail(*_: Any) -> Any:
    raise Bug("in a method")


def broken(method: str) -> Contribution:
    """Return a contribution whose codec has a defect."""
    codec, given = make_codec("float32"), contribution(BAD)
    setattr(codec, method, fail)
    return replace(given, codec=codec)


def averaged(transport: PeerTransport) -> tuple[int, ...]:
    """Contribute until a round is committed, and return its contributors."""
    for outer_step in range(20):
        try:
            return transport.average(contribution(transport.replica, outer_step=outer_step)).wait().contributors
        except RoundVoidError:
            continue
    raise AssertionError("no round was committed")


def test_an_internal_error_ends_one_transport_at_once_and_the_others_go_on(wires: Wires) -> None:
    """Those that wait do not wait for the 30 minutes after which a round would count as forgotten."""
    transports = wires.meet(3, continue_without_lost=True, round_timeout_s=600.0)
    good = [in_thread(functools.partial(averaged, each), "round") for each in transports if each.replica != BAD]
    bad = transports[BAD]
    waiting: list[Future[Any]] = [
        in_thread(lambda: bad.average(broken("payload_bytes")).wait(), "waiting"),
        in_thread(bad.finish, "waiting"),
        in_thread(lambda: bad.agree({"seed": "0"}), "waiting"),
    ]
    for each in waiting:
        with pytest.raises(TransportError, match=r"rank 1 has ended all .*internal error \(Bug: in a method\)"):
            each.result(LIMIT_S)
    assert "Bug" in str(bad.failure)
    assert [each.result(LIMIT_S) for each in good] == [(0, 2), (0, 2)]
    for late in (lambda: bad.average(contribution(BAD, outer_step=50)).wait(), bad.finish):
        with pytest.raises(TransportError, match="Bug"):
            late()


@pytest.mark.parametrize("method", ["accumulate", "cut"])
def test_an_error_in_an_exchange_makes_the_round_void_for_all_with_its_reason(wires: Wires, method: str) -> None:
    transports = wires.meet(2)
    check_void(transports, [contribution(0), broken(method)], "in a method")
    exchange(transports, [contribution(m, outer_step=1) for m in range(2)])


def test_an_error_in_a_callback_or_a_message_over_the_limit_ends_its_own_transport_only(
    wires: Wires,
) -> None:
    first, second, third = wires.meet(3, on_change={0: fail}, continue_without_lost=True)
    with pytest.raises(TransportError, match=r"internal error \(TransportError: a control message of 105\d+ bytes"):
        third.ask_to_join(Entry(2, "", places=("0" * 4096,) * 257), 20.0)
    with pytest.raises(TransportError, match=r"internal error \(Bug: in a method\)"):
        averaged(first)
    assert averaged(second) == (1,)
    with pytest.raises(ConnectionRefusedError), closing(stranger_at(first.address)):
        pass


def test_an_error_of_this_process_about_what_another_one_has_sent_is_not_the_others(wires: Wires) -> None:
    """It was lost, one member after the other, if the disk was full, say."""

    def is_full(rank: int, value: bytes) -> None:
        raise OSError("no space is left")

    first, second = wires.meet(2, continue_without_lost=True)
    first.connections.receivers["order"] = is_full
    second.connections.post(second.connections.send, 0, Store("order", b""))
    with pytest.raises(TransportError, match=r"internal error \(OSError: no space is left\)"):
        averaged(first)


def test_an_error_of_who_takes_the_mean_voids_the_round_and_is_named(wires: Wires) -> None:
    first, second = wires.meet(2)
    pending = first.average(contribution(0), on_mean=fail), second.average(contribution(1))
    for each in pending:
        with pytest.raises(RoundVoidError, match="in a method"):
            each.wait()


def test_a_payload_is_copied_on_a_stream_of_its_own_gpu(wires: Wires, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy runs on the stream of its source: an event of another GPU's stream would come too early."""
    cuda, empty = Cuda().install(monkeypatch), torch.empty
    monkeypatch.setattr(Cuda, "synchronize", lambda event: None, raising=False)
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **kind: empty(*shape, **kind))
    transports = wires.meet(2)
    for outer_step, index in enumerate((1, 0, 1)):
        given = [contribution(m, outer_step=outer_step) for m in range(2)]
        given[0] = replace(given[0], payload=on_gpu(given[0].payload, index))
        averages = exchange(transports, given)
        assert torch.equal(averages[0].values, averages[1].values)
        assert {place for _, place in cuda.log} == {torch.device("cuda", index)}
        assert [what for what, _ in cuda.log][:3] == ["follows", "copies in", "marks"]
        cuda.log.clear()
    monkeypatch.setattr(Cuda, "synchronize", fail)
    given = contribution(0, outer_step=4)
    with pytest.raises(TransportError, match="Bug"):
        transports[0].average(replace(given, payload=on_gpu(given.payload, 0))).wait()
