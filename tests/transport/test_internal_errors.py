"""An internal error ends the transport in which it happens, at once and with its reason, and no other."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from typing import Any, cast

import pytest
import torch

from diloco.errors import RoundVoidError, TransportError
from diloco.protocol import Fields, Machine, Timing, actions, events
from diloco.transport import (
    HEAD,
    Address,
    ConnectionManager,
    HostCopies,
    PayloadConnection,
    PayloadExchange,
    PayloadLinks,
    PeerTransport,
    ProtocolRunner,
    ReliableLink,
    SendScheduler,
    TcpStreams,
    in_thread,
)
from tests.transport.connection_managers import LIMIT_S, MakeRank, pair, stranger_at
from tests.transport.contract import contribution
from tests.transport.test_payload_connection import Listening, head_of
from tests.transport.wires import Wires

BAD = 1  # the replica in which the error happens


class Bug(Exception):
    """An error that no code expects."""


Owner = Callable[[Any], int]  # the rank of an object

PLACES: dict[str, tuple[type, str, Owner, Callable[..., bool]]] = {
    "a message": (
        Machine,
        "handle",
        lambda machine: machine.rules.rank,
        lambda event, now_s: isinstance(event, events.Received) and event.message["kind"] == "header",
    ),
    "a contribution": (
        Machine,
        "handle",
        lambda machine: machine.rules.rank,
        lambda event, now_s: isinstance(event, events.Submitted),
    ),
    "an action": (
        ProtocolRunner,
        "_do",
        lambda runner: runner.rules.rank,
        lambda action: isinstance(action, actions.SendMessage) and action.message["kind"] == "header",
    ),
    "the start of an exchange": (
        PayloadExchange,
        "__init__",
        lambda exchange: BAD,
        lambda started, *_: started.contribution.replica == BAD,
    ),
    "the thread of an exchange": (PayloadExchange, "run", lambda exchange: exchange.contribution.replica, lambda: True),
    "the opening of links": (PayloadLinks, "_connected", lambda links: links._rules.rank, lambda *_: True),
    "heartbeats": (ConnectionManager, "drop_silent", lambda manager: manager.rank, lambda ranks: True),
}


def break_at(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a method raise in replica `BAD`."""
    owner, method, rank, condition = PLACES[place]
    before = getattr(owner, method)

    @functools.wraps(before)
    def broken(self: Any, *arguments: Any) -> Any:
        if condition(*arguments) and rank(self) == BAD:
            raise Bug(f"in {place}")
        return before(self, *arguments)

    monkeypatch.setattr(owner, method, broken)


def averaged(transport: PeerTransport, first: int = 0) -> tuple[int, ...]:
    """Contribute until a round is committed, and return its contributors."""
    for outer_step in range(first, first + 20):
        try:
            return transport.average(contribution(transport.replica, outer_step=outer_step)).wait(LIMIT_S).contributors
        except RoundVoidError:
            continue
    raise AssertionError("no round was committed")


