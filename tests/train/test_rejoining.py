"""Replicas that have lost each other, over TCP and in a swarm, find each other again, to join, found a view, or end."""

import asyncio
import errno
import gc
import itertools
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from diloco.algorithm import named_parameters
from diloco.checkpoint import CheckpointWriter
from diloco.data import Shares, as_message
from diloco.errors import RendezvousError, RunFinishedError, TransportError
from diloco.events import Event, Lost, Note, RoundCommitted, ViewChanged
from diloco.membership import GREATEST, View
from diloco.protocol import Disconnected, Entry, Excluded, Looking, RankLost, Received, Rules
from diloco.train import MetFleet, Swarm, find_beginning, save_session
from diloco.transport import (
    Address,
    Admission,
    ConnectionManager,
    Members,
    NodePlace,
    PeerStreams,
    Place,
    SwarmPlace,
    TcpStreams,
)
from diloco.waiting import in_thread
from tests.train.source_runs import session_of
from tests.transport.nowhere import answering, free_address
from tests.transport.relays import frame, stranger_at
from tests.transport.swarms import HIVEMIND_LEAVES_CONNECTIONS, LOOPBACK
from tests.transport.swarms import QUICK as SWARM
from tests.transport.wires import LIMIT_S, QUICK, at_once, rendezvous, wait_for_members

Meet = Callable[..., list[MetFleet]]
Make = Callable[..., MetFleet]
RULES = Rules(**QUICK | {"continue_without_lost": True, "together": False, "raise_on_loss": False})
SOON = replace(RULES, silence_s=2.0)


@pytest.fixture
def meet() -> Iterator[Meet]:
    """Fleets of one replica each that start together."""
    fleets: list[MetFleet] = []

    def made(
        count: int, *, at_replica_0: bool = False, rules: Rules = RULES, keys: Path | None = None
    ) -> list[MetFleet]:
        with nullcontext(free_address()) if at_replica_0 else rendezvous(count) as address:
            places = [Place(replica=m, num_replicas=count, rendezvous=address) for m in range(count)]
            if keys:
                places = [replace(each, identity=keys / f"{each.replica}.key") for each in places]
            found = at_once([lambda place=place: MetFleet(place, rules) for place in places])
        for each in found:
            if isinstance(each, Exception):
                raise each
        fleets.extend(found)
        return found

    yield made
    at_once([fleet.close for fleet in fleets])


@pytest.mark.parametrize("at_replica_0", [False, True])
def test_one_that_lost_the_others_joins_them_at_their_step(meet: Meet, at_replica_0: bool) -> None:
    """The rendezvous is no longer there, or is the other replica, which told for ever who had come at the start."""
    *others, lost = meet(2 if at_replica_0 else 3, at_replica_0=at_replica_0)
    for fleet in others:
        fleet.transport.step = 40
    lost.rejoin(LIMIT_S)
    assert lost.joining
    assert lost.join(LIMIT_S) == 40
    assert len(lost.transport.view.members) == len(others) + 1
    assert not lost.joining


def test_one_that_is_started_again_joins_though_another_comes_back_meanwhile(meet: Meet, keys: Path) -> None:
    """Its connection ends when the other replica closes its transport; both look for the others at the same time."""
    fleets = meet(4, keys=keys)
    fleets[3].close()
    at = fleets[1].transport.address
    place = Place(replica=3, num_replicas=4, rendezvous=at, identity=keys / "3.key")
    started = MetFleet(place, RULES)
    try:
        fleets[0].rejoin(LIMIT_S)
        fleets[0].join(LIMIT_S)
        started.join(LIMIT_S)
        assert started.transport.view.members == (0, 1, 2, 3)
    finally:
        started.close()


