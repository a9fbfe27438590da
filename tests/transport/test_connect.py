"""Connecting through a rendezvous: ports, ranks that do not fit or do not come, other programs, IPv6, the doctor."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from diloco.cli import main
from diloco.errors import RendezvousError, TransportError
from diloco.protocol import Entry, Refused
from diloco.transport import (
    Address,
    Directory,
    Members,
    TcpDirectory,
    TcpStreams,
    connect,
    examine,
    join,
    parse_address,
)
from diloco.waiting import in_thread
from tests.transport.contract import contribution, exchange
from tests.transport.nowhere import diloco_threads, failure, free_address, nobody_at, place, registering, rules
from tests.transport.relays import frame, stranger_at
from tests.transport.wires import Wires, answering_probes, at_once, rendezvous

LIMIT_S = 20.0


def work_together(num_replicas: int, address: Address) -> list[Directory]:
    """Connect ranks at ``address``, exchange one round, and return the connections after closing them."""
    patient = rules(rendezvous_timeout_s=20.0)
    found: list[Directory] = at_once(
        [lambda m=m: connect(place(m, num_replicas, address), patient, held_step=10 * m) for m in range(num_replicas)]
    )
    assert all(isinstance(each, Directory) for each in found), found
    averages = exchange([each.transport for each in found], [contribution(m) for m in range(num_replicas)])
    assert averages[0].contributors == tuple(range(num_replicas))
    at_once([each.transport.close for each in found])
    return found


# Ports and addresses of this machine.


def test_a_port_that_is_taken_is_named_and_of_a_range_the_first_free_one_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, rendezvous(2) as address:
        port = server.getsockname()[1]
        with pytest.raises(TransportError, match=rf"can't listen on 127\.0\.0\.1 at port {port}: .*in use") as caught:
            connect(place(1, 2, address, listen=("127.0.0.1", range(port, port + 1))), rules())
        assert "Choose another port or an address of this machine (network.listen)" in str(caught.value)
        last = min(port + 20, 65535)
        with rendezvous(1) as other:
            connected = connect(place(0, 1, other, listen=("127.0.0.1", range(port, last + 1))), rules())
        assert port < connected.transport.address.port <= last
        connected.transport.close()
        with pytest.raises(TransportError, match=r"can't listen on 192\.0\.2\.1"):
            connect(place(1, 2, address, listen=("192.0.2.1", range(1))), rules())


# Ranks that do not fit.


@pytest.mark.parametrize(
    ("rank", "num_replicas", "codec", "words"),
    [
        (1, 3, "int8", r"replica 0 \(127.* has codec = fp4 and replica 1 \(127.* has codec = int8; both sides need"),
        (0, 3, "fp4", "two processes claim rank 0: one at .* and one at"),
        (5, 6, "fp4", r"rank 5 at .* can't register in a run of 3 ranks; ranks are 0 to 2"),
    ],
    ids=["other settings", "same rank", "no such rank"],
)
def test_a_rank_that_does_not_fit_is_refused_alone(rank: int, num_replicas: int, codec: str, words: str) -> None:
    """The others wait for one that fits. Before, each of these ended all ranks that waited."""
    known = dict[int, Entry]()

    def right(rank: int) -> Future[Directory]:
        fits = rules(facts={"codec": "fp4"}, rendezvous_timeout_s=60.0)
        return in_thread(lambda: connect(place(rank, 3, address), fits), "connect")

    with rendezvous(3, known=known) as address:
        first = right(0)
        while not known:
            wait([first], 0.01)
        said = failure(connect, place(rank, num_replicas, address), rules(facts={"codec": codec}))
        assert re.search(words, said), said
        found = [each.result() for each in (first, right(1), right(2))]
    assert [sorted(each.transport.entries()) for each in found] == [[0, 1, 2]] * 3
    for each in found:
        each.transport.close()


def test_a_rank_that_did_not_come_is_named_and_one_that_gave_up_may_come_back() -> None:
    with rendezvous(2) as address:
        with closing(stranger_at(address)) as stranger:
            stranger.sendall(frame({"kind": "ask", "entry": Entry(0, "nowhere")}))
            assert stranger.recv(1) == b"", "the connection is closed and nothing is registered"
        assert failure(connect, place(1, 2, address), rules()) == (
            f"rank 1 waited 1 s at {address} for rank 0. Start the missing ranks, or choose a longer "
            "network.round_timeout, of which this is half."
        )
        found = work_together(2, address)
    assert [sorted(each.transport.entries()) for each in found] == [[0, 1], [0, 1]]


@pytest.mark.parametrize("host", ["127.0.0.1", "a..b"], ids=["nobody there", "no name that a resolver takes"])
def test_a_rank_that_can_not_be_reached_is_named_with_its_address(host: str) -> None:
    """The other side registers an address at which it does not listen, as behind a router."""
    with rendezvous(2) as address, nobody_at() as free:
        nowhere = Address(host, free.port)
        with registering(address, Entry(0, str(nowhere))):
            (error,) = at_once([lambda: connect(place(1, 2, address), rules(rendezvous_timeout_s=20.0, silence_s=1.0))])
    assert re.match(rf"rank 1 can't reach rank 0 at {nowhere} within 1 s: ", str(error))
    assert error.replicas == (0,)
    assert "`diloco doctor` checks the connection" in str(error)


# No rendezvous, or another program in its place.


def test_where_nobody_answers_the_address_and_the_ways_out_are_named() -> None:
    before = diloco_threads()
    with nobody_at() as address:
        words = failure(connect, place(1, 2, address), rules())
    assert words.startswith(f"rank 1 found no rendezvous at {address} within 1 s: nothing listens there (connection")
    assert "(connection refused). Start replica 0 there, open that port" in words
    for host in ("replica-0.invalid", "\N{SNOWMAN}" * 64):  # the second is no name that a resolver takes
        words = failure(connect, place(1, 2, Address(host, 29400)), rules())
        assert f"no route to the rendezvous {host!r}" in words
    assert diloco_threads() <= before, "nothing stays open"


@contextlib.contextmanager
def another_program(answer: bytes | None) -> Iterator[Address]:
    """Listen, answer every connection with these bytes, and close it; with None, send nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as callers:

        def serve_all() -> None:
            with contextlib.suppress(OSError):
                while True:
                    caller = callers.enter_context(server.accept()[0])
                    with contextlib.suppress(OSError):  # the doctor's first connection is closed at once
                        if answer is not None and caller.recv(4):
                            caller.sendall(answer)
                            caller.shutdown(socket.SHUT_RDWR)

        serving = threading.Thread(target=serve_all)
        serving.start()
        yield Address("127.0.0.1", server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)
        serving.join()


