"""The transport over TCP: the contract, refused contributions, speeds of members, closing, and who sees whom."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest
import torch

from diloco.algorithm import UNKNOWN_UPLINK, Contribution
from diloco.errors import ReplicaLostError, RoundVoidError, TransportError
from diloco.protocol import header_of
from diloco.transport import PeerTransport, Pending, Transport
from diloco.waiting import in_thread
from tests.transport.contract import MakeEndpoints, TransportContract, contribution, exchange
from tests.transport.wires import Wires, at_once

LIMIT_S = 60.0


class TestTcpContract(TransportContract):
    @pytest.fixture
    def make_endpoints(self, wires: Wires) -> MakeEndpoints:
        def make(num_replicas: int) -> Sequence[Transport]:
            return wires.meet(num_replicas)

        return make


def test_a_sum_in_other_memory_than_the_mean_has_the_same_bits(wires: Wires, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: a device with an index has memory of its own."""

    def make_endpoints(num_replicas: int) -> Sequence[Transport]:
        transports = wires.meet(num_replicas)
        for each in transports:
            elsewhere = partial(_averaged_elsewhere, each.average)
            monkeypatch.setattr(each, "average", elsewhere)
        return transports

    contract = TransportContract()
    contract.test_every_replica_gets_the_same_weighted_mean(make_endpoints, 3)
    contract.test_clipping_gives_every_replica_the_bits_of_the_pure_function(make_endpoints)
    contract.test_encoded_means_are_the_bits_of_the_pure_function_round_after_round(make_endpoints)
    contract.test_the_mean_over_senders_has_the_bits_of_the_pure_function(make_endpoints)


def _averaged_elsewhere(average: Callable[[Contribution], Pending], given: Contribution) -> Pending:
    return average(replace(given, device=torch.device("cpu", 0)))


def say(transport: PeerTransport, to: int, contribution: Any, **fields: Any) -> None:
    """Send a header that nothing follows."""
    header = header_of(contribution, transport.view.id, UNKNOWN_UPLINK, taking_over=False)
    message = msgspec.structs.replace(header, **fields)
    transport.connections.post(transport.connections.send, to, message)


def test_of_two_contributions_the_first_one_stands(wires: Wires) -> None:
    first, second = wires.meet(2)
    pending = second.average(contribution(1))
    say(second, 0, contribution(1), weight=5.0)
    average = first.average(contribution(0)).wait()
    assert torch.equal(average.values, pending.wait().values)
    assert (average.weight, average.note) == (2.0, "")


def test_what_is_left_out_of_a_mean_is_told_of(wires: Wires) -> None:
    transports = wires.meet(3, min_contributors=2)
    given = [contribution(m) for m in range(3)]
    given[1] = replace(given[1], payload=torch.full_like(given[1].payload, 255))
    averages = exchange(transports, given)
    assert {average.contributors for average in averages} == {(0, 2)}
    assert {average.note.partition(":")[0] for average in averages} == {"the contribution of replica 1 was refused"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"numel": 999}, "replica 1 was refused: it holds 999 values instead of 1000 values"),
        ({"buffers": None}, "replica 1 was refused: it holds no floating buffers"),
        ({"weight": 1e19}, "replica 1 was refused: its weight is 1e\\+19"),
        ({"withdrawn": "gradients that are not finite"}, "replica 1 was refused: gradients that are not finite"),
    ],
)
def test_whose_contribution_makes_a_round_void_is_named(wires: Wires, change: dict[str, Any], words: str) -> None:
    transports = wires.meet(3)
    pending = [transports[m].average(contribution(m)) for m in (0, 2)]
    for rank in (0, 2):
        say(transports[1], rank, contribution(1), **change)
    for each in pending:
        with pytest.raises(RoundVoidError, match=words):
            each.wait()


