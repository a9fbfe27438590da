"""Replicas that lose the others in the shared start of a run end with the same bits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from diloco.data import build_corpus
from diloco.events import Event, Note, RoundCommitted, ViewChanged
from diloco.model import with_vocabulary
from diloco.protocol import Rules
from diloco.train import PeerFleet, Session, fleet_over_tcp, follow_views
from diloco.transport import Address, Place, TcpStreams
from tests.runs import settings_of
from tests.transport.wires import QUICK, at_once, rendezvous

LIMIT_S = 60.0
"""A generous limit, for busy machines."""


class Peer:
    """One replica and its thread, which trains until all replicas are asked to end.

    Args:
        place: the replica's place in the run.
        make: creates the session from its fleet and a consumer of events.
    """

    def __init__(self, place: Place, make: Callable[..., Session]) -> None:
        rules = Rules(**QUICK | {"continue_without_lost": True, "together": False, "raise_on_loss": False})
        self.fleet = fleet_over_tcp(place, rules)
        self.events: list[Event] = []
        self.digest = ""
        self._make, self._changed, self._asked = make, threading.Condition(), threading.Event()
        self._thread = threading.Thread(target=self._train, daemon=True)

    def make(self) -> None:
        """Create the session. Call it while no replica trains, or if shared random numbers do not matter."""
        self.session = self._make(self.fleet, self._note)
        for replica in self.session.replicas:  # NumPy crashes if one thread swaps its generator while another reads it
            replica.random_state = mock.MagicMock()

    def start(self) -> None:
        self.session.open_to_joiners()
        self._thread.start()

    def _train(self) -> None:
        last, stop = None, mock.MagicMock(signal=None, interrupting=nullcontext)
        try:
            while last is None or self.session.totals.steps < last:
                follow_views(self.fleet, self.session, stop, self._note)
                self.session.step()
                last = last or self.fleet.stop_step(self.session.totals.steps, wanted=self._asked.is_set())
            self.digest = self.session.global_digest()
            self.fleet.finish()
        finally:
            self.fleet.close()

    def _note(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait_for(self, fits: Callable[[Event], bool]) -> None:
        """Wait for an event that fits."""
        with self._changed:
            came = self._changed.wait_for(lambda: any(map(fits, self.events)), LIMIT_S)
            assert came, f"not in {self.events[-9:]}"

    def give_up_others(self, at_once: threading.Barrier) -> None:
        """Lose all other replicas at the moment at which they lose this one."""
        connections = self.fleet.transport.connections

        def drop_all() -> None:
            at_once.wait(LIMIT_S)
            connections.drop_silent(connections.connected)

        connections.post(drop_all)

    def ask_to_stop(self) -> None:
        self._asked.set()

    def end(self) -> None:
        """Ask the replica to stop and wait until its thread has ended."""
        self.ask_to_stop()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), f"it did not end: {self.events[-9:]}"


def looks(event: Event) -> bool:
    return isinstance(event, Note) and "searching for the other replicas" in event.text


class Peers:
    """Three replicas of a run that start together and end at the same step.

    Args:
        data_parallel_steps: the length of the shared start.
    """

    def __init__(self, data: Path, data_parallel_steps: int) -> None:
        arguments = f"--replicas 3 --steps 100000 --data-parallel-steps {data_parallel_steps}"
        settings = settings_of(data, arguments)
        self.corpus = build_corpus(settings.data)
        self.settings = replace(settings, model=with_vocabulary(settings.model, self.corpus.tokenizer.vocab_size))
        with rendezvous(3) as address:
            self.all = at_once([lambda m=m: self.peer(m, address) for m in range(3)])
        for each in self.all:
            each.make()

    def peer(self, replica: int, address: Address) -> Peer:
        return Peer(Place(replica=replica, num_replicas=3, rendezvous=address, join_window_s=1.0), self._session)

    def _session(self, fleet: PeerFleet, note: Callable[[Event], None]) -> Session:
        return Session(self.settings, self.corpus, fleet, torch.device("cpu"), note)


def test_all_who_lose_each_other_in_the_shared_start_end_it_and_go_on_together(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The founder trains only after others have joined, because they could otherwise found another view."""
    peers = Peers(data, data_parallel_steps=100_000).all
    for each in peers:
        each.start()
    with monkeypatch.context() as cut:
        cut.setattr(TcpStreams, "open", mock.AsyncMock(side_effect=ConnectionRefusedError("cut off")))
        at_once = threading.Barrier(3)
        for each in peers:
            each.give_up_others(at_once)
        for each in peers:
            each.wait_for(looks)
    peers[0].wait_for(lambda event: isinstance(event, RoundCommitted) and event.contributors == (0, 1, 2))
    for each in peers:
        each.ask_to_stop()
    for each in peers:
        each.end()
    assert len({each.digest for each in peers}) == 1
    events = [event for each in peers for event in each.events]
    looked = max(event.step for event in events if looks(event))
    assert min(event.step for event in events if isinstance(event, ViewChanged)) <= looked + 1
