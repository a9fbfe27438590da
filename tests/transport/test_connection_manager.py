"""Control connections: the order of messages, the detection and kinds of losses, and closing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable
from contextlib import closing

import pytest

from diloco.errors import TransportError
from diloco.protocol import Loss, Timing
from diloco.transport import MAX_BLOB_BYTES, Address, ConnectionManager, Stream, TcpStreams, pack
from diloco.transport.connections import control_thread
from tests.processes import Processes, receive, report
from tests.transport.connection_managers import LIMIT_S, QUICK, MakeRank, Rank, pair, stranger_at
from tests.transport.wires import at_once

# Messages.


def test_messages_and_blobs_arrive_in_order_both_ways(make_rank: MakeRank) -> None:
    first, second = pair(make_rank)
    assert first.connections.connected == {1}
    assert second.connections.connected == {0}
    for number in range(200):
        first.say(1, {"kind": "n", "number": number}, bytes([number]) * number)
        second.say(0, {"kind": "m", "number": number})
    for number in range(200):
        assert second.heard.get(timeout=LIMIT_S)[:3] == (0, {"kind": "n", "number": number}, bytes([number]) * number)
        assert first.heard.get(timeout=LIMIT_S)[:3] == (1, {"kind": "m", "number": number}, b"")


def test_a_message_to_nobody_is_dropped_and_one_that_is_too_large_is_an_error(make_rank: MakeRank) -> None:
    first, second = pair(make_rank)
    first.say(7, {"kind": "lost"})
    first.say(1, {"kind": "arrives"})
    assert second.heard.get(timeout=LIMIT_S)[1] == {"kind": "arrives"}

    async def too_large() -> None:
        first.connections.send(1, {"kind": "x"}, bytes(MAX_BLOB_BYTES + 1))

    with pytest.raises(TransportError, match="Nothing was sent"):
        first.connections.call(too_large(), LIMIT_S)


def test_an_emulated_latency_delays_every_message_and_keeps_their_order(make_rank: MakeRank) -> None:
    slow = Timing(heartbeat_s=0.1, silence_s=5.0, latency_s=0.25)
    first, second = pair(make_rank, slow)
    sent_s = time.monotonic()
    for number in range(20):
        first.say(1, {"kind": "n", "number": number})
    arrived = [second.heard.get(timeout=LIMIT_S) for _ in range(20)]
    assert [message["number"] for _, message, _, _ in arrived] == list(range(20))
    assert all(at_s - sent_s >= 0.25 for *_, at_s in arrived)


def test_two_that_connect_to_each_other_at_the_same_time_keep_one_connection(
    make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each side receives the other's hello before the answer to its own, as over a long round trip."""
    ranks = (make_rank(0), make_rank(1))
    # hellos by sender
    said, taken = (threading.Event(), threading.Event()), (threading.Event(), threading.Event())

    async def both(events: Iterable[threading.Event]) -> None:
        for event in events:
            assert await asyncio.to_thread(event.wait, LIMIT_S)

    def delay(me: int, other: int) -> None:
        streams, address = ranks[me].connections.streams, str(ranks[other].address)
        open_stream, admit = streams.open, streams.admit

        async def opened(place: Address) -> Stream:
            reader, writer = await open_stream(place)
            read = reader.readexactly

            async def answer(size: int) -> bytes:
                said[me].set()
                data = await read(size)
                await both(taken)
                return data

            monkeypatch.setattr(reader, "readexactly", answer)
            return reader, writer

        async def admitted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
            await both(said)
            return await admit(reader, writer)

        def identity(writer: asyncio.StreamWriter) -> str:
            taken[other].set()
            return address

        monkeypatch.setattr(streams, "open", opened)
        monkeypatch.setattr(streams, "admit", admitted)
        monkeypatch.setattr(streams, "identity", identity)

    delay(0, 1)
    delay(1, 0)
    assert at_once([lambda: ranks[0].reach(ranks[1]), lambda: ranks[1].reach(ranks[0])]) == [None, None]
    for me, other in ((0, 1), (1, 0)):
        ranks[me].say(other, {"kind": "still here"})
        assert ranks[other].heard.get(timeout=LIMIT_S)[:2] == (me, {"kind": "still here"})
        assert ranks[me].losses.empty()


# Losses.


def test_a_rank_that_leaves_is_gone_and_nobody_is_told_on_its_own_side(make_rank: MakeRank) -> None:
    first, second = pair(make_rank)
    second.connections.close()
    rank, loss = first.losses.get(timeout=LIMIT_S)
    assert (rank, loss.kind) == (1, "gone")
    assert loss.text == f"its process at {second.address} has ended"
    assert first.connections.connected == frozenset()
    assert second.losses.empty()


def member(rank: int, address: Address) -> None:
    """A member in a process of its own, which stays connected until it is killed."""
    other = Rank(1)
    other.connections.call(other.connections.connect(0, address), LIMIT_S)
    report(str(other.address))
    receive(600.0)


def test_a_process_that_is_killed_is_gone(make_rank: MakeRank) -> None:
    first = make_rank(0)
    with Processes() as processes:
        processes.start(1, member, first.address)
        address = processes.next_report(0)
        processes.kill(0)
        assert first.losses.get(timeout=LIMIT_S) == (1, Loss("gone", f"its process at {address} has ended"))


def test_a_process_that_stands_still_is_silent_and_its_connection_still_stands(make_rank: MakeRank) -> None:
    first = make_rank(0)
    with Processes() as processes:
        processes.start(1, member, first.address)
        address = processes.next_report(0)
        processes.freeze(0)
        rank, loss = first.losses.get(timeout=LIMIT_S)
        assert (rank, loss) == (1, Loss("silent", f"nothing was received from {address} for 1 s"))
        processes.thaw(0)