def test_whose_values_spoil_three_means_is_put_out(wires: Wires) -> None:
    """Each replica notices the fault unless another one has before; in this test all stop when one is lost."""
    transports = wires.meet(3)

    def contribute() -> None:
        for outer_step in range(32):  # in some of them the vote of another one comes first
            given = [contribution(m, outer_step=outer_step, scale=1e37 if m == 1 else 1.0) for m in range(3)]
            for each in [transport.average(one) for transport, one in zip(transports, given, strict=True)]:
                with suppress(RoundVoidError):
                    each.wait()

    with pytest.raises(ReplicaLostError, match="replica 1 has spoilt at least 3 recent rounds: the mean has values up"):
        contribute()


# Speeds that members report to each other.


def all_have_heard(transports: Sequence[PeerTransport], name: str) -> None:
    """Wait until all earlier messages have been processed, as the messages of a connection arrive in order."""
    met = at_once([lambda each=each: each.meet(name, 0) for each in transports])
    assert met == [dict.fromkeys(range(len(transports)), 0)] * len(transports)


def next_view_of(transport: PeerTransport) -> threading.Event:
    """Return an event that is set once the transport has adopted a view."""
    adopted = threading.Event()
    transport.on_change = lambda following: adopted.set()
    return adopted


def test_members_hear_each_others_speeds_and_forget_who_leaves(wires: Wires) -> None:
    first, second, third = transports = wires.meet(3, continue_without_lost=True)
    for number, transport in enumerate(transports):
        transport.announce_speed(1.5 + number)
    all_have_heard(transports, "told")
    assert first.speeds() == {1: 2.5, 2: 3.5}
    assert second.speeds() == {0: 1.5, 2: 3.5}
    third.announce_speed(0.25)
    all_have_heard(transports, "told again")
    assert first.speeds() == {1: 2.5, 2: 0.25}
    adopted = next_view_of(first)
    third.leave()
    assert adopted.wait(LIMIT_S)
    assert first.speeds() == {1: 2.5}


@pytest.mark.parametrize("value", [-1.0, "3.0"])
def test_who_tells_a_speed_that_is_none_is_lost_and_named(wires: Wires, value: object) -> None:
    first, second = wires.meet(2, continue_without_lost=True, min_replicas=1)
    adopted = next_view_of(first)
    message: Any = {"kind": "announcement", "topic": "speed", "value": value}
    second.connections.post(second.connections.send, 0, message)
    assert adopted.wait(LIMIT_S)
    assert "replica 1" in first.reason
    assert "at `$.value`" in first.reason
    assert first.speeds() == {}


# Closing, and who sees whom.


def test_closing_wakes_all_that_wait_and_what_comes_afterwards_is_refused(
    wires: Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other replica is silent: it contributes nothing, enters no barrier, and never publishes its state."""
    transport, other = wires.meet(2)
    asked, ready = threading.Event(), threading.Event()
    other.publish(lambda fragment: {"ready": asked.set() or ready.wait()})
    waiting = [
        in_thread(transport.average(contribution(0)).wait, "waiting"),
        in_thread(lambda: transport.meet("the end", 1), "waiting"),
        in_thread(lambda: transport.agree({"seed": "0"}), "waiting"),
        transport.fetch_in_background(0, [1]),
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
    for late in (lambda: transport.average(contribution(0, outer_step=1)), lambda: transport.meet("later", 1)):
        with pytest.raises(TransportError, match="has closed its transport"):
            late()


def test_of_two_that_do_not_see_each_other_the_third_keeps_one(wires: Wires) -> None:
    """A replica that the third has lost can't accuse another one: two of three continue, whichever they are."""
    transports = wires.meet(3, continue_without_lost=True)
    told = [next_view_of(each) for each in transports]
    for mine, other in ((transports[0], 1), (transports[1], 0)):
        mine.connections.post(mine.connections.drop_silent, [other])
    assert told[2].wait(LIMIT_S)
    going = transports[2].view.members
    assert going in ((0, 2), (1, 2))
    assert all(told[number].wait(LIMIT_S) for number in going)
    assert transports[going[0]].view == transports[2].view
    assert transports[2].failure is None