HTTP = b"HTTP/1.1 400 Bad Request\r\n\r\n"


@pytest.mark.parametrize(
    ("rank", "answer", "words"),
    [
        (1, HTTP, "does not use this version of diloco's protocol"),
        (1, b"", r"lost|[Rr]eset|closed"),
        (1, None, "no answer"),
        (0, HTTP, "in use by another program, which did not answer as a diloco does"),
    ],
    ids=["http", "hangs up", "says nothing", "rank 0"],
)
def test_another_program_at_the_rendezvous_is_told_apart(rank: int, answer: bytes | None, words: str) -> None:
    """Rank 0, which was to listen there, says so long before the time-out."""
    before = diloco_threads()
    with another_program(answer) as address:
        said = failure(connect, place(rank, 2, address), rules(rendezvous_timeout_s=1.0 if rank else 300.0))
    assert f"no rendezvous at {address}" in said
    assert re.search(words, said)
    assert diloco_threads() <= before


def test_rank_0_listens_once_what_had_the_port_has_ended() -> None:
    """The replica 0 of a run that has just been stopped may do so, and closes the connection when it is asked."""
    before = socket.create_server(("127.0.0.1", 0))
    address = Address(*before.getsockname())

    def ends() -> None:
        with before.accept()[0]:
            before.close()

    _, connected = at_once([ends, lambda: connect(place(0, 1, address), rules())])
    assert connected.transport.address == address
    connected.transport.close()


