"""Replicas over TCP that have lost each other find each other again, to join, found a view, or end."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from diloco.errors import RendezvousError, RunFinishedError, TransportError
from diloco.membership import Candidate, LastViews
from diloco.protocol import Rules
from diloco.train import PeerFleet
from diloco.transport import Looking, PeerTransport, Place
from tests.transport.nowhere import answering, free_address
from tests.transport.relays import frame, stranger_at
from tests.transport.swarms import wait_for_members
from tests.transport.wires import QUICK, at_once, rendezvous

LIMIT_S = 30.0
Meet = Callable[..., list[PeerFleet]]


RULES = Rules(**QUICK | {"continue_without_lost": True, "together": False, "raise_on_loss": False})


@pytest.fixture
def meet() -> Iterator[Meet]:
    """Fleets of one replica each that start together."""
    fleets: list[PeerFleet] = []

    def made(count: int, *, at_replica_0: bool = False) -> list[PeerFleet]:
        with nullcontext(free_address()) if at_replica_0 else rendezvous(count) as address:
            places = [Place(replica=m, num_replicas=count, rendezvous=address, join_window_s=0.5) for m in range(count)]
            found = at_once([lambda place=place: PeerFleet(place, RULES) for place in places])
        for each in found:
            if isinstance(each, Exception):
                raise each
        fleets.extend(found)
        return found

    yield made
    at_once([fleet.close for fleet in fleets])


@contextmanager
def all_lost(fleets: list[PeerFleet]) -> Iterator[None]:
    """Make all fleets close their transports before any searches, or one would be found as a member of the old view."""
    close, all_closed = PeerTransport.close, threading.Barrier(len(fleets))
    ways = [fleet.transport for fleet in fleets]

    def close_with_all(transport: PeerTransport) -> None:
        close(transport)
        if transport in ways:
            all_closed.wait(LIMIT_S)

    with mock.patch.object(PeerTransport, "close", close_with_all):
        yield


def test_one_that_lost_the_others_joins_them_at_their_step(meet: Meet) -> None:
    """The rendezvous is no longer there."""
    fleets = meet(3)
    for fleet in fleets[:2]:
        fleet.transport.step = 40
    fleets[2].rejoin(LIMIT_S)
    assert fleets[2].joining
    assert fleets[2].join(LIMIT_S) == 40
    assert fleets[2].transport.view.members == (0, 1, 2)
    assert not fleets[2].joining


def test_one_of_two_joins_the_one_at_whose_address_they_met(meet: Meet) -> None:
    """That one told it for ever who had come at the start."""
    fleets = meet(2, at_replica_0=True)
    fleets[1].rejoin(LIMIT_S)
    fleets[1].join(LIMIT_S)
    assert fleets[1].transport.view.members == (0, 1)


def test_one_that_is_started_again_joins_though_another_comes_back_meanwhile(meet: Meet) -> None:
    """Its connection ends when the other replica closes its transport, and only the restarted one can reconnect."""
    fleets = meet(4)
    fleets[3].close()
    place = Place(replica=3, num_replicas=4, rendezvous=fleets[1].transport.address, join_window_s=1.0)
    started = PeerFleet(place, RULES)
    try:
        fleets[0].rejoin(LIMIT_S)
        fleets[0].join(LIMIT_S)
        assert 3 not in fleets[0].transport.connections.connected
        started.join(LIMIT_S)
        assert started.transport.view.members == (0, 1, 2, 3)
    finally:
        started.close()


def test_where_all_have_lost_each_other_the_one_with_the_newest_state_founds_another_view(meet: Meet) -> None:
    fleets = meet(3)
    for fleet, step in zip(fleets, (10, 20, 30), strict=True):
        fleet.transport.step = step

    def rejoin(m: int) -> None:
        fleets[m].rejoin(LIMIT_S)
        fleets[m].close_to_joiners("")
        if m == 2:
            fleets[m].gather(LIMIT_S)
        else:
            assert fleets[m].join(LIMIT_S) == 30

    with all_lost(fleets):
        assert at_once([lambda m=m: rejoin(m) for m in range(3)]) == [None] * 3
    assert fleets[2].transport.view.id > 0
    for fleet in fleets:
        wait_for_members(fleet.transport, 3)  # the first replica to join is the last to learn of later joiners


def test_who_founded_a_view_that_too_few_came_to_is_still_a_minority(meet: Meet) -> None:
    """Regression: it used that view the next time and continued alone, while the others continued without it."""
    fleets = meet(3)
    fleets[0].transport.step = 30
    with all_lost(fleets):
        assert at_once([lambda m=m: fleets[m].rejoin(LIMIT_S) for m in range(3)]) == [None] * 3
    with pytest.raises(RendezvousError, match=r"^Too few of 3 replicas rejoined; missing: 1, 2\. "):
        fleets[0].gather(0.01)
    for fleet in fleets[1:]:
        fleet.transport.close()
    for _ in range(2):  # also when it searches once more
        with pytest.raises(RendezvousError, match="has searched for the others for"):
            fleets[0].rejoin(1.5)


def test_who_joins_a_view_that_too_few_came_to_is_told_and_a_minority_as_well(meet: Meet) -> None:
    """Regression: it used that view when the founder searched again, and continued alone in it."""
    fleets = meet(5)
    fleets[0].transport.step = 30
    with all_lost(fleets):
        assert at_once([lambda m=m: fleets[m].rejoin(LIMIT_S) for m in range(5)]) == [None] * 5
    fleets[0].close_to_joiners("")
    assert fleets[1].join(LIMIT_S) == 30
    for fleet in fleets[:2]:
        with pytest.raises(RendezvousError, match="Too few of "):
            fleet.gather(0.01)
    for fleet in (fleets[0], *fleets[2:]):
        fleet.transport.close()
    with pytest.raises(RendezvousError, match="has searched for the others for"):
        fleets[1].rejoin(1.5)


@pytest.mark.parametrize("frozen", [0, 2])
def test_who_looks_when_the_others_have_finished_hears_that_the_run_is_over(meet: Meet, frozen: int) -> None:
    """The others announced it while this replica was not a member. If it was frozen, they tried several times."""
    first, second = meet(2)
    second.transport.leave()
    manager, errors = type(first.transport.connections), iter([TimeoutError()] * frozen)
    open_one = manager.open

    async def open_or_fail(connections: Any, address: Any) -> Any:
        if error := next(errors, None):
            raise error
        return await open_one(connections, address)

    with mock.patch.object(manager, "open", open_or_fail):
        first.directory.finish()
    first.close()
    for _ in range(1000):
        if second.transport.finishers:
            break
        second.transport.connections.call(asyncio.sleep(0.01))
    with pytest.raises(RunFinishedError, match="the others have finished the run, and no member is left to join"):
        second.rejoin(LIMIT_S)


def test_nobody_else_votes_for_a_member(meet: Meet) -> None:
    """The one with the newest state would found a view without the members, which may be continuing."""
    fleets = meet(3)
    fleets[2].transport.step = 30
    others = fleets[2].transport.connections.identities
    others.update(dict.fromkeys(others, "another key"))
    with all_lost(fleets):
        outcomes = at_once([lambda m=m: fleets[m].rejoin(2.0) for m in range(3)])
    assert all("has searched for the others for 2 s" in str(each) for each in outcomes)


def test_nobody_else_says_that_a_member_was_started_again(meet: Meet) -> None:
    """Before, any process that a searcher asked could end a member that lives by speaking in its name."""
    fleets = meet(3)
    directory = fleets[2].directory
    identities = dict(fleets[2].transport.connections.identities)
    directory.election = replace(directory.election, views=LastViews(fleets[2].transport.view, identities=identities))
    words = "answers in the name of replica 1, which is another one"
    with answering(Looking(Candidate(1, 30))) as liar, pytest.raises(TransportError, match=words):
        fleets[2].transport.connections.call(directory.ask(liar))
    with answering(Looking(Candidate(1, 30))) as restarted:
        directory.known[1] = replace(directory.known[1], address=str(restarted))
        assert isinstance(fleets[2].transport.connections.call(directory.ask(restarted)), Looking)


def test_one_that_has_rejoined_still_knows_how_many_ranks_there_are(meet: Meet) -> None:
    """Before, a stranger could connect to it as any number of other ranks, and use up all descriptors."""
    fleet = meet(2)[1]
    fleet.rejoin(LIMIT_S)
    with closing(stranger_at(fleet.transport.address)) as stranger:
        stranger.sendall(frame({"kind": "hello", "rank": 7, "address": "127.0.0.1:1"}))
        assert stranger.recv(1) == b""
    assert 7 not in fleet.transport.connections.connected


def test_nobody_else_says_that_a_replica_has_finished(meet: Meet) -> None:
    """One member could say so in the name of all, so that this replica gives up or continues alone."""
    third = meet(3)[2].transport
    third.leave()
    for replica in (0, 1):
        with closing(stranger_at(third.address)) as other:
            other.sendall(frame({"kind": "over", "replica": replica}))
            assert other.recv(1) == b""
    assert not third.finishers
