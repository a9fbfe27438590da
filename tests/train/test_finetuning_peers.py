"""Replicas that are killed or lose the others, and rejoin, end with the same adapters and send nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from diloco.data import build_chat_corpus
from diloco.events import Event, Note, ViewChanged
from diloco.model import with_vocabulary
from diloco.train import Session, StopAsked, TorchFleet, follow_views, join_run
from diloco.transport import Address, Place, TcpStreams, TcpWire, connect
from tests.finetuning import write_base, write_sums
from tests.train.test_finetuning import plan_of
from tests.transport.wires import QUICK, at_once, rendezvous

LIMIT_S = 60.0
"""A generous limit, for busy machines."""


class Peer:
    """One replica and its thread, which trains until all replicas are asked to end or this one is killed.

    Args:
        place: the replica's place in the run.
        make: creates the session from its fleet and a consumer of events.
    """

    def __init__(self, place: Place, make: Callable[..., Session]) -> None:
        wire = TcpWire(
            **QUICK | {"continue_without_lost": True, "join_window_s": 1.0, "comes_back": True, "raise_on_loss": False}
        )
        self.fleet = TorchFleet(connect(place, wire), place, wire)
        self._make = make
        self._changed = threading.Condition()
        self.events: list[Event] = []
        self._asked, self._killed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._train, daemon=True)
        self.digest = ""

    def make(self) -> None:
        """Create the session. Call it while no replica trains, or if shared random numbers do not matter."""
        self.session = self._make(self.fleet, self._note)
        for replica in self.session.replicas:  # NumPy crashes if one thread swaps its generator while another reads it
            replica.random_state = mock.MagicMock()

    def start(self) -> None:
        """Start training, at the step of the others if they are already training."""
        if self.fleet.joining:
            join_run(self.session, self.fleet, LIMIT_S)
        self.session.open_to_joiners()
        self._thread.start()

    def _train(self) -> None:
        last = None
        stop = mock.MagicMock(signal=None, interrupting=self._interrupting)
        try:
            while not self._killed.is_set() and (last is None or self.session.totals.steps < last):
                follow_views(self.fleet, self.session, stop, self._note)
                self.session.step()
                last = last or self.fleet.stop_step(self.session.totals.steps, wanted=self._asked.is_set())
            if not self._killed.is_set():
                self.digest = self.session.global_digest()
                self.fleet.finish()
        finally:
            self.fleet.close()

    @contextmanager
    def _interrupting(self) -> Iterator[None]:
        if self._killed.is_set():
            raise StopAsked
        yield

    def _note(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait_for_round_of(self, *replicas: int) -> None:
        """Wait for the next round of exactly these contributors."""
        before = len(self.events)

        def come() -> bool:
            return any(getattr(event, "contributors", ()) == replicas for event in self.events[before:])

        self._wait_for(come, f"round of {replicas}")

    def wait_until_it_looks_for_the_others(self) -> None:
        self._wait_for(lambda: any(map(looks, self.events)), "search")

    def _wait_for(self, come: Callable[[], bool], what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(come, LIMIT_S), f"no {what}: {self.events[-9:]}"

    def give_up_others(self, at_once: threading.Barrier) -> None:
        """Lose all other replicas at the moment at which they lose this one."""
        connections = self.fleet.transport.connections

        def drop_all() -> None:
            at_once.wait(LIMIT_S)
            connections.drop_silent(connections.connected)

        connections.post(drop_all)

    def kill(self) -> None:
        """End the replica between two steps, without announcing it to the others."""
        self._killed.set()
        self._thread.join()

    def end(self) -> None:
        """Ask the replica to stop and wait until its thread has ended."""
        self._asked.set()
        self._thread.join(LIMIT_S)
        if self._thread.is_alive():
            self._killed.set()
            self.fleet.close()
            raise AssertionError(f"it did not end: {self.events[-9:]}")


def looks(event: Event) -> bool:
    return isinstance(event, Note) and "searching for the other replicas" in event.text


class Peers:
    """Three replicas of a run that start together and end at the same step.

    Args:
        data_parallel_steps: the length of the shared start.
    """

    def __init__(self, folder: Path, data_parallel_steps: int = 0) -> None:
        base, sums = write_base(folder / "base"), write_sums(folder / "sums.jsonl")
        values = {"network__replicas": 3, "train__steps": 100_000, "train__data_parallel_steps": data_parallel_steps}
        settings = plan_of(base, sums, **values).configuration
        self.corpus = build_chat_corpus(settings.data, settings.train.sequence_length)
        self.settings = replace(settings, model=with_vocabulary(settings.model, self.corpus.tokenizer.vocab_size))
        with rendezvous(3) as address:
            self.all = at_once([lambda m=m: self.peer(m, address) for m in range(3)])
        for each in self.all:
            each.make()

    def peer(self, replica: int, address: Address) -> Peer:
        return Peer(Place(replica=replica, num_replicas=3, rendezvous=address), self._session)

    def _session(self, fleet: TorchFleet, note: Callable[[Event], None]) -> Session:
        return Session(self.settings, self.corpus, fleet, torch.device("cpu"), note)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Peers]]:
    begun: list[Peers] = []

    def made(**values: int) -> Peers:
        begun.append(peers := Peers(tmp_path, **values))
        for each in peers.all:
            each.start()
        return peers

    yield made
    for peers in begun:
        for each in peers.all:
            each.end()


def test_who_is_killed_and_started_again_takes_over_the_adapters_of_the_others(begin: Callable[..., Peers]) -> None:
    peers = begin()
    first, second, third = peers.all
    first.wait_for_round_of(0, 1, 2)
    third.kill()
    first.wait_for_round_of(0, 1)
    peers.all.append(again := peers.peer(2, first.fleet.transport.address))
    again.make()
    again.start()
    again.wait_for_round_of(0, 1, 2)
    for each in peers.all:
        each.end()
    assert third.digest == ""
    assert first.digest == second.digest == again.digest != ""
    assert all("lora_" in name for name in again.session.global_params())


def test_who_loses_the_others_in_the_shared_start_joins_them_after_it(begin: Callable[..., Peers]) -> None:
    peers = begin(data_parallel_steps=20)
    first, second, third = peers.all
    connections = third.fleet.transport.connections
    connections.post(connections.drop_silent, (0, 1))
    first.wait_for_round_of(0, 1)
    third.wait_for_round_of(0, 1, 2)
    for each in peers.all:
        each.end()
    assert first.digest == second.digest == third.digest != ""


def test_all_who_lose_each_other_in_the_shared_start_end_it_and_go_on_together(
    begin: Callable[..., Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The founder trains only after others have joined, because they could otherwise found another view."""
    peers = begin(data_parallel_steps=100_000)
    first, second, third = peers.all
    with monkeypatch.context() as cut:
        cut.setattr(TcpStreams, "open", mock.AsyncMock(side_effect=ConnectionRefusedError("cut off")))
        at_once = threading.Barrier(3)
        for each in peers.all:
            each.give_up_others(at_once)
        for each in peers.all:
            each.wait_until_it_looks_for_the_others()
    first.wait_for_round_of(0, 1, 2)
    for each in peers.all:
        each.end()
    assert first.digest == second.digest == third.digest != ""
    events = [event for each in peers.all for event in each.events]
    looked = max(event.step for event in events if looks(event))
    assert min(event.step for event in events if isinstance(event, ViewChanged)) <= looked + 1