@pytest.mark.filterwarnings(  # Python leaves a socket open that is reset before its handshake
    "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_rank_0_stays_registered_while_another_rank_keeps_it_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had forgotten itself, as it asked nobody meanwhile, and ended with a `KeyError`."""
    monkeypatch.setattr(sys.modules[TcpDirectory.__module__], "_GONE_S", 0.2)
    monkeypatch.setattr(sys.modules[TcpStreams.__module__], "_HANDSHAKE_S", 0.5)
    address = free_address()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts no connection
        rank_0 = in_thread(lambda: failure(connect, place(0, 4, address), rules(rendezvous_timeout_s=2.0)), "rank 0")
        hung = Entry(1, str(Address(*silent.getsockname())))
        with registering(address, hung), registering(address, Entry(2, "127.0.0.1:1")):
            assert re.search("rank 0 waited 2 s .* for rank .*3", rank_0.result())


def test_an_address_that_answers_nothing_delays_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of a machine without power: Linux tries for two minutes, for which all other answers waited."""
    monkeypatch.setattr(sys.modules[TcpStreams.__module__], "_HANDSHAKE_S", 0.2)

    async def open_it(address: Address) -> None:
        with pytest.raises(TimeoutError):
            await TcpStreams().open(address)

    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        asyncio.run(asyncio.wait_for(open_it(Address(*full.getsockname())), LIMIT_S / 4))


def test_the_rank_that_answers_at_the_rendezvous_is_never_the_one_that_does_not_fit() -> None:
    """Its end would end the rendezvous, and the others would not learn why."""
    address = free_address()
    codecs = {1: "int8", 0: "fp4"}  # the one that is refused may come first
    said = at_once(
        [lambda m=m, c=c: connect(place(m, 2, address), rules(facts={"codec": c})) for m, c in codecs.items()]
    )
    assert "rank 0 waited 1 s" in str(said[1]), said
    assert "one was refused: replica 0 (" in str(said[1]) or "codec" in str(said[0])


# Successful connections.


def test_a_replica_that_is_started_again_has_the_same_key_and_another_certificate(tmp_path: Path) -> None:
    """By the first it is the same replica, and by the second the process that it replaces has ended."""
    address = Address("127.0.0.1", 0)
    own, shared = tmp_path / "own.key", tmp_path / "run" / "identity.key"
    with ExitStack() as open_ones:
        places = [place(0, 1, address, identity=path) for path in (shared, shared, own, None, None)]
        transports = [open_ones.enter_context(closing(each.transport(rules(), None))) for each in places]
        streams = [each.connections.streams for each in transports]
        assert len({each.me for each in streams}) == 4
        assert len({each.credentials.certificate for each in streams}) == 5
        assert streams[0].me == streams[1].me


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"] if socket.has_ipv6 else ["127.0.0.1"])
def test_rank_0_holds_the_rendezvous_itself_where_nobody_else_does(host: str) -> None:
    """Whichever rank comes first; the others try again until it listens."""
    address = free_address(host)
    found = work_together(3, address)
    assert parse_address(found[0].transport.entries()[0].address) == address
    assert {parse_address(entry.address).host for entry in found[2].transport.entries().values()} == {host}
    assert [[entry.held_step for entry in each.transport.entries().values()] for each in found] == [[0, 10, 20]] * 3


@pytest.fixture
def alone() -> Iterator[Directory]:
    directory = connect(place(0, 1, Address("127.0.0.1", 0)), rules(), held_step=10)
    with closing(directory.transport):
        yield directory


def test_who_is_asked_for_the_members_before_it_has_begun_is_none_itself() -> None:
    """It had no view to read, so that its control thread named an AttributeError to the user."""
    meeting = place(0, 2, Address("127.0.0.1", 0))
    with closing(meeting.transport(rules(), None)) as transport:
        assert meeting.directory(transport, -1, None).members == ()


@pytest.mark.parametrize(("waits", "asked"), [(True, 6), (False, 2)])
def test_a_joiner_waits_for_as_long_as_the_members_wait_for_others(*, waits: bool, asked: int) -> None:
    """It gave up after a while, so that its owner had to start it once more."""
    now_s = 0.0

    def sleep(pause_s: float) -> None:
        nonlocal now_s
        now_s += 40.0

    answers = [
        *[Refused("the members wait: replica 1 can't be reached", waits=waits)] * 5,
        Refused("no", for_good=True),
    ]
    transport = mock.Mock(ask_to_join=mock.Mock(side_effect=[(each, {}) for each in answers]))
    directory = mock.Mock(transport=transport, swarm="", entry=Entry(0, "here:1"))
    with (
        mock.patch.multiple(time, monotonic=lambda: now_s, sleep=sleep),
        pytest.raises(RendezvousError, match="the members refuse: no" if waits else "replica 1 can't be reached"),
    ):
        join(directory, 30.0)
    assert transport.ask_to_join.call_count == asked


def test_a_joiner_has_all_members_asked_at_once_to_open_a_connection(
    alone: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, each had cost it a silence if the member had gone that it could not reach."""
    asked, all_are = list[Address](), asyncio.Event()

    async def ask(place: Address, unreachable: int) -> None:
        asked.append(place)
        if len(asked) == 3:
            all_are.set()
        await all_are.wait()

    async def arrives(entry: Entry, wait_s: float) -> bool:
        await all_are.wait()
        return False

    monkeypatch.setattr(alone, "ask", ask)
    monkeypatch.setattr(alone, "arrives", arrives)
    found = Members(tuple(Entry(rank, f"a:{rank}") for rank in range(1, 5)), (1, 2, 3, 4))
    assert not alone.connections.call(alone._called_back(found, found.known[3]), LIMIT_S)
    assert sorted(map(str, asked)) == ["a:1", "a:2", "a:3"]


def test_a_joiner_that_asks_a_member_again_looks_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a swarm it looked into the DHT before each attempt, which takes seconds on a busy machine."""
    with rendezvous(2) as address:
        patient = rules(rendezvous_timeout_s=20.0)
        both = at_once([lambda m=m: connect(place(m, 2, address), patient) for m in range(2)])
    with contextlib.ExitStack() as open_ones:
        first, _ = (each for each in both if open_ones.enter_context(closing(each.transport)))
        monkeypatch.setattr(first, "addresses", mock.AsyncMock(side_effect=AssertionError("it looks up others")))
        first.connections.call(first.refresh(), LIMIT_S)
        monkeypatch.undo()
        usual, asked = first.ask, list[Address]()

        async def ask(place: Address) -> object:
            asked.append(place)
            return await (usual(place) if asked[1:] else asyncio.Event().wait())

        monkeypatch.setattr(first, "ask", ask)
        first.transport.rules = replace(first.transport.rules, heartbeat_s=0.01, silence_s=0.5)
        first.connections.call(first.refresh(), LIMIT_S)
    assert asked == [asked[0]] * 2, "one that does not answer is not waited for for minutes"


# The doctor.


def test_the_way_to_a_replica_in_training_has_a_latency_and_a_rate_each_way(wires: Wires) -> None:
    finding = asyncio.run(examine(wires.meet(2)[0].address, 300_000, LIMIT_S))
    assert not finding.problem
    assert 0 < finding.latency_s < LIMIT_S
    assert min(finding.up_bits_per_s, finding.down_bits_per_s) > 0


def test_each_way_that_does_not_work_is_told_apart() -> None:
    with nobody_at() as address:
        finding = asyncio.run(examine(address, 1000, LIMIT_S))
    assert finding.problem.startswith("nothing listens there (connection refused); start a replica or `diloco doctor")
    for answer, patience_s, words in (
        (None, 0.2, "it accepted the connection but did not respond for 0.2 s; "),
        (HTTP, LIMIT_S, "what answers there is not a diloco: the other side does not use this version"),
    ):
        with another_program(answer) as address:
            assert asyncio.run(examine(address, 1000, patience_s)).problem.startswith(words)


def test_the_command_names_each_failure_and_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    with answering_probes() as address:
        assert main(["doctor", str(address), "nobody.invalid:1", "--size", "100kB"]) == 1
        captured = capsys.readouterr()
        assert [line.split()[1] for line in captured.out.splitlines()[1:]] == ["ok", "FAILED"]
        assert "nobody.invalid:1: the name does not resolve" in captured.err
        assert main(["doctor", str(address), "--size", "100kB"]) == 0


@pytest.mark.parametrize("arguments", [[], ["a:1", "--listen", "a:1"], ["a:1", "--size", "65MB"], ["a"]])
def test_misuse_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    assert capsys.readouterr().err
