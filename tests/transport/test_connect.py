"""Connecting through a rendezvous: ports, incompatible ranks, missing ranks, and IPv6."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Sequence

import pytest
import torch

from diloco.errors import TransportError
from diloco.protocol import Average, Entry, Registry
from diloco.transport import Address, Connected, ConnectionManager, ask, connect, parse_address, serve
from tests.transport.contract import contribution, exchange
from tests.transport.nowhere import diloco_threads, failure, free_address, nobody_at, place, wire
from tests.transport.wires import at_once, rendezvous


def work_together(num_replicas: int, address: Address, held: Sequence[int] = ()) -> list[Connected]:
    """Connect ranks at ``address``, exchange one round, and return the connections after closing them."""
    found: list[Connected] = at_once(
        [
            lambda m=m: connect(
                place(m, num_replicas, address), wire(rendezvous_timeout_s=20.0), held_step=held[m] if held else -1
            )
            for m in range(num_replicas)
        ]
    )
    assert all(isinstance(each, Connected) for each in found), found
    try:
        given = [contribution(m, codec="fp4") for m in range(num_replicas)]
        averages: list[Average] = exchange([each.transport for each in found], given)
        assert all(torch.equal(average.values, averages[0].values) for average in averages)
        assert averages[0].contributors == tuple(range(num_replicas))
    finally:
        at_once([each.transport.close for each in found])
    return found


# Ports and addresses of this machine.


def test_a_port_that_is_taken_is_named_and_so_is_a_range_without_a_free_one() -> None:
    before = diloco_threads()
    with socket.create_server(("127.0.0.1", 0)) as server, rendezvous(2) as address:
        port = server.getsockname()[1]
        taken = wire(host="127.0.0.1", ports=str(port))
        with pytest.raises(TransportError, match=rf"can't listen on 127\.0\.0\.1 at port {port}: .*in use") as caught:
            connect(place(1, 2, address), taken)
        assert "Choose another port (transport.ports)" in str(caught.value)
        assert not [thread for thread in diloco_threads() - before if thread.name == "diloco-post"]


def test_of_a_range_the_first_free_port_is_taken(connections: ConnectionManager) -> None:
    for _ in range(20):  # until two neighbouring ports are found, of which the first is in use
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            try:
                found = connections.listen("127.0.0.1", range(port, port + 2), "somewhere")
            except TransportError:
                continue
            assert found == Address("somewhere", port + 1)
            return
    pytest.fail("no free port has a free neighbour")


def test_a_host_that_is_not_this_machines_is_named() -> None:
    with rendezvous(2) as address, pytest.raises(TransportError, match=r"can't listen on 192\.0\.2\.1"):
        connect(place(1, 2, address), wire(host="192.0.2.1"))


def test_an_interface_that_is_not_there_is_named() -> None:
    with (
        rendezvous(1) as address,
        pytest.raises(TransportError, match="interface 'none7' can't be determined") as caught,
    ):
        connect(place(0, 1, address), wire(interface="none7"))
    assert "transport.interface" in str(caught.value)


# Incompatible ranks.


@pytest.mark.parametrize(
    ("rank", "num_replicas", "codec", "words"),
    [
        (1, 3, "int8", r"replica 0 \(127.* has codec = fp4 and replica 1 \(127.* has codec = int8; both sides need"),
        (0, 3, "fp4", "two processes claim rank 0: one at .* and one at"),
        (5, 6, "fp4", r"rank 5 at .* can't register in a run of 3 ranks; ranks are 0 to 2"),
    ],
    ids=["other settings", "same rank", "no such rank"],
)
def test_a_rank_that_does_not_fit_is_refused_alone(
    rank: int, num_replicas: int, codec: str, words: str, connections: ConnectionManager
) -> None:
    """The others wait for one that fits. Before, each of these ended all ranks that waited."""

    def right(rank: int) -> Connected:
        return connect(place(rank, 3, address), wire(facts={"codec": "fp4"}, rendezvous_timeout_s=60.0))

    registry, found = Registry(3), list[Connected]()
    serve(connections, registry)
    address = connections.listen("127.0.0.1", range(1), "127.0.0.1")
    first = threading.Thread(target=lambda: found.append(right(0)))
    first.start()
    while not registry.entries:
        first.join(0.01)
    said = failure(connect, place(rank, num_replicas, address), wire(facts={"codec": codec}))
    assert re.search(words, said), said
    found += at_once([lambda: right(1), lambda: right(2)])
    first.join()
    assert [sorted(each.table.entries) for each in found] == [[0, 1, 2]] * 3
    for each in found:
        each.transport.close()


def test_who_waits_in_vain_learns_why_another_was_refused() -> None:
    """It may itself be the one with the wrong setting."""
    with rendezvous(2) as address:
        told = at_once(
            [
                lambda: connect(place(0, 2, address), wire(facts={"codec": "fp4"})),
                lambda: connect(place(1, 2, address), wire(facts={"codec": "int8"})),
            ]
        )
    assert all("has codec = fp4 and replica 1" in str(each) for each in told), told
    assert sum(" (one was refused: replica 0 (" in str(each) for each in told) == 1, told


def test_a_rank_that_did_not_come_is_named() -> None:
    with rendezvous(3) as address:
        (words,) = [str(each) for each in at_once([lambda: connect(place(1, 3, address), wire())])]
    assert words == (
        f"rank 1 waited 1 s at {address} for rank 0, 2. Start the missing ranks, or choose a longer "
        "transport.rendezvous_timeout_s."
    )


def test_who_waits_says_for_whom(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first message says that there is no answer yet, and later ones name the missing ranks."""
    monkeypatch.setattr("diloco.waiting.FIRST_S", 0.1)
    monkeypatch.setattr("diloco.transport.torch_distributed.rendezvous.TELL_EVERY_S", 0.3)
    with rendezvous(3) as address:
        failure(connect, place(1, 3, address), wire())
    waits = [record.getMessage() for record in caplog.records if record.name == "diloco.waiting"]
    told = [re.sub(r"for [01] s", "for N s", words) for words in waits]
    assert told[0] == f"waiting for an answer at the rendezvous {address} for N s; gives up after 1 s"
    assert told[-1] == f"waiting for rank 0, 2 at the rendezvous {address} for N s; gives up after 1 s"


