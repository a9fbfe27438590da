"""Control connections: order, how a loss is noticed and what kind it is, and strangers at the port."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from diloco.errors import TransportError
from diloco.transport.address import Address
from diloco.transport.peers import switchboard
from diloco.transport.peers.frames import MAX_BLOB_BYTES, pack, read_frame
from diloco.transport.peers.liveness import Loss, Timing
from diloco.transport.peers.switchboard import Switchboard
from diloco.transport.torch_distributed.tcp_streams import TcpStreams
from tests.processes import Processes, report, told

QUICK = Timing(heartbeat_s=0.1, silence_s=1.0)
LIMIT_S = 30.0


class Rank:
    """A switchboard that remembers what it is told."""

    def __init__(self, rank: int, timing: Timing = QUICK) -> None:
        self.heard: queue.Queue[tuple[int, dict[str, Any], bytes, float]] = queue.Queue()
        self.losses: queue.Queue[tuple[int, Loss]] = queue.Queue()
        self.board = Switchboard(
            rank,
            timing,
            lambda sender, message, blob: self.heard.put((sender, message, blob, time.monotonic())),
            lambda other, loss: self.losses.put((other, loss)),
            TcpStreams(),
        )
        self.address = self.board.listen("127.0.0.1", range(1), "127.0.0.1")

    def reach(self, other: Rank) -> None:
        self.board.call(self.board.connect(other.board.rank, other.address), LIMIT_S)
        other.settled()  # it answers first and remembers the connection then

    def say(self, other: int, message: dict[str, Any], blob: bytes = b"") -> None:
        self.board.post(self.board.send, other, message, blob)

    def settled(self) -> None:
        """Afterwards everything that was posted before has been done."""
        done = threading.Event()
        self.board.post(done.set)
        assert done.wait(LIMIT_S)


@pytest.fixture
def make() -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def one(*arguments: Any) -> Rank:
        made.append(Rank(*arguments))
        return made[-1]

    yield one
    for each in made:
        each.board.close()


Make = Callable[..., Rank]


def pair(make: Make, *timing: Timing) -> tuple[Rank, Rank]:
    first, second = make(0, *timing), make(1, *timing)
    second.reach(first)
    return first, second


# Messages.


def test_messages_and_blobs_arrive_in_order_both_ways(make: Make) -> None:
    first, second = pair(make)
    assert first.board.connected == {1}
    assert second.board.connected == {0}
    for number in range(200):
        first.say(1, {"kind": "n", "number": number}, bytes([number]) * number)
        second.say(0, {"kind": "m", "number": number})
    for number in range(200):
        assert second.heard.get(timeout=LIMIT_S)[:3] == (0, {"kind": "n", "number": number}, bytes([number]) * number)
        assert first.heard.get(timeout=LIMIT_S)[:3] == (1, {"kind": "m", "number": number}, b"")


def test_a_message_to_nobody_is_dropped_and_one_that_is_too_large_is_an_error(make: Make) -> None:
    first, second = pair(make)
    first.say(7, {"kind": "lost"})
    first.say(1, {"kind": "arrives"})
    assert second.heard.get(timeout=LIMIT_S)[1] == {"kind": "arrives"}

    async def too_large() -> None:
        first.board.send(1, {"kind": "x"}, bytes(MAX_BLOB_BYTES + 1))

    with pytest.raises(TransportError, match="Nothing was sent"):
        first.board.call(too_large(), LIMIT_S)


def test_an_emulated_latency_delays_every_message_and_keeps_their_order(make: Make) -> None:
    slow = Timing(heartbeat_s=0.1, silence_s=5.0, latency_s=0.25)
    first, second = pair(make, slow)
    sent_s = time.monotonic()
    for number in range(20):
        first.say(1, {"kind": "n", "number": number})
    arrived = [second.heard.get(timeout=LIMIT_S) for _ in range(20)]
    assert [message["number"] for _, message, _, _ in arrived] == list(range(20))
    assert all(at_s - sent_s >= 0.25 for *_, at_s in arrived)


# Losses.


def test_a_rank_that_leaves_is_gone_and_nobody_is_told_on_its_own_side(make: Make) -> None:
    first, second = pair(make)
    second.board.close()
    rank, loss = first.losses.get(timeout=LIMIT_S)
    assert (rank, loss.kind) == (1, "gone")
    assert loss.text == f"its process at {second.address} has ended"
    assert first.board.connected == frozenset()
    assert second.losses.empty()


def member(rank: int, address: Address) -> None:
    """In a process of its own: connected until it is killed."""
    other = Rank(1)
    other.board.call(other.board.connect(0, address), LIMIT_S)
    report(str(other.address))
    told(600.0)


def test_a_process_that_is_killed_is_gone(make: Make) -> None:
    first = make(0)
    with Processes() as processes:
        processes.start(1, member, first.address)
        address = processes.heard(0)
        processes.kill(0)
        assert first.losses.get(timeout=LIMIT_S) == (1, Loss("gone", f"its process at {address} has ended"))


def test_a_process_that_stands_still_is_silent_and_its_connection_still_stands(make: Make) -> None:
    first = make(0)
    with Processes() as processes:
        processes.start(1, member, first.address)
        address = processes.heard(0)
        processes.freeze(0)
        rank, loss = first.losses.get(timeout=LIMIT_S)
        assert (rank, loss) == (1, Loss("silent", f"nothing came from {address} for 1 s"))
        processes.thaw(0)


def test_beats_alone_keep_a_rank_and_nobody_hears_of_them(make: Make) -> None:
    """Over several times the silence; what is asserted holds at any time, so a slow machine changes nothing."""
    quiet = Timing(heartbeat_s=0.02, silence_s=2.0)
    first, second = pair(make, quiet)
    over = threading.Event()
    first.board.post(lambda: first.board.loop.call_later(3.0, over.set))
    assert over.wait(LIMIT_S)
    assert first.losses.empty()
    assert second.losses.empty()
    assert first.heard.empty()


def test_who_opened_a_connection_says_that_it_stands_and_not_with_the_next_beat(make: Make) -> None:
    """Else the other one might let it into a view before it knows the connection itself."""
    first, second = pair(make, Timing(heartbeat_s=300.0, silence_s=900.0))  # the second one opened it

    async def heard() -> None:
        while not first.board.words(1):
            first.board.arrived.clear()
            await first.board.arrived.wait()

    first.board.call(heard(), LIMIT_S)
    assert second.board.words(0) == 0


def test_who_hangs_up_hears_no_loss_and_the_other_one_does(make: Make) -> None:
    first, second = pair(make)
    first.board.post(first.board.hang_up, 1)
    rank, loss = second.losses.get(timeout=LIMIT_S)
    assert (rank, loss.kind) == (0, "cut"), "somebody listens there: the process has not ended"
    assert f"the connection to {first.address} ended" in loss.text
    assert first.losses.empty()


def test_who_was_given_up_is_told_so_and_does_not_ask_the_port(make: Make) -> None:
    """By then the other side may have gone on and ended: a closed port would say nothing about what it did before."""
    first, second = pair(make)
    first.say(1, {"kind": "given-up"})
    rank, loss = second.losses.get(timeout=LIMIT_S)
    assert (rank, loss.kind) == (0, "cut")
    assert "heard nothing of this process for too long and gave it up" in loss.text


def test_a_member_that_sends_what_is_no_message_is_lost(make: Make) -> None:
    first = make(0)
    with closing(socket.create_connection((first.address.host, first.address.port))) as odd:
        odd.sendall(pack({"kind": "hello", "rank": 5, "address": "127.0.0.1:1"}))
        assert odd.recv(16)
        odd.sendall(b"garbage, and more than a head of it")
        rank, _ = first.losses.get(timeout=LIMIT_S)
    assert rank == 5


def test_a_new_connection_of_a_rank_takes_the_place_of_the_old_one_which_is_told(make: Make) -> None:
    first, second = pair(make)
    before = first.board.connection(1)
    again = make(1)
    again.reach(first)
    assert second.heard.get(timeout=LIMIT_S)[1] == {"kind": "replaced"}
    first.settled()
    assert first.board.connection(1) not in (None, before)
    again.say(0, {"kind": "me"})
    assert first.heard.get(timeout=LIMIT_S)[1] == {"kind": "me"}
    assert first.losses.empty(), "who comes in its place says so itself"


# Strangers.


STRANGERS = {
    "http": b"GET / HTTP/1.1\r\nHost: me\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "random": bytes((17 * n * n + 3) % 256 for n in range(4096)),
    "huge text": b"DLC1" + (0xFFFFFFFF).to_bytes(4, "big") + bytes(8),
    "huge blob": b"DLC1" + (2).to_bytes(4, "big") + (1 << 62).to_bytes(8, "big") + b"{}",
    "no kind": pack({"kind": ""})[:16].replace(b"\x0b", b"\x02") + b"{}",
    "unknown kind": pack({"kind": "launch-missiles"}),
    "no rank": pack({"kind": "hello"}),
    "no number": pack({"kind": "hello", "rank": "first", "address": "a:1"}),
    "no address": pack({"kind": "hello", "rank": 3, "address": "a:b"}),
    "half a frame": pack({"kind": "hello", "rank": 3, "address": "a:1"})[:-1],
}


@pytest.mark.parametrize("opening", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_harms_nobody(make: Make, opening: bytes) -> None:
    first, second = pair(make)
    with closing(socket.create_connection((first.address.host, first.address.port))) as stranger:
        stranger.sendall(opening)
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(LIMIT_S)
        while stranger.recv(4096):
            pass
    assert first.board.connected == {1}
    second.say(0, {"kind": "hello again"})
    assert first.heard.get(timeout=LIMIT_S)[1] == {"kind": "hello again"}
    assert first.losses.empty()


def test_a_huge_announced_size_costs_no_memory(make: Make) -> None:
    """The connection ends at its head; nothing of the size is ever asked for."""
    first = make(0)
    pages = os.sysconf("SC_PAGE_SIZE")

    def resident_bytes() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * pages

    before = resident_bytes()
    for _ in range(20):
        with closing(socket.create_connection((first.address.host, first.address.port))) as stranger:
            stranger.sendall(STRANGERS["huge blob"])
            assert stranger.recv(1) == b""
    assert resident_bytes() - before < 64 << 20


def test_a_stranger_who_says_nothing_is_shown_out(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switchboard, "_FIRST_MESSAGE_S", 0.05)
    first = make(0)
    with closing(socket.create_connection((first.address.host, first.address.port))) as stranger:
        stranger.settimeout(LIMIT_S)
        assert stranger.recv(1) == b""


def test_somebody_else_behind_an_address_is_told_apart(make: Make) -> None:
    first, other = make(0), make(4)
    with pytest.raises(TransportError, match=rf"{other.address} was to be rank 1 and answered .*another diloco"):
        first.board.call(first.board.connect(1, other.address), LIMIT_S)
    assert first.board.connected == frozenset()


# Services, and the end.


def test_a_service_takes_over_a_connection_which_ends_with_it(make: Make) -> None:
    async def echo(
        message: dict[str, Any], blob: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if message["words"] == "fail":
            raise ValueError("an odd question")
        writer.write(pack({"kind": "echo", "words": message["words"]}, blob))
        await writer.drain()

    async def ask(words: str) -> tuple[dict[str, Any], bytes]:
        reader, writer = await asyncio.open_connection(first.address.host, first.address.port)
        writer.write(pack({"kind": "echo", "words": words}, b"blob"))
        try:
            answer = await read_frame(reader)
            assert await reader.read() == b""
            return answer
        finally:
            writer.close()

    first, second = pair(make)
    first.board.services["echo"] = echo
    assert second.board.call(ask("hello"), LIMIT_S) == ({"kind": "echo", "words": "hello"}, b"blob")
    with pytest.raises(asyncio.IncompleteReadError):
        second.board.call(ask("fail"), LIMIT_S)
    assert first.board.connected == {1}


def test_closing_ends_the_thread_and_may_be_done_twice(make: Make) -> None:
    first, second = pair(make)
    second.board.close()
    second.board.close()
    second.board.post(lambda: pytest.fail("after the end"))
    assert not second.board._thread.is_alive()
    assert first.losses.get(timeout=LIMIT_S)[0] == 1


def test_who_says_hello_while_the_other_one_closes_is_shown_out(make: Make) -> None:
    """Its task may be past the point where it can be told to end, and opens a line when the others are closed."""
    first = make(0)
    with closing(socket.create_connection((first.address.host, first.address.port))) as late:
        first.settled()

        async def hello_in_the_last_moment(turns: int) -> None:
            late.sendall(pack({"kind": "hello", "rank": 5, "address": "127.0.0.1:1"}))
            for _ in range(turns):
                await asyncio.sleep(0)
            await first.board._close()

        first.board.call(hello_in_the_last_moment(0), LIMIT_S)
        assert first.board.connected == frozenset()
        first.board.close()
        late.settimeout(LIMIT_S)
        while late.recv(4096):
            pass


@pytest.mark.parametrize("turns", range(7))
def test_who_comes_while_the_other_one_closes_leaves_nothing_open(make: Make, turns: int) -> None:
    """However far its connection has come: accepted by the system, known to the loop, or looked after by a task."""
    first = make(0)

    async def come_and_close() -> None:
        late.connect((first.address.host, first.address.port))
        for _ in range(turns):
            await asyncio.sleep(0)
        await first.board._close()

    with closing(socket.socket()) as late:
        first.board.call(come_and_close(), LIMIT_S)
        first.board.close()
        late.settimeout(LIMIT_S)
        with contextlib.suppress(ConnectionError):
            while late.recv(4096):
                pass
    gc.collect()


def test_what_nobody_takes_keeps_no_connection_open_after_the_end(make: Make) -> None:
    async def pour(
        message: dict[str, Any], blob: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(bytes(64 << 20))
        asked.set()

    first, asked = make(0), threading.Event()
    first.board.services["pour"] = pour
    with closing(socket.create_connection((first.address.host, first.address.port))) as idle:
        idle.sendall(pack({"kind": "pour"}))
        assert asked.wait(LIMIT_S)
        first.settled()
        first.board.close()
        gc.collect()
        idle.settimeout(LIMIT_S)
        with contextlib.suppress(ConnectionError):
            while idle.recv(1 << 20):
                pass