def test_beats_alone_keep_a_rank_and_nobody_hears_of_them(make_rank: MakeRank) -> None:
    """Runs for several silences. The assertions hold at any time, so a slow machine changes nothing."""
    quiet = Timing(heartbeat_s=0.02, silence_s=2.0)
    first, second = pair(make_rank, quiet)
    over = threading.Event()
    first.connections.post(lambda: first.connections.loop.call_later(3.0, over.set))
    assert over.wait(LIMIT_S)
    assert first.losses.empty()
    assert second.losses.empty()
    assert first.heard.empty()


def test_who_opened_a_connection_says_that_it_stands_and_not_with_the_next_beat(make_rank: MakeRank) -> None:
    """Otherwise the other side might admit it to a view before it knows the connection itself."""
    first, second = pair(make_rank, Timing(heartbeat_s=300.0, silence_s=900.0))  # the second one opened the connection

    async def heard() -> None:
        while (connection := first.connections.get(1)) is None or not connection.num_messages:
            first.connections.arrived.clear()
            await first.connections.arrived.wait()

    first.connections.call(heard(), LIMIT_S)
    assert (connection := second.connections.get(0)) is not None
    assert connection.num_messages == 0


def test_who_hangs_up_hears_no_loss_and_the_other_one_does(make_rank: MakeRank) -> None:
    first, second = pair(make_rank)
    first.connections.post(first.connections.hang_up, 1)
    rank, loss = second.losses.get(timeout=LIMIT_S)
    assert (rank, loss.kind) == (0, "cut"), "its port still listens: the process has not ended"
    assert f"the connection to {first.address} ended" in loss.text
    assert first.losses.empty()


def test_who_was_given_up_is_told_so_and_does_not_ask_the_port(make_rank: MakeRank) -> None:
    """By then the other side may have continued and ended: a closed port would prove nothing about earlier."""
    first, second = pair(make_rank)
    first.say(1, {"kind": "given-up"})
    rank, loss = second.losses.get(timeout=LIMIT_S)
    assert (rank, loss.kind) == (0, "cut")
    assert "received nothing from this process for too long and dropped it" in loss.text


def test_a_member_that_sends_what_is_no_message_is_lost(make_rank: MakeRank) -> None:
    first = make_rank(0)
    with closing(stranger_at(first.address)) as odd:
        odd.sendall(pack({"kind": "hello", "rank": 5, "address": "127.0.0.1:1"}))
        assert odd.recv(16)
        odd.sendall(b"garbage, and more than a head of it")
        rank, _ = first.losses.get(timeout=LIMIT_S)
    assert rank == 5


def test_a_new_connection_of_a_rank_takes_the_place_of_one_that_is_silent_which_is_told(make_rank: MakeRank) -> None:
    first, second = pair(make_rank, Timing(heartbeat_s=0.1, silence_s=LIMIT_S))
    before, awake = first.connections.get(1), threading.Event()
    second.connections.post(awake.wait)  # it stalls
    again = make_rank(1)
    again.reach(first)
    awake.set()
    assert second.heard.get(timeout=LIMIT_S)[1] == {"kind": "replaced"}
    first.settled()
    assert first.connections.get(1) not in (None, before)
    again.say(0, {"kind": "me"})
    assert first.heard.get(timeout=LIMIT_S)[1] == {"kind": "me"}
    assert first.losses.empty(), "the process that replaces it reports itself"


def test_nobody_takes_the_place_of_a_rank_that_answers(make_rank: MakeRank) -> None:
    first, second = pair(make_rank)
    before = first.connections.get(1)
    with pytest.raises(TransportError, match=rf"rank 1 is connected from {second.address}, which still answers"):
        make_rank(1).reach(first)
    assert first.connections.get(1) is before
    second.say(0, {"kind": "here"})
    assert first.heard.get(timeout=LIMIT_S)[1] == {"kind": "here"}
    assert second.heard.empty()
    assert first.losses.empty()


def test_closing_ends_the_thread_and_may_be_done_twice(make_rank: MakeRank) -> None:
    first, second = pair(make_rank)
    second.connections.close()
    second.connections.close()
    second.connections.post(lambda: pytest.fail("after the end"))
    assert not any(thread.name == "diloco-control-1" for thread in threading.enumerate())
    assert first.losses.get(timeout=LIMIT_S)[0] == 1


class NeverEnding(TcpStreams):
    """Streams of a network whose daemon has died: closing them takes forever."""

    async def close(self) -> None:
        await asyncio.Event().wait()


def test_closing_takes_seconds_also_where_the_network_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_thread, "CLOSING_S", 0.3)
    connections = ConnectionManager(0, QUICK, NeverEnding())
    connections.listen("127.0.0.1", range(1), "127.0.0.1")
    closing = threading.Thread(target=connections.close, daemon=True)
    closing.start()
    closing.join(LIMIT_S)
    assert not closing.is_alive()
    assert connections.loop.is_closed()


def test_a_call_that_takes_too_long_is_ended(make_rank: MakeRank) -> None:
    ended = threading.Event()

    async def for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        make_rank(0).connections.call(for_ever(), 0.1)
    assert ended.wait(LIMIT_S)


def test_closing_takes_seconds_also_where_the_thread_is_busy(
    monkeypatch: pytest.MonkeyPatch, make_rank: MakeRank
) -> None:
    connections, free = make_rank(0).connections, threading.Event()
    connections.post(free.wait)
    with monkeypatch.context() as patch:
        patch.setattr(control_thread, "CLOSING_S", 0.1)
        connections.close()
    assert not connections.loop.is_closed(), "its thread is still busy"
    free.set()