def test_a_rank_that_gave_up_may_come_back_as_long_as_the_others_wait() -> None:
    with rendezvous(2) as address:
        failure(connect, place(1, 2, address), wire())
        found = work_together(2, address)
    assert [sorted(each.table.entries) for each in found] == [[0, 1], [0, 1]]


def test_a_rank_without_a_rendezvous_is_told_what_to_give() -> None:
    assert "replica 0 was given no rendezvous. Use HOST:PORT of replica 0" in failure(
        connect, place(0, 2, None), wire()
    )


def test_a_run_that_is_over_is_not_joined(connections: ConnectionManager) -> None:
    """Its rendezvous (of a launcher, say) still answers, with addresses at which nothing listens any more."""
    with nobody_at() as first, nobody_at() as second:
        serve(connections, Registry(2, entries=[Entry(0, str(first)), Entry(1, str(second))]))
        address = connections.listen("127.0.0.1", range(1), "127.0.0.1")
        assert "has ended: none of its replicas answers" in failure(connect, place(1, 2, address), wire())


def test_a_rank_that_can_not_be_reached_is_named_with_its_address(connections: ConnectionManager) -> None:
    """The other side registers an address at which it does not listen, as behind a router."""
    with rendezvous(2) as address, nobody_at() as nowhere:
        found = at_once(
            [
                lambda: connect(place(1, 2, address), wire(rendezvous_timeout_s=20.0)),
                lambda: ask(connections, address, Entry(0, str(nowhere)), 20.0),
            ]
        )
    assert re.match(rf"rank 1 can't reach rank 0 at {nowhere} within \d+ s: ", str(found[0]))
    assert found[0].replicas == (0,)
    assert "`diloco doctor` checks the connection" in str(found[0])


# Successful connections.


def test_rank_0_holds_the_rendezvous_itself_where_nobody_else_does() -> None:
    address = free_address()
    found = work_together(3, address)
    assert parse_address(found[0].table.entries[0].address) == address
    assert {parse_address(entry.address).host for entry in found[2].table.entries.values()} == {"127.0.0.1"}


def test_held_steps_of_all_are_known_to_all() -> None:
    with rendezvous(2) as address:
        found = work_together(2, address, held=[0, 10])
    assert [[entry.held_step for entry in each.table.entries.values()] for each in found] == [[0, 10]] * 2


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
def test_everything_goes_over_ipv6_too() -> None:
    """The rendezvous, control connections and payloads all use ::1."""
    found = work_together(2, free_address("::1"))
    assert {parse_address(entry.address).host for entry in found[0].table.entries.values()} == {"::1"}