@pytest.mark.parametrize("begins_with", ["its own", "the initial one", "one that it is given"])
def test_one_that_was_killed_comes_back_to_its_own_head_and_to_the_parameters_of_all(
    begins_with: str, meet: Meet, data: Path, tmp_path: Path
) -> None:
    """Without a checkpoint it begins with the initial head, or with that of ``--init-from``: nobody's is sent."""
    words = "--transport tcp --join 127.0.0.1:1 --sync.arguments.average.at-home lm_head"
    fleets = meet(2)
    donor, killed = at_once([partial(session_of, data, words, fleet) for fleet in fleets])
    head = killed.replicas[0].model.get_parameter("lm_head.weight").detach()
    initial = head.clone()
    with torch.no_grad():
        head.add_(1.0)
        donor.replicas[0].model.get_parameter("lm_head.weight").sub_(1.0)
        for fragment in donor.replicas[0].diloco.fragments:
            with fragment.state.changing():
                fragment.state.values.add_(0.5)
    if begins_with == "its own":
        writer = CheckpointWriter()
        save_session(killed, writer, tmp_path / "replica-1" / "checkpoints", keep=1)
        assert writer.poll(wait=True)
        words += f" --resume {tmp_path}"
    fleets[1].close()
    place = Place(replica=1, num_replicas=2, rendezvous=fleets[0].transport.address)
    started = MetFleet(place, RULES)
    try:
        given = {name: each + 2.0 for name, each in named_parameters(donor.replicas[0].model).items()}
        back = session_of(data, words, started, initial=given if begins_with == "one that it is given" else None)
        find_beginning(back)
        model, theirs = back.replicas[0].model, donor.replicas[0].diloco.named_global_params()
        heads = {"its own": initial + 1.0, "the initial one": initial, "one that it is given": initial - 1.0 + 2.0}
        assert torch.equal(model.get_parameter("lm_head.weight"), heads[begins_with])
        for name, values in theirs.items():
            assert torch.equal(model.get_parameter(name), values), name
    finally:
        started.close()


@pytest.mark.parametrize("where", ["at the one that waits", "at the rendezvous"])
def test_one_that_is_started_again_joins_one_that_waits_for_it(meet: Meet, where: str, tmp_path: Path) -> None:
    """Also if it begins as at the start of the run, and collects the ranks: the one that waits finds it."""
    first, second = meet(2, at_replica_0=True, rules=replace(SOON, min_replicas=2), keys=tmp_path)
    place, transport = first.place, second.directory.transport
    assert isinstance(place, Place)
    second.transport.step, view_id = 40, second.transport.view.id
    first.close()
    wait_until(lambda: transport.views.waiting == "1 of at least 2 replicas are left")
    if where == "at the one that waits":
        place = replace(place, rendezvous=transport.address)
    started = MetFleet(place, replace(SOON, min_replicas=2))
    try:
        assert started.joining
        assert started.join(LIMIT_S) == 40
        wait_until(lambda: transport.view.members == (0, 1) and transport.view.id > view_id)
        assert transport.failure is None
    finally:
        started.close()


def test_one_that_waits_yields_to_one_that_was_started_again_and_is_further(meet: Meet, tmp_path: Path) -> None:
    """No member of its view can be so far: the others have gone on without it."""
    rules = replace(SOON, min_replicas=2, rendezvous_timeout_s=4.0)
    first, second = meet(2, rules=rules, keys=tmp_path)
    place, transport = first.place, second.directory.transport
    assert isinstance(place, Place)
    first.close()
    wait_until(lambda: transport.views.waiting)
    place = replace(place, rendezvous=transport.address)
    started = in_thread(lambda: MetFleet(place, rules, held_step=1 << 40), "started")
    wait_until(second.failure)
    assert f"replica 0 has a checkpoint of step {1 << 40}: the others went on" in str(second.failure())
    with pytest.raises(RendezvousError, match="has searched for the others for 1 s"):
        second.rejoin(1.0)
    with pytest.raises(RendezvousError, match="found no rendezvous"):
        started.result(LIMIT_S)