@pytest.mark.parametrize("place", [each for each in PLACES if each != "heartbeats"])
def test_an_internal_error_ends_one_transport_at_once_and_the_others_go_on(
    wires: Wires, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Those that wait do not wait for the 30 minutes after which a round would count as forgotten."""
    break_at(place, monkeypatch)
    transports = wires.meet(3, continue_without_lost=True, round_timeout_s=600.0)
    good = [in_thread(functools.partial(averaged, each), "good") for each in transports if each.replica != BAD]
    bad = transports[BAD]
    waiting: list[Future[Any]] = [
        in_thread(lambda: bad.average(contribution(BAD)).wait(), "round"),
        in_thread(lambda: bad.meet("the end", 1), "barrier"),
        in_thread(lambda: bad.agree({"seed": "0"}), "agreement"),
    ]
    for each in waiting:
        with pytest.raises(TransportError, match=rf"rank 1 has ended all .*internal error \(Bug: in {place}\)"):
            each.result(LIMIT_S)
    assert "Bug" in str(bad.failure)
    assert [each.result(LIMIT_S) for each in good] == [(0, 2), (0, 2)]
    for late in (lambda: bad.average(contribution(BAD, outer_step=50)).wait(), lambda: bad.meet("later", 1)):
        with pytest.raises(TransportError, match="Bug"):
            late()


def test_an_error_in_the_loop_of_heartbeats_ends_the_transport_whose_heart_would_stop(
    wires: Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = wires.meet(2, continue_without_lost=True)
    break_at("heartbeats", monkeypatch)
    with pytest.raises(TransportError, match=r"internal error \(Bug: in heartbeats\)"):
        bad.meet("the end", 1)
    assert averaged(good) == (0,)


def test_a_message_over_the_limit_ends_its_own_sender(wires: Wires) -> None:
    first, second = wires.meet(2, continue_without_lost=True)
    with pytest.raises(TransportError, match=r"internal error \(TransportError: a control message of 105\d+ \+"):
        second.agree({str(number): "0" * 4096 for number in range(256)})
    assert averaged(first) == (0,)


def test_actions_after_one_that_raises_are_carried_out(wires: Wires, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the callback of a view change raises, after which the links of the view would be opened."""
    opened: list[int] = []
    before = PayloadLinks.open

    def note(self: Any, view: Any, open_link: Any) -> Any:
        if self._rules.rank == 0:
            opened.append(view.id)
        return before(self, view, open_link)

    def fail(following: Any) -> None:
        raise Bug("in a callback")

    transports = wires.meet(3, continue_without_lost=True)
    monkeypatch.setattr(PayloadLinks, "open", note)
    transports[0].on_change = fail
    transports[2].leave()
    with pytest.raises(TransportError, match=r"internal error \(Bug: in a callback\)"):
        averaged(transports[0])
    assert opened == [1]
    assert averaged(transports[1]) == (1,)


def test_an_error_in_a_callback_of_the_loop_is_fatal_only_if_it_is_ours(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_rank(0)
    told = threading.Event()
    first.connections.on_fault = told.set

    def of_a_library() -> None:
        raise Bug("elsewhere")

    first.connections.post(of_a_library)
    first.settled()
    assert "a task of the connections failed: Bug: elsewhere" in caplog.text
    assert not told.is_set()
    first.connections.post(ReliableLink(SendScheduler(first.connections.loop))._start_next, 5)  # a tag without messages
    assert told.wait(LIMIT_S)
    with pytest.raises(TransportError, match=r"internal error \(KeyError: 5\)"):
        first.connections.call(asyncio.sleep(0))


def test_an_error_in_a_task_ends_what_other_threads_wait_for(make_rank: MakeRank) -> None:
    connections = make_rank(0).connections

    async def fail() -> None:
        raise Bug("in a task")

    async def begin() -> None:
        connections.begin(fail())
        await asyncio.sleep(LIMIT_S)

    with pytest.raises(TransportError, match=r"internal error \(Bug: in a task\)"):
        connections.call(begin(), LIMIT_S)
    began_s = time.monotonic()
    connections.close()
    assert time.monotonic() - began_s < 5.0


def test_an_error_while_a_part_is_stored_ends_its_link_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise Bug("in memory")

    async def listen() -> None:
        link, received = ReliableLink(SendScheduler(asyncio.get_running_loop())), Future[None]()
        link.receive(7, memoryview(bytearray(3)), received)
        connection = PayloadConnection(link, transport := Listening(), 20.0)
        link.add(0, connection)
        connection.begin(b"")
        monkeypatch.setattr(ReliableLink, "arrived", fail)
        transport.hear(connection, HEAD.pack(*head_of(b"abc", total=3)) + b"abc")
        with pytest.raises(TransportError, match="Bug: in memory"):
            received.result(0)

    asyncio.run(listen())


def test_an_error_while_a_payload_is_copied_from_a_gpu_is_reported() -> None:
    class Copied:
        def synchronize(self) -> None:
            raise Bug("on the device")

    copies, errors = HostCopies(), list[BaseException]()
    copies.after(cast(torch.cuda.Event, Copied()), lambda: None, errors.append)
    copies.close()
    assert [str(each) for each in errors] == ["on the device"]


@pytest.mark.parametrize("host", ["x" * 64, "a..b", "\N{SNOWMAN}" * 64])
def test_a_name_that_no_resolver_takes_is_an_unreachable_address(host: str) -> None:
    """A peer may announce it, and an error of another type would count as an internal one."""
    with pytest.raises(OSError, match="is no valid address"):
        asyncio.run(TcpStreams().open(Address(host, 1)))


def test_the_port_of_a_transport_that_an_internal_error_has_ended_refuses_and_can_be_opened_again(
    make_rank: MakeRank,
) -> None:
    """A replica that rejoins listens where the others know it."""
    first = make_rank(0)
    first.connections.post(first.connections.fail, Bug("anywhere"))
    streams = cast(TcpStreams, first.connections.streams)
    while streams._server is not None and streams._server.sockets:
        first.settled()
    with pytest.raises(ConnectionRefusedError):
        stranger_at(first.address)
    with closing(streams.keep()) as again, closing(stranger_at(first.address)):
        assert again.getsockname()[1] == first.address.port


@pytest.mark.parametrize("latency_s", [0.0, 0.05], ids=["at once", "after an emulated latency"])
def test_a_malformed_message_costs_its_sender_the_connection_and_nobody_else(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch, latency_s: float
) -> None:
    first, second = pair(make_rank, Timing(heartbeat_s=0.1, silence_s=5.0, latency_s=latency_s))
    before = first.connections._on_event

    def refuse(event: events.Event) -> None:
        if isinstance(event, events.Received) and event.message["kind"] == "odd":
            Fields(event.message).integer("step")
        before(event)

    monkeypatch.setattr(first.connections, "_on_event", refuse)
    second.say(0, {"kind": "odd"})
    rank, loss = first.losses.get(timeout=LIMIT_S)
    assert rank == 1
    assert "it sent an invalid message: field 'step' is missing" in loss.text
    assert first.connections.fault == second.connections.fault == ""
