"""An internal error ends the transport in which it happens, at once and with its reason, and no other."""

from __future__ import annotations

import functools
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from diloco.algorithm import Contribution, make_codec
from diloco.errors import RoundVoidError, TransportError
from diloco.transport import PeerTransport
from diloco.waiting import in_thread
from tests.gpus import Cuda, on_gpu
from tests.transport.contract import contribution, exchange
from tests.transport.relays import stranger_at
from tests.transport.wires import Wires

BAD = 1  # the replica in which the error happens
LIMIT_S = 30.0


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
            return transport.average(contribution(transport.replica, outer_step=outer_step)).wait(LIMIT_S).contributors
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
        in_thread(lambda: bad.meet("the end", 1), "waiting"),
        in_thread(lambda: bad.agree({"seed": "0"}), "waiting"),
    ]
    for each in waiting:
        with pytest.raises(TransportError, match=r"rank 1 has ended all .*internal error \(Bug: in a method\)"):
            each.result(LIMIT_S)
    assert "Bug" in str(bad.failure)
    assert [each.result(LIMIT_S) for each in good] == [(0, 2), (0, 2)]
    for late in (lambda: bad.average(contribution(BAD, outer_step=50)).wait(), lambda: bad.meet("later", 1)):
        with pytest.raises(TransportError, match="Bug"):
            late()


@pytest.mark.parametrize("method", ["accumulate", "cut"])
def test_an_error_in_an_exchange_makes_the_round_void_for_all_with_its_reason(wires: Wires, method: str) -> None:
    transports = wires.meet(2)
    pending = [transports[0].average(contribution(0)), transports[1].average(broken(method))]
    for each in pending:
        with pytest.raises(RoundVoidError, match="in a method"):
            each.wait()
    exchange(transports, [contribution(m, outer_step=1) for m in range(2)])


def test_a_message_over_the_limit_ends_its_own_sender(wires: Wires) -> None:
    first, second = wires.meet(2, continue_without_lost=True)
    with pytest.raises(TransportError, match=r"internal error \(TransportError: a control message of 105\d+ \+"):
        second.agree({str(number): "0" * 4096 for number in range(256)})
    assert averaged(first) == (0,)


def test_an_error_in_the_owners_callback_ends_its_transport_and_the_others_go_on(wires: Wires) -> None:
    transports = wires.meet(3, continue_without_lost=True)
    transports[0].on_change = fail
    transports[2].leave()
    with pytest.raises(TransportError, match=r"internal error \(Bug: in a method\)"):
        averaged(transports[0])
    assert averaged(transports[1]) == (1,)
    with pytest.raises(ConnectionRefusedError), closing(stranger_at(transports[0].address)):
        pass


def test_an_error_of_who_takes_the_average_ends_the_wait_for_it(wires: Wires) -> None:
    first, second = wires.meet(2)
    pending = first.average(contribution(0), on_commit=fail), second.average(contribution(1))
    with pytest.raises(TransportError, match=r"internal error \(Bug: in a method\)"):
        pending[0].wait(LIMIT_S)
    assert pending[1].wait(LIMIT_S).contributors == (0, 1)


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