def test_one_that_waits_yields_to_one_that_was_started_again_and_is_a_member_elsewhere(
    meet: Meet, tmp_path: Path
) -> None:
    """All others have been started again since they went on without it, so that none of them knows its view."""
    rules = replace(SOON, min_replicas=3)
    *ended, last = meet(3, rules=rules, keys=tmp_path)
    ports = [each.directory.transport.address.port for each in ended]
    for each in ended:
        each.close()
    waiting = last.directory.transport
    wait_until(lambda: waiting.views.waiting)
    with rendezvous(2) as address:
        places = [
            Place(
                replica=m,
                num_replicas=2,
                rendezvous=address,
                identity=tmp_path / f"{m}.key",
                listen=("", range(port, port + 1)),
            )
            for m, port in enumerate(ports)
        ]
        elsewhere = at_once([lambda place=place: MetFleet(place, SOON) for place in places])
    try:
        for each in elsewhere:
            each.directory.transport.connections.most_ranks = 3
        wait_until(lambda: waiting.failure)
        words = r"^replica [01] was started again, and replicas 0, 1 went on without this replica\."
        assert re.search(words, str(waiting.failure))
    finally:
        for each in elsewhere:
            each.close()


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


def test_who_waits_for_members_that_finish_without_it_hears_that_the_run_is_over(meet: Meet) -> None:
    """It was frozen as they went on, and what they told it was lost; it waited for ever for them to be back."""
    *others, fleet = meet(3)
    with mock.patch.object(fleet.transport.views, "exclude"):
        for each in others:
            each.transport.connections.call_event(RankLost(2, "frozen", "silent"), LIMIT_S)
        wait_until(lambda: all(each.transport.view.members == (0, 1) for each in others))
        assert fleet.transport.failure is None
        others[0].directory.finish()
        wait_until(lambda: fleet.transport.failure)
    assert "replica 0 has finished the run without this replica" in str(fleet.transport.failure)
    for each in others:
        each.close()
    with pytest.raises(RunFinishedError, match="the others have finished the run"):
        fleet.rejoin(LIMIT_S)


def test_who_was_replaced_and_finds_nobody_ends_with_a_sentence(meet: Meet, data: Path) -> None:
    """It had stood still, and the others had ended since, so it searched for ever."""
    *others, fleet = meet(3)
    session, stop = session_of(data, "--replicas 3 --network.round-timeout 1s", fleet), mock.MagicMock(signal=None)
    views = fleet.transport.views
    parting = Excluded(GREATEST, "it was started again")
    fleet.transport.connections.call_event(Received(0, parting), LIMIT_S)
    assert views.replaced
    for each in others:
        each.transport.close()
    with pytest.raises(RendezvousError, match=r"^Another process has taken the place of replica 2: .* has searched"):
        session.follow_views(stop)


def test_nobody_founds_a_view_before_others_had_the_time_to_announce_themselves(meet: Meet) -> None:
    """Else the first one that searches founds it, and not the one with the newest state."""
    (fleet,), now_s = meet(1), 100.0
    directory = fleet.directory
    directory.me, directory.join_window_s, directory.begins = Looking(0, 5), 3.0, False

    async def sleep(pause_s: float) -> None:
        nonlocal now_s
        now_s += pause_s

    clock = mock.MagicMock(time=lambda: now_s)
    with mock.patch.multiple(asyncio, sleep=sleep, get_running_loop=lambda: clock):
        assert asyncio.run(directory.find()) == View.of(1)
    assert 3.0 <= now_s - 100.0 < 3.0 + max(directory.pauses_s)


def test_one_that_has_rejoined_still_knows_how_many_ranks_there_are(meet: Meet) -> None:
    """Before, a stranger could connect to it as any number of other ranks, and use up all descriptors."""
    fleet = meet(2)[1]
    fleet.rejoin(LIMIT_S)
    with closing(stranger_at(fleet.transport.address)) as stranger:
        stranger.sendall(frame({"kind": "hello", "rank": 7, "address": "127.0.0.1:1"}))
        assert stranger.recv(1) == b""
    assert 7 not in fleet.transport.connections.connected


@contextmanager
def taken(port: int) -> Iterator[None]:
    """Let another program listen at a port."""
    with closing(socket.create_server(("127.0.0.1", port))):
        yield


