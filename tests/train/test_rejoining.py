"""Replicas over torch that have lost each other find each other again, to join, found a view, or end."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest

from diloco.errors import RendezvousError, RunFinishedError, TransportError
from diloco.membership import BootstrapElection, View
from diloco.protocol import Entry
from diloco.train import TorchFleet, joining
from diloco.transport import PeerTransport, Place, TcpWire, ask, connect
from tests.transport.nowhere import nobody_at
from tests.transport.swarms import wait_for_members
from tests.transport.wires import QUICK, at_once, deaf_manager, rendezvous

LIMIT_S = 30.0
Meet = Callable[..., list[TorchFleet]]


WIRE = TcpWire(
    **QUICK | {"join_window_s": 1.0, "continue_without_lost": True, "comes_back": True, "raise_on_loss": False}
)


@pytest.fixture
def meet() -> Iterator[Meet]:
    """Fleets of one replica each that start together. With ``ended``, one more replica registered and has ended."""
    fleets: list[TorchFleet] = []

    def made(count: int, *, ended: bool = False) -> list[TorchFleet]:
        registered = count + ended
        with rendezvous(registered) as address, nobody_at() as nowhere, deaf_manager() as asking:
            places = [Place(replica=m, num_replicas=registered, rendezvous=address) for m in range(count)]
            begin = [lambda place=place: TorchFleet(connect(place, WIRE), place, WIRE) for place in places]
            register = [lambda: ask(asking, address, Entry(count, str(nowhere)), LIMIT_S)] if ended else []
            found = at_once([*begin, *register])[:count]
        for each in found:
            if isinstance(each, Exception):
                raise each
        fleets.extend(found)
        return found

    yield made
    at_once([fleet.close for fleet in fleets])


@contextmanager
def all_lost(fleets: list[TorchFleet]) -> Iterator[None]:
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


def test_one_that_is_started_again_joins_though_another_comes_back_meanwhile(meet: Meet) -> None:
    """Its connection ends when the other replica closes its transport, and only the restarted one can reconnect."""
    fleets = meet(4)
    fleets[3].close()
    place = Place(replica=3, num_replicas=4, rendezvous=fleets[1].transport.address)
    started = TorchFleet(connect(place, WIRE), place, WIRE)
    try:
        fleets[0].rejoin(LIMIT_S)
        fleets[0].join(LIMIT_S)
        assert 3 not in fleets[0].transport.connections.connected
        started.join(LIMIT_S)
        assert started.transport.view.members == (0, 1, 2, 3)
    finally:
        started.close()


def test_one_that_ends_while_all_connect_is_lost_and_joins_when_it_is_started_again(meet: Meet) -> None:
    fleets = meet(2, ended=True)
    for fleet in fleets:
        wait_for_members(fleet.transport, 2)
    place = Place(replica=2, num_replicas=3, rendezvous=fleets[1].transport.address)
    started = TorchFleet(connect(place, WIRE), place, WIRE)
    try:
        started.join(LIMIT_S)
        assert started.transport.view.members == (0, 1, 2)
    finally:
        started.close()


def test_who_joins_waits_while_the_others_have_nothing_yet_and_not_when_they_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others have just started as well, or average gradients at every step."""
    monkeypatch.setattr(joining, "_RETRY_S", 0.0)
    session, fleet = mock.MagicMock(replicas=[mock.MagicMock()]), mock.MagicMock()
    session.settings.algorithm, session.settings.transport.give_up_after_s = "streaming", None
    session.settings.train.data_parallel_steps = session.replicas[0].diloco.shared.begun_after = 0
    session.totals.steps, fleet.join.return_value, fleet.gives_up.return_value = 0, 40, False
    nothing = TransportError("replica 0 has published nothing.")
    session.begin_diloco.return_value.take_over.side_effect = [nothing, nothing, None]
    joining.join_run(session, fleet, LIMIT_S)
    assert session.totals.steps == 40
    fleet.gives_up.return_value = True
    session.begin_diloco.return_value.take_over.side_effect = [nothing, None]
    with pytest.raises(TransportError, match="published nothing"):
        joining.join_run(session, fleet, LIMIT_S)


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
    with pytest.raises(RendezvousError, match=r"^Too few of replicas 0, 1, 2 rejoined; missing: 1, 2\. "):
        fleets[0].gather(0.01)
    for fleet in fleets[1:]:
        fleet.transport.close()
    for _ in range(2):  # also when it searches once more
        with pytest.raises(RendezvousError, match="has searched for the others for"):
            fleets[0].rejoin(1.5)


def test_a_vote_for_a_founder_holds_in_the_next_search_as_well(meet: Meet) -> None:
    """Otherwise another one could found a view by a second vote."""
    fleets, vote, seen = meet(3), View(1, (0,)), list[View | None]()

    def founds(election: BootstrapElection, others: object, waited_s: float) -> None:
        assert election.views is not None
        seen.append(election.me.vote)
        election.views.vote = vote

    for fleet in fleets[:2]:
        fleet.transport.close()
    with mock.patch.object(BootstrapElection, "founds", founds):
        for _ in range(2):
            seen.clear()
            with pytest.raises(RendezvousError, match="has searched for the others for"):
                fleets[2].rejoin(0.1)
    assert seen[0] == vote


def test_who_joins_a_view_that_too_few_came_to_is_told_and_a_minority_as_well(meet: Meet) -> None:
    """Regression: it used that view when the founder searched again, and continued alone in it."""
    fleets = meet(5)
    fleets[0].transport.step = 30
    with all_lost(fleets):
        assert at_once([lambda m=m: fleets[m].rejoin(LIMIT_S) for m in range(5)]) == [None] * 5
    fleets[0].close_to_joiners("")
    assert fleets[1].join(LIMIT_S) == 30
    for fleet in fleets[:2]:
        with pytest.raises(RendezvousError, match="Too few of replicas"):
            fleet.gather(0.01)
    for fleet in (fleets[0], *fleets[2:]):
        fleet.transport.close()
    with pytest.raises(RendezvousError, match="has searched for the others for"):
        fleets[1].rejoin(1.5)


def test_a_minority_founds_nothing_and_ends_when_its_owner_said_so(meet: Meet) -> None:
    """Two others may be continuing without it. Its port stays open, as a closed one would look as if it had ended."""
    fleets = meet(3)
    address = fleets[0].transport.address
    with all_lost(fleets):
        found = at_once([lambda: fleets[0].rejoin(1.5), *(fleet.transport.close for fleet in fleets[1:])])
    assert isinstance(found[0], RendezvousError)
    assert "replica 0 has searched for the others for 1.5 s, its limit" in str(found[0])
    socket.create_connection((address.host, address.port)).close()


def test_who_looks_when_the_others_have_finished_hears_that_the_run_is_over(meet: Meet) -> None:
    """The others announced it while this replica was not a member."""
    first, second = meet(2)
    second.transport.leave()
    first.tell_finished()
    first.close()
    for _ in range(1000):
        if second.transport.run_is_over:
            break
        second.transport.connections.call(asyncio.sleep(0.01))
    with pytest.raises(RunFinishedError, match="the others have finished the run, and no member is left to join"):
        second.rejoin(LIMIT_S)