FULL = mock.patch("socket.socketpair", side_effect=OSError(errno.EMFILE, "Too many open files"))
"""A process that has no descriptor left for another loop."""


@pytest.mark.parametrize(
    ("fault", "words"), [(taken, "Address already in use"), (lambda port: FULL, "Too many open")], ids=["port", "files"]
)
def test_one_that_can_not_listen_for_the_others_may_try_again(
    meet: Meet, fault: Callable[[int], AbstractContextManager[Any]], words: str
) -> None:
    """An internal error has closed its port. Before, its run ended with a traceback."""
    fleet = meet(2)[1]
    connections = fleet.directory.transport.connections
    connections.call(connections.streams.refuse())
    with fault(connections.address.port), pytest.raises(TransportError, match=f"can't listen for the others.*{words}"):
        fleet.rejoin(LIMIT_S)
    fleet.rejoin(LIMIT_S)
    assert fleet.joining


def rejoin_and_open(fleet: MetFleet) -> None:
    """As a session does: who has founded a view lets the others join."""
    fleet.rejoin(LIMIT_S)
    if not fleet.joining:
        fleet.close_to_joiners("")


def lose(connections: ConnectionManager, rank: int, *, gone: bool) -> None:
    """End the connection to a rank, as if its process had ended, or as if nothing could be heard from it."""
    connections.hang_up(rank)
    connections.handle(Disconnected(rank))
    connections.handle(RankLost(rank, "it was cut off", "ended" if gone else "unreachable"))


def wait_until(what: Callable[[], object]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < until_s
        time.sleep(0.01)  # what other threads do can only be polled here


def test_the_larger_side_yields_once_it_is_the_smaller_one_though_it_took_nobody_for_ended(meet: Meet) -> None:
    """It learns by the question of the other side, asks there itself, and yields once that answers."""
    fleets = meet(3, rules=replace(SOON, silence_s=1.0))
    ways = [fleet.transport.connections for fleet in fleets]
    for rank, other in ((1, 0), (2, 0), (0, 1), (0, 2)):
        ways[rank].post(partial(lose, ways[rank], other, gone=rank == 0))
    wait_until(lambda: [fleet.transport.view.members for fleet in fleets] == [(0,), (1, 2), (1, 2)])
    fleets[2].close()
    wait_until(lambda: fleets[1].failure())
    words = "Replica 0 runs, though nothing listened .*: replica 0 went on without replica 1. .* This side yields"
    assert re.search(words, str(fleets[1].failure()))
    fleets[1].rejoin(LIMIT_S)
    fleets[1].join(LIMIT_S)
    assert fleets[0].transport.view.members == (0, 1)
    (finding,) = fleets[0].take_findings()
    assert re.search("Replica 1 runs, .*: replica 1 went on without replica 0.* to yield", finding)


def test_another_process_at_the_address_of_one_that_has_ended_makes_nobody_yield(meet: Meet) -> None:
    """It may be of another run with the same settings, which got the port of the one that ended."""
    first, second = meet(2, rules=replace(SOON, silence_s=1.0))
    connections, members = first.transport.connections, Members((Entry(1, "there:1"),), (1, 2, 3))
    second.directory.transport.close()
    wait_until(lambda: first.transport.view.members == (0,))
    dialled, dial = list[Address](), TcpStreams.open

    async def note(streams: TcpStreams, address: Address) -> Any:
        dialled.append(address)
        return await dial(streams, address)

    with answering(members) as elsewhere, mock.patch.object(TcpStreams, "open", note):
        connections.entries[1] = replace(connections.entries[1], address=str(elsewhere))
        wait_until(lambda: len(dialled) > 1)  # what the first one led to is done
    assert dialled[0] == elsewhere
    assert first.failure() is None
    assert not first.take_findings()


def test_nobody_else_says_that_a_replica_has_finished(meet: Meet) -> None:
    """One member could say so in the name of all, so that this replica gives up or continues alone."""
    third = meet(3)[2].transport
    third.leave()
    for replica in (0, 1):
        with closing(stranger_at(third.address)) as other:
            other.sendall(frame({"kind": "over", "replica": replica}))
            assert other.recv(1) == b""
    assert not third.finishers


class Peer:
    """One replica and its thread, which trains until all replicas are asked to end."""

    def __init__(self, fleet: MetFleet, data: Path, arguments: str) -> None:
        self.fleet, self.events = fleet, list[Event]()
        self.asked, self._news = threading.Event(), queue.SimpleQueue[Event]()
        self.session = session_of(data, f"--steps 100000 {arguments}", fleet, self._note)
        # NumPy crashes if one thread swaps its generator while another reads it
        self.session.replicas[0].random_state = mock.MagicMock()
        self.session.open_to_joiners()
        self.thread = threading.Thread(target=self._train, daemon=True)

    def _train(self) -> None:
        last, stop = None, mock.MagicMock(signal=None, interrupting=nullcontext)
        try:
            while last is None or self.session.totals.steps < last:
                self.session.follow_views(stop)
                self.session.step()
                last = last or self.fleet.stop_step(self.session.totals.steps, wanted=self.asked.is_set())
            self.fleet.finish(done=False)
        finally:
            self.fleet.close()

    def _note(self, event: Event) -> None:
        self.events.append(event)
        self._news.put(event)

    def wait_for(self, kind: type[Event], **fields: Any) -> None:
        """Wait for an event of a kind with these fields."""
        event: Event | None = None
        while not (isinstance(event, kind) and vars(event).items() >= fields.items()):
            event = self._news.get(timeout=LIMIT_S)


def end_together(peers: list[Peer]) -> None:
    """Ask all to stop, and check that they do, with the same global parameters."""
    for each in peers:
        each.asked.set()
        each.fleet.stop_soon()  # as at a signal: who asked between two steps only might wait for others and leave alone
    for each in peers:
        each.thread.join(LIMIT_S)
        assert not each.thread.is_alive(), f"it did not end: {each.events[-9:]}"
    assert len({each.session.global_digest() for each in peers}) == 1


@pytest.mark.parametrize(
    ("replicas", "yielding"), [(2, (1,)), (3, (2,)), (3, (0,)), (4, (1, 2))], ids=lambda value: str(value)
)
def test_of_two_sides_that_go_on_as_a_router_refuses_connections_one_yields(
    meet: Meet, data: Path, monkeypatch: pytest.MonkeyPatch, replicas: int, yielding: tuple[int, ...]
) -> None:
    """Each side takes the processes of the other one for ended. Before, both went on to the end, without a word."""
    arguments = f"--replicas {replicas} --data-parallel-steps 0"
    peers = [Peer(fleet, data, arguments) for fleet in meet(replicas, rules=SOON)]
    for each in peers:
        each.thread.start()
    for each in peers:
        each.wait_for(RoundCommitted, contributors=tuple(range(replicas)))
    staying = tuple(m for m in range(replicas) if m not in yielding)
    sides = {m: yielding if m in yielding else staying for m in range(replicas)}
    numbers = {each.fleet.transport.address.port: m for m, each in enumerate(peers)}
    owners = {each.fleet.transport.connections.streams: m for m, each in enumerate(peers)}
    dial = TcpStreams.open

    async def refused(streams: TcpStreams, address: Address) -> Any:
        if numbers[address.port] not in sides[owners[streams]]:
            raise ConnectionRefusedError("the router has lost its way")
        return await dial(streams, address)

    def cut(connections: ConnectionManager, others: tuple[int, ...]) -> None:
        for rank in connections.connected & {*others}:
            connections.peers[rank].writer.transport.abort()

    with monkeypatch.context() as broken:
        broken.setattr(TcpStreams, "open", refused)
        for m, each in enumerate(peers):
            connections = each.fleet.transport.connections
            connections.post(cut, connections, staying if m in yielding else yielding)
        for m, each in enumerate(peers):
            each.wait_for(RoundCommitted, contributors=sides[m])
    for m in yielding:
        peers[m].wait_for(Lost)
    for fragment, each in itertools.product((0, 1), peers):  # the state of each has arrived everywhere
        each.wait_for(RoundCommitted, fragment=fragment, contributors=tuple(range(replicas)))
    end_together(peers)
    told = [event.reason for m in yielding for event in peers[m].events if isinstance(event, Lost)]
    assert any("This side yields, and adopts their state" in each for each in told), told
    for m in staying:
        assert not [event for event in peers[m].events if isinstance(event, Lost)]
    told = [event.text for m in staying for event in peers[m].events if isinstance(event, Note)]
    assert any("They are to yield, and adopt the state of this side" in each for each in told), told


@pytest.mark.parametrize("shared_start", [0, 100000])
def test_all_who_lose_each_other_wait_and_go_on_together(
    meet: Meet, data: Path, monkeypatch: pytest.MonkeyPatch, shared_start: int
) -> None:
    """They keep their transports, and nobody founds a view or adopts the state of another one."""
    peers = [Peer(fleet, data, f"--replicas 3 --data-parallel-steps {shared_start}") for fleet in meet(3)]
    before = [each.fleet.transport for each in peers]
    for each in peers:
        each.thread.start()
    with monkeypatch.context() as cut:
        cut.setattr(TcpStreams, "open", mock.AsyncMock(side_effect=OSError("cut off")))
        barrier = threading.Barrier(3)

        def lose_all(connections: ConnectionManager) -> None:
            barrier.wait(LIMIT_S)  # each loses the others at the moment at which they lose it
            connections.drop(dict.fromkeys(connections.peers.values(), "it is silent"), "silent")

        for each in peers:
            connections = each.fleet.transport.connections
            connections.post(partial(lose_all, connections))
        for m, each in enumerate(peers):
            wait_until(lambda each=each: each.fleet.directory.transport.views.waiting)
            assert each.fleet.directory.transport.views.missing == {0, 1, 2} - {m}
    for each in peers:
        each.wait_for(ViewChanged, members=(0, 1, 2), lost=())
    if not shared_start:
        peers[0].wait_for(RoundCommitted, contributors=(0, 1, 2))
    end_together(peers)
    assert [each.fleet.transport for each in peers] == before
    assert not [event for each in peers for event in each.events if isinstance(event, Lost)]


@pytest.fixture
def swarm(keys: Path) -> Iterator[Make]:
    fleets: list[MetFleet] = []

    def made(
        number: int,
        *known: MetFleet,
        run: str = "run",
        held_step: int = -1,
        start: int = 1,
        join_window_s: float = 0.5,
        founds: bool = False,
        min_replicas: int = 1,
    ) -> MetFleet:
        addresses = tuple(address for each in known for address in each.directory.listens_at())
        place = SwarmPlace(
            identity=keys / f"{number}.key",
            admission=Admission(run, "", frozenset()),
            node=NodePlace(join=addresses, listen=LOOPBACK, map_ports=False),
            replica=number,
            name="anna-pc",
            founds=founds,
            join_window_s=join_window_s,
        )
        own = {"rendezvous_timeout_s": 15.0, "together": False, "min_replicas": min_replicas}
        rules = Rules(**SWARM | own)
        fleets.append(Swarm(place, rules, held_step=held_step, replicas=start, margin=1))
        return fleets[-1]

    yield made
    for fleet in fleets:
        fleet.transport.close()
    gc.collect()  # so that objects which Hivemind leaves open are reported for this test, not for a later one


@HIVEMIND_LEAVES_CONNECTIONS
def test_who_comes_when_the_others_have_finished_is_told_so_at_once(swarm: Make) -> None:
    """This includes a replica that rejoins. One that can resume from a checkpoint founds its own swarm."""
    standing = swarm(9, run="another")  # keeps the entries of the DHT alive
    first = swarm(0, standing, founds=True)
    first.close_to_joiners("")
    second = swarm(1, standing, first)
    second.join(LIMIT_S)
    assert first.transport.names() == second.transport.names() == {"0": "anna-pc/0", "1": "anna-pc/1"}
    first.directory.finish()
    first.close()
    second.transport.close()
    with pytest.raises(RunFinishedError, match="the others have finished run 'run', and no member is left"):
        second.rejoin(LIMIT_S)
    with pytest.raises(RunFinishedError):
        swarm(2, standing)
    assert not swarm(3, standing, held_step=5, founds=True).joining


def find_again(fleet: MetFleet) -> None:
    """Rejoin. Its port may have been taken meanwhile, as a run's may, which tries again, too."""
    for _ in range(20):
        try:
            return fleet.rejoin(LIMIT_S)
        except TransportError as error:
            if "address already in use" not in str(error):
                raise
    raise AssertionError("its port stays taken")


@HIVEMIND_LEAVES_CONNECTIONS
def test_those_who_lost_each_other_meet_again_where_they_were(swarm: Make) -> None:
    """First one alone, which the other one goes on without, then both. Nobody gave the first one an address."""
    first = swarm(0)
    first.close_to_joiners("")
    second = swarm(1, first)
    second.join(LIMIT_S)
    first.transport.step, before = 40, second.directory.listens_at()
    find_again(second)
    assert second.joining
    assert second.directory.listens_at() == before
    assert second.join(LIMIT_S) == 40
    wait_for_members(first.transport, 2)
    assert first.directory.swarm == second.directory.swarm


@HIVEMIND_LEAVES_CONNECTIONS
def test_peers_that_are_too_few_without_each_other_wait_and_meet_again(
    swarm: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They keep their transports, and are the same peers of the same swarm."""
    first = swarm(0, min_replicas=2)
    first.close_to_joiners("")
    second = swarm(1, first, min_replicas=2)
    second.join(LIMIT_S)
    wait_for_members(first.transport, 2)
    ways, ids = [each.directory.transport for each in (first, second)], [first.transport.view.id]
    with monkeypatch.context() as cut:
        cut.setattr(PeerStreams, "open", mock.AsyncMock(side_effect=OSError("cut off")))
        for each in ways:
            connections = each.connections
            connections.post(lambda on=connections: on.drop(dict.fromkeys(on.peers.values(), "it is silent"), "silent"))
        wait_until(lambda: all(each.views.waiting for each in ways))
    wait_until(lambda: all(each.view.members == (0, 1) and each.view.id > ids[0] for each in ways))
    assert [each.failure for each in ways] == [None, None]


@HIVEMIND_LEAVES_CONNECTIONS
def test_who_joins_before_training_goes_on_has_something_to_draw_at_once(swarm: Make) -> None:
    """The founder's checkpoint is from a moment after a view change but before the next slice of data had begun."""
    before = Shares.of((0, 1)).following(6, (0,), joined=(), margin=4, batch_size=1)
    first = swarm(0, start=2)
    first.load_state_dict({"traffic": [0, 0], "step": 8, "shares": as_message(before), "swarm": "another"})
    first.close_to_joiners("")
    second = swarm(1, first, start=2)
    assert second.join(LIMIT_S) == 8
    assert [each.from_step for each in second.take_assignments()] == [8, 10]
    drawn = [position for m in (0, 1) for position in _drawn(before, m, range(8 if m == 0 else 6))]
    drawn += _drawn(before, 0, range(8, 10)) + _drawn(second.shares, 1, range(8, 20))
    drawn += _drawn(second.shares, 0, range(10, 20)) + _drawn(before, 1, range(6, 10))  # the last are left out
    assert sorted(drawn) == list(range(len(drawn)))
    assert first.shares == second.shares


def _drawn(shares: Shares, member: int, steps: range) -> list[int]:
    """Return the positions, one per step, that a member draws in the steps for which it has assignments."""
    of_member = shares.of_member(member)
    at = [(step, [each for each in of_member if each.from_step <= step]) for step in steps]
    return [int(known[-1].positions(member, step, 1)[0]) for step, known in at if known]
